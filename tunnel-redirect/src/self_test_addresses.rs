//! Addresses that the server connects to through its own hooks.
//!
//! The end of each redirect range is reserved for them. Each running server takes a random pair there: an *origin*, which
//! no host has, and the *virtual address* that it is mapped to. Two servers that overlap during an upgrade therefore never
//! mistake the other's redirect for their own. The listener drops such connections silently.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use tunnel_routing::{RouteTarget, reserved_addresses, reserved_addresses_v6};

use super::config::RedirectConfig;

/// Port used while no other is tunnelled.
pub(super) const SELF_TEST_PORT: u16 = 10250;

/// One pair per family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SelfTestAddresses {
    pub(super) origin: Ipv4Addr,
    pub(super) virtual_address: Ipv4Addr,
    pub(super) origin_v6: Ipv6Addr,
    pub(super) virtual_address_v6: Ipv6Addr,
}

impl SelfTestAddresses {
    /// Draws a random pair of each family.
    pub(super) fn new(config: &RedirectConfig) -> Self {
        let v4 = reserved_addresses(config.redirect_range);
        let v6 = reserved_addresses_v6(config.redirect_range_v6);
        // Both blocks have at least 16 addresses, 8 pairs.
        let pairs = 1_u32 << (31 - u32::from(v4.prefix_len()));
        let pair = rand::random_range(0..pairs) * 2;
        let pairs_v6 = 1_u128 << (127 - u32::from(v6.prefix_len()));
        let pair_v6 = rand::random_range(0..pairs_v6) * 2;
        let (base, base_v6) = (u32::from(v4.network()), u128::from(v6.network()));
        Self {
            origin: Ipv4Addr::from(base + pair),
            virtual_address: Ipv4Addr::from(base + pair + 1),
            origin_v6: Ipv6Addr::from(base_v6 + pair_v6),
            virtual_address_v6: Ipv6Addr::from(base_v6 + pair_v6 + 1),
        }
    }

    /// Returns an address of each family that is some server's virtual address at most and never an origin: hooks leave connects to
    /// it alone, also those of another network namespace, and the listener closes them.
    pub fn never_an_origin(v4: Ipv4Net, v6: Ipv6Net) -> (Ipv4Addr, Ipv6Addr) {
        let (base, base_v6) = (reserved_addresses(v4).network(), reserved_addresses_v6(v6).network());
        (Ipv4Addr::from(u32::from(base) | 1), Ipv6Addr::from(u128::from(base_v6) | 1))
    }

    /// Draws pairs that were not tried; there are at least eight.
    pub(super) fn besides(tried: &[Self], config: &RedirectConfig) -> Self {
        loop {
            let drawn = Self::new(config);
            let is_new = |old: &Self| {
                old.virtual_address != drawn.virtual_address
                    && old.virtual_address_v6 != drawn.virtual_address_v6
            };
            if tried.iter().all(is_new) {
                return drawn;
            }
        }
    }

    /// The routes from the origins to their virtual addresses.
    pub(super) fn routes(&self, ipv6: bool) -> impl Iterator<Item = (IpNet, RouteTarget)> {
        let route = |origin: IpAddr, virtual_address: IpAddr| {
            (IpNet::from(origin), RouteTarget { virtual_address, up: true, any_port: false })
        };
        let v4 = route(self.origin.into(), self.virtual_address.into());
        let v6 = ipv6.then(|| route(self.origin_v6.into(), self.virtual_address_v6.into()));
        std::iter::once(v4).chain(v6)
    }
}
