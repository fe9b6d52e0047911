//! Nodes that have a tunnel to any server, debounced for the Events and the condition. Pure: the time is an argument.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use tokio::time::Instant;
use tunnel_runtime::NodeName;

use tunnel_routing::inventory::Inventory;

/// A tunnel that is away for less than this has not ended: its agent reconnects, or connects to another server.
const AWAY: Duration = Duration::from_secs(5);
/// Within this time after the end of a node's tunnel, the link counts as possibly flapping.
const FLAP_INTERVAL: Duration = Duration::from_secs(60);
/// A tunnel that may be flapping has ended when it has been away for this long.
const FLAP_END: Duration = Duration::from_secs(10);
/// The same while the tunnel's server is out of reach. It covers the time in which the agents of a server that is killed
/// connect to others.
const OUT_OF_REACH: Duration = Duration::from_secs(60);
/// Time in which a starting server learns the nodes of the other servers. Those tunnels are not new.
const SETTLED: Duration = Duration::from_secs(5);
/// Time for an agent that this server has never seen to connect: agents need a moment to find a server that has
/// started, or to be started on a new node.
const CONNECT: Duration = Duration::from_secs(30);
/// Time for which the end of a tunnel that another server should report is kept: that server may have died with the
/// tunnel. Its Lease ends 15 s later, which is noticed within 3 s.
const HELD: Duration = Duration::from_secs(20);

/// A node's tunnel came up or ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) node: NodeName,
    pub(super) up: bool,
    /// True if this server has to report it.
    pub(super) is_news: bool,
}

/// The tunnels of edge nodes. The cost of a change does not depend on the number of nodes.
#[derive(Debug)]
pub(super) struct Tracker {
    started: Instant,
    /// False if another server leads and reports changes.
    leads: bool,
    of: HashMap<NodeName, Tunnel>,
    /// Times at which changed states take effect.
    due: BTreeSet<(Instant, NodeName)>,
}

#[derive(Clone, Debug)]
struct Tunnel {
    live: bool,
    /// True if it was last at a server that is out of reach: the agent may still be there.
    unsure: bool,
    /// Time of the last change of `live`.
    since: Instant,
    /// The state in effect; None if it is not known yet whether there is a tunnel.
    counts: Option<bool>,
    ended: Option<Instant>,
}

impl Tunnel {
    /// Returns the time at which the present state takes effect; None if it already has.
    fn due(&self, started: Instant, leads: bool) -> Option<Instant> {
        let held = if leads { Duration::ZERO } else { HELD };
        match (self.live, self.counts) {
            (true, Some(true)) | (false, Some(false)) => None,
            (true, _) => Some(self.since.max(started + SETTLED)),
            (false, None) => Some(self.since + CONNECT),
            (false, Some(true)) if self.unsure => Some(self.since + OUT_OF_REACH + held),
            (false, Some(true)) => {
                let (end, flap_end) = (self.since + AWAY, self.since + FLAP_END);
                let interval = |at: Instant| (at + FLAP_INTERVAL).max(end).min(flap_end);
                Some(self.ended.map_or(end, interval) + held)
            }
        }
    }
}

impl Tracker {
    /// Creates the tracker of a server that starts now.
    pub(super) fn new(started: Instant) -> Self {
        Self { started, leads: false, of: HashMap::new(), due: BTreeSet::new() }
    }

    /// Returns the node's state in effect, true for a tunnel, and the time of its last change; None while unknown.
    pub(super) fn get(&self, node: &NodeName) -> Option<(bool, Instant)> {
        let tunnel = self.of.get(node)?;
        Some((tunnel.counts?, tunnel.since))
    }

    /// Records that the node has a tunnel (`live`) or has none. `unsure`: it may have one to a server that is out of reach.
    pub(super) fn observe(&mut self, now: Instant, node: &NodeName, live: bool, unsure: bool) {
        let unknown = Tunnel { live, unsure: false, since: now, counts: None, ended: None };
        self.change(node, unknown, |tunnel| {
            tunnel.unsure = unsure && !live;
            if tunnel.live != live {
                (tunnel.live, tunnel.since) = (live, now);
            }
        });
    }

    /// Expects a tunnel of all edge nodes, and forgets other nodes without one.
    pub(super) fn expect(&mut self, now: Instant, inventory: &Inventory) {
        let is_edge = |node: &NodeName| inventory.get(node.as_str()).is_some_and(|node| node.edge);
        for node in inventory.iter().filter(|node| node.edge) {
            if !self.of.contains_key(&node.name) {
                self.observe(now, &node.name, false, false);
            }
        }
        self.of.retain(|node, tunnel| tunnel.live || tunnel.counts == Some(true) || is_edge(node));
        self.due.retain(|(_, node)| self.of.contains_key(node));
    }

