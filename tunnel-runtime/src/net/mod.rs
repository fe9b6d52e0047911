//! Addresses of this host.

mod address;
mod changes;
mod lookup;
mod option;
mod reach;

use std::io;
use std::net::IpAddr;

use ipnet::{IpNet, ip_mask_to_prefix};
use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use nix::sys::socket::SockaddrStorage;

pub use address::{identifies_host, source_address};
pub use changes::{Ended, NetChanges};
pub use lookup::{lookup, lookup_holding};
pub use option::refine;
pub use reach::Reach;

/// An address of one of this host's interfaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterfaceAddress {
    pub address: IpAddr,
    /// Length of its network's prefix.
    pub prefix: u8,
    /// True if the interface is up.
    pub up: bool,
}

/// Returns the addresses of every interface, loopback included, in the kernel's order.
///
/// # Errors
/// Fails if the kernel does not list them (getifaddrs(3)).
pub fn interface_addresses() -> io::Result<Vec<InterfaceAddress>> {
    let interfaces = getifaddrs()?.filter_map(|interface| {
        let address = ip_of(&interface.address?)?;
        let mask = interface.netmask.as_ref().and_then(ip_of);
        let prefix = mask.and_then(|mask| ip_mask_to_prefix(mask).ok());
        let prefix = prefix.unwrap_or_else(|| IpNet::from(address).prefix_len());
        Some(InterfaceAddress { address, prefix, up: interface.flags.contains(InterfaceFlags::IFF_UP) })
    });
    Ok(interfaces.collect())
}

fn ip_of(address: &SockaddrStorage) -> Option<IpAddr> {
    let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
    v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
}

/// True if one of the ranges permits this host to dial `address` for others. A wide range means neither this host
/// itself nor its neighbours, see [`Reach`]. `alone`: only a range of this single address will do.
pub fn may_dial(ranges: &[IpNet], address: IpAddr, alone: bool) -> bool {
    let address = address.to_canonical();
    let reach = Reach::of(address);
    let meant =
        |range: &&IpNet| reach.is_meant_by(range) && (!alone || range.prefix_len() == range.max_prefix_len());
    ranges.iter().filter(meant).any(|range| range.contains(&address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_has_a_loopback_address_which_does_not_identify_it() {
        let addresses = interface_addresses().unwrap();
        let loopback = |entry: &InterfaceAddress| entry.address == IpAddr::from([127, 0, 0, 1]);
        assert!(addresses.iter().any(|entry| loopback(entry) && entry.prefix == 8), "{addresses:?}");
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
            assert_eq!(may_dial(&all, address.parse().unwrap(), false), expected, "{address}");
        }
        let own: [IpNet; 1] = ["127.0.0.0/8".parse().unwrap()];
        let may_dial = |ranges: &[IpNet], address: &str| may_dial(ranges, address.parse().unwrap(), false);
        assert!(may_dial(&own, "127.0.0.1"));
        assert!(!may_dial(&own, "10.0.0.1"));
        assert!(!may_dial(&[], "10.0.0.1"));
    }

    /// Otherwise a wide range gives the credentials of a cloud's instance to every caller.
    #[test]
    fn a_metadata_service_needs_a_range_of_its_own() {
        let dials = |ranges: &[&str], address: &str| {
            let ranges: Vec<IpNet> = ranges.iter().map(|range| range.parse().unwrap()).collect();
            may_dial(&ranges, address.parse().unwrap(), false)
        };
        let wide = ["0.0.0.0/0", "169.0.0.0/8", "::/0", "fd00::/8", "fe00::/8"];
        for (address, own) in [
            ("169.254.169.254", "169.254.0.0/16"),
            ("169.254.169.254", "169.254.169.254/32"),
            ("::ffff:169.254.169.254", "169.254.169.254/32"),
            ("fe80::a9fe:a9fe", "fe80::/10"),
            ("fd00:ec2::254", "fd00:ec2::254/128"),
            ("fd20:ce::254", "fd20:ce::254/128"),
            ("100.100.100.200", "100.100.100.200/32"),
        ] {
            assert!(!dials(&wide, address), "{address}");
            assert!(dials(&[own], address), "{address} by {own}");
        }
        assert!(dials(&wide, "169.1.1.1") && dials(&wide, "fd00:ec2::253"));
    }
}
