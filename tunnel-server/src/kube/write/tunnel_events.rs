//! Events about tunnels on their Nodes. Which changes are reported is decided without I/O, with the time as an argument.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use kube::runtime::events::EventType;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tunnel_core::identity::NodeName;

use super::events::{self, Events};

/// How often the end of a node's tunnel is reported immediately. One that follows sooner may be a link that flaps.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);
/// A tunnel that may be flapping counts as ended when it has been away for this long.
const FLAP_END: Duration = Duration::from_secs(10);

/// Publishes the Events of server `identity`, until `live` ends. `live` has the nodes with a tunnel to it.
pub(super) async fn run(identity: &str, events: Events, mut live: watch::Receiver<Arc<HashSet<NodeName>>>) {
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
struct Tunnels(HashMap<NodeName, Tunnel>);

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
    fn observe(&mut self, now: Instant, live: &HashSet<NodeName>) {
        for (node, tunnel) in &mut self.0 {
            let is = live.contains(node);
            if tunnel.live != is {
                (tunnel.live, tunnel.since) = (is, now);
            }
        }
        for node in live {
            if !self.0.contains_key(node) {
                let tunnel = Tunnel { live: true, since: now, reported_up: false, reported_down: None };
                self.0.insert(node.clone(), tunnel);
            }
        }
        // Of a tunnel that is gone only a recent report has to be remembered.
        self.0.retain(|_, tunnel| {
            tunnel.live
                || tunnel.reported_up
                || tunnel.reported_down.is_some_and(|at| now < at + REPORT_INTERVAL)
        });
    }

    /// When something will be due without any further change.
    fn due(&self) -> Option<Instant> {
        self.0.values().filter_map(Tunnel::due).min()
    }

    /// What is due, each once: the node, and whether its tunnel is up.
    fn take(&mut self, now: Instant) -> Vec<(NodeName, bool)> {
        let due = self.0.iter_mut().filter(|(_, tunnel)| tunnel.due().is_some_and(|due| due <= now));
        due.map(|(node, tunnel)| {
            tunnel.reported_up = tunnel.live;
            if !tunnel.live {
                tunnel.reported_down = Some(now);
            }
            (node.clone(), tunnel.live)
        })
        .collect()
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
            let live = if up { HashSet::from(["edge-1".parse().unwrap()]) } else { HashSet::new() };
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
        assert_eq!(reports.tunnels.0.len(), 1);
        reports.at(10 + REPORT_INTERVAL.as_secs(), false);
        assert_eq!(reports.tunnels.0.len(), 0);
        assert_eq!(reports.tunnels.due(), None);
    }
}
