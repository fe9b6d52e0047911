//! The sockets that accept connections.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use tokio::net::TcpListener;
use tunnel_link::relay::prepare_socket;
use tunnel_redirect::{Redirect, RedirectConfig, RedirectError};
use tunnel_runtime::config::{BindError, ConfigError};

use super::config::ListenersConfig;
use super::parts::Parts;
use super::table::{ADMIN, LISTENERS};
use crate::admission::Budget;
use crate::listener::{EgressConfig, EgressSocket, REDIRECT};
use crate::takeover::Predecessor;

/// The listeners that are switched on.
pub(crate) struct Listeners {
    /// Each socket with the name of its listener.
    sockets: Vec<(&'static str, TcpListener)>,
    egress_socket: Option<EgressSocket>,
}

impl Listeners {
    /// Binds all listeners except the redirect's. Takes those that `before` has at the same address.
    pub(crate) async fn bind(
        config: &ListenersConfig,
        before: &mut Option<Predecessor>,
    ) -> anyhow::Result<Self> {
        let egress_socket = egress_socket(&config.egress, before).await?;
        let mut sockets = Vec::new();
        for row in &LISTENERS {
            for (flag, address) in (row.addresses)(config) {
                // With port 0, the kernel picks another one each time, so this takes none of `before`.
                let taken = before.as_mut().and_then(|before| before.listener(row.name, |at| at == address));
                let socket = match taken {
                    Some(taken) => TcpListener::from_std(taken).inspect(|taken| row.prepare(taken)),
                    None => row.listen(address),
                };
                let socket = socket.map_err(|error| BindError::new(flag, address, error))?;
                sockets.push((row.name, socket));
            }
        }
        Ok(Self { sockets, egress_socket })
    }

    /// Starts the redirect and takes its listeners.
    pub(crate) async fn start_redirect(
        &mut self,
        options: RedirectConfig,
        before: &mut Option<Predecessor>,
    ) -> anyhow::Result<Arc<Redirect>> {
        let mut taken = |v4: bool| {
            let before = before.as_mut()?;
            before.listener(REDIRECT, |address| address.is_ipv4() == v4)
        };
        let listeners = [taken(true), taken(false)];
        let started =
            tunnel_redirect::listen(options, listeners, prepare_socket).await.map_err(|error| match error {
                RedirectError::NotCgroup { path, reason } => anyhow::Error::new(ConfigError::new(
                    "--redirect-cgroup",
                    path.display().to_string(),
                    format!("{reason}: give a directory of a cgroup v2 hierarchy"),
                )),
                other => anyhow::Error::new(other).context("--redirect=on"),
            });
        let (redirect, listeners) = started?;
        self.sockets.extend(listeners.into_iter().map(|listener| (REDIRECT, listener)));
        Ok(redirect)
    }

    /// Returns the name and the address of each, for the status, which the admin port itself answers.
    pub(crate) fn addresses(&self) -> io::Result<Vec<(&'static str, SocketAddr)>> {
        let shown = self.sockets.iter().filter(|(name, _)| *name != ADMIN);
        shown.map(|(name, socket)| Ok((*name, socket.local_addr()?))).collect()
    }

    /// Returns a copy of each, for another process.
    pub(crate) fn copies(&self) -> io::Result<Vec<(String, SocketAddr, OwnedFd)>> {
        let copy = |(name, socket): &(&str, TcpListener)| {
            Ok(((*name).to_owned(), socket.local_addr()?, socket.as_fd().try_clone_to_owned()?))
        };
        // A Unix socket has no address, but a name of its own.
        let unix = self.egress_socket.iter().map(|socket| {
            let (name, copy) = socket.copy()?;
            Ok((name, SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)), copy))
        });
        self.sockets.iter().map(copy).chain(unix).collect()
    }

    /// Takes the sockets of the listener with this name, in the order of its addresses.
    pub(crate) fn take(&mut self, name: &str) -> Vec<TcpListener> {
        self.sockets.extract_if(.., |(other, _)| *other == name).map(|(_, socket)| socket).collect()
    }

    /// Serves all of them.
    pub(crate) fn start(mut self, mut parts: Parts<'_>, budget: &Budget) {
        parts.egress_socket = self.egress_socket.take();
        for row in &LISTENERS {
            if let Some(start) = row.start {
                start(&mut parts, self.take(row.name), row.places(budget));
            }
        }
    }
}

/// Returns the Unix socket of the egress listener: that of `before` if it has the same path.
async fn egress_socket(
    config: &EgressConfig,
    before: &mut Option<Predecessor>,
) -> anyhow::Result<Option<EgressSocket>> {
    let Some(path) = &config.socket else { return Ok(None) };
    let taken = before.as_mut().and_then(|before| before.socket(&EgressSocket::name(path), |_| true));
    if let Some(taken) = taken
        && let Some(socket) = EgressSocket::take(path, config.socket_mode, taken)?
    {
        return Ok(Some(socket));
    }
    EgressSocket::bind(path, config.socket_mode, before.is_some()).await.map(Some)
}
