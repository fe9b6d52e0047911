//! Self-test of the hooks: a real connection of this process to itself through all of them.
//!
//! Each round takes the next port, as other programs' rules may capture a single one; after a failure it repeats the
//! port.

use std::collections::BTreeSet;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::ops::Bound;
use std::time::Duration;

use nix::libc;
use tunnel_abi::counter::{self, Hook, Lookup, RedirectedBy, of_lookup, of_verdict};
use tunnel_abi::verdict::Verdict;

use super::error::{RedirectError, SelfTestError};
use super::running::Inner;
use super::self_test_addresses::SELF_TEST_PORT;

/// Loopback answers immediately; this allows for a badly overloaded machine.
const DEADLINE: Duration = Duration::from_secs(3);

/// One family's part of the test.
struct Probe {
    origin: SocketAddr,
    virtual_address: SocketAddr,
    connect: Hook,
    connect_name: &'static str,
    peer_name: &'static str,
    restored: u32,
    v6: bool,
}

/// Input of the test, copied under the lock.
pub(super) struct SelfTest {
    pub(super) port: u16,
    probes: Vec<Probe>,
    serving: bool,
    fails_at_connect: bool,
    cgroup: String,
}

impl SelfTest {
    pub(super) fn new(inner: &Inner, ipv6: bool, fails_at_connect: bool, cgroup: String) -> Self {
        let port = next_port(&inner.contents.ports, inner.verified_port);
        let v4 = Probe {
            origin: (inner.self_test_addresses.origin, port).into(),
            virtual_address: (inner.self_test_addresses.virtual_address, port).into(),
            connect: Hook::Connect4,
            connect_name: "connect4",
            peer_name: "getpeername4",
            restored: counter::RESTORED_V4,
            v6: false,
        };
        let v6 = ipv6.then(|| Probe {
            origin: (inner.self_test_addresses.origin_v6, port).into(),
            virtual_address: (inner.self_test_addresses.virtual_address_v6, port).into(),
            connect: Hook::Connect6,
            connect_name: "connect6",
            peer_name: "getpeername6",
            restored: counter::RESTORED_V6,
            v6: true,
        });
        Self {
            port,
            probes: [Some(v4), v6].into_iter().flatten().collect(),
            serving: inner.serving,
            fails_at_connect,
            cgroup,
        }
    }

    /// Connects in each family. `count` reads one of our counters, which another server's programs do not change.
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
        let steered = || -> Result<u64, RedirectError> {
            let of = |lookup| count(of_lookup(RedirectedBy::Hook, probe.v6, lookup));
            Ok(of(Lookup::Steered)? + of(Lookup::Replaced)?)
        };
        let before = (count(redirected)?, steered()?, count(probe.restored)?);
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
                return failed(SelfTestError::NotSteered { virtual_address: probe.virtual_address, reason });
            }
        };
        if steered()? == before.1 {
            let reason = "something else accepted it".to_owned();
            return failed(SelfTestError::NotSteered { virtual_address: probe.virtual_address, reason });
        }
        let peer = stream.peer_addr();
        // If the listener has already closed the connection, only the counter can tell.
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

/// The port after `last`, or else the first.
fn next_port(ports: &BTreeSet<u16>, last: Option<u16>) -> u16 {
    let later = last.and_then(|last| ports.range((Bound::Excluded(last), Bound::Unbounded)).next());
    later.or_else(|| ports.first()).copied().unwrap_or(SELF_TEST_PORT)
}

fn describe(result: io::Result<TcpStream>) -> String {
    result.map_or_else(|error| error.to_string(), |_| "success".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_port_has_its_turn() {
        let ports = BTreeSet::from([9100, 9200, 10250]);
        let (mut tested, mut last) = (Vec::new(), None);
        for _ in 0..4 {
            last = Some(next_port(&ports, last));
            tested.extend(last);
        }
        assert_eq!(tested, [9100, 9200, 10250, 9100]);
        // The last one is no longer tunnelled, and then none is.
        assert_eq!(next_port(&ports, Some(9150)), 9200);
        assert_eq!(next_port(&ports, Some(u16::MAX)), 9100);
        assert_eq!(next_port(&BTreeSet::new(), Some(9100)), SELF_TEST_PORT);
    }
}
