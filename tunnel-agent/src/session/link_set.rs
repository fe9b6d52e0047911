//! One [`LinkLoop`] for each server that this agent is to be attached to, as servers come and go.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;
use tunnel_pki::enrol::{IdentityKeeper, Refused};
use tunnel_runtime::config::HostPort;
use tunnel_runtime::lifecycle::ReadyGuard;

use super::choice::{Use, rank, reach};
use super::link_loop::{LinkLoop, LinkStatus};
use super::shared::Shared;

/// Time for which a server whose address is gone is still tried while no other one can be reached.
const GRACE: Duration = Duration::from_secs(60);
/// Interval of checks whether a server may be left.
const CHECK: Duration = Duration::from_secs(1);

/// An agent that has its identity.
pub struct Running {
    pub links: Arc<LinkSet>,
    pub keeper: Arc<IdentityKeeper>,
}

/// An agent's links. A server whose address is gone is left only when that costs nothing: another server can be used,
/// or this one could not be reached for a while. With fewer sessions than servers, a session with a substitute is left
/// once it is not needed any more. Nothing else ends a working session.
pub struct LinkSet {
    shared: Arc<Shared>,
    entries: Mutex<Vec<Entry>>,
    /// The known servers, in order of preference.
    ranked: Mutex<Vec<String>>,
}

struct Entry {
    link: Arc<LinkLoop>,
    /// Time at which its address was first missing, if it is now.
    gone: Option<Instant>,
}

impl LinkSet {
    /// Creates a set without links. Each link will be a task of the runtime.
    pub fn new(shared: Arc<Shared>) -> Arc<Self> {
        Arc::new(Self { shared, entries: Mutex::default(), ranked: Mutex::default() })
    }

    /// Connects to these servers, or to some of them, from now on. An empty list has no effect.
    pub fn set(&self, servers: &[HostPort]) {
        if servers.is_empty() || self.shared.runtime.shutdown.is_draining() {
            return;
        }
        let wanted: Vec<String> = servers.iter().map(ToString::to_string).collect();
        let mut entries = self.entries.lock();
        for entry in entries.iter_mut() {
            let is_wanted = wanted.iter().any(|server| server == entry.link.server());
            entry.gone = (!is_wanted).then(|| entry.gone.unwrap_or_else(Instant::now));
        }
        drop(entries);
        let config = &self.shared.runtime.config;
        *self.ranked.lock() = rank(&config.node_name, wanted, config.given.links.max_servers);
        self.check();
    }

    /// Connects to servers in place of those that do not serve, and leaves those that may be left.
    fn check(&self) {
        if !self.shared.runtime.shutdown.is_draining() {
            self.choose();
            self.leave_gone();
        }
    }

    /// Connects to the wanted number of servers, and to more while some of them do not serve.
    fn choose(&self) {
        let ranked = self.ranked.lock();
        let mut entries = self.entries.lock();
        let serves = |server: &String| {
            let entry = entries.iter().find(|entry| entry.link.server() == server);
            entry.map_or(Use::Idle, |entry| entry.link.usefulness())
        };
        let (number, others_may_go) =
            reach(ranked.iter().map(serves), self.shared.runtime.config.given.links.max_servers);
        let (chosen, others) = ranked.split_at(number);
        for server in chosen {
            if entries.iter().all(|entry| entry.link.server() != server) {
                let link = LinkLoop::new(self.shared.clone(), server.clone());
                self.shared.runtime.tasks.spawn(link.clone().run());
                entries.push(Entry { link, gone: None });
            }
        }
        if others_may_go {
            entries.retain(|entry| {
                let leave = others.iter().any(|server| server == entry.link.server());
                if leave {
                    tracing::info!(server = entry.link.server(), "leaving a server beyond --max-servers");
                    entry.link.leave();
                }
                !leave
            });
        }
    }

    /// Leaves the servers that may be left.
    fn leave_gone(&self) {
        let mut entries = self.entries.lock();
        // A standby link leads to a server that is attached through another address, which may be the one to leave.
        let usable = |link: &LinkLoop| link.attached() || link.stands_by();
        let another = entries.iter().any(|entry| entry.gone.is_none() && usable(&entry.link));
        entries.retain(|entry| {
            let Some(gone) = entry.gone else { return true };
            if !may_leave(another, entry.link.attached(), gone.elapsed()) {
                return true;
            }
            tracing::info!(server = entry.link.server(), "leaving a server without an address");
            entry.link.leave();
            false
        });
    }

    /// Follows the known servers until their sender is dropped.
    pub async fn follow(self: Arc<Self>, mut servers: watch::Receiver<Arc<Vec<HostPort>>>) {
        let mut tick = tokio::time::interval(CHECK);
        servers.mark_changed();
        loop {
            tokio::select! {
                changed = servers.changed() => {
                    if changed.is_err() { return }
                    let now = servers.borrow_and_update().clone();
                    self.set(&now);
                }
                _ = tick.tick() => self.check(),
            }
        }
    }

    pub fn status(&self) -> Vec<LinkStatus> {
        self.entries.lock().iter().map(|entry| entry.link.status()).collect()
    }

    /// Becomes ready when the first server has attached. A later loss shows only in the status and the metrics:
    /// restarting an agent because its servers are unreachable would not help.
    pub async fn ready_once_attached(self: Arc<Self>, attaching: ReadyGuard) {
        let mut tick = tokio::time::interval(Duration::from_millis(100));
        while !self.attached() {
            tick.tick().await;
        }
        attaching.ready();
    }

    /// Addresses of the servers that have a session in use.
    pub fn attached_at(&self) -> BTreeSet<String> {
        let entries = self.entries.lock();
        let attached = entries.iter().filter(|entry| entry.link.attached());
        attached.map(|entry| entry.link.server().to_owned()).collect()
    }

    /// True if some server has a session in use.
    pub fn attached(&self) -> bool {
        self.entries.lock().iter().any(|entry| entry.link.attached())
    }

    /// The strongest refusal between some server and this agent. While one is attached, only [`Refused::EnrollAgain`]
    /// counts: a server that asks for it attaches a link before it refuses it.
    pub fn refused(&self) -> Option<Refused> {
        let strongest = self.entries.lock().iter().filter_map(|entry| entry.link.refused()).max();
        strongest.filter(|refused| *refused == Refused::EnrollAgain || !self.attached())
    }
}

/// `another`: another server, whose address is not gone, can be used.
fn may_leave(another: bool, attached: bool, gone_for: Duration) -> bool {
    another || (!attached && gone_for >= GRACE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_only_working_server_is_never_left() {
        for gone_for in [Duration::ZERO, GRACE, GRACE * 1000] {
            assert!(!may_leave(false, true, gone_for));
            assert!(may_leave(true, true, gone_for));
            assert!(may_leave(true, false, gone_for));
        }
        assert!(!may_leave(false, false, GRACE / 2));
        assert!(may_leave(false, false, GRACE));
    }
}
