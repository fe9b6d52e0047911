//! What the kernel should hold, as the router sees it.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::shared_map::{SharedMap, SharedSet};

/// Everything that the programs decide by. [`Redirect::apply`](super::Redirect::apply) writes what differs from before.
/// Copies share what they have in common.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Desired {
    /// TCP ports that are tunnelled. With none, nothing is redirected.
    pub ports: BTreeSet<u16>,
    /// Never redirected; wins over `routes`. This host's own addresses are added when it is applied.
    pub excluded: SharedSet<IpNet>,
    /// Sources that may use the token range besides this host itself.
    pub clients: BTreeSet<IpNet>,
    /// Networks that are redirected.
    pub routes: SharedMap<IpNet, RouteTarget>,
}

/// Where a network is redirected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteTarget {
    /// First address of the token block, which is as large as the network and of its family.
    pub token: IpAddr,
    /// False: connect() fails, since no server holds a tunnel to the node.
    pub up: bool,
    /// Every port is redirected, not only [`Desired::ports`].
    pub any_port: bool,
}
