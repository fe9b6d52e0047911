//! The loops, one for each server, as servers come and go.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio_util::task::TaskTracker;
use tunnel_core::config::HostPort;
use tunnel_core::identity::AgentIdentity;

use super::{LinkLoop, LinkStatus, Shared};

/// How long a server whose address has gone is still tried when no other one can be reached either.
const GRACE: Duration = Duration::from_secs(60);
/// How often it is looked whether a server may be left.
const LOOK: Duration = Duration::from_secs(1);

/// The loops of an agent. A server is left only when that takes nothing away: another one that is still wanted can be
/// used, or it could not be reached for a while itself.
pub struct Links {
    shared: Arc<Shared>,
    identity: watch::Receiver<Arc<AgentIdentity>>,
    tasks: TaskTracker,
    entries: Mutex<Vec<Entry>>,
}

struct Entry {
    link: Arc<LinkLoop>,
    /// When its address went.
    gone: Option<Instant>,
}

impl Links {
    /// No loops yet; their tasks become those of `tasks`.
    pub fn new(
        shared: Arc<Shared>,
        identity: watch::Receiver<Arc<AgentIdentity>>,
        tasks: TaskTracker,
    ) -> Arc<Self> {
        Arc::new(Self { shared, identity, tasks, entries: Mutex::default() })
    }

    fn entries(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// These are the servers from now on. An empty list changes nothing: it is no news that there are none.
    pub fn set(&self, servers: &[HostPort]) {
        if servers.is_empty() || self.shared.draining.is_cancelled() {
            return;
        }
        let wanted: Vec<String> = servers.iter().map(ToString::to_string).collect();
        let mut entries = self.entries();
        for entry in entries.iter_mut() {
            let is_wanted = wanted.iter().any(|server| server == entry.link.server());
            entry.gone = (!is_wanted).then(|| entry.gone.unwrap_or_else(Instant::now));
        }
        for server in wanted {
            if entries.iter().all(|entry| entry.link.server() != server) {
                let link = LinkLoop::new(self.shared.clone(), server);
                self.tasks.spawn(link.clone().run(self.identity.clone()));
                entries.push(Entry { link, gone: None });
            }
        }
        drop(entries);
        self.tidy();
    }

    /// Leaves the servers that may be left.
    fn tidy(&self) {
        let mut entries = self.entries();
        // One that stands by leads to a server that is attached through another address, which may be the one to leave.
        let usable = |link: &LinkLoop| link.attached() || link.stands_by();
        let another = entries.iter().any(|entry| entry.gone.is_none() && usable(&entry.link));
        entries.retain(|entry| {
            let Some(gone) = entry.gone else { return true };
            if !may_leave(another, entry.link.attached(), gone.elapsed()) {
                return true;
            }
            tracing::info!(server = entry.link.server(), "leaving a server whose address has gone");
            entry.link.leave();
            false
        });
    }

    /// Follows the servers until nobody tells of them any more.
    pub async fn follow(&self, mut servers: watch::Receiver<Arc<Vec<HostPort>>>) {
        let mut tick = tokio::time::interval(LOOK);
        loop {
            let now = servers.borrow_and_update().clone();
            self.set(&now);
            tokio::select! {
                changed = servers.changed() => if changed.is_err() { return },
                _ = tick.tick() => {}
            }
        }
    }

    /// What an operator sees.
    pub fn status(&self) -> Vec<LinkStatus> {
        self.entries().iter().map(|entry| entry.link.status()).collect()
    }

    /// Whether some server has a session in use.
    pub fn attached(&self) -> bool {
        self.entries().iter().any(|entry| entry.link.attached())
    }

    /// How long the agent and some server have not taken each other's certificate, when no server is attached.
    pub fn refused_for(&self) -> Option<Duration> {
        if self.attached() {
            return None;
        }
        self.entries().iter().filter_map(|entry| entry.link.refused_for()).max()
    }
}

/// `another`: a server that is wanted can be used.
fn may_leave(another: bool, attached: bool, gone_for: Duration) -> bool {
    another || (!attached && gone_for >= GRACE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_only_tunnel_that_works_is_never_left() {
        for gone_for in [Duration::ZERO, GRACE, GRACE * 1000] {
            assert!(!may_leave(false, true, gone_for));
            assert!(may_leave(true, true, gone_for));
            assert!(may_leave(true, false, gone_for));
        }
        assert!(!may_leave(false, false, GRACE / 2));
        assert!(may_leave(false, false, GRACE));
    }
}
