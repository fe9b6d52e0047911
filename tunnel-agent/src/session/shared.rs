//! What all sessions of this agent share.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tunnel_core::identity::NodeName;

use super::bench_policy::BenchPolicy;
use super::choice::Spread;
use super::epoch::EpochSource;
use super::handover::Handover;
use super::resumed::Resumed;
use crate::identity::Announced;
use crate::metrics::Metrics;
use crate::places::Places;
use crate::policy::Policy;
use crate::reach::Reach;

/// What all sessions of this agent share.
pub struct Shared {
    /// The node that the certificate names.
    pub node: NodeName,
    pub reach: Reach,
    pub epochs: EpochSource,
    pub policy: Arc<Policy>,
    /// How many connections to carry at a time.
    pub places: Places,
    /// The node's addresses, as reported to the servers.
    pub addresses: watch::Receiver<Arc<Vec<IpAddr>>>,
    /// Takes the trust bundles that servers announce.
    pub bundles: mpsc::Sender<Announced>,
    pub attached: Attached,
    /// Another agent of this node that takes over from this one, or from which this one does.
    pub handover: Handover,
    pub resumed: Resumed,
    /// How many servers to be attached to.
    pub spread: Spread,
    /// TCP connections of a session at most; `None`: as the congestion control of both ends needs.
    pub max_links: Option<u32>,
    /// How long a link may be silent before the kernel asks whether it is alive.
    pub keepalive: Duration,
    /// Measurements by the servers.
    pub bench: BenchPolicy,
    pub metrics: Metrics,
    /// Take nothing new, finish what is carried.
    pub draining: CancellationToken,
    /// End everything.
    pub forced: CancellationToken,
}

/// Which servers are attached, and through which address: two addresses of one server must not replace each other's
/// sessions in turns.
#[derive(Debug, Default)]
pub struct Attached {
    /// By server id: the configured address, and the session's epoch.
    servers: Mutex<HashMap<String, (String, u64)>>,
    /// How often one was given up.
    released: watch::Sender<u64>,
}

impl Attached {
    /// Claims a server for the link through `address`.
    ///
    /// # Errors
    /// The other address through which it is attached already.
    pub(super) fn claim(&self, server_id: &str, address: &str, epoch: u64) -> Result<(), String> {
        let mut servers = self.servers.lock();
        match servers.get(server_id) {
            Some((other, _)) if other != address => Err(other.clone()),
            _ => {
                servers.insert(server_id.to_owned(), (address.to_owned(), epoch));
                Ok(())
            }
        }
    }

    /// Gives up what the session with this epoch claimed, but not the claim of its successor through the same address. One that
    /// has claimed nothing tells nobody: links that stand by would wake each other without end.
    pub(super) fn release(&self, epoch: u64) {
        let given_up = {
            let mut servers = self.servers.lock();
            let before = servers.len();
            servers.retain(|_, (_, holder)| *holder != epoch);
            servers.len() < before
        };
        if given_up {
            self.released.send_modify(|times| *times += 1);
        }
    }

    /// Changes whenever some link gives up its server.
    pub(super) fn releases(&self) -> watch::Receiver<u64> {
        self.released.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_server_that_is_given_up_wakes_those_that_stand_by() {
        let attached = Attached::default();
        attached.claim("server", "a:1", 1).unwrap();
        let mut releases = attached.releases();
        for (address, epoch) in [("b:1", 2), ("c:1", 3)] {
            assert_eq!(attached.claim("server", address, epoch), Err("a:1".to_owned()));
            attached.release(epoch);
            assert!(!releases.has_changed().unwrap(), "{address} had nothing to give up");
        }
        // The same address again, before the session before has ended.
        attached.claim("server", "a:1", 4).unwrap();
        attached.release(1);
        assert!(!releases.has_changed().unwrap(), "its successor has it");
        attached.release(4);
        assert!(releases.has_changed().unwrap(), "also for who did not wait at that moment");
        releases.mark_unchanged();
        attached.release(4);
        assert!(!releases.has_changed().unwrap(), "once");
        attached.claim("server", "b:1", 5).unwrap();
    }
}
