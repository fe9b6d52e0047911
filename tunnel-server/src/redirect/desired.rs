//! What the kernel should know, as the routing sees it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// Everything that the programs decide by. The loader applies it as a difference from what it applied before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Desired {
    /// TCP ports that are tunnelled. With none, nothing is redirected.
    pub ports: BTreeSet<u16>,
    /// Never redirected; wins over `routes`. This host's own addresses are added by the loader.
    pub excluded: BTreeSet<IpNet>,
    /// Sources that may use the token range besides this host itself.
    pub clients: BTreeSet<IpNet>,
    /// Destinations that are redirected.
    pub routes: BTreeMap<IpNet, RouteTarget>,
}

/// Where a destination is redirected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteTarget {
    /// First address of the token block, which is as large as the destination's range and of its family.
    pub token: IpAddr,
    /// False: connect() fails, since no server holds a tunnel to the node.
    pub up: bool,
    /// Every port is redirected, not only [`Desired::ports`].
    pub any_port: bool,
}

/// What does not change while the redirect runs.
#[derive(Clone, Debug)]
pub struct RedirectConfig {
    /// Cgroup v2 directory whose processes are redirected; none: the host's root, found and checked.
    pub cgroup: Option<PathBuf>,
    /// Token addresses for IPv4 destinations.
    pub token_range: Ipv4Net,
    /// Token addresses for IPv6 destinations.
    pub token_range_v6: Ipv6Net,
    /// Sockets with this `SO_MARK` are never redirected.
    pub mark: u32,
    /// Sources that may use the token range, besides this host and [`Desired::clients`].
    pub clients: Vec<IpNet>,
    /// Whether a connect to a node without a tunnel fails at once where the kernel can do that (5.18).
    /// False behaves as an older kernel does: it is accepted, and the server must reset it.
    pub fail_at_connect: bool,
}

impl Default for RedirectConfig {
    fn default() -> Self {
        Self {
            cgroup: None,
            // RFC 2544's benchmarking range: never routed on the Internet.
            token_range: Ipv4Net::new_assert(std::net::Ipv4Addr::new(198, 18, 0, 0), 15),
            // A ULA /64 (RFC 4193).
            token_range_v6: Ipv6Net::new_assert(
                std::net::Ipv6Addr::new(0xfd9e, 0x706f, 0x7374, 0x6572, 0, 0, 0, 0),
                64,
            ),
            mark: tunnel_abi::SOCKET_MARK,
            clients: Vec::new(),
            fail_at_connect: true,
        }
    }
}
