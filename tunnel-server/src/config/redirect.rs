//! The flags of the redirect.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use tunnel_runtime::config::value::{self, List, OnOff};
use tunnel_runtime::config::{ConfigError, duration_text};

use tunnel_redirect::{LEAST_ORPHAN_TIMEOUT, OrphanPolicy, PinConfig, Pods, RedirectConfig};

/// RFC 2544's benchmarking range, never routed on the Internet.
const DEFAULT_RANGE: &str = "198.18.0.0/15";
/// A unique local range (RFC 4193); the letters spell "poster".
const DEFAULT_RANGE_V6: &str = "fd9e:706f:7374:6572::/64";

/// Which connections are redirected, and by which means.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Redirect")]
pub struct RedirectFlags {
    /// TCP ports of edge nodes that are redirected, comma-separated.
    #[arg(long, value_name = "LIST", default_value = "10250,10255", value_parser = value::ports)]
    pub redirect_ports: BTreeSet<u16>,
    /// Addresses that are never redirected, comma-separated [default: none; cloud nodes never are].
    #[arg(long, value_name = "CIDRS", default_value = "", hide_default_value = true, value_parser = value::cidrs)]
    pub exclude: List<IpNet>,
    /// Where the addresses of edge nodes are, comma-separated: only these are redirected [default: anywhere but in this host's
    /// networks, the /24 or /64 of a cloud node, and what else is known to be others']. A kubelet reports its own addresses, so
    /// name the edge networks where you can.
    #[arg(long, value_name = "CIDRS", default_value = "", hide_default_value = true, value_parser = value::cidrs)]
    pub edge_addresses: List<IpNet>,
    /// The cluster's ranges of Service addresses, comma-separated: never an edge node's [default: none; with Kubernetes 1.33
    /// or later the cluster's ServiceCIDRs are known anyway, and the API server's address never is].
    #[arg(long, value_name = "CIDRS", default_value = "", hide_default_value = true, value_parser = value::cidrs)]
    pub service_cidrs: List<IpNet>,
    /// Also redirect connections to edge nodes' pods, on any port: the ranges that hold the pods' addresses,
    /// comma-separated, or off. A kubelet can report any range, so name only what is used for pods of edge nodes.
    #[arg(long, value_name = "CIDRS|off", default_value = "off", value_parser = edge_pod_routes)]
    pub edge_pod_routes: List<IpNet>,
    /// Source addresses that may use the redirect, besides this host and its pods, comma-separated [default: none].
    #[arg(long, value_name = "CIDRS", default_value = "", hide_default_value = true, value_parser = value::cidrs)]
    pub redirect_clients: List<IpNet>,
    #[command(flatten)]
    pub ranges: RedirectRanges,
    /// Only processes in this cgroup v2 directory are redirected [default: the host's cgroup v2 root].
    #[arg(long, value_name = "DIR")]
    pub redirect_cgroup: Option<PathBuf>,
    /// How long, with a unit (s, m, h), at least 5s, the BPF programs redirect without a heartbeat of this process. Then
    /// --orphan-policy applies.
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = orphan_timeout)]
    pub orphan_timeout: Duration,
    /// Action on connects to edge nodes after --orphan-timeout: direct leads them to whoever has the address in the
    /// cloud's network; refuse has them fail until a server is back or `cleanup` removes the programs (needs --bpffs).
    #[arg(long, value_name = "direct|refuse", value_enum, default_value_t, hide_possible_values = true)]
    pub orphan_policy: OrphanPolicy,
    /// How connections of pods and Services are redirected. route: by policy routing, which keeps the edge node's address, so
    /// that NetworkPolicies match it, and also takes Services and other hosts' connections (needs /dev/net/tun). connect: to a
    /// virtual address, as those of the host's processes. auto: by route where there is a /dev/net/tun, Linux 5.14 and no Cilium.
    #[arg(long, value_name = "connect|route|auto", value_enum, default_value_t, hide_possible_values = true)]
    pub redirect_pods: Pods,
    /// This host is a gateway: the network leads edge nodes' addresses here, for the clients of --redirect-clients. What the
    /// tunnel does not take fails instead of being sent back into the network. Needs --redirect-pods=route.
    #[arg(
        long,
        value_name = "on|off",
        default_value = "off",
        default_missing_value = "on",
        num_args = 0..=1,
        require_equals = true,
        value_parser = value::on_off
    )]
    pub gateway: OnOff,
}

/// Names of the redirect's objects in the kernel, for `cleanup` too.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Redirect")]
pub struct RedirectRanges {
    /// Addresses that stand for IPv4 addresses of edge nodes inside the redirect: a /8 to /24 that nothing else uses.
    #[arg(long, value_name = "CIDR", default_value = DEFAULT_RANGE, value_parser = redirect_range)]
    pub redirect_range: Ipv4Net,
    /// The same for IPv6, a /64 to /96.
    #[arg(long, value_name = "CIDR", default_value = DEFAULT_RANGE_V6, value_parser = redirect_range_v6)]
    pub redirect_range_v6: Ipv6Net,
    /// BPF file system for pinned programs, with which connects to edge nodes fail at once while a killed server is down;
    /// off: the programs are not pinned, and such connects are not redirected.
    #[arg(long, value_name = "DIR|off", env = "POSTERN_BPFFS", default_value = "/sys/fs/bpf", value_parser = directory)]
    pub bpffs: Directory,
}

