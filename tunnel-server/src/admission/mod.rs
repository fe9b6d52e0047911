//! Limits on what clients and agents may hold, so that none can starve the others.

mod accept;
mod budget;
mod shares;
mod source_buckets;

use std::net::{IpAddr, Ipv6Addr};

pub use accept::Accept;
pub use budget::Budget;
pub(crate) use budget::Part;
pub(crate) use shares::{Full, Share, Shares, decrement};
pub(crate) use source_buckets::SourceBuckets;
pub(crate) use tunnel_runtime::places::{Place, Places};

/// Returns the key by which connections count as one source: an IPv4 address, or the /64 of an IPv6 address, within
/// which an IPv6 host chooses its addresses freely.
pub(crate) fn source_key(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        // The /64 of ::1 is not loopback.
        IpAddr::V6(v6) if !v6.is_loopback() => IpAddr::V6(Ipv6Addr::from(u128::from(v6) & (u128::MAX << 64))),
        other => other,
    }
}
