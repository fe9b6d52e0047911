//! The most recent failed connections, for the status.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::Instant;

use parking_lot::Mutex;
use tunnel_link::outcome::{Hop, Outcome};
use tunnel_runtime::NodeName;

/// Number of failures kept for each hop, so that frequent ones of one hop do not displace the others.
pub(crate) const KEPT: usize = 20;
/// Maximum length of a reason, which may contain data from a client or a target.
const LONGEST_DETAIL: usize = 300;

/// A connection that failed.
#[derive(Clone, Debug)]
pub(crate) struct FailedConnection {
    pub(crate) at: Instant,
    pub(crate) listener: &'static str,
    pub(crate) client: SocketAddr,
    /// `None` if this server dialled the target itself.
    pub(crate) node: Option<NodeName>,
    pub(crate) destination: SocketAddr,
    pub(crate) outcome: Outcome,
    pub(crate) detail: String,
}

/// Failures of one hop since the start.
#[derive(Clone, Debug, Default)]
pub(crate) struct AtHop {
    pub(crate) count: u64,
    /// Newest first.
    pub(crate) recent: VecDeque<FailedConnection>,
}

/// The failures by hop.
#[derive(Debug, Default)]
pub(crate) struct Failures(Mutex<BTreeMap<Hop, AtHop>>);

impl Failures {
    /// Keeps the connection if it failed.
    pub(crate) fn add(&self, mut failure: FailedConnection) {
        let Some(hop) = failure.outcome.hop() else { return };
        if let Some((end, _)) = failure.detail.char_indices().nth(LONGEST_DETAIL) {
            failure.detail.truncate(end);
            failure.detail.push('…');
        }
        let mut hops = self.0.lock();
        let at_hop = hops.entry(hop).or_default();
        at_hop.count += 1;
        at_hop.recent.truncate(KEPT - 1);
        at_hop.recent.push_front(failure);
    }

    pub(crate) fn all(&self) -> BTreeMap<Hop, AtHop> {
        self.0.lock().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(outcome: Outcome, detail: &str) -> FailedConnection {
        FailedConnection {
            at: Instant::now(),
            listener: "redirect",
            client: "127.0.0.1:1".parse().unwrap(),
            node: "edge-1".parse().ok(),
            destination: "10.8.0.7:10250".parse().unwrap(),
            outcome,
            detail: detail.to_owned(),
        }
    }

    #[test]
    fn the_last_of_each_hop_are_kept() {
        let failures = Failures::default();
        failures.add(failure(Outcome::NoTunnel, "no tunnel"));
        failures.add(failure(Outcome::Ok, ""));
        for number in 0..3 * KEPT {
            failures.add(failure(Outcome::Refused, &number.to_string()));
        }
        let all = failures.all();
        assert_eq!(all.keys().copied().collect::<Vec<_>>(), [Hop::Tunnel, Hop::Target]);
        let target = &all[&Hop::Target];
        assert_eq!((target.count, target.recent.len()), (3 * KEPT as u64, KEPT));
        assert_eq!(target.recent[0].detail, (3 * KEPT - 1).to_string());
        assert_eq!(all[&Hop::Tunnel].recent[0].detail, "no tunnel");
    }

    #[test]
    fn a_long_reason_is_cut_between_characters() {
        let failures = Failures::default();
        failures.add(failure(Outcome::TargetReset, &"ü".repeat(LONGEST_DETAIL + 5)));
        let detail = failures.all()[&Hop::Target].recent[0].detail.clone();
        assert_eq!(detail.chars().count(), LONGEST_DETAIL + 1);
    }
}
