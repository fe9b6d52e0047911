//! Addresses of this host.

mod changes;

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use ipnet::IpNet;
use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

pub use changes::{Ended, NetChanges};

/// An address of one of this host's interfaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterfaceAddress {
    pub address: IpAddr,
    /// Whether the interface is up.
    pub up: bool,
}

/// The addresses of every interface, loopback included, in the kernel's order.
///
/// # Errors
/// The kernel does not list them (getifaddrs(3)).
pub fn interface_addresses() -> io::Result<Vec<InterfaceAddress>> {
    let interfaces = getifaddrs()?.filter_map(|interface| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
        let address = v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))?;
        Some(InterfaceAddress { address, up: interface.flags.contains(InterfaceFlags::IFF_UP) })
    });
    Ok(interfaces.collect())
}

/// Whether `address` can tell one host from another: it is not unspecified, loopback or link-local.
pub const fn identifies_host(address: IpAddr) -> bool {
    let link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !(address.is_unspecified() || address.is_loopback() || link_local)
}

/// Whether one of the ranges says that this host may dial `address` for others. A range of anything does not mean this host
/// itself: the unspecified address is in none, and loopback only in a range of its own, because what listens there trusts
/// whoever reaches it.
pub fn may_dial(ranges: &[IpNet], address: IpAddr) -> bool {
    let address = address.to_canonical();
    let meant = |range: &IpNet| !address.is_loopback() || range.network().is_loopback();
    !address.is_unspecified() && ranges.iter().any(|range| range.contains(&address) && meant(range))
}

/// The source address that this host uses towards `peer`. Connecting a UDP socket asks the routing table and sends
/// nothing. None when there is no route, or the source would be loopback or link-local.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_has_a_loopback_address_which_does_not_identify_it() {
        let addresses = interface_addresses().unwrap();
        assert!(addresses.iter().any(|entry| entry.address.is_loopback()), "{addresses:?}");
        for (address, expected) in [
            ("127.0.0.1", false),
            ("169.254.1.1", false),
            ("fe80::1", false),
            ("::", false),
            ("10.0.0.1", true),
        ] {
            assert_eq!(identifies_host(address.parse().unwrap()), expected, "{address}");
        }
    }

    #[test]
    fn loopback_needs_a_range_of_its_own() {
        let all: [IpNet; 2] = ["0.0.0.0/0".parse().unwrap(), "::/0".parse().unwrap()];
        for (address, expected) in [
            ("10.0.0.1", true),
            ("fd00::1", true),
            ("127.0.0.1", false),
            ("127.9.9.9", false),
            ("::1", false),
            ("::ffff:127.0.0.1", false),
            ("0.0.0.0", false),
            ("::ffff:0.0.0.0", false),
            ("::", false),
        ] {
            assert_eq!(may_dial(&all, address.parse().unwrap()), expected, "{address}");
        }
        let own: [IpNet; 1] = ["127.0.0.0/8".parse().unwrap()];
        assert!(may_dial(&own, "127.0.0.1".parse().unwrap()));
        assert!(!may_dial(&own, "10.0.0.1".parse().unwrap()));
        assert!(!may_dial(&[], "10.0.0.1".parse().unwrap()));
    }
}
