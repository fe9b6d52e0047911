//! The sockets that accept connections.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use tokio::net::TcpListener;
use tunnel_core::config::{BindError, ConfigError};
use tunnel_core::takeover::MOST_SOCKETS;

use crate::agent_port::KONNECTIVITY;
use crate::config::{Config, EgressConfig, MOST_SECURE_PORTS};
use crate::door::{
    Connect, Door as _, EGRESS, EgressSocket, Http, Https, MAP, MetricsDoor, Plain, Redirected,
};
use crate::maps::{MOST as MOST_MAPS, Map};
use crate::redirect::{self, Redirect, RedirectConfig, RedirectError};
use crate::status::AGENTS;
use crate::takeover::Predecessor;

/// Number of listeners besides those of maps and of further ports of the https listener: two of the redirect, one each
/// for agents, konnectivity's agents and the admin port, one each for https, http, plain, connect and metrics, and the
/// port and the path of egress.
const OTHERS: usize = 12;
// A successor gets all of them at once.
const _: () = assert!(MOST_MAPS + MOST_SECURE_PORTS + OTHERS <= MOST_SOCKETS);

/// The listeners; `None` for one that is switched off.
pub(crate) struct Listeners {
    pub(crate) agents: Option<TcpListener>,
    pub(crate) https: Option<TcpListener>,
    /// Further https listeners, each with the port of nodes that it leads to.
    pub(crate) secure: Vec<(u16, TcpListener)>,
    pub(crate) http: Option<TcpListener>,
    pub(crate) plain: Option<TcpListener>,
    pub(crate) egress: Option<TcpListener>,
    pub(crate) egress_socket: Option<EgressSocket>,
    pub(crate) connect: Option<TcpListener>,
    pub(crate) konnectivity: Option<TcpListener>,
    pub(crate) metrics: Option<TcpListener>,
    /// Listeners of static maps.
    pub(crate) maps: Vec<(Map, TcpListener)>,
    /// One for IPv4 and one for IPv6; empty without the redirect.
    pub(crate) redirected: Vec<TcpListener>,
}

impl Listeners {
    /// Binds all listeners except the redirect's. Takes those that `before` has at the same address.
    pub(crate) async fn bind(
        config: &Config,
        maps: Vec<Map>,
        before: &mut Option<Predecessor>,
    ) -> anyhow::Result<Self> {
        let at = |port: Option<u16>| port.map(|port| SocketAddr::new(config.process.bind_address, port));
        let egress_socket = egress_socket(&config.egress, before).await?;
        let mut mapped = Vec::new();
        for map in maps {
            if let Some(listener) = bind("--map", MAP, Some(map.listen), before).await? {
                mapped.push((map, listener));
            }
        }
        let mut secure = Vec::new();
        for (port, of_node) in &config.doors.secure_ports {
            let listener = bind("--secure-ports", Https::NAME, at(Some(*port)), before).await?;
            secure.extend(listener.map(|listener| (*of_node, listener)));
        }
        Ok(Self {
            secure,
            agents: bind("--agent-port", AGENTS, at(config.agents.port), before).await?,
            https: bind("--secure-port", Https::NAME, at(config.doors.secure_port), before).await?,
            http: bind("--insecure-port", Http::NAME, config.doors.insecure_address(), before).await?,
            plain: bind("--plain-port", Plain::NAME, at(config.doors.plain.port), before).await?,
            egress: bind("--egress-port", EGRESS, at(config.egress.port), before).await?,
            egress_socket,
            connect: bind("--connect-port", Connect::NAME, at(config.connect.connect_port), before).await?,
            konnectivity: {
                let at = at(config.konnectivity.port);
                bind("--konnectivity-agent-port", KONNECTIVITY, at, before).await?
            },
            metrics: bind("--metrics-port", MetricsDoor::NAME, at(config.process.metrics_port), before)
                .await?,
            maps: mapped,
            redirected: Vec::new(),
        })
    }

