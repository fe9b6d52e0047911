//! Static maps: listeners that each lead to one target on one node. They come from flags and from a file.

mod file;
mod parse;

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use tunnel_runtime::NodeName;

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

/// True if the kernel refuses to listen on both: they have the same port, and one address covers the other. An IPv6
/// wildcard takes IPv4 connections too, unless the host sets net.ipv6.bindv6only.
pub(crate) fn overlap(one: SocketAddr, other: SocketAddr) -> bool {
    let (port, other_port) = (one.port(), other.port());
    let (one, other) = (one.ip().to_canonical(), other.ip().to_canonical());
    let covers = |wide: IpAddr, narrow: IpAddr| wide.is_unspecified() && (wide.is_ipv6() || narrow.is_ipv4());
    port == other_port && (one == other || covers(one, other) || covers(other, one))
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

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn listeners_overlap_where_the_kernel_refuses_the_second() {
        let hosts = ["0.0.0.0", "127.0.0.1", "127.0.0.2", "::", "::1", "::ffff:127.0.0.1"];
        let hosts = hosts.map(|host| host.parse::<IpAddr>().unwrap());
        for (one, other) in hosts.iter().flat_map(|one| hosts.map(|other| (*one, other))) {
            // A host without IPv6 cannot tell.
            let Ok(first) = TcpListener::bind((one, 0)) else { continue };
            let first = first.local_addr().unwrap();
            let second = SocketAddr::new(other, first.port());
            let refused = match TcpListener::bind(second) {
                Ok(_) => false,
                Err(error) if error.kind() == ErrorKind::AddrInUse => true,
                Err(_) => continue,
            };
            assert_eq!(overlap(first, second), refused, "{first} and {second}");
        }
    }
}
