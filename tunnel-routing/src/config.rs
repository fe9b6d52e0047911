//! Input of the routes besides the nodes.

use std::collections::{BTreeSet, HashSet};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use tunnel_runtime::NodeName;
use tunnel_runtime::clock::Clock;
use tunnel_runtime::net::{InterfaceAddress, identifies_host, interface_addresses};

/// Settings that do not change at run time.
#[derive(Clone, Debug)]
pub struct RouterConfig {
    pub redirect_range: Ipv4Net,
    pub redirect_range_v6: Ipv6Net,
    /// TCP ports that are tunnelled in addition to those of [`Router::set_ports`](super::Router::set_ports).
    pub ports: BTreeSet<u16>,
    /// Pods of edge nodes in these ranges are redirected too, on any port.
    pub pods: Vec<IpNet>,
    /// Name of this host's node; if None, it is found by its addresses.
    pub host: Option<NodeName>,
    /// Ranges of edge nodes' addresses; empty for any.
    pub edge_addresses: Vec<IpNet>,
    /// The API server and the Services: never an edge node's.
    pub foreign: Vec<IpNet>,
    /// Never redirected.
    pub exclude: Vec<IpNet>,
    /// Sources that may use the redirect, besides this host and its pods.
    pub clients: Vec<IpNet>,
    /// This host's addresses, each with its network: never an edge node's. The cloud node that has one of them is this
    /// host, whose pods may use the redirect. [`host_addresses`] in production. Returns None if not known at present.
    pub host_addresses: fn() -> Option<HashSet<IpNet>>,
    /// This host's.
    pub clock: Clock,
}

impl RouterConfig {
    /// Only these: no pods, no ranges, and unknown addresses of this host.
    pub fn new(redirect_range: Ipv4Net, redirect_range_v6: Ipv6Net, ports: impl Into<BTreeSet<u16>>) -> Self {
        Self {
            redirect_range,
            redirect_range_v6,
            ports: ports.into(),
            pods: Vec::new(),
            host: None,
            edge_addresses: Vec::new(),
            foreign: Vec::new(),
            exclude: Vec::new(),
            clients: Vec::new(),
            host_addresses: || None,
            clock: Clock::default(),
        }
    }

    pub(super) fn redirect_ranges(&self) -> [IpNet; 2] {
        [IpNet::V4(self.redirect_range), IpNet::V6(self.redirect_range_v6)]
    }
}

/// The addresses of this host's interfaces that identify it, without loopback and link-local ones, with their networks.
/// None if the kernel does not list them.
pub fn host_addresses() -> Option<HashSet<IpNet>> {
    let listed = interface_addresses().inspect_err(
        |error| tracing::warn!(%error, "failed to list this host's addresses, keeping the known ones"),
    );
    let identifying = listed.ok()?.into_iter().filter(|entry| identifies_host(entry.address));
    // Nobody is reached through an interface that is down.
    let network = |entry: InterfaceAddress| match entry.up {
        true => IpNet::new(entry.address, entry.prefix).ok(),
        false => Some(IpNet::from(entry.address)),
    };
    Some(identifying.filter_map(network).collect())
}
