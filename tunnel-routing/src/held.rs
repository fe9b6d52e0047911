//! The sides that hold a tunnel to each edge node, and the counts of nodes by side.

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::desired::Table;

/// The side that holds a tunnel to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
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

impl Held {
    pub(super) fn anywhere(self) -> bool {
        self.here || self.elsewhere
    }
}

/// `postern_nodes`: counted as tunnels come and go, as a scrape must not walk over 100,000 nodes.
#[derive(Debug)]
pub(super) struct Counts {
    here: Gauge,
    elsewhere: Gauge,
    away: Gauge,
    /// As in [`Table::nodes`].
    held: Vec<Held>,
}

impl Counts {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let nodes = Family::<[(&'static str, &'static str); 1], Gauge>::default();
        let [here, elsewhere, away] =
            ["here", "elsewhere", "away"].map(|state| nodes.get_or_create(&[("state", state)]).clone());
        let help =
            "Edge nodes by state: here has a tunnel to this server, elsewhere only to others, away to none";
        registry.register("nodes", help, nodes);
        Self { here, elsewhere, away, held: Vec::new() }
    }

    fn of(&self, held: Held) -> &Gauge {
        match held {
            Held { here: true, .. } => &self.here,
            Held { elsewhere: true, .. } => &self.elsewhere,
            Held { .. } => &self.away,
        }
    }

    /// Takes the counts of a new table. Returns the holders of the one before, for the caller to drop outside of the lock.
    pub(super) fn replace(&mut self, counted: Counted) -> Vec<Held> {
        self.here.set(counted.here);
        self.elsewhere.set(counted.elsewhere);
        self.away.set(counted.away);
        std::mem::replace(&mut self.held, counted.held)
    }

    /// Records the present holders of the node at this place in the table.
    pub(super) fn set(&mut self, table: &Table, place: usize, held: Held) {
        let before = std::mem::replace(&mut self.held[place], held);
        if table.edge.get(place) == Some(&true) {
            self.of(before).dec();
            self.of(held).inc();
        }
    }
}

/// The nodes of a table that is not in effect yet.
#[derive(Debug, Default)]
pub(super) struct Counted {
    here: i64,
    elsewhere: i64,
    away: i64,
    held: Vec<Held>,
}

impl Counted {
    /// Adds the table's next node.
    pub(super) fn add(&mut self, table: &Table, held: Held) {
        if table.edge.get(self.held.len()) == Some(&true) {
            *match held {
                Held { here: true, .. } => &mut self.here,
                Held { elsewhere: true, .. } => &mut self.elsewhere,
                Held { .. } => &mut self.away,
            } += 1;
        }
        self.held.push(held);
    }
}
