//! What the conditions should be while this server leads: pure, with the time as an argument.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use jiff::Timestamp;
use tokio::time::Instant;
use tunnel_core::identity::NodeName;

use crate::inventory::Inventory;

/// An agent that was never seen by this server gets this long to come: agents need a moment to find a server that has
/// started, and a leader that has just begun does not know yet who comes.
const COMING: Duration = Duration::from_secs(30);
/// An agent that was seen may be away for so long.
const AWAY: Duration = Duration::from_secs(5);

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
pub(super) struct Reign {
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
    /// When it may be said.
    claim: Instant,
    since: Timestamp,
}

impl Reign {
    /// `present` is the condition's status on every node that has it.
    pub(super) fn new(began: Instant, present: HashMap<NodeName, String>) -> Self {
        Self { began, present, nodes: HashMap::new(), live: HashSet::new(), absent: HashMap::new() }
    }

    /// Takes up what the API server has now.
    pub(super) fn read(&mut self, present: HashMap<NodeName, String>) {
        self.present = present;
    }

    /// Takes up the nodes there are, and which of them have a tunnel.
    pub(super) fn update(&mut self, now: Instant, inventory: &Inventory, live: &HashSet<NodeName>) {
        self.nodes = inventory.nodes.iter().map(|node| (node.name.clone(), node.edge)).collect();
        let before = std::mem::replace(&mut self.live, live.clone());
        let mut absent = HashMap::new();
        for (node, edge) in &self.nodes {
            if !edge || live.contains(node) {
                continue;
            }
            let absence = self.absent.get(node).copied().unwrap_or_else(|| {
                let patience = if before.contains(node) { AWAY } else { COMING };
                let claim = (now + patience).max(self.began + COMING);
                Absence { claim, since: Timestamp::now() }
            });
            absent.insert(node.clone(), absence);
        }
        self.absent = absent;
        // One that comes back under this name is another node, without a condition.
        self.present.retain(|node, _| self.nodes.contains_key(node));
    }

    /// What is to be written for `node` now.
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

    /// The nodes for which something is to be written now, and when there will be more without any further change.
    pub(super) fn plan(&self, now: Instant) -> (Vec<NodeName>, Option<Instant>) {
        let due = self.nodes.keys().filter(|node| self.want(now, node).is_some()).cloned().collect();
        let claims = self.absent.values().map(|absence| absence.claim);
        (due, claims.filter(|claim| *claim > now).min())
    }

    /// Something was written.
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
            kubelet_port: DEFAULT_KUBELET_PORT,
            pod_cidrs: Vec::new(),
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
    fn a_tunnel_is_claimed_at_once_and_its_absence_after_a_while() {
        let start = Instant::now();
        let mut reign = Reign::new(start, HashMap::new());
        reign.update(start, &inventory(&[("edge-1", true), ("edge-2", true)]), &live(&["edge-1"]));
        assert_eq!(reign.plan(start), (vec![name("edge-1")], Some(start + COMING)));
        assert_eq!(reign.want(start, &name("edge-1")), Some(Want::Up));
        reign.wrote(&name("edge-1"), Want::Up);
        assert_eq!(reign.plan(start + COMING - seconds(1)).0, []);
        assert_eq!(reign.plan(start + COMING), (vec![name("edge-2")], None));
        assert!(matches!(reign.want(start + COMING, &name("edge-2")), Some(Want::Down(_))));
    }

    #[test]
    fn a_restart_to_which_all_agents_come_back_writes_nothing() {
        let start = Instant::now();
        let nodes: Vec<_> = (0..10_000).map(|n| format!("edge-{n}")).collect();
        let all: Vec<_> = nodes.iter().map(|node| (node.as_str(), true)).collect();
        let names: Vec<_> = nodes.iter().map(String::as_str).collect();
        let known: Vec<_> = names.iter().map(|node| (*node, "True")).collect();
        let mut reign = Reign::new(start, present(&known));
        for (second, part) in [(0, 0), (5, 4_000), (20, 10_000)] {
            let now = start + seconds(second);
            reign.update(now, &inventory(&all), &live(&names[..part]));
            assert_eq!(reign.plan(now).0, [], "after {second} s");
        }
        assert_eq!(reign.plan(start + seconds(3600)), (vec![], None));
    }

    #[test]
    fn a_tunnel_that_ends_is_claimed_down_unless_it_is_soon_back() {
        let start = Instant::now();
        let nodes = inventory(&[("edge-1", true)]);
        let mut reign = Reign::new(start, present(&[("edge-1", "True")]));
        reign.update(start, &nodes, &live(&["edge-1"]));
        let later = start + seconds(100);
        reign.update(later, &nodes, &live(&[]));
        assert_eq!(reign.plan(later), (vec![], Some(later + AWAY)));
        reign.update(later + seconds(2), &nodes, &live(&["edge-1"]));
        assert_eq!(reign.plan(later + seconds(60)), (vec![], None));
        let end = start + seconds(200);
        reign.update(end, &nodes, &live(&[]));
        // Another node's change in between does not start the time anew.
        reign.update(end + seconds(3), &nodes, &live(&[]));
        assert_eq!(reign.plan(end + AWAY).0, [name("edge-1")]);
    }

    #[test]
    fn nothing_is_claimed_down_while_the_reign_is_new() {
        let start = Instant::now();
        let nodes = inventory(&[("edge-1", true)]);
        let mut reign = Reign::new(start, present(&[("edge-1", "True")]));
        reign.update(start, &nodes, &live(&["edge-1"]));
        reign.update(start + seconds(1), &nodes, &live(&[]));
        assert_eq!(reign.plan(start + COMING - seconds(1)), (vec![], Some(start + COMING)));
        assert_eq!(reign.plan(start + COMING).0, [name("edge-1")]);
    }

    #[test]
    fn a_node_that_is_no_edge_node_loses_ours_and_others_are_left_alone() {
        let start = Instant::now();
        let mut reign = Reign::new(start, present(&[("was-edge", "True"), ("unknown", "True")]));
        reign.update(start, &inventory(&[("was-edge", false), ("cloud-1", false)]), &live(&["was-edge"]));
        assert_eq!(reign.plan(start).0, [name("was-edge")]);
        assert_eq!(reign.want(start, &name("was-edge")), Some(Want::Gone));
        reign.wrote(&name("was-edge"), Want::Gone);
        assert_eq!(reign.plan(start + seconds(3600)), (vec![], None));
    }

    #[test]
    fn a_node_that_was_made_anew_gets_a_condition_again() {
        let start = Instant::now();
        let mut reign = Reign::new(start, present(&[("edge-1", "True")]));
        reign.update(start, &inventory(&[("edge-1", true)]), &live(&["edge-1"]));
        assert_eq!(reign.plan(start).0, []);
        reign.update(start, &inventory(&[]), &live(&["edge-1"]));
        reign.update(start, &inventory(&[("edge-1", true)]), &live(&["edge-1"]));
        assert_eq!(reign.plan(start).0, [name("edge-1")]);
    }

    #[test]
    fn a_status_that_is_neither_is_put_right() {
        let start = Instant::now();
        let mut reign = Reign::new(start, present(&[("edge-1", "Unknown")]));
        reign.update(start, &inventory(&[("edge-1", true)]), &live(&["edge-1"]));
        assert_eq!(reign.want(start, &name("edge-1")), Some(Want::Up));
    }
}
