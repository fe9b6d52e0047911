//! From the name or address by which a client means a node to that node, for the doors that are given one.

use std::net::IpAddr;

use tunnel_core::text::printable;

use crate::route::{ByAddress, NodeAddress, Router};

/// What a client means by a host.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Host {
    /// Never a name: whoever registers a Node may call it like another's address.
    Address(IpAddr),
    /// In lower case.
    Name(String),
}

impl Host {
    /// Of an address, in brackets or not, or a name, either with a dot behind it or not.
    pub(super) fn of(text: &str) -> Self {
        let bare = text.strip_suffix('.').unwrap_or(text);
        let literal = bare.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(bare);
        match literal.parse::<IpAddr>() {
            Ok(address) => Self::Address(address.to_canonical()),
            Err(_) => Self::Name(bare.to_ascii_lowercase()),
        }
    }
}

/// The only node with that address, or the one of that name.
pub(super) fn resolve(host: &str, router: &Router) -> Result<NodeAddress, String> {
    let snapshot = router.snapshot();
    let address = match Host::of(host) {
        Host::Address(address) => address,
        Host::Name(name) => {
            let unknown = || format!("{:?} is not the name of an edge node", printable(&name, 100));
            return snapshot.by_name(&name).ok_or_else(unknown);
        }
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

#[cfg(test)]
pub(super) mod tests {
    use prometheus_client::registry::Registry;

    use super::*;
    use crate::inventory::{Inventory, InventoryNode};

    /// Nodes that are called like addresses, of each other and of others.
    pub(in crate::door) fn crossed() -> std::sync::Arc<Router> {
        let node = |name: &str, addresses: &[&str]| InventoryNode {
            edge: true,
            addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
            ..InventoryNode::without_addresses(name)
        };
        let router = Router::without_nodes(&mut Registry::default());
        router.set_inventory(Inventory::from(vec![
            node("10.8.0.9", &["10.8.0.7"]),
            node("10.8.0.7", &["10.8.0.9"]),
            node("10.8.0.5", &["10.8.0.6"]),
            node("127.0.0.1", &["10.8.0.4"]),
            node("010.8.0.9", &["10.8.0.8"]),
            node("edge-1", &["169.254.3.3", "10.8.0.1", "fd00:8::1"]),
        ]));
        router
    }

    /// Hosts, and the address of the node that each means; None: of none.
    pub(in crate::door) const HOSTS: [(&str, Option<&str>); 13] = [
        ("10.8.0.9", Some("10.8.0.9")),
        ("10.8.0.9.", Some("10.8.0.9")),
        ("10.8.0.7", Some("10.8.0.7")),
        ("10.8.0.7.", Some("10.8.0.7")),
        // Of a node, but nobody's address.
        ("10.8.0.5", None),
        ("10.8.0.5.", None),
        ("127.0.0.1", None),
        ("127.0.0.1.", None),
        // Not how an address is written.
        ("010.8.0.9", Some("10.8.0.8")),
        ("edge-1", Some("10.8.0.1")),
        ("EDGE-1.", Some("10.8.0.1")),
        ("10.8.0.1", Some("10.8.0.1")),
        ("edge-2", None),
    ];

    #[test]
    fn an_address_is_an_address_before_it_is_a_name() {
        let router = crossed();
        let bracketed = [
            ("[fd00:8::1]", Some("fd00:8::1")),
            ("fd00:8::1", Some("fd00:8::1")),
            ("FD00:8:0::1.", Some("fd00:8::1")),
            ("::ffff:10.8.0.9", Some("10.8.0.9")),
            ("[::ffff:10.8.0.9]", Some("10.8.0.9")),
            ("[10.8.0.9]", Some("10.8.0.9")),
        ];
        for (host, address) in HOSTS.into_iter().chain(bracketed) {
            let found = resolve(host, &router).ok().map(|node| node.address.to_string());
            assert_eq!(found.as_deref(), address, "{host}");
        }
    }
}
