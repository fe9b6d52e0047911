//! The proof that the hooks work: a real connection of this process to itself through all of them.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use nix::libc;
use tunnel_abi::counter::{self, Hook, Lookup, of_lookup, of_verdict};
use tunnel_abi::verdict::Verdict;

use super::{Inner, RedirectError};

/// Loopback answers at once; this is for a machine that is badly overloaded.
const DEADLINE: Duration = Duration::from_secs(3);

/// How the self-test failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The connect hook did not redirect our own connect.
    #[error(
        "a connect of this process was not redirected by {hook} of {cgroup}: the process must run inside that cgroup, \
         and the program must be attached (`bpftool cgroup tree`)"
    )]
    NotRedirected {
        /// `connect4` or `connect6`.
        hook: &'static str,
        /// Where it is attached.
        cgroup: String,
    },
    /// The redirected connect did not reach the listener.
    #[error(
        "a redirected connect to {token} did not reach the listener ({reason}): check the route `local <token range> dev lo`, the sk_lookup program (`bpftool net`), and firewall rules for loopback"
    )]
    NotSteered {
        /// The token connected to.
        token: IpAddr,
        /// What happened instead.
        reason: String,
    },
    /// The client saw another peer than the one that it asked for.
    #[error("getpeername() says {found} instead of {expected}: the {hook} program is not in effect")]
    WrongPeer {
        /// `getpeername4` or `getpeername6`.
        hook: &'static str,
        /// The address asked for.
        expected: SocketAddr,
        /// What the socket says.
        found: String,
    },
    /// The server is not serving, so the connect must fail, and it did not.
    #[error("the redirect is closed, but a connect through it ended in: {0}; restart the server")]
    NotClosed(String),
}

/// One family's part of the test.
struct Probe {
    origin: SocketAddr,
    token: IpAddr,
    connect: Hook,
    connect_name: &'static str,
    peer_name: &'static str,
    restored: u32,
    v6: bool,
}

/// What must be known to run the test, copied out of the lock.
pub(super) struct Plan {
    probes: Vec<Probe>,
    serving: bool,
    fails_at_connect: bool,
    cgroup: String,
}

impl Plan {
    pub(super) fn new(inner: &Inner, ipv6: bool, fails_at_connect: bool, cgroup: String) -> Self {
        let port = inner.held.ports.first().copied().unwrap_or(super::self_test::DEFAULT_PORT);
        let v4 = Probe {
            origin: (inner.self_test.origin, port).into(),
            token: inner.self_test.token.into(),
            connect: Hook::Connect4,
            connect_name: "connect4",
            peer_name: "getpeername4",
            restored: counter::RESTORED_V4,
            v6: false,
        };
        let v6 = ipv6.then(|| Probe {
            origin: (inner.self_test.origin_v6, port).into(),
            token: inner.self_test.token_v6.into(),
            connect: Hook::Connect6,
            connect_name: "connect6",
            peer_name: "getpeername6",
            restored: counter::RESTORED_V6,
            v6: true,
        });
        Self {
            probes: [Some(v4), v6].into_iter().flatten().collect(),
            serving: inner.serving,
            fails_at_connect,
            cgroup,
        }
    }

    /// Connects. `count` reads a counter: that our own programs counted tells them from another server's.
    pub(super) fn run(&self, count: impl Fn(u32) -> Result<u64, RedirectError>) -> Result<(), RedirectError> {
        for probe in &self.probes {
            self.one(probe, &count)?;
        }
        Ok(())
    }

    fn one(
        &self,
        probe: &Probe,
        count: &impl Fn(u32) -> Result<u64, RedirectError>,
    ) -> Result<(), RedirectError> {
        let verdict = if self.serving { Verdict::Redirect(()) } else { Verdict::Down(()) };
        let redirected = of_verdict(probe.connect, &verdict);
        let steered = of_lookup(probe.v6, Lookup::Steered);
        let before = (count(redirected)?, count(steered)?, count(probe.restored)?);

        let result = TcpStream::connect_timeout(&probe.origin, DEADLINE);
        if count(redirected)? == before.0 {
            let failure = Failure::NotRedirected { hook: probe.connect_name, cgroup: self.cgroup.clone() };
            return Err(failure.into());
        }
        if !self.serving && self.fails_at_connect {
            return match result {
                Err(error) if error.raw_os_error() == Some(libc::EHOSTUNREACH) => Ok(()),
                other => Err(Failure::NotClosed(describe(other)).into()),
            };
        }
        let stream = match result {
            Ok(stream) => stream,
            Err(error) => {
                return Err(Failure::NotSteered { token: probe.token, reason: error.to_string() }.into());
            }
        };
        if count(steered)? == before.1 {
            let reason = "something else accepted it".to_owned();
            return Err(Failure::NotSteered { token: probe.token, reason }.into());
        }
        let peer = stream.peer_addr();
        // The door may have closed the connection already; then only the counter tells.
        let right = match &peer {
            Ok(peer) => *peer == probe.origin,
            Err(error) => error.kind() == io::ErrorKind::NotConnected,
        };
        if !right || (peer.is_ok() && count(probe.restored)? == before.2) {
            let found = peer.map_or_else(|error| error.to_string(), |peer| peer.to_string());
            return Err(Failure::WrongPeer { hook: probe.peer_name, expected: probe.origin, found }.into());
        }
        Ok(())
    }
}

fn describe(result: io::Result<TcpStream>) -> String {
    result.map_or_else(|error| error.to_string(), |_| "success".into())
}
