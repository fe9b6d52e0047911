//! State shared by all sessions of this agent.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tunnel_pki::AgentIdentity;
use tunnel_pki::enrol::Announced;

use super::bench_policy::BenchPolicy;
use super::epoch::EpochSource;
use super::resumed::Resumed;
use crate::runtime::Runtime;

/// State shared by all sessions of this agent.
pub struct Shared {
    pub runtime: Runtime,
    /// The identity for new links.
    pub identity: watch::Receiver<Arc<AgentIdentity>>,
    /// Takes the trust bundles that servers announce.
    pub bundles: mpsc::Sender<Announced>,
    pub(super) epochs: EpochSource,
    pub(super) attached: Attached,
    pub(crate) resumed: Resumed,
    /// Limits measurements by the servers.
    pub(super) bench: BenchPolicy,
}

impl Shared {
    pub fn new(
        runtime: Runtime,
        identity: watch::Receiver<Arc<AgentIdentity>>,
        bundles: mpsc::Sender<Announced>,
    ) -> Arc<Self> {
        let given = &runtime.config.given;
        let clock = identity.borrow().clock;
        Arc::new(Self {
            epochs: EpochSource::open(given.state_dir.join("epoch"), clock),
            bench: BenchPolicy::new(given.links.bench),
            attached: Attached::default(),
            resumed: Resumed::default(),
            runtime,
            identity,
            bundles,
        })
    }
}

/// The attached servers, each with the address used: two addresses of one server must not replace each other's sessions
/// in turns.
#[derive(Debug, Default)]
pub(super) struct Attached {
    /// By server ID: the configured address and the session's epoch.
    servers: Mutex<HashMap<String, (String, u64)>>,
    /// Number of released claims.
    released: watch::Sender<u64>,
}

impl Attached {
    /// Claims a server for the link through `address`, if no later session through it has.
    ///
    /// # Errors
    /// The other address through which the server is already attached.
    pub(super) fn claim(&self, server_id: &str, address: &str, epoch: u64) -> Result<(), String> {
        let mut servers = self.servers.lock();
        match servers.get(server_id) {
            Some((other, _)) if other != address => Err(other.clone()),
            Some((_, later)) if *later > epoch => Ok(()),
            _ => {
                servers.insert(server_id.to_owned(), (address.to_owned(), epoch));
                Ok(())
            }
        }
    }

    /// Releases the claim of the session with this epoch, but not that of its successor through the same address.
    /// Without a claim it notifies nobody: standby links would wake each other without end.
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

    /// Changes whenever a link releases its server.
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
        // The same address again, before the previous session has ended.
        attached.claim("server", "a:1", 4).unwrap();
        attached.claim("server", "a:1", 1).unwrap();
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
