//! What the conditions should be while this server leads: pure, with the time as an argument.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use jiff::Timestamp;
use tokio::time::Instant;
use tunnel_core::identity::NodeName;

use crate::inventory::Inventory;

/// An agent that this server has never seen gets this long to connect: agents need a moment to find a server that has
/// started, and a new leader does not know yet which of them will.
const CONNECT_GRACE: Duration = Duration::from_secs(30);
/// An agent that was seen may be away for this long.
const AWAY_GRACE: Duration = Duration::from_secs(5);

/// What a node's condition should become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Want {
    Up,
    /// Since when there is no tunnel.
    Down(Timestamp),
    /// No edge node any more.
    Gone,
}

impl Want {
    /// The condition's status; None for no condition.
    pub(super) fn status(self) -> Option<&'static str> {
        match self {
            Self::Up => Some("True"),
            Self::Down(_) => Some("False"),
            Self::Gone => None,
        }
    }
}

/// The time during which this server leads.
#[derive(Debug)]
pub(super) struct LeaderTerm {
    began: Instant,
    /// The condition's status on the nodes that have the condition, as the API server has it.
    present: HashMap<NodeName, String>,
    /// Every node of the inventory, and whether it is an edge node.
    nodes: HashMap<NodeName, bool>,
    live: HashSet<NodeName>,
    /// Edge nodes without a tunnel.
    absent: HashMap<NodeName, Absence>,
}

#[derive(Clone, Copy, Debug)]
struct Absence {
    /// When it may be written.
    claim: Instant,
    since: Timestamp,
}

impl LeaderTerm {
    /// `present` is the condition's status on every node that has it.
    pub(super) fn new(began: Instant, present: HashMap<NodeName, String>) -> Self {
        Self { began, present, nodes: HashMap::new(), live: HashSet::new(), absent: HashMap::new() }
    }

    /// Replaces what the API server has.
    pub(super) fn set_present(&mut self, present: HashMap<NodeName, String>) {
        self.present = present;
    }

    /// Replaces the nodes, and which of them have a tunnel.
    pub(super) fn update(&mut self, now: Instant, inventory: &Inventory, live: &HashSet<NodeName>) {
        self.nodes = inventory.nodes.iter().map(|node| (node.name.clone(), node.edge)).collect();
        let before = std::mem::replace(&mut self.live, live.clone());
        let mut absent = HashMap::new();
        for (node, edge) in &self.nodes {
            if !edge || live.contains(node) {
                continue;
            }
            let absence = self.absent.get(node).copied().unwrap_or_else(|| {
                let patience = if before.contains(node) { AWAY_GRACE } else { CONNECT_GRACE };
                let claim = (now + patience).max(self.began + CONNECT_GRACE);
                Absence { claim, since: Timestamp::now() }
            });
            absent.insert(node.clone(), absence);
        }
        self.absent = absent;
        // A node that is created again under this name is another one, without a condition.
        self.present.retain(|node, _| self.nodes.contains_key(node));
    }

    /// What to write for `node` now.
    pub(super) fn want(&self, now: Instant, node: &NodeName) -> Option<Want> {
        let present = self.present.get(node).map(String::as_str);
        let want = if !*self.nodes.get(node)? {
            Want::Gone
        } else if let Some(absence) = self.absent.get(node) {
            if now < absence.claim {
                return None;
            }
            Want::Down(absence.since)
        } else {
            Want::Up
        };
        (want.status() != present).then_some(want)
    }

    /// The nodes that are to be written now, and when there will be more without any further change.
    pub(super) fn plan(&self, now: Instant) -> (Vec<NodeName>, Option<Instant>) {
        let due = self.nodes.keys().filter(|node| self.want(now, node).is_some()).cloned().collect();
        let claims = self.absent.values().map(|absence| absence.claim);
        (due, claims.filter(|claim| *claim > now).min())
    }

