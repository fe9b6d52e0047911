//! Dials targets for a server, within this agent's policy, and relays the connections.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tunnel_link::konnectivity::{Dial, Gone, Inbox, Outbox, in_words_of_go};
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{Side, Traffic, copy, copy_halves};
use tunnel_runtime::config::HostPort;
use tunnel_runtime::net::lookup_holding;
use tunnel_runtime::text::printable;

use super::shared::Shared;
use crate::busy::{Busy, BusyGuard, Counted};
use crate::dial::{DEFAULT_DEADLINE, DialError, DialRequest, Dialled, Socket};
use crate::places::Place;

/// Minimum time for one of several addresses while any is left, as in Go's dialler.
const SHORTEST_SHARE: Duration = Duration::from_secs(2);

/// The dialler of one server's stream.
pub(super) struct ForServer {
    pub(super) shared: Arc<Shared>,
    pub(super) busy: Arc<Busy>,
    pub(super) server_id: String,
}

/// An open connection.
pub(super) struct Connected {
    socket: Socket,
    target: SocketAddr,
    _place: Place,
    _busy: BusyGuard,
}

/// A failed dial.
#[derive(Debug)]
struct Failed {
    outcome: Outcome,
    reason: String,
}

#[tonic::async_trait]
impl Dial for ForServer {
    type Connected = Connected;

    async fn dial(&self, address: &str, gone: &Gone) -> Result<Connected, String> {
        let (started, busy) = (Instant::now(), self.busy.hold());
        let dialled = tokio::select! {
            biased;
            dialled = self.connect(address) => dialled,
            () = gone.cut() => {
                self.shared.runtime.metrics.dialled("cancelled", started.elapsed());
                return Err("the dial was closed".to_owned());
            }
        };
        match dialled {
            Ok((Dialled { socket, place, .. }, target)) => {
                self.shared.runtime.metrics.dialled("ok", started.elapsed());
                Ok(Connected { socket, target, _place: place, _busy: busy })
            }
            Err(Failed { outcome, reason }) => {
                let (label, took) = (outcome.as_str(), started.elapsed());
                let server = printable(&self.server_id, 100);
                self.shared.runtime.metrics.dial_failed(label, took, server, &reason);
                self.shared.metrics.dial_failed(outcome);
                Err(in_words_of_go(outcome, reason))
            }
        }
    }

    async fn relay(
        &self,
        connected: Connected,
        inbox: &mut Inbox,
        outbox: &mut Outbox,
        gone: &Gone,
    ) -> Result<(), String> {
        let Connected { mut socket, target, _place, _busy } = connected;
        let shared = &self.shared;
        let gauges = [&shared.runtime.metrics.connections_active, &shared.metrics.connections];
        let _counted = gauges.map(Counted::new);
        let started = Instant::now();
        let traffic = Traffic::part_of(vec![shared.runtime.metrics.relayed.clone()]);
        let copying = async {
            match &mut socket {
                Socket::Kernel(socket) => copy(socket, inbox, outbox, &traffic, Side::Agent).await,
                Socket::Simulated(line) => {
                    let (mut from, mut to) = tokio::io::split(line);
                    copy_halves((&mut from, &mut to), inbox, outbox, &traffic, Side::Agent).await
                }
            }
        };
        let ended = tokio::select! {
            biased;
            ended = copying => ended,
            () = gone.wait() => Err((Outcome::ClientReset, "the server has ended the connection".to_owned())),
            () = shared.runtime.shutdown.forced() => Err((Outcome::Shutdown, "this agent stops".to_owned())),
        };
        let outcome = ended.as_ref().map_or_else(|(outcome, _)| *outcome, |()| Outcome::Ok);
        shared.runtime.metrics.ended(outcome);
        tracing::debug!(
            server = printable(&self.server_id, 100),
            destination = %target,
            to_target = traffic.to_socket(),
            from_target = traffic.from_socket(),
            duration_ms = started.elapsed().as_millis() as u64,
            %outcome,
            "connection"
        );
        ended.map_err(|(_, reason)| reason)
    }
}

impl ForServer {
    /// Connects to the first address that the policy allows and that answers.
    async fn connect(&self, address: &str) -> Result<(Dialled, SocketAddr), Failed> {
        let deadline = tokio::time::Instant::now() + DEFAULT_DEADLINE;
        let named = || format!("dial tcp {}", printable(address, 100));
        let timed_out = || Failed { outcome: Outcome::TimedOut, reason: format!("{}: i/o timeout", named()) };
        let targets = match tokio::time::timeout_at(deadline, self.targets(address)).await {
            Ok(targets) => targets?,
            Err(_) => return Err(timed_out()),
        };
        // A konnectivity server names none.
        let (mut failed, loopback_ports) = (None, BTreeSet::new());
        for (tried, target) in targets.iter().copied().enumerate() {
            let left = deadline.saturating_duration_since(tokio::time::Instant::now());
            let request = DialRequest::within(share(left, targets.len() - tried), target);
            let dialled = self.shared.dialler.dial(request, &loopback_ports);
            match tokio::time::timeout_at(deadline, dialled).await {
                Ok(Ok(dialled)) => return Ok((dialled, target)),
                // The policy's refusal of one address matters less than the failure of another one.
                Ok(Err(DialError::Denied { .. })) if failed.is_some() => {}
                Ok(Err(error)) => {
                    let reason = format!("{}: {error}", named());
                    failed = Some(Failed { outcome: Outcome::from_code(error.code()), reason });
                }
                Err(_) => return Err(timed_out()),
            }
        }
        Err(failed.unwrap_or_else(|| unknown(address, "it has no address")))
    }

    /// Resolves the address. This node's own name gives its own address without a lookup.
    async fn targets(&self, address: &str) -> Result<Vec<SocketAddr>, Failed> {
        let HostPort { host, port } = address.parse::<HostPort>().map_err(|reason: &str| Failed {
            outcome: Outcome::Protocol,
            reason: format!("address {:?}: {reason}", printable(address, 100)),
        })?;
        if let Ok(ip) = host.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(ip, port)]);
        }
        let host = host.trim_end_matches('.');
        if host == self.shared.runtime.config.node_name.as_str() {
            let own = self.shared.runtime.addresses.borrow().first().copied();
            if let Some(first) = own {
                return Ok(vec![SocketAddr::new(first, port)]);
            }
        }
        // The wait counts against the dial's deadline. The permit is held until the resolver answers, also after that. The
        // semaphore is never closed.
        let turn = Arc::new(self.shared.lookups.clone().acquire_owned().await);
        lookup_holding(host, port, &turn).await.map_err(|error| unknown(address, &error.to_string()))
    }
}

/// Time for one of the remaining addresses. One that does not answer must leave some to the others.
fn share(left: Duration, addresses: usize) -> Duration {
    let even = left / u32::try_from(addresses).unwrap_or(u32::MAX).max(1);
    even.max(SHORTEST_SHARE.min(left))
}

fn unknown(address: &str, why: &str) -> Failed {
    let reason = format!("dial tcp: lookup {}: no such host: {why}", printable(address, 100));
    Failed { outcome: Outcome::Unreachable, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_does_not_answer_leaves_time_to_the_next() {
        let (second, deadline) = (Duration::from_secs(1), DEFAULT_DEADLINE);
        assert_eq!(share(deadline, 1), deadline);
        assert_eq!(share(deadline, 2), deadline / 2);
        assert_eq!(share(deadline, 100), SHORTEST_SHARE);
        assert_eq!(share(second, 100), second);
    }
}
