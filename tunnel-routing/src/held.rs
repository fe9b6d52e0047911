//! The sides that hold a tunnel to each edge node, and the counts of nodes by side.

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::desired::Table;

/// The side that holds a tunnel to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TunnelHolder {
    This,
    /// At least one of the other servers.
    Peers,
}

/// The sides that hold a tunnel to a node now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) here: bool,
    pub(super) elsewhere: bool,
}

/// The states of a node, as the label of `postern_nodes`.
const STATES: [&str; 3] = ["here", "elsewhere", "away"];

impl Held {
    pub(super) fn anywhere(self) -> bool {
        self.here || self.elsewhere
    }

    /// The place of the node's state in [`STATES`].
    const fn state(self) -> usize {
        match self {
            Self { here: true, .. } => 0,
            Self { elsewhere: true, .. } => 1,
            Self { .. } => 2,
        }
    }
}

/// `postern_nodes`: counted as tunnels come and go, as a scrape must not walk over 100,000 nodes.
#[derive(Debug)]
pub(super) struct Counts {
    /// By state, as [`STATES`].
    nodes: [Gauge; 3],
    /// As in [`Table::nodes`].
    held: Vec<Held>,
}

impl Counts {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let family = Family::<[(&'static str, &'static str); 1], Gauge>::default();
        let nodes = STATES.map(|state| family.get_or_create(&[("state", state)]).clone());
        let help =
            "Edge nodes by state: here has a tunnel to this server, elsewhere only to others, away to none";
        registry.register("nodes", help, family);
        Self { nodes, held: Vec::new() }
    }

    /// Takes the counts of a new table. Returns the holders of the one before, for the caller to drop outside of the lock.
    pub(super) fn replace(&mut self, counted: Counted) -> Vec<Held> {
        for (gauge, count) in self.nodes.iter().zip(counted.nodes) {
            gauge.set(count);
        }
        std::mem::replace(&mut self.held, counted.held)
    }

    /// Records the present holders of the node at this place in the table.
    pub(super) fn set(&mut self, table: &Table, place: usize, held: Held) {
        let before = std::mem::replace(&mut self.held[place], held);
        if table.edge.get(place) == Some(&true) {
            self.nodes[before.state()].dec();
            self.nodes[held.state()].inc();
        }
    }
}

/// The nodes of a table that is not in effect yet.
#[derive(Debug, Default)]
pub(super) struct Counted {
    /// By state, as [`STATES`].
    nodes: [i64; 3],
    held: Vec<Held>,
}

impl Counted {
    /// Adds the table's next node.
    pub(super) fn add(&mut self, table: &Table, held: Held) {
        if table.edge.get(self.held.len()) == Some(&true) {
            self.nodes[held.state()] += 1;
        }
        self.held.push(held);
    }
}
