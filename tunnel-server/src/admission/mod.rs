//! Limits on what clients and agents may hold, so that none can starve the others.

mod budget;
mod places;
mod shares;

use std::net::{IpAddr, Ipv6Addr};

pub use budget::Budget;
pub(crate) use places::{Place, Places};
pub(crate) use shares::{Full, Share, Shares};

/// What counts as one source: an IPv4 address, or a /64, from which an IPv6 host chooses its addresses freely.
pub(crate) fn source_key(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        // The /64 of ::1 is not loopback.
        IpAddr::V6(v6) if !v6.is_loopback() => IpAddr::V6(Ipv6Addr::from(u128::from(v6) & (u128::MAX << 64))),
        other => other,
    }
}
