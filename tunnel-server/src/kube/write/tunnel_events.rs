//! Events about tunnels on their Nodes, written by the server that leads: a node has a tunnel while any server has its session.
//! Which changes are reported is decided without I/O, with the time as an argument.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use kube::runtime::events::EventType;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tunnel_core::identity::NodeName;

use super::events::{self, Events};
use crate::shared_map::SharedSet;

/// A tunnel that is away for less than this has not ended: its agent comes back, or goes to another server.
const AWAY: Duration = Duration::from_secs(5);
/// How often the end of a node's tunnel is reported as soon as it is one. One that follows sooner may be a link that flaps.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);
/// A tunnel that may be flapping counts as ended when it has been away for this long.
const FLAP_END: Duration = Duration::from_secs(10);
/// How long a server that starts learns which nodes the others have. Those have not got their tunnels just now.
const SETTLED: Duration = Duration::from_secs(5);
/// How long the end of a tunnel is kept that another server should report: that one may have died with the tunnel, and its
/// Lease ends 15 s later, which is seen within 3 s.
const HELD: Duration = Duration::from_secs(20);

/// Publishes Events while this server leads, until `live` ends. `live` has the nodes with a tunnel to any server, `elsewhere`
/// those with one to another server.
pub(super) async fn run(
    mut leader: watch::Receiver<bool>,
    events: Events,
    mut live: watch::Receiver<SharedSet<NodeName>>,
    elsewhere: watch::Receiver<SharedSet<NodeName>>,
) {
    let mut tunnels = Tunnels::new(Instant::now());
    live.mark_changed();
    loop {
        let (now, leads) = (Instant::now(), *leader.borrow_and_update());
        let news = tunnels.take(now, leads, &elsewhere.borrow());
        for (node, up) in news {
            let (kind, reason, note) = if up {
                (EventType::Normal, "TunnelUp", "the agent has a tunnel")
            } else {
                (EventType::Warning, "TunnelDown", "the agent has a tunnel to no server any more")
            };
            events.publish(events::node(node.as_str()), kind, reason, note.to_owned());
        }
        let next = tunnels.next(now, leads);
        tokio::select! {
            changed = live.changed() => match changed {
                Ok(()) => tunnels.observe(Instant::now(), &live.borrow_and_update()),
                Err(_) => return,
            },
            Ok(()) = leader.changed() => {}
            () = sleep_until(next.unwrap_or(now)), if next.is_some() => {}
        }
    }
}

/// What was reported of each node's tunnel.
#[derive(Debug)]
struct Tunnels {
    /// When this server knows what the others have.
    settled: Instant,
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
    fn due(&self, settled: Instant) -> Option<Instant> {
        match (self.live, self.reported_up) {
            (true, false) => Some(self.since.max(settled)),
            (false, true) => {
                let (ended, flap_ended) = (self.since + AWAY, self.since + FLAP_END);
                let interval = |at: Instant| (at + REPORT_INTERVAL).max(ended).min(flap_ended);
                Some(self.reported_down.map_or(ended, interval))
            }
            _ => None,
        }
    }
}

impl Tunnels {
    /// Of a server that starts now.
    fn new(now: Instant) -> Self {
        Self {
            settled: now + SETTLED,
            of: HashMap::new(),
            live: SharedSet::default(),
            due: BTreeSet::new(),
            forget: BTreeSet::new(),
        }
    }

