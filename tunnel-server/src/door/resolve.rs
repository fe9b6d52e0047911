//! From the name or address by which a client means a node to that node, for the doors that are given one.

use std::net::IpAddr;

use tunnel_core::text::printable;

use crate::route::{ByAddress, NodeAddress, Router};

/// The node of that name, or the only one with that address.
pub(super) fn resolve(host: &str, router: &Router) -> Result<NodeAddress, String> {
    let name = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
    let snapshot = router.snapshot();
    if let Some(node) = snapshot.by_name(&name) {
        return Ok(node);
    }
    let Ok(address) = name.trim_matches(['[', ']']).parse::<IpAddr>() else {
        return Err(format!("{:?} is not the name of an edge node", printable(&name, 100)));
    };
    match snapshot.by_address(address) {
        ByAddress::Unique(node) => Ok(node),
        ByAddress::Ambiguous(nodes) => {
            let nodes: Vec<_> = nodes.iter().map(ToString::to_string).collect();
            Err(format!("{address} is the address of {}: name the node instead", nodes.join(", ")))
        }
        ByAddress::Unknown => Err(format!("{address} is not the address of an edge node")),
    }
}
