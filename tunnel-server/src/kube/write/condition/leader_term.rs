//! What the conditions should be while this server leads: pure, with the time as an argument.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use jiff::Timestamp;
use tokio::time::Instant;
use tunnel_core::identity::NodeName;

use crate::inventory::Inventory;
use crate::shared_map::SharedSet;

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

/// The time during which this server leads. A change costs what it changes, however many nodes there are.
#[derive(Debug)]
pub(super) struct LeaderTerm {
    began: Instant,
    /// The condition's status on the nodes that have the condition, as the API server has it.
    present: HashMap<NodeName, String>,
    inventory: Inventory,
    live: SharedSet<NodeName>,
    /// Edge nodes without a tunnel.
    absent: HashMap<NodeName, Absence>,
    /// When each of these may be written, for those that may not yet.
    claims: BTreeSet<(Instant, NodeName)>,
    /// What is to be written.
    due: BTreeSet<NodeName>,
    /// What the API server has was read anew.
    reread: bool,
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
        Self {
            began,
            present,
            inventory: Inventory::default(),
            live: SharedSet::default(),
            absent: HashMap::new(),
            claims: BTreeSet::new(),
            due: BTreeSet::new(),
            reread: true,
        }
    }

    /// Replaces what the API server has.
    pub(super) fn set_present(&mut self, present: HashMap<NodeName, String>) {
        self.present = present;
        self.reread = true;
    }

    /// Replaces the nodes, and which of them have a tunnel.
    pub(super) fn update(&mut self, now: Instant, inventory: &Inventory, live: &SharedSet<NodeName>) {
        let nodes = inventory.changes_since(&self.inventory).into_iter().map(|change| change.key);
        let touched: BTreeSet<NodeName> =
            nodes.chain(live.changes_since(&self.live).into_iter().map(|(node, _)| node)).cloned().collect();
        self.inventory = inventory.clone();
        let before = std::mem::replace(&mut self.live, live.clone());
        if std::mem::take(&mut self.reread) {
            self.present.retain(|node, _| inventory.get(node.as_str()).is_some());
            let all = inventory.iter().map(|node| node.name.clone());
            all.for_each(|node| self.follow(now, node, &before));
        }
        touched.into_iter().for_each(|node| self.follow(now, node, &before));
    }

    /// Takes over what has changed about a node. `before`: those that had a tunnel.
    fn follow(&mut self, now: Instant, node: NodeName, before: &SharedSet<NodeName>) {
        let known = self.inventory.get(node.as_str()).map(|known| known.edge);
        if known == Some(true) && !self.live.contains(&node) {
            if !self.absent.contains_key(&node) {
                let patience = if before.contains(&node) { AWAY_GRACE } else { CONNECT_GRACE };
                let claim = (now + patience).max(self.began + CONNECT_GRACE);
                self.claims.insert((claim, node.clone()));
                self.absent.insert(node.clone(), Absence { claim, since: Timestamp::now() });
            }
        } else if let Some(absence) = self.absent.remove(&node) {
            self.claims.remove(&(absence.claim, node.clone()));
        }
        if known.is_none() {
            // A node that is created again under this name is another one, without a condition.
            self.present.remove(&node);
        }
        self.judge(now, node);
    }

    fn judge(&mut self, now: Instant, node: NodeName) {
        if self.want(now, &node).is_some() {
            self.due.insert(node)
        } else {
            self.due.remove(&node)
        };
    }

    /// What to write for `node` now.
    pub(super) fn want(&self, now: Instant, node: &NodeName) -> Option<Want> {
        let present = self.present.get(node).map(String::as_str);
        let want = if !self.inventory.get(node.as_str())?.edge {
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
    pub(super) fn plan(&mut self, now: Instant) -> (&BTreeSet<NodeName>, Option<Instant>) {
        while let Some(claim) = self.claims.first().filter(|(claim, _)| *claim <= now).cloned() {
            self.claims.remove(&claim);
            self.judge(now, claim.1);
        }
        (&self.due, self.claims.first().map(|(claim, _)| *claim))
    }

    pub(super) fn wrote(&mut self, node: &NodeName, want: Want) {
        match want.status() {
            Some(status) => self.present.insert(node.clone(), status.to_owned()),
            None => self.present.remove(node),
        };
        self.judge(Instant::now(), node.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::InventoryNode;

    fn name(name: &str) -> NodeName {
        name.parse().unwrap()
    }

    fn inventory(nodes: &[(&str, bool)]) -> Inventory {
        let node = |(node, edge): &(&str, bool)| InventoryNode {
            edge: *edge,
            ..InventoryNode::without_addresses(node)
        };
        nodes.iter().map(node).collect()
    }

    fn live(nodes: &[&str]) -> SharedSet<NodeName> {
        nodes.iter().map(|node| name(node)).collect()
    }

    fn present(nodes: &[(&str, &str)]) -> HashMap<NodeName, String> {
        nodes.iter().map(|(node, status)| (name(node), (*status).to_owned())).collect()
    }

    /// What is to be written, and when there is more.
    fn plan(term: &mut LeaderTerm, now: Instant) -> (Vec<NodeName>, Option<Instant>) {
        let (due, next) = term.plan(now);
        (due.iter().cloned().collect(), next)
    }

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_tunnel_is_written_immediately_and_its_absence_after_a_while() {
        let start = Instant::now();
        let mut term = LeaderTerm::new(start, HashMap::new());
        term.update(start, &inventory(&[("edge-1", true), ("edge-2", true)]), &live(&["edge-1"]));
        assert_eq!(plan(&mut term, start), (vec![name("edge-1")], Some(start + CONNECT_GRACE)));
        assert_eq!(term.want(start, &name("edge-1")), Some(Want::Up));
        term.wrote(&name("edge-1"), Want::Up);
        assert_eq!(plan(&mut term, start + CONNECT_GRACE - seconds(1)).0, []);
        assert_eq!(plan(&mut term, start + CONNECT_GRACE), (vec![name("edge-2")], None));
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
            assert_eq!(plan(&mut term, now).0, [], "after {second} s");
        }
        assert_eq!(plan(&mut term, start + seconds(3600)), (vec![], None));
    }

    #[test]
    fn a_tunnel_that_ends_is_written_unless_it_is_soon_back() {
        let start = Instant::now();
        let nodes = inventory(&[("edge-1", true)]);
        let mut term = LeaderTerm::new(start, present(&[("edge-1", "True")]));
        term.update(start, &nodes, &live(&["edge-1"]));
        let later = start + seconds(100);
        term.update(later, &nodes, &live(&[]));
        assert_eq!(plan(&mut term, later), (vec![], Some(later + AWAY_GRACE)));
        term.update(later + seconds(2), &nodes, &live(&["edge-1"]));
        assert_eq!(plan(&mut term, later + seconds(60)), (vec![], None));
        let end = start + seconds(200);
        term.update(end, &nodes, &live(&[]));
        // Another node's change in between does not restart the time.
        term.update(end + seconds(3), &nodes, &live(&[]));
        assert_eq!(plan(&mut term, end + AWAY_GRACE).0, [name("edge-1")]);
    }

    #[test]
    fn no_tunnel_is_written_as_down_early_in_a_term() {
        let start = Instant::now();
        let nodes = inventory(&[("edge-1", true)]);
        let mut term = LeaderTerm::new(start, present(&[("edge-1", "True")]));
        term.update(start, &nodes, &live(&["edge-1"]));
        term.update(start + seconds(1), &nodes, &live(&[]));
        assert_eq!(
            plan(&mut term, start + CONNECT_GRACE - seconds(1)),
            (vec![], Some(start + CONNECT_GRACE))
        );
        assert_eq!(plan(&mut term, start + CONNECT_GRACE).0, [name("edge-1")]);
    }

    #[test]
    fn only_nodes_of_the_inventory_lose_the_condition() {
        let start = Instant::now();
        let mut term = LeaderTerm::new(start, present(&[("was-edge", "True"), ("unknown", "True")]));
        term.update(start, &inventory(&[("was-edge", false), ("cloud-1", false)]), &live(&["was-edge"]));
        assert_eq!(plan(&mut term, start).0, [name("was-edge")]);
        assert_eq!(term.want(start, &name("was-edge")), Some(Want::Gone));
        term.wrote(&name("was-edge"), Want::Gone);
        assert_eq!(plan(&mut term, start + seconds(3600)), (vec![], None));
    }

    #[test]
    fn a_node_that_was_created_again_gets_a_condition_again() {
        let start = Instant::now();
        let mut term = LeaderTerm::new(start, present(&[("edge-1", "True")]));
        term.update(start, &inventory(&[("edge-1", true)]), &live(&["edge-1"]));
        assert_eq!(plan(&mut term, start).0, []);
        term.update(start, &inventory(&[]), &live(&["edge-1"]));
        term.update(start, &inventory(&[("edge-1", true)]), &live(&["edge-1"]));
        assert_eq!(plan(&mut term, start).0, [name("edge-1")]);
    }

    #[test]
    fn an_unknown_status_is_replaced() {
        let start = Instant::now();
        let mut term = LeaderTerm::new(start, present(&[("edge-1", "Unknown")]));
        term.update(start, &inventory(&[("edge-1", true)]), &live(&["edge-1"]));
        assert_eq!(term.want(start, &name("edge-1")), Some(Want::Up));
    }
}