    fn observe(&mut self, now: Instant, live: &SharedSet<NodeName>) {
        let before = std::mem::replace(&mut self.live, live.clone());
        for (node, is) in live.changes_since(&before) {
            let tunnel = self.of.entry(node.clone());
            let tunnel =
                tunnel.or_insert(Tunnel { live: is, since: now, reported_up: false, reported_down: None });
            let due = tunnel.due(self.settled);
            if tunnel.live != is {
                (tunnel.live, tunnel.since) = (is, now);
            }
            self.due.extend(tunnel.due(self.settled).map(|due| (due, node.clone())));
            if let Some(due) = due.filter(|due| tunnel.due(self.settled) != Some(*due)) {
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

    /// When [`Self::take`] has something to do without any further change; `now` is when it was called last.
    fn next(&self, now: Instant, leads: bool) -> Option<Instant> {
        let mut due = self.due.iter().map(|(due, _)| *due);
        if leads {
            return due.next();
        }
        // What is left of the past is kept.
        let kept = self.due.first().map(|(due, _)| *due).filter(|due| *due <= now);
        kept.map(|due| due + HELD).into_iter().chain(due.find(|due| *due > now)).min()
    }

    /// What is due, each once: the node, and whether its tunnel is up. While this server does not lead it is for another one to
    /// report.
    fn take(&mut self, now: Instant, leads: bool, elsewhere: &SharedSet<NodeName>) -> Vec<(NodeName, bool)> {
        let mut taken = Vec::new();
        let due: Vec<_> = self.due.iter().take_while(|(due, _)| *due <= now).cloned().collect();
        for (at, node) in due {
            let tunnel = self.of.get_mut(&node);
            if !leads && now < at + HELD && tunnel.as_ref().is_some_and(|tunnel| !tunnel.live) {
                continue;
            }
            self.due.remove(&(at, node.clone()));
            let Some(tunnel) = tunnel else { continue };
            let before = tunnel.live && tunnel.since < self.settled && elsewhere.contains(&node);
            tunnel.reported_up = tunnel.live;
            if !tunnel.live {
                tunnel.reported_down = Some(now);
                self.forget.insert((now + REPORT_INTERVAL, node.clone()));
            }
            if leads && !before {
                taken.push((node, tunnel.live));
            }
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
        leads: bool,
        elsewhere: SharedSet<NodeName>,
        start: Instant,
        now: Instant,
        reported: Vec<(u64, bool)>,
    }

    impl Reports {
        /// Of a server that has been running for a while.
        fn new() -> Self {
            let start = Instant::now();
            let mut reports = Self::of_start(start);
            reports.tunnels.settled = start;
            reports
        }

        fn of_start(start: Instant) -> Self {
            let (tunnels, elsewhere) = (Tunnels::new(start), SharedSet::default());
            Self { tunnels, leads: true, elsewhere, start, now: start, reported: Vec::new() }
        }

        fn at(&mut self, second: u64, up: bool) {
            let now = self.start + Duration::from_secs(second);
            while let Some(next) = self.tunnels.next(self.now, self.leads).filter(|next| *next < now) {
                self.collect(next.max(self.now));
            }
            let live = up.then(|| "edge-1".parse().unwrap()).into_iter().collect();
            self.tunnels.observe(now, &live);
            self.collect(now);
        }

        fn collect(&mut self, now: Instant) {
            self.now = now;
            let second = (now - self.start).as_secs();
            let taken = self.tunnels.take(now, self.leads, &self.elsewhere);
            self.reported.extend(taken.into_iter().map(|(_, up)| (second, up)));
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
    fn reports_of_a_node_that_is_gone_are_forgotten() {
        for leads in [true, false] {
            let mut reports = Reports::new();
            reports.leads = leads;
            reports.at(0, true);
            reports.at(10, false);
            assert_eq!(reports.tunnels.of.len(), 1);
            reports.at(10 + HELD.as_secs() + 10, false);
            reports.at(10 + HELD.as_secs() + 10 + REPORT_INTERVAL.as_secs(), false);
            assert_eq!(reports.tunnels.of.len(), 0);
            assert_eq!(reports.tunnels.next(reports.now, leads), None);
        }
    }

    #[test]
    fn who_leads_reports_and_who_begins_to_lead_what_nobody_may_have_reported() {
        let mut reports = Reports::new();
        reports.leads = false;
        reports.at(0, true);
        reports.at(100, false);
        reports.at(124, false);
        assert_eq!(reports.reported, []);
        reports.leads = true;
        reports.at(124, false);
        assert_eq!(reports.reported, [(124, false)]);
        reports.at(200, true);
        // This one another server has had the time to report, and that one leads again.
        reports.leads = false;
        reports.at(300, false);
        reports.at(326, false);
        reports.leads = true;
        reports.at(327, false);
        reports.at(400, true);
        assert_eq!(reports.reported, [(124, false), (200, true), (400, true)]);
    }

    #[test]
    fn what_the_others_have_when_a_server_starts_is_no_news() {
        for (elsewhere, reported) in [(true, vec![]), (false, vec![(SETTLED.as_secs(), true)])] {
            let mut reports = Reports::of_start(Instant::now());
            reports.at(1, true);
            reports.elsewhere = elsewhere.then(|| "edge-1".parse().unwrap()).into_iter().collect();
            reports.at(20, true);
            assert_eq!(reports.reported, reported);
            reports.reported.clear();
            reports.at(30, false);
            reports.at(50, true);
            assert_eq!(reports.reported, [(35, false), (50, true)]);
        }
    }
}
