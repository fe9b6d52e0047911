//! The state that the kernel should have.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use tunnel_runtime::NodeName;

/// Maximum number of routes of one family in the kernel, which also holds that of the redirect's self-test.
pub const MAX_ROUTES: usize = tunnel_abi::ROUTE_CAPACITY as usize - 1;

/// All input of the redirect. Cheap to clone: the table is shared, and a session that starts or ends only changes `up`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Desired {
    /// TCP ports that are tunnelled. If empty, nothing is redirected.
    pub ports: BTreeSet<u16>,
    pub table: Arc<Table>,
    /// For each of [`Table::nodes`], true if it has a tunnel.
    pub up: Vec<bool>,
}

/// The part that follows from the nodes, independent of their tunnels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// Never redirected; takes precedence over `routes`. This host's own addresses are added when it is applied.
    pub excluded: BTreeSet<IpNet>,
    /// Sources, besides this host itself, that may use the redirect range.
    pub clients: BTreeSet<IpNet>,
    /// Networks that are redirected.
    pub routes: BTreeMap<IpNet, Route>,
    /// Ordered by name, each with the routes that are up while the node has a tunnel.
    pub nodes: Vec<(NodeName, Vec<IpNet>)>,
    /// For each of `nodes`, true if it is an edge node.
    pub edge: Vec<bool>,
}

impl Table {
    /// Index in [`Table::nodes`].
    pub(super) fn place(&self, node: &NodeName) -> Option<usize> {
        self.nodes.binary_search_by(|(name, _)| name.cmp(node)).ok()
    }
}

/// The route of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// First address of the block of virtual addresses, which has the network's size and family.
    pub virtual_address: IpAddr,
    /// True if every port is redirected, not only [`Desired::ports`].
    pub any_port: bool,
    /// Index in [`Table::nodes`] of the node that it follows; None if it is never up.
    pub node: Option<usize>,
}

/// The current target of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteTarget {
    /// See [`Route::virtual_address`].
    pub virtual_address: IpAddr,
    /// If false, connect() fails, as no server holds a tunnel to the node.
    pub up: bool,
    /// See [`Route::any_port`].
    pub any_port: bool,
}

impl Desired {
    /// Ordered by network.
    pub fn routes(&self) -> impl Iterator<Item = (IpNet, RouteTarget)> {
        self.table.routes.iter().map(|(net, route)| (*net, self.target(*route)))
    }

    pub fn route(&self, net: IpNet) -> Option<RouteTarget> {
        self.table.routes.get(&net).map(|route| self.target(*route))
    }

    fn target(&self, Route { virtual_address, any_port, node }: Route) -> RouteTarget {
        RouteTarget { virtual_address, up: node.is_some_and(|node| self.up[node]), any_port }
    }

    /// The routes that went up or down since `before`; None if anything else has changed too.
    pub fn flips_since(&self, before: &Self) -> Option<Vec<(IpNet, bool)>> {
        if !Arc::ptr_eq(&self.table, &before.table) || self.ports != before.ports {
            return None;
        }
        let nodes = self.table.nodes.iter().zip(self.up.iter().zip(&before.up));
        let flipped = nodes.filter(|(_, (up, was_up))| up != was_up);
        Some(flipped.flat_map(|((_, nets), (up, _))| nets.iter().map(|net| (*net, *up))).collect())
    }

    /// Brings the routes of the node at this place in the table up or down. Returns true if that changes any.
    pub(super) fn set_up(&mut self, place: usize, up: bool) -> bool {
        let before = std::mem::replace(&mut self.up[place], up);
        before != up && !self.table.nodes[place].1.is_empty()
    }
}
