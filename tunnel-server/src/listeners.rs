//! The sockets through which connections come in.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use tokio::net::TcpListener;
use tunnel_core::config::{BindError, ConfigError};

use crate::config::Config;
use crate::door::{Door as _, Http, Https, Redirected};
use crate::redirect::{self, Redirect, RedirectConfig, RedirectError};
use crate::status::AGENTS;
use crate::takeover::Predecessor;

/// A listener that is None is switched off.
pub(crate) struct Listeners {
    pub(crate) agents: Option<TcpListener>,
    pub(crate) https: Option<TcpListener>,
    pub(crate) http: Option<TcpListener>,
    /// For IPv4 and IPv6; none without the redirect.
    pub(crate) redirected: Vec<TcpListener>,
}

impl Listeners {
    /// Binds all but those of the redirect; takes those that `before` has at the same address.
    pub(crate) async fn bind(config: &Config, before: &mut Option<Predecessor>) -> Result<Self, BindError> {
        let at = |port: Option<u16>| port.map(|port| SocketAddr::new(config.bind_address, port));
        Ok(Self {
            agents: bind("--agent-port", AGENTS, at(config.agent_port), before).await?,
            https: bind("--secure-port", Https::NAME, at(config.secure_port), before).await?,
            http: bind("--insecure-port", Http::NAME, config.insecure_address, before).await?,
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

    /// The door and the address of each.
    pub(crate) fn addresses(&self) -> io::Result<Vec<(&'static str, SocketAddr)>> {
        self.all().map(|(door, listener)| Ok((door, listener.local_addr()?))).collect()
    }

    /// Each once more, for another process.
    pub(crate) fn copies(&self) -> io::Result<Vec<(String, SocketAddr, OwnedFd)>> {
        let copy = |(door, listener): (&'static str, &TcpListener)| {
            Ok((door.to_owned(), listener.local_addr()?, listener.as_fd().try_clone_to_owned()?))
        };
        self.all().map(copy).collect()
    }

    fn all(&self) -> impl Iterator<Item = (&'static str, &TcpListener)> {
        let agents = self.agents.iter().map(|listener| (AGENTS, listener));
        let https = self.https.iter().map(|listener| (Https::NAME, listener));
        let http = self.http.iter().map(|listener| (Http::NAME, listener));
        let redirected = self.redirected.iter().map(|listener| (Redirected::NAME, listener));
        agents.chain(https).chain(http).chain(redirected)
    }
}

async fn bind(
    key: &'static str,
    door: &str,
    address: Option<SocketAddr>,
    before: &mut Option<Predecessor>,
) -> Result<Option<TcpListener>, BindError> {
    let Some(address) = address else { return Ok(None) };
    // A port that the kernel picks is another one each time.
    let taken = before.as_mut().and_then(|before| before.listener(door, |at| at == address));
    let listener = match taken {
        Some(taken) => TcpListener::from_std(taken),
        None => TcpListener::bind(address).await,
    };
    listener.map(Some).map_err(|error| BindError::new(key, address, error))
}