/// None for off. An alias, because clap's derive treats `Option` specially.
type Directory = Option<PathBuf>;

impl RedirectFlags {
    /// Configuration to start the redirect with.
    pub fn start_config(&self, state_dir: &Path) -> RedirectConfig {
        RedirectConfig {
            cgroup: self.redirect_cgroup.clone(),
            clients: self.redirect_clients.clone(),
            state_dir: Some(state_dir.to_owned()),
            orphan_timeout: self.orphan_timeout,
            orphan_policy: self.orphan_policy,
            pods: self.redirect_pods,
            gateway: self.gateway,
            ..self.ranges.start_config(state_dir)
        }
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        if self.redirect_ports.is_empty() {
            let reason = "empty; name the ports to redirect";
            return Err(ConfigError::new("--redirect-ports", "", reason));
        }
        if self.orphan_policy == OrphanPolicy::Refuse && self.ranges.bpffs.is_none() {
            let reason = "not possible with --bpffs=off, where the programs end with this process: give a BPF file system";
            return Err(ConfigError::new("--orphan-policy", "refuse", reason));
        }
        if self.gateway && self.redirect_pods != Pods::Route {
            let reason = "what the network leads here is taken by route only: give --redirect-pods=route too";
            return Err(ConfigError::without_value("--gateway", reason));
        }
        if self.gateway && self.redirect_clients.is_empty() {
            let reason =
                "it would serve this host's pods only: name the clients' addresses with --redirect-clients";
            return Err(ConfigError::without_value("--gateway", reason));
        }
        let RedirectRanges { redirect_range, redirect_range_v6, .. } = self.ranges;
        let ranges: [(_, IpNet); 2] =
            [("--redirect-range", redirect_range.into()), ("--redirect-range-v6", redirect_range_v6.into())];
        for (key, range) in ranges {
            if let Some(excluded) = self.exclude.iter().find(|excluded| overlap(&range, excluded)) {
                let reason = format!("it overlaps {excluded} of --exclude");
                return Err(ConfigError::new(key, range.to_string(), reason));
            }
        }
        Ok(())
    }
}

impl RedirectRanges {
    pub(crate) fn start_config(&self, state_dir: &Path) -> RedirectConfig {
        let pins = self.bpffs.clone().map(|dir| PinConfig { dir, state_dir: state_dir.to_owned() });
        RedirectConfig {
            redirect_range: self.redirect_range,
            redirect_range_v6: self.redirect_range_v6,
            pins,
            ..RedirectConfig::default()
        }
    }
}

fn directory(value: &str) -> Result<Directory, Infallible> {
    Ok((value != "off").then(|| value.into()))
}

fn orphan_timeout(value: &str) -> Result<Duration, String> {
    let timeout = value::duration(value)?;
    if timeout < LEAST_ORPHAN_TIMEOUT {
        let least = duration_text(LEAST_ORPHAN_TIMEOUT);
        return Err(format!("shorter than {least}: a server that is merely busy would be taken for dead"));
    }
    Ok(timeout)
}

/// Parses the ranges whose pod connections are redirected; `off` for none.
fn edge_pod_routes(value: &str) -> Result<List<IpNet>, String> {
    match value {
        "off" => Ok(Vec::new()),
        "" | "on" => Err("name the ranges of edge nodes' pods, such as 10.244.0.0/16, or off".to_owned()),
        ranges => value::cidrs(ranges),
    }
}

fn redirect_range(value: &str) -> Result<Ipv4Net, String> {
    let IpNet::V4(range) = value::cidr(value)? else {
        return Err("not IPv4; the IPv6 range is --redirect-range-v6".to_owned());
    };
    if !(8..=24).contains(&range.prefix_len()) {
        return Err("use a /8 to /24: one address for each edge address".to_owned());
    }
    let useless = [
        (Ipv4Net::new_assert(Ipv4Addr::new(0, 0, 0, 0), 8), "0.0.0.0/8 is not a usable network"),
        (Ipv4Net::new_assert(Ipv4Addr::new(127, 0, 0, 0), 8), "it contains loopback addresses"),
        (Ipv4Net::new_assert(Ipv4Addr::new(169, 254, 0, 0), 16), "it contains link-local addresses"),
        (Ipv4Net::new_assert(Ipv4Addr::new(224, 0, 0, 0), 3), "it contains multicast or reserved addresses"),
    ];
    match useless.iter().find(|(net, _)| overlap(&IpNet::V4(range), &IpNet::V4(*net))) {
        Some((_, reason)) => Err((*reason).to_owned()),
        None => Ok(range),
    }
}

fn redirect_range_v6(value: &str) -> Result<Ipv6Net, String> {
    let IpNet::V6(range) = value::cidr(value)? else {
        return Err("not IPv6; the IPv4 range is --redirect-range".to_owned());
    };
    if !(64..=96).contains(&range.prefix_len()) {
        return Err("use a /64 to /96: one address for each edge address".to_owned());
    }
    let first = range.network();
    // fc00::/7 (RFC 4193) and 2000::/3 (RFC 4291 §2.4); other ranges have special meanings.
    if !(first.is_unique_local() || first.segments()[0] >> 13 == 1) {
        return Err("not a unique local or global unicast range; use one such as fd00:1:2:3::/64".to_owned());
    }
    Ok(range)
}

fn overlap(a: &IpNet, b: &IpNet) -> bool {
    a.contains(b) || b.contains(a)
}