    pub(super) fn set_leading(&mut self, leads: bool) {
        if std::mem::replace(&mut self.leads, leads) != leads {
            let due = self.of.iter().map(|(node, tunnel)| (tunnel.due(self.started, leads), node));
            self.due = due.filter_map(|(due, node)| Some((due?, node.clone()))).collect();
        }
    }

    /// Returns the time at which [`Self::take`] has something to do without any further change.
    pub(super) fn next(&self) -> Option<Instant> {
        self.due.first().map(|(due, _)| *due)
    }

    /// Returns the states that take effect now, each once. `elsewhere` reports nodes with a tunnel to another server:
    /// just after a start these are no news.
    pub(super) fn take(&mut self, now: Instant, elsewhere: impl Fn(&NodeName) -> bool) -> Vec<Change> {
        let mut changes = Vec::new();
        while let Some((_, node)) = self.due.first().filter(|(due, _)| *due <= now).cloned() {
            self.due.pop_first();
            let Some(tunnel) = self.of.get(&node).cloned() else { continue };
            let (up, settled) = (tunnel.live, self.started + SETTLED);
            let known_before = up && tunnel.since < settled && elsewhere(&node);
            // A node whose agent has never connected has lost nothing.
            let lost = tunnel.counts == Some(true);
            self.change(&node, tunnel, |tunnel| {
                tunnel.counts = Some(up);
                if !up && lost {
                    tunnel.ended = Some(now);
                }
            });
            let is_news = self.leads && if up { !known_before } else { lost };
            changes.push(Change { node, up, is_news });
        }
        changes
    }

