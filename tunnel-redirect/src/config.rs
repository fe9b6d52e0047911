//! Settings that do not change while the redirect runs.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use tunnel_routing::{reserved_addresses, reserved_addresses_v6};

/// Settings of [`Redirect::start`](super::Redirect::start).
#[derive(Clone, Debug)]
pub struct RedirectConfig {
    /// Cgroup v2 directory whose processes are redirected; None for the host's root, which is found and checked.
    pub cgroup: Option<PathBuf>,
    /// Virtual addresses for IPv4 destinations: a /24 or larger, of which 16 or more are the self-test's.
    pub redirect_range: Ipv4Net,
    /// Virtual addresses for IPv6 destinations: a /112 or larger.
    pub redirect_range_v6: Ipv6Net,
    /// Sources that may use the redirect range, besides this host and [`Table::clients`](tunnel_routing::Table::clients).
    pub clients: Vec<IpNet>,
    /// If true, a connect to a node without a tunnel fails immediately on kernels with support (6.1). If false, it
    /// behaves as on older kernels: it is accepted, and the server must reset it.
    pub fail_at_connect: bool,
    /// The server's state directory. Its successor has the same one; servers with another one must have other redirect
    /// ranges. All servers with None count as having the same.
    pub state_dir: Option<PathBuf>,
    /// Keeps the programs attached if this process dies; with None they are removed with it.
    pub pins: Option<PinConfig>,
    /// Time after this process's last heartbeat at which the programs stop redirecting.
    pub orphan_timeout: Duration,
    pub orphan_policy: OrphanPolicy,
    /// The way of connections from other network namespaces than this process's.
    pub pods: Pods,
    /// The network leads edge nodes' addresses to this host. What it does not take by route fails instead of being sent on.
    pub gateway: bool,
}

impl RedirectConfig {
    /// The redirect ranges, without host bits; that of IPv6 if the host has it.
    pub(super) fn ranges(&self, ipv6: bool) -> Vec<IpNet> {
        let v6 = ipv6.then(|| IpNet::V6(self.redirect_range_v6.trunc()));
        [Some(IpNet::V4(self.redirect_range.trunc())), v6].into_iter().flatten().collect()
    }

    /// The ends of the ranges, which are reserved for self-tests.
    pub(super) fn self_tests(&self) -> [IpNet; 2] {
        [
            IpNet::V4(reserved_addresses(self.redirect_range)),
            IpNet::V6(reserved_addresses_v6(self.redirect_range_v6)),
        ]
    }
}

/// How connections of pods are redirected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Pods {
    /// At connect(), to a virtual address, as those of the host's own processes.
    Connect,
    /// By route, with the true address, and with them everything else that reaches this host for an edge node.
    Route,
    /// By route where the host, the kernel and Cilium allow it.
    #[default]
    Auto,
}

/// Action of pinned programs on connects to edge addresses once their server is gone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum OrphanPolicy {
    /// They leave them alone.
    #[default]
    Direct,
    /// They have them fail, until another server takes over or `cleanup` removes them.
    Refuse,
}

/// Location of the pinned programs of a server that dies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinConfig {
    /// A directory of a BPF file system.
    pub dir: PathBuf,
    /// The server's state directory; pins with the same one belong to this server.
    pub state_dir: PathBuf,
}

/// Default of [`RedirectConfig::orphan_timeout`].
pub const ORPHAN_TIMEOUT: Duration = Duration::from_secs(30);
/// Minimum: a server that is briefly busy or stopped in a debugger is not dead.
pub const LEAST_ORPHAN_TIMEOUT: Duration = Duration::from_secs(5);

impl Default for RedirectConfig {
    fn default() -> Self {
        Self {
            cgroup: None,
            // RFC 2544's benchmarking range, never routed on the Internet.
            redirect_range: Ipv4Net::new_assert(Ipv4Addr::new(198, 18, 0, 0), 15),
            // A ULA /64 (RFC 4193).
            redirect_range_v6: Ipv6Net::new_assert(
                Ipv6Addr::new(0xfd9e, 0x706f, 0x7374, 0x6572, 0, 0, 0, 0),
                64,
            ),
            clients: Vec::new(),
            fail_at_connect: true,
            state_dir: None,
            pins: None,
            orphan_timeout: ORPHAN_TIMEOUT,
            orphan_policy: OrphanPolicy::default(),
            pods: Pods::default(),
            gateway: false,
        }
    }
}
