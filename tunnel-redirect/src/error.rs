//! Errors of the redirect, each with its fix.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use ipnet::IpNet;

/// An error of the redirect. Every variant's text ends in a fix.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RedirectError {
    #[error(
        "this tunnel-server was built without its BPF programs ({reason}): run `cargo xtask build-ebpf` and build it \
         again, or start it with --redirect=off"
    )]
    NoObject {
        /// Reported by the build script.
        reason: &'static str,
    },
    #[error(
        "this kernel ({release}) has no {feature}: Linux 5.10 or newer with CONFIG_BPF_SYSCALL, CONFIG_CGROUP_BPF and CONFIG_NET is needed; upgrade it, or start with --redirect=off"
    )]
    Kernel {
        /// `uname -r`.
        release: String,
        feature: &'static str,
    },
    #[error("missing capabilities: {}: run as root, or grant them (systemd: AmbientCapabilities=; Kubernetes: securityContext.capabilities.add)", missing.join(", "))]
    Capabilities {
        /// Names such as `CAP_BPF`.
        missing: Vec<&'static str>,
    },
    #[error(
        "no cgroup v2 hierarchy in /proc/self/mountinfo: boot with systemd.unified_cgroup_hierarchy=1, or name a mounted one with --redirect-cgroup"
    )]
    NoCgroup,
    #[error("--redirect-cgroup={}: {reason}: give a directory of a cgroup v2 hierarchy", path.display())]
    NotCgroup { path: PathBuf, reason: String },
    /// Only a cgroup namespace's root is visible.
    #[error(
        "{} is the root of a cgroup namespace, not of the host: processes outside it would not be redirected. Run in \
         the host's cgroup namespace or mount the host's /sys/fs/cgroup into the container, or, if only this subtree \
         is meant, give it with --redirect-cgroup",
        path.display()
    )]
    NotRoot {
        /// The mount point that was found.
        path: PathBuf,
    },
    /// The server itself is outside the cgroup, so it cannot verify the hooks.
    #[error("this process is in the cgroup {}, outside {}: its own connects would not be redirected and nothing could be verified; start it inside (write its pid to {}/cgroup.procs) or attach to a parent with --redirect-cgroup", own.display(), path.display(), path.display())]
    Outside {
        /// The cgroup to attach to.
        path: PathBuf,
        /// This process's own cgroup.
        own: PathBuf,
    },
    #[error(
        "EPERM: program {program} (id {id}) is attached to {hook} of {} without BPF_F_ALLOW_MULTI, which forbids every \
         other program there: detach it (`bpftool cgroup detach {} {hook} id {id}`) or upgrade what attached it \
         (Cilium before 1.11 did), or start with --redirect=off",
        path.display(),
        path.display()
    )]
    Foreign {
        /// For example `connect4`.
        hook: &'static str,
        program: String,
        id: u32,
        path: PathBuf,
    },
    #[error("EPERM at {operation}: {fix}")]
    NotPermitted { operation: String, fix: &'static str },
    #[error(
        "the kernel refused the program {program}: {reason}; please report this with the kernel's version, and start with --redirect=off meanwhile"
    )]
    Load { program: &'static str, reason: String },
    #[error(
        "cannot attach {program} to {target}: {reason}; the log at --log-level=debug has what the verifier said"
    )]
    Attach {
        program: &'static str,
        /// Cgroup or namespace.
        target: String,
        reason: String,
    },
    #[error(
        "map {map}: {reason}; the tables stay as they were up to this entry, and the next change tries again"
    )]
    Map { map: &'static str, reason: String },
    #[error(
        "{wanted} {what} do not fit: the kernel's table holds {capacity}; aggregate them into larger networks"
    )]
    Full { what: &'static str, wanted: usize, capacity: usize },
    #[error("route {net} -> {virtual_address}: {reason}; nothing was changed")]
    Route { net: IpNet, virtual_address: IpAddr, reason: String },
    #[error(
        "{key}={range}: the virtual addresses would collide with {user}: give a range that nothing else uses with {key}, or remove that"
    )]
    RangeUsed {
        /// The flag.
        key: &'static str,
        range: IpNet,
        /// For example an interface's address.
        user: String,
    },
    #[error(
        "rtnetlink: cannot {operation}: {reason}; check CAP_NET_ADMIN, `ip rule`, `ip route show table local`, and net.ipv6.conf.default.disable_ipv6 if it is about IPv6"
    )]
    Netlink { operation: String, reason: String },
    #[error(
        "--redirect-pods=route: cannot make a TUN device: {source}; load the module tun, give this process /dev/net/tun, or use --redirect-pods=connect"
    )]
    Tun { source: io::Error },
    #[error("the redirect's listener: {operation}: {source}")]
    Listener { operation: &'static str, source: io::Error },
    /// Cilium came after this server had started.
    #[error(
        "Cilium came after this server had started, and its eBPF host routing ignores rules for ports: restart this server, or set --redirect-pods=route if Cilium has bpf.hostLegacyRouting=true"
    )]
    Cilium,
    #[error("the redirect does not work: {0}")]
    SelfTest(#[from] SelfTestError),
    #[error(
        "cannot pin {}: {reason}; check the BPF file system named by --bpffs, or switch pins off with --bpffs=off", path.display()
    )]
    Pin { path: PathBuf, reason: String },
    #[error("the redirect has been stopped")]
    Stopped,
    #[error(
        "{key}={own}: a tunnel-server that runs on this host has the range {range} ({holder}): stop it, or give each \
         cluster a --redirect-range and --redirect-range-v6 of its own"
    )]
    RangeTaken {
        /// The flag.
        key: &'static str,
        own: IpNet,
        range: IpNet,
        /// The process that claimed it.
        holder: String,
    },
    /// Reading the system's state failed.
    #[error("{what}: {source}")]
    Io { what: String, source: io::Error },
}

/// Failures of the server's connection to itself through the hooks.
#[derive(Debug, thiserror::Error)]
pub enum SelfTestError {
    #[error(
        "a connect of this process was not redirected by {hook} of {cgroup}: the process must run inside that cgroup, \
         and the program must be attached (`bpftool cgroup tree`)"
    )]
    NotRedirected {
        /// `connect4` or `connect6`.
        hook: &'static str,
        cgroup: String,
    },
    #[error(
        "a redirected connect to {virtual_address} did not reach the listener ({reason}): check the route `local <redirect range> dev lo`, the sk_lookup program (`bpftool net`), firewall rules for loopback, and rules that take this port (`tunnel-server doctor`)"
    )]
    NotSteered {
        /// The virtual address, with the destination port.
        virtual_address: SocketAddr,
        reason: String,
    },
    #[error("getpeername() says {found} instead of {expected}: the {hook} program is not in effect")]
    WrongPeer {
        /// `getpeername4` or `getpeername6`.
        hook: &'static str,
        expected: SocketAddr,
        found: String,
    },
    #[error(
        "the kernel sends packets for the edge node's address {to} {found}, not to this server: a rule with a priority below 90 matches first (`ip rule`): give it one above 92, or set --redirect-pods=connect"
    )]
    NotByRoute { to: SocketAddr, found: String },
    /// The server is not serving, so the connect must fail, but it did not.
    #[error("the redirect is closed, but a connect through it ended in: {0}; restart the server")]
    NotClosed(String),
}