    /// Applies `change` to the node's tunnel. A node that was not known starts as `unknown`.
    fn change(&mut self, node: &NodeName, unknown: Tunnel, change: impl FnOnce(&mut Tunnel)) {
        let tunnel = self.of.entry(node.clone()).or_insert(unknown);
        if let Some(due) = tunnel.due(self.started, self.leads) {
            self.due.remove(&(due, node.clone()));
        }
        change(tunnel);
        if let Some(due) = tunnel.due(self.started, self.leads) {
            self.due.insert((due, node.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use tunnel_routing::inventory::InventoryNode;

    use super::*;

    fn edge() -> NodeName {
        "edge-1".parse().unwrap()
    }

    fn inventory(edge: bool) -> Inventory {
        [InventoryNode { edge, ..InventoryNode::new("edge-1".parse().unwrap()) }].into_iter().collect()
    }

    /// A node that is up or down, second by second, and the seconds of the reports.
    struct Reports {
        tracker: Tracker,
        elsewhere: bool,
        start: Instant,
        now: Instant,
        reported: Vec<(u64, bool)>,
    }

    impl Reports {
        /// Reports of a server that has been running for a while.
        fn new() -> Self {
            let start = Instant::now();
            Self { start, now: start, ..Self::of_start(start - SETTLED) }
        }

        fn of_start(start: Instant) -> Self {
            let mut tracker = Tracker::new(start);
            tracker.set_leading(true);
            Self { tracker, elsewhere: false, start, now: start, reported: Vec::new() }
        }

        fn at(&mut self, second: u64, up: bool) {
            self.observe(second, up, false);
        }

        fn observe(&mut self, second: u64, up: bool, unsure: bool) {
            let now = self.start + Duration::from_secs(second);
            while let Some(next) = self.tracker.next().filter(|next| *next < now) {
                self.collect(next.max(self.now));
            }
            self.tracker.observe(now, &edge(), up, unsure);
            self.collect(now);
        }

        fn collect(&mut self, now: Instant) {
            self.now = now;
            let second = (now - self.start).as_secs();
            let taken = self.tracker.take(now, |_| self.elsewhere);
            self.reported
                .extend(taken.iter().filter(|change| change.is_news).map(|change| (second, change.up)));
        }
    }

    #[test]
    fn a_tunnel_is_reported_at_once_and_its_end_when_it_is_one() {
        let mut reports = Reports::new();
        reports.at(0, true);
        reports.at(5, true);
        reports.at(100, false);
        reports.at(200, false);
        reports.at(300, true);
        assert_eq!(reports.reported, [(0, true), (105, false), (300, true)]);
    }

    #[test]
    fn an_agent_that_goes_from_server_to_server_is_not_reported() {
        let mut reports = Reports::new();
        reports.at(0, true);
        for second in (10..310).step_by(10) {
            reports.at(second, false);
            reports.at(second + 4, true);
        }
        reports.at(1000, true);
        assert_eq!(reports.reported, [(0, true)]);
    }

    #[test]
    fn a_flapping_link_is_reported_once_a_minute() {
        let mut reports = Reports::new();
        reports.at(0, true);
        for second in (10..310).step_by(10) {
            reports.at(second, false);
            reports.at(second + 7, true);
        }
        let downs: Vec<_> =
            reports.reported.iter().filter(|(_, up)| !up).map(|(second, _)| *second).collect();
        assert_eq!(downs, [15, 75, 135, 195, 255]);
        assert_eq!(reports.reported.len(), 1 + 2 * downs.len(), "{:?}", reports.reported);
    }

    #[test]
    fn a_flapping_link_that_stays_away_is_reported() {
        let mut reports = Reports::new();
        reports.at(0, true);
        reports.at(10, false);
        reports.at(17, true);
        reports.at(20, false);
        reports.at(500, false);
        assert_eq!(reports.reported, [(0, true), (15, false), (17, true), (30, false)]);
    }

    #[test]
    fn a_tunnel_to_a_server_out_of_reach_ends_later_or_once_that_is_known() {
        let mut reports = Reports::new();
        reports.at(0, true);
        // The server is in reach again, and has the node.
        reports.observe(100, false, true);
        reports.at(159, true);
        // It has the node no more.
        reports.observe(200, false, true);
        reports.at(230, false);
        let lost = reports.start + Duration::from_secs(200);
        assert_eq!(reports.tracker.get(&edge()), Some((false, lost)));
        reports.at(300, true);
        // It stays out of reach, or the agent is gone.
        reports.observe(400, false, true);
        reports.observe(500, false, true);
        assert_eq!(reports.reported, [(0, true), (230, false), (300, true), (460, false)]);
    }

    #[test]
    fn a_node_that_is_gone_is_forgotten_once_the_end_of_its_tunnel_counts() {
        for leads in [true, false] {
            let mut reports = Reports::new();
            reports.tracker.set_leading(leads);
            reports.at(0, true);
            reports.at(10, false);
            reports.tracker.expect(reports.now, &inventory(false));
            assert!(reports.tracker.get(&edge()).is_some(), "that is still to be reported");
            reports.at(10 + HELD.as_secs() + 10, false);
            reports.tracker.expect(reports.now, &inventory(false));
            assert!(reports.tracker.of.is_empty() && reports.tracker.next().is_none());
            assert_eq!(reports.reported.len(), if leads { 2 } else { 0 });
        }
    }

    #[test]
    fn an_agent_that_never_comes_counts_after_a_while_and_is_no_news() {
        let mut reports = Reports::of_start(Instant::now());
        let came = reports.start + Duration::from_secs(100);
        reports.tracker.expect(came, &inventory(true));
        // Another change of the inventory does not restart the timer.
        reports.tracker.expect(came + CONNECT / 2, &inventory(true));
        reports.collect(came + CONNECT - Duration::from_secs(1));
        assert_eq!(reports.tracker.get(&edge()), None);
        reports.collect(came + CONNECT);
        assert_eq!(reports.tracker.get(&edge()), Some((false, came)));
        assert_eq!(reports.reported, []);
        reports.at(200, true);
        assert_eq!(reports.tracker.get(&edge()), Some((true, came + Duration::from_secs(100))));
        assert_eq!(reports.reported, [(200, true)]);
    }

    #[test]
    fn a_restart_after_which_all_agents_return_ends_no_tunnel() {
        let mut reports = Reports::of_start(Instant::now());
        reports.tracker.expect(reports.start, &inventory(true));
        reports.at(20, true);
        assert_eq!(reports.tracker.get(&edge()).map(|(up, _)| up), Some(true));
        reports.at(100, false);
        assert_eq!(reports.tracker.get(&edge()).map(|(up, _)| up), Some(true), "it may be back soon");
        reports.at(103, true);
        reports.at(200, true);
        assert_eq!(reports.reported, [(20, true)]);
    }

    #[test]
    fn who_leads_reports_and_who_begins_to_lead_what_nobody_may_have_reported() {
        let mut reports = Reports::new();
        reports.tracker.set_leading(false);
        reports.at(0, true);
        reports.at(100, false);
        reports.at(124, false);
        assert_eq!(reports.reported, []);
        reports.tracker.set_leading(true);
        reports.at(124, false);
        assert_eq!(reports.reported, [(124, false)]);
        reports.at(200, true);
        // Another server had the time to report this one, and leads again.
        reports.tracker.set_leading(false);
        reports.at(300, false);
        reports.at(326, false);
        reports.tracker.set_leading(true);
        reports.at(327, false);
        reports.at(400, true);
        assert_eq!(reports.reported, [(124, false), (200, true), (400, true)]);
    }

    #[test]
    fn what_the_others_have_when_a_server_starts_is_no_news() {
        for (elsewhere, reported) in [(true, vec![]), (false, vec![(SETTLED.as_secs(), true)])] {
            let mut reports = Reports::of_start(Instant::now());
            reports.at(1, true);
            reports.elsewhere = elsewhere;
            reports.at(20, true);
            assert_eq!(reports.reported, reported);
            reports.reported.clear();
            reports.at(30, false);
            reports.at(50, true);
            assert_eq!(reports.reported, [(35, false), (50, true)]);
        }
    }
}