    /// Starts the redirect and takes its listeners.
    pub(crate) async fn start_redirect(
        &mut self,
        options: RedirectConfig,
        before: &mut Option<Predecessor>,
    ) -> anyhow::Result<Arc<Redirect>> {
        let mut taken = |v4: bool| {
            let before = before.as_mut()?;
            before.listener(Redirected::NAME, |address| address.is_ipv4() == v4)
        };
        let listeners = [taken(true), taken(false)];
        let started = redirect::listen(options, listeners).await.map_err(|error| match error {
            RedirectError::NotCgroup { path, reason } => anyhow::Error::new(ConfigError::new(
                "--redirect-cgroup",
                path.display().to_string(),
                format!("{reason}: give a directory of a cgroup v2 hierarchy"),
            )),
            other => anyhow::Error::new(other).context("--redirect=on"),
        });
        let (redirect, listeners) = started?;
        self.redirected = listeners;
        Ok(redirect)
    }

    /// Returns the name and the address of each.
    pub(crate) fn addresses(&self) -> io::Result<Vec<(&'static str, SocketAddr)>> {
        self.all().map(|(door, listener)| Ok((door, listener.local_addr()?))).collect()
    }

    /// Returns a copy of each, for another process.
    pub(crate) fn copies(&self) -> io::Result<Vec<(String, SocketAddr, OwnedFd)>> {
        let copy = |(door, listener): (&'static str, &TcpListener)| {
            Ok((door.to_owned(), listener.local_addr()?, listener.as_fd().try_clone_to_owned()?))
        };
        // A Unix socket has no address, but a name of its own.
        let unix = self.egress_socket.iter().map(|socket| {
            let (name, copy) = socket.copy()?;
            Ok((name, SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)), copy))
        });
        self.all().map(copy).chain(unix).collect()
    }

    fn all(&self) -> impl Iterator<Item = (&'static str, &TcpListener)> {
        let agents = self.agents.iter().map(|listener| (AGENTS, listener));
        let secure = self.secure.iter().map(|(_, listener)| listener);
        let https = self.https.iter().chain(secure).map(|listener| (Https::NAME, listener));
        let http = self.http.iter().map(|listener| (Http::NAME, listener));
        let plain = self.plain.iter().map(|listener| (Plain::NAME, listener));
        let redirected = self.redirected.iter().map(|listener| (Redirected::NAME, listener));
        let egress = self.egress.iter().map(|listener| (EGRESS, listener));
        let connect = self.connect.iter().map(|listener| (Connect::NAME, listener));
        let konnectivity = self.konnectivity.iter().map(|listener| (KONNECTIVITY, listener));
        let metrics = self.metrics.iter().map(|listener| (MetricsDoor::NAME, listener));
        let maps = self.maps.iter().map(|(_, listener)| (MAP, listener));
        let named = agents.chain(https).chain(http).chain(plain).chain(egress).chain(connect);
        named.chain(konnectivity).chain(metrics).chain(maps).chain(redirected)
    }
}

/// Returns the Unix socket of the egress listener: that of `before` if it has the same path.
async fn egress_socket(
    config: &EgressConfig,
    before: &mut Option<Predecessor>,
) -> anyhow::Result<Option<EgressSocket>> {
    let Some(path) = &config.socket else { return Ok(None) };
    let taken = before.as_mut().and_then(|before| before.socket(&EgressSocket::name(path)));
    if let Some(taken) = taken
        && let Some(socket) = EgressSocket::take(path, config.socket_mode, taken)?
    {
        return Ok(Some(socket));
    }
    EgressSocket::bind(path, config.socket_mode, before.is_some()).await.map(Some)
}

async fn bind(
    key: &'static str,
    door: &str,
    address: Option<SocketAddr>,
    before: &mut Option<Predecessor>,
) -> Result<Option<TcpListener>, BindError> {
    let Some(address) = address else { return Ok(None) };
    // With port 0, the kernel picks another one each time, so this takes none of `before`.
    let taken = before.as_mut().and_then(|before| before.listener(door, |at| at == address));
    let listener = match taken {
        Some(taken) => TcpListener::from_std(taken),
        None => TcpListener::bind(address).await,
    };
    listener.map(Some).map_err(|error| BindError::new(key, address, error))
}
