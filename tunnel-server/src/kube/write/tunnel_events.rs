//! Events about tunnels on their Nodes. Which changes are reported is decided without I/O, with the time as an argument.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use kube::runtime::events::EventType;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tunnel_core::identity::NodeName;

use super::events::{self, Events};
use crate::shared_map::SharedSet;

/// How often the end of a node's tunnel is reported immediately. One that follows sooner may be a link that flaps.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);
/// A tunnel that may be flapping counts as ended when it has been away for this long.
const FLAP_END: Duration = Duration::from_secs(10);

/// Publishes the Events of server `identity`, until `live` ends. `live` has the nodes with a tunnel to it.
pub(super) async fn run(identity: &str, events: Events, mut live: watch::Receiver<SharedSet<NodeName>>) {
    let mut tunnels = Tunnels::default();
    live.mark_changed();
    loop {
        let due = tunnels.due();
        tokio::select! {
            changed = live.changed() => match changed {
                Ok(()) => tunnels.observe(Instant::now(), &live.borrow_and_update()),
                Err(_) => return,
            },
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
        }
        for (node, up) in tunnels.take(Instant::now()) {
            let (kind, reason, note) = if up {
                (EventType::Normal, "TunnelUp", format!("the agent has a tunnel to server {identity}"))
            } else {
                (
                    EventType::Warning,
                    "TunnelDown",
                    format!("the agent's tunnel to server {identity} has ended"),
                )
            };
            events.publish(events::node(node.as_str()), kind, reason, note);
        }
    }
}

/// What was reported of each node's tunnel.
#[derive(Debug, Default)]
struct Tunnels {
    of: HashMap<NodeName, Tunnel>,
    live: SharedSet<NodeName>,
    /// When each is to be reported.
    due: BTreeSet<(Instant, NodeName)>,
    /// When each of those that are gone may be forgotten.
    forget: BTreeSet<(Instant, NodeName)>,
}

#[derive(Debug)]
struct Tunnel {
    live: bool,
    /// Since when it is live, or is not.
    since: Instant,
    reported_up: bool,
    reported_down: Option<Instant>,
}

impl Tunnel {
    /// When the present state is to be reported; None while it was.
    fn due(&self) -> Option<Instant> {
        match (self.live, self.reported_up) {
            (true, false) => Some(self.since),
            (false, true) => {
                let away = self.since + FLAP_END;
                Some(
                    self.reported_down
                        .map_or(self.since, |at| (at + REPORT_INTERVAL).max(self.since).min(away)),
                )
            }
            _ => None,
        }
    }
}

impl Tunnels {
    fn observe(&mut self, now: Instant, live: &SharedSet<NodeName>) {
        let before = std::mem::replace(&mut self.live, live.clone());
        for (node, is) in live.changes_since(&before) {
            let tunnel = self.of.entry(node.clone());
            let tunnel =
                tunnel.or_insert(Tunnel { live: is, since: now, reported_up: false, reported_down: None });
            let due = tunnel.due();
            if tunnel.live != is {
                (tunnel.live, tunnel.since) = (is, now);
            }
            self.due.extend(tunnel.due().map(|due| (due, node.clone())));
            if let Some(due) = due.filter(|due| tunnel.due() != Some(*due)) {
                self.due.remove(&(due, node.clone()));
            }
            self.forget.extend((!is).then(|| (now, node.clone())));
        }
        while let Some((at, node)) = self.forget.first().filter(|(at, _)| *at <= now).cloned() {
            self.forget.remove(&(at, node.clone()));
            let Some(tunnel) = self.of.get(&node).filter(|tunnel| !tunnel.live) else { continue };
            // Of a tunnel that is gone only a recent report has to be remembered.
            match tunnel.reported_down.map(|at| at + REPORT_INTERVAL).filter(|until| now < *until) {
                Some(until) => _ = self.forget.insert((until, node)),
                None if tunnel.reported_up => {}
                None => _ = self.of.remove(&node),
            }
        }
    }

    /// When something will be due without any further change.
    fn due(&self) -> Option<Instant> {
        self.due.first().map(|(due, _)| *due)
    }

    /// What is due, each once: the node, and whether its tunnel is up.
    fn take(&mut self, now: Instant) -> Vec<(NodeName, bool)> {
        let mut taken = Vec::new();
        while let Some((at, node)) = self.due.first().filter(|(due, _)| *due <= now).cloned() {
            self.due.remove(&(at, node.clone()));
            let Some(tunnel) = self.of.get_mut(&node) else { continue };
            tunnel.reported_up = tunnel.live;
            if !tunnel.live {
                tunnel.reported_down = Some(now);
                self.forget.insert((now + REPORT_INTERVAL, node.clone()));
            }
            taken.push((node, tunnel.live));
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node that is up or down, second by second, and the seconds at which something was reported.
    struct Reports {
        tunnels: Tunnels,
        start: Instant,
        reported: Vec<(u64, bool)>,
    }

    impl Reports {
        fn new() -> Self {
            Self { tunnels: Tunnels::default(), start: Instant::now(), reported: Vec::new() }
        }

        fn at(&mut self, second: u64, up: bool) {
            let now = self.start + Duration::from_secs(second);
            while let Some(due) = self.tunnels.due().filter(|due| *due < now) {
                self.collect(due);
            }
            let live = up.then(|| "edge-1".parse().unwrap()).into_iter().collect();
            self.tunnels.observe(now, &live);
            self.collect(now);
        }

        fn collect(&mut self, now: Instant) {
            let second = (now - self.start).as_secs();
            self.reported.extend(self.tunnels.take(now).into_iter().map(|(_, up)| (second, up)));
        }
    }

    #[test]
    fn up_and_down_are_reported_immediately() {
        let mut reports = Reports::new();
        reports.at(0, true);
        reports.at(5, true);
        reports.at(100, false);
        reports.at(200, false);
        reports.at(300, true);
        assert_eq!(reports.reported, [(0, true), (100, false), (300, true)]);
    }

    #[test]
    fn a_flapping_link_is_reported_once_a_minute() {
        let mut reports = Reports::new();
        reports.at(0, true);
        for second in (10..310).step_by(10) {
            reports.at(second, false);
            reports.at(second + 3, true);
        }
        let downs: Vec<_> =
            reports.reported.iter().filter(|(_, up)| !up).map(|(second, _)| *second).collect();
        assert_eq!(downs, [10, 70, 130, 190, 250]);
        assert_eq!(reports.reported.len(), 1 + 2 * downs.len(), "{:?}", reports.reported);
    }

    #[test]
    fn a_flapping_link_that_stays_away_is_reported() {
        let mut reports = Reports::new();
        reports.at(0, true);
        reports.at(10, false);
        reports.at(12, true);
        reports.at(20, false);
        reports.at(500, false);
        assert_eq!(reports.reported, [(0, true), (10, false), (12, true), (30, false)]);
    }

    #[test]
    fn reports_of_a_node_that_is_gone_are_forgotten() {
        let mut reports = Reports::new();
        reports.at(0, true);
        reports.at(10, false);
        assert_eq!(reports.tunnels.of.len(), 1);
        reports.at(10 + REPORT_INTERVAL.as_secs(), false);
        assert_eq!(reports.tunnels.of.len(), 0);
        assert_eq!(reports.tunnels.due(), None);
    }
}
