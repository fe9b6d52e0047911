//! Kinds of hosts that addresses lead to.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

/// Metadata services outside of the link-local ranges: Amazon's, Google's and Alibaba's.
const METADATA: [IpAddr; 3] = [
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)),
    IpAddr::V6(Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254)),
    IpAddr::V4(Ipv4Addr::new(100, 100, 100, 200)),
];

/// The kind of host that an address leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// No single host: unspecified, multicast, broadcast, 0.0.0.0/8.
    Nothing,
    /// This host, where programs trust every client.
    Loopback,
    /// A neighbour, such as a cloud's metadata service, which gives credentials to whoever asks.
    LinkLocal,
    Host,
}

impl Reach {
    /// An IPv4-mapped address is the IPv4 one, as for connect(2) (RFC 4291 section 2.5.5.2).
    pub fn of(address: IpAddr) -> Self {
        let address = address.to_canonical();
        if address.is_loopback() {
            return Self::Loopback;
        }
        let (nothing, link_local) = match address {
            IpAddr::V4(v4) => {
                (v4.octets()[0] == 0 || v4.is_multicast() || v4.is_broadcast(), v4.is_link_local())
            }
            IpAddr::V6(v6) => (v6.is_unspecified() || v6.is_multicast(), v6.is_unicast_link_local()),
        };
        if nothing {
            Self::Nothing
        } else if link_local || METADATA.contains(&address) {
            Self::LinkLocal
        } else {
            Self::Host
        }
    }

    /// True if a range that contains such an address means it: 0.0.0.0/0 opens neither loopback nor a metadata service.
    /// That takes a range which lies within their kind.
    pub fn is_meant_by(self, range: &IpNet) -> bool {
        match self {
            Self::Nothing => false,
            Self::Host => true,
            Self::Loopback | Self::LinkLocal => {
                Self::of(range.network()) == self && Self::of(range.broadcast()) == self
            }
        }
    }
}
