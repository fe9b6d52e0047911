//! Properties of host addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

/// True if `address` can identify a host: it is not unspecified, loopback or link-local.
pub const fn identifies_host(address: IpAddr) -> bool {
    let link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !(address.is_unspecified() || address.is_loopback() || link_local)
}

/// Returns the source address that this host uses towards `peer`. Connecting a UDP socket queries the routing table
/// and sends nothing. `None` if there is no route, or if the source would be loopback or link-local.
pub fn source_address(peer: SocketAddr) -> Option<IpAddr> {
    let any = match peer {
        SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(peer).ok()?;
    let source = socket.local_addr().ok()?.ip();
    identifies_host(source).then_some(source)
}
