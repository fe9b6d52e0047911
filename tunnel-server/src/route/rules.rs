//! What may be an edge node's address.

use std::collections::HashSet;
use std::net::IpAddr;

use ipnet::IpNet;

/// What may be an edge node's address, besides what the cloud nodes have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules<'a> {
    /// Empty: any address of a host.
    pub(super) edge_addresses: &'a [IpNet],
    /// What the operator excluded: never redirected.
    pub(super) exclude: &'a [IpNet],
    pub(super) token_ranges: &'a [IpNet],
    /// The API server and the Services.
    pub(super) foreign: &'a [IpNet],
    /// Where edge nodes' pods are redirected too.
    pub(super) pods: &'a [IpNet],
    /// This host's addresses.
    pub(super) host: &'a HashSet<IpAddr>,
}

/// Whether an address can be that of one host on a network that others reach.
pub(super) fn is_host(address: IpAddr) -> bool {
    if address.is_unspecified() || address.is_loopback() || address.is_multicast() {
        return false;
    }
    match address {
        IpAddr::V4(v4) => !v4.is_link_local() && !v4.is_broadcast(),
        IpAddr::V6(v6) => !v6.is_unicast_link_local() && v6.to_ipv4_mapped().is_none(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn only_a_host_on_a_network_has_such_an_address() {
        for host in
            ["10.8.0.7", "169.253.255.255", "169.255.0.1", "223.255.255.255", "fd00::1", "2001:db8::1"]
        {
            assert!(is_host(ip(host)), "{host}");
        }
        for other in [
            "0.0.0.0",
            "127.0.0.1",
            "224.0.0.1",
            "169.254.1.1",
            "255.255.255.255",
            "::",
            "::1",
            "ff02::1",
            "fe80::1",
            "::ffff:10.8.0.7",
        ] {
            assert!(!is_host(ip(other)), "{other}");
        }
    }
}
