//! The proof that the hooks work: a real connection of this process to itself through all of them.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use nix::libc;
use tunnel_abi::counter::{self, Hook, Lookup, of_lookup, of_verdict};
use tunnel_abi::verdict::Verdict;

use super::error::{RedirectError, SelfTestError};
use super::running::Inner;
use super::self_test_addresses::SELF_TEST_PORT;

/// Loopback answers immediately; this is for a badly overloaded machine.
const DEADLINE: Duration = Duration::from_secs(3);

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

/// Everything that the test needs, copied out of the lock.
pub(super) struct SelfTest {
    probes: Vec<Probe>,
    serving: bool,
    fails_at_connect: bool,
    cgroup: String,
}

impl SelfTest {
    pub(super) fn new(inner: &Inner, ipv6: bool, fails_at_connect: bool, cgroup: String) -> Self {
        let port = inner.contents.ports.first().copied().unwrap_or(SELF_TEST_PORT);
        let v4 = Probe {
            origin: (inner.self_test_addresses.origin, port).into(),
            token: inner.self_test_addresses.token.into(),
            connect: Hook::Connect4,
            connect_name: "connect4",
            peer_name: "getpeername4",
            restored: counter::RESTORED_V4,
            v6: false,
        };
        let v6 = ipv6.then(|| Probe {
            origin: (inner.self_test_addresses.origin_v6, port).into(),
            token: inner.self_test_addresses.token_v6.into(),
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

    /// Connects. `count` reads a counter: only our own programs change ours, not another server's.
    pub(super) fn run(&self, count: impl Fn(u32) -> Result<u64, RedirectError>) -> Result<(), RedirectError> {
        for probe in &self.probes {
            self.connect(probe, &count)?;
        }
        Ok(())
    }

    fn connect(
        &self,
        probe: &Probe,
        count: &impl Fn(u32) -> Result<u64, RedirectError>,
    ) -> Result<(), RedirectError> {
        let verdict = if self.serving { Verdict::Redirect(()) } else { Verdict::Down(()) };
        let redirected = of_verdict(probe.connect, &verdict);
        let steered = of_lookup(probe.v6, Lookup::Steered);
        let before = (count(redirected)?, count(steered)?, count(probe.restored)?);
        let failed = |error: SelfTestError| Err(error.into());

        let result = TcpStream::connect_timeout(&probe.origin, DEADLINE);
        if count(redirected)? == before.0 {
            let cgroup = self.cgroup.clone();
            return failed(SelfTestError::NotRedirected { hook: probe.connect_name, cgroup });
        }
        if !self.serving && self.fails_at_connect {
            return match result {
                Err(error) if error.raw_os_error() == Some(libc::EHOSTUNREACH) => Ok(()),
                other => failed(SelfTestError::NotClosed(describe(other))),
            };
        }
        let stream = match result {
            Ok(stream) => stream,
            Err(error) => {
                let reason = error.to_string();
                return failed(SelfTestError::NotSteered { token: probe.token, reason });
            }
        };
        if count(steered)? == before.1 {
            let reason = "something else accepted it".to_owned();
            return failed(SelfTestError::NotSteered { token: probe.token, reason });
        }
        let peer = stream.peer_addr();
        // If the door has closed the connection already, only the counter can tell.
        let right = match &peer {
            Ok(peer) => *peer == probe.origin,
            Err(error) => error.kind() == io::ErrorKind::NotConnected,
        };
        if !right || (peer.is_ok() && count(probe.restored)? == before.2) {
            let found = peer.map_or_else(|error| error.to_string(), |peer| peer.to_string());
            return failed(SelfTestError::WrongPeer { hook: probe.peer_name, expected: probe.origin, found });
        }
        Ok(())
    }
}

fn describe(result: io::Result<TcpStream>) -> String {
    result.map_or_else(|error| error.to_string(), |_| "success".into())
}