    pub(super) fn wrote(&mut self, node: &NodeName, want: Want) {
        match want.status() {
            Some(status) => self.present.insert(node.clone(), status.to_owned()),
            None => self.present.remove(node),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::{DEFAULT_KUBELET_PORT, InventoryNode};

    fn name(name: &str) -> NodeName {
        name.parse().unwrap()
    }

    fn inventory(nodes: &[(&str, bool)]) -> Inventory {
        let node = |(node, edge): &(&str, bool)| InventoryNode {
            name: name(node),
            edge: *edge,
            addresses: Vec::new(),
            left_out: 0,
            kubelet_port: DEFAULT_KUBELET_PORT,
            pod_cidrs: Vec::new(),
            created: None,
        };
        Inventory { nodes: nodes.iter().map(node).collect() }
    }

    fn live(nodes: &[&str]) -> HashSet<NodeName> {
        nodes.iter().map(|node| name(node)).collect()
    }

    fn present(nodes: &[(&str, &str)]) -> HashMap<NodeName, String> {
        nodes.iter().map(|(node, status)| (name(node), (*status).to_owned())).collect()
    }

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_tunnel_is_written_immediately_and_its_absence_after_a_while() {
        let start = Instant::now();
        let mut term = LeaderTerm::new(start, HashMap::new());
        term.update(start, &inventory(&[("edge-1", true), ("edge-2", true)]), &live(&["edge-1"]));
        assert_eq!(term.plan(start), (vec![name("edge-1")], Some(start + CONNECT_GRACE)));
        assert_eq!(term.want(start, &name("edge-1")), Some(Want::Up));
        term.wrote(&name("edge-1"), Want::Up);
        assert_eq!(term.plan(start + CONNECT_GRACE - seconds(1)).0, []);
        assert_eq!(term.plan(start + CONNECT_GRACE), (vec![name("edge-2")], None));
        assert!(matches!(term.want(start + CONNECT_GRACE, &name("edge-2")), Some(Want::Down(_))));
    }

    #[test]
    fn a_restart_after_which_all_agents_return_writes_nothing() {
        let start = Instant::now();
        let nodes: Vec<_> = (0..10_000).map(|n| format!("edge-{n}")).collect();
        let all: Vec<_> = nodes.iter().map(|node| (node.as_str(), true)).collect();
        let names: Vec<_> = nodes.iter().map(String::as_str).collect();
        let known: Vec<_> = names.iter().map(|node| (*node, "True")).collect();
        let mut term = LeaderTerm::new(start, present(&known));
        for (second, part) in [(0, 0), (5, 4_000), (20, 10_000)] {
            let now = start + seconds(second);
            term.update(now, &inventory(&all), &live(&names[..part]));
            assert_eq!(term.plan(now).0, [], "after {second} s");
        }
        assert_eq!(term.plan(start + seconds(3600)), (vec![], None));
    }

    #[test]
    fn a_tunnel_that_ends_is_written_unless_it_is_soon_back() {
        let start = Instant::now();
        let nodes = inventory(&[("edge-1", true)]);
        let mut term = LeaderTerm::new(start, present(&[("edge-1", "True")]));
        term.update(start, &nodes, &live(&["edge-1"]));
        let later = start + seconds(100);
        term.update(later, &nodes, &live(&[]));
        assert_eq!(term.plan(later), (vec![], Some(later + AWAY_GRACE)));
        term.update(later + seconds(2), &nodes, &live(&["edge-1"]));
        assert_eq!(term.plan(later + seconds(60)), (vec![], None));
        let end = start + seconds(200);
        term.update(end, &nodes, &live(&[]));
        // Another node's change in between does not restart the time.
        term.update(end + seconds(3), &nodes, &live(&[]));
        assert_eq!(term.plan(end + AWAY_GRACE).0, [name("edge-1")]);
    }

    #[test]
    fn no_tunnel_is_written_as_down_early_in_a_term() {
        let start = Instant::now();
        let nodes = inventory(&[("edge-1", true)]);
        let mut term = LeaderTerm::new(start, present(&[("edge-1", "True")]));
        term.update(start, &nodes, &live(&["edge-1"]));
        term.update(start + seconds(1), &nodes, &live(&[]));
        assert_eq!(term.plan(start + CONNECT_GRACE - seconds(1)), (vec![], Some(start + CONNECT_GRACE)));
        assert_eq!(term.plan(start + CONNECT_GRACE).0, [name("edge-1")]);
    }

    #[test]
    fn only_nodes_of_the_inventory_lose_the_condition() {
        let start = Instant::now();
        let mut term = LeaderTerm::new(start, present(&[("was-edge", "True"), ("unknown", "True")]));
        term.update(start, &inventory(&[("was-edge", false), ("cloud-1", false)]), &live(&["was-edge"]));
        assert_eq!(term.plan(start).0, [name("was-edge")]);
        assert_eq!(term.want(start, &name("was-edge")), Some(Want::Gone));
        term.wrote(&name("was-edge"), Want::Gone);
        assert_eq!(term.plan(start + seconds(3600)), (vec![], None));
    }

    #[test]
    fn a_node_that_was_created_again_gets_a_condition_again() {
        let start = Instant::now();
        let mut term = LeaderTerm::new(start, present(&[("edge-1", "True")]));
        term.update(start, &inventory(&[("edge-1", true)]), &live(&["edge-1"]));
        assert_eq!(term.plan(start).0, []);
        term.update(start, &inventory(&[]), &live(&["edge-1"]));
        term.update(start, &inventory(&[("edge-1", true)]), &live(&["edge-1"]));
        assert_eq!(term.plan(start).0, [name("edge-1")]);
    }

    #[test]
    fn an_unknown_status_is_replaced() {
        let start = Instant::now();
        let mut term = LeaderTerm::new(start, present(&[("edge-1", "Unknown")]));
        term.update(start, &inventory(&[("edge-1", true)]), &live(&["edge-1"]));
        assert_eq!(term.want(start, &name("edge-1")), Some(Want::Up));
    }
}
