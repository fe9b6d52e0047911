//! Listeners on this node, and their targets.

use std::io;
use std::net::{self, SocketAddr};
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::Duration;

use ipnet::IpNet;
use tokio::net::TcpListener;
use tunnel_core::config::{BindError, HostPort};
use tunnel_core::log_once::LogOnce;

/// Maximum number of listeners: a successor gets them all in one message.
pub(crate) const MOST_LISTENERS: usize = 128;
/// Name of these listeners among the sockets that a successor gets.
pub(crate) const NAME: &str = "outbound";
/// Retry interval for an address that another agent holds.
const RETRY: Duration = Duration::from_secs(1);

/// A listener of this node, and its target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listen {
    pub address: SocketAddr,
    /// None: each client names its target to the server.
    pub target: Option<HostPort>,
    /// Clients that may use it.
    pub clients: Vec<IpNet>,
}

impl Listen {
    /// The flag that defines it.
    pub(crate) fn name(&self) -> &'static str {
        if self.target.is_some() { "--forward" } else { "--connect-address" }
    }

    pub(crate) fn flag(&self) -> String {
        format!("{}={}", self.name(), self.address)
    }
}

/// Listeners, bound except for those whose address another agent still holds: see [`listen_late`].
pub(crate) type BoundListeners = Vec<(Listen, Option<TcpListener>)>;

/// Binds all listeners. `taken` returns the socket that the previous agent passed for an address. An address in use is
/// no error if there is a previous agent (`replaces`): some versions keep their sockets.
///
/// # Errors
/// An address cannot be bound.
pub(crate) async fn bind(
    listeners: &[Listen],
    replaces: bool,
    mut taken: impl FnMut(SocketAddr) -> Option<net::TcpListener>,
) -> Result<BoundListeners, BindError> {
    let mut bound = Vec::new();
    for listen in listeners {
        let listener = match taken(listen.address) {
            Some(listener) => TcpListener::from_std(listener),
            None => TcpListener::bind(listen.address).await,
        };
        let listener = match listener {
            Ok(listener) => Some(listener),
            Err(error) if replaces && error.kind() == io::ErrorKind::AddrInUse => {
                let flag = listen.flag();
                tracing::warn!(
                    flag,
                    "the agent before keeps this address: it is listened on once that one has ended"
                );
                None
            }
            Err(error) => return Err(BindError::new(listen.name(), listen.address, error)),
        };
        bound.push((listen.clone(), listener));
    }
    Ok(bound)
}

/// Binds an address that another agent holds, as soon as possible.
pub(crate) async fn listen_late(listen: &Listen) -> TcpListener {
    let (flag, mut failing) = (listen.flag(), LogOnce::default());
    loop {
        match TcpListener::bind(listen.address).await {
            Ok(listener) => {
                tracing::info!(flag, "listening");
                return listener;
            }
            Err(error) if failing.is_new(&error) => {
                tracing::warn!(flag, %error, "cannot listen yet; trying again");
            }
            Err(_) => {}
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Duplicates the socket for a successor.
///
/// # Errors
/// Too many open files.
pub(crate) fn copy(listener: &TcpListener) -> io::Result<OwnedFd> {
    listener.as_fd().try_clone_to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(address: SocketAddr) -> Listen {
        Listen { address, target: Some("prometheus.monitoring:9090".parse().unwrap()), clients: Vec::new() }
    }

    #[tokio::test]
    async fn what_the_agent_before_has_is_taken_or_waited_for() {
        let (passed, kept) = (bind_one().await, bind_one().await);
        let listeners = [map(passed.local_addr().unwrap()), map(kept.local_addr().unwrap())];
        let taken = |address: SocketAddr| {
            let socket = (address == listeners[0].address).then(|| copy(&passed).unwrap());
            socket.map(net::TcpListener::from)
        };
        assert!(bind(&listeners, false, |_| None).await.is_err(), "nothing is passed on");
        let bound = bind(&listeners, true, taken).await.unwrap();
        let is_bound: Vec<_> = bound.iter().map(|(listen, now)| (listen, now.is_some())).collect();
        assert_eq!(is_bound, [(&listeners[0], true), (&listeners[1], false)]);
        drop(kept);
        let late = listen_late(&listeners[1]).await;
        assert_eq!(late.local_addr().unwrap(), listeners[1].address);
    }

    async fn bind_one() -> TcpListener {
        TcpListener::bind("127.0.0.1:0").await.unwrap()
    }
}
