//! Static maps: listeners that each lead to one target on one node. They come from flags and from a file.

mod file;
mod parse;

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use tunnel_core::identity::NodeName;

pub(crate) use file::parse_file;
pub(crate) use parse::parse_flag;

/// Maximum number of listeners: a successor gets all of them in one message.
pub(crate) const MOST: usize = 128;

/// A listener, and its target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Map {
    pub listen: SocketAddr,
    pub node: NodeName,
    pub target: Target,
    /// Clients that may connect.
    pub clients: Vec<IpNet>,
}

/// Target of a map on its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A port of the node itself, at any of its addresses.
    Port(u16),
    Address(SocketAddr),
}

impl Map {
    pub fn permits(&self, client: IpAddr) -> bool {
        let client = client.to_canonical();
        self.clients.iter().any(|range| range.contains(&client))
    }
}

/// True if the two have the same port, and the same address or a wildcard: the kernel may then refuse one of them.
pub(crate) fn overlap(one: SocketAddr, other: SocketAddr) -> bool {
    let host = one.ip() == other.ip() || one.ip().is_unspecified() || other.ip().is_unspecified();
    host && one.port() == other.port()
}

/// Checks that all maps can be listened on at the same time.
///
/// # Errors
/// Names the two maps that cannot, or says that there are too many.
pub(crate) fn check(maps: &[Map]) -> Result<(), String> {
    if maps.len() > MOST {
        return Err(format!("{} maps; at most {MOST} are possible", maps.len()));
    }
    for (index, map) in maps.iter().enumerate() {
        let (listen, node) = (map.listen, &map.node);
        if let Some(other) = maps[..index].iter().find(|other| overlap(other.listen, listen)) {
            return Err(format!(
                "{listen} to {node}: {} to {} has that port already",
                other.listen, other.node
            ));
        }
    }
    Ok(())
}
