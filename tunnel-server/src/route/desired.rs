//! What the kernel should hold.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use tunnel_core::identity::NodeName;

/// How many routes of one family fit into the kernel next to that of the redirect's self-test.
pub const MAX_ROUTES: usize = tunnel_abi::ROUTE_CAPACITY as usize - 1;

/// Everything that the redirect decides by. A copy costs little: the table is shared, and a session that comes or goes
/// changes `up` only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Desired {
    /// TCP ports that are tunnelled. With none, nothing is redirected.
    pub ports: BTreeSet<u16>,
    pub table: Arc<Table>,
    /// Which of [`Table::nodes`] have a tunnel.
    pub up: Vec<bool>,
}

/// What follows from the nodes, whether they have a tunnel or not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// Never redirected; wins over `routes`. This host's own addresses are added when it is applied.
    pub excluded: BTreeSet<IpNet>,
    /// Sources that may use the token range besides this host itself.
    pub clients: BTreeSet<IpNet>,
    /// Networks that are redirected.
    pub routes: BTreeMap<IpNet, Route>,
    /// In the order of their names, with the routes that are up while the node has a tunnel.
    pub nodes: Vec<(NodeName, Vec<IpNet>)>,
}

/// The route of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// First address of the token block, which is as large as the network and of its family.
    pub token: IpAddr,
    /// Every port is redirected, not only [`Desired::ports`].
    pub any_port: bool,
    /// The place in [`Table::nodes`] of the node that it follows; None: it is never up.
    pub node: Option<usize>,
}

/// Where a network is redirected to at present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteTarget {
    /// See [`Route::token`].
    pub token: IpAddr,
    /// False: connect() fails, since no server holds a tunnel to the node.
    pub up: bool,
    /// See [`Route::any_port`].
    pub any_port: bool,
}

impl Desired {
    /// In the order of the networks.
    pub fn routes(&self) -> impl Iterator<Item = (IpNet, RouteTarget)> {
        self.table.routes.iter().map(|(net, route)| (*net, self.target(*route)))
    }

    pub fn route(&self, net: IpNet) -> Option<RouteTarget> {
        self.table.routes.get(&net).map(|route| self.target(*route))
    }

    fn target(&self, Route { token, any_port, node }: Route) -> RouteTarget {
        RouteTarget { token, up: node.is_some_and(|node| self.up[node]), any_port }
    }

    /// The routes that went up or down since `before`. None: something else has changed too.
    pub(crate) fn flips_since(&self, before: &Self) -> Option<Vec<(IpNet, bool)>> {
        if !Arc::ptr_eq(&self.table, &before.table) || self.ports != before.ports {
            return None;
        }
        let nodes = self.table.nodes.iter().zip(self.up.iter().zip(&before.up));
        let flipped = nodes.filter(|(_, (up, was_up))| up != was_up);
        Some(flipped.flat_map(|((_, nets), (up, _))| nets.iter().map(|net| (*net, *up))).collect())
    }

    /// Whether the node has any routes, which are up now, or down.
    pub(super) fn set_up(&mut self, node: &NodeName, up: bool) -> bool {
        let Ok(place) = self.table.nodes.binary_search_by(|(name, _)| name.cmp(node)) else { return false };
        self.up[place] = up;
        !self.table.nodes[place].1.is_empty()
    }
}
