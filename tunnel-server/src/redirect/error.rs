//! What can go wrong with the redirect, each with its mend.

use std::io;
use std::path::PathBuf;

use ipnet::IpNet;

/// An error of the redirect. Every variant's text ends in what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RedirectError {
    /// The binary carries no usable object.
    #[error(
        "this tunnel-server was built without its BPF programs ({reason}): run `cargo xtask build-ebpf` and build it \
         again, or start it with --redirect=off"
    )]
    NoObject {
        /// What the build script found.
        reason: &'static str,
    },
    /// The kernel lacks something.
    #[error(
        "this kernel ({release}) has no {feature}: Linux 5.10 or newer with CONFIG_BPF_SYSCALL, CONFIG_CGROUP_BPF and CONFIG_NET is needed; upgrade it, or start with --redirect=off"
    )]
    Kernel {
        /// `uname -r`.
        release: String,
        /// The missing feature.
        feature: &'static str,
    },
    /// The process may not do it.
    #[error("missing capabilities: {}: run as root, or grant them (systemd: AmbientCapabilities=; Kubernetes: securityContext.capabilities.add)", missing.join(", "))]
    Capabilities {
        /// Names, such as `CAP_BPF`.
        missing: Vec<&'static str>,
    },
    /// No cgroup v2 hierarchy is mounted.
    #[error(
        "no cgroup v2 hierarchy in /proc/self/mountinfo: mount one (`mount -t cgroup2 none /sys/fs/cgroup/unified`), or name it with --redirect-cgroup"
    )]
    NoCgroup,
    /// The given directory is something else.
    #[error("--redirect-cgroup={}: {reason}: give a directory of a cgroup v2 hierarchy", path.display())]
    NotCgroup {
        /// As given.
        path: PathBuf,
        /// Why it cannot be used.
        reason: String,
    },
    /// Only a cgroup namespace's root is in sight.
    #[error(
        "{} is the root of a cgroup namespace, not of the host: processes outside it would not be redirected. Run in \
         the host's cgroup namespace or mount the host's /sys/fs/cgroup into the container, or, if only this subtree \
         is meant, give it with --redirect-cgroup",
        path.display()
    )]
    NotRoot {
        /// The mount point found.
        path: PathBuf,
    },
    /// The server itself is outside the cgroup, so it cannot verify the hooks.
    #[error("this process is in the cgroup {}, outside {}: its own connects would not be redirected and nothing could be verified; start it inside (write its pid to {}/cgroup.procs) or attach to a parent with --redirect-cgroup", own.display(), path.display(), path.display())]
    Outside {
        /// The cgroup to attach to.
        path: PathBuf,
        /// The process's own.
        own: PathBuf,
    },
    /// Somebody attached exclusively.
    #[error(
        "EPERM: program {program} (id {id}) is attached to {hook} of {} without BPF_F_ALLOW_MULTI, which forbids every \
         other program there: detach it (`bpftool cgroup detach {} {hook} id {id}`) or upgrade what attached it \
         (Cilium before 1.11 did), or start with --redirect=off",
        path.display(),
        path.display()
    )]
    Foreign {
        /// Hook, such as `connect4`.
        hook: &'static str,
        /// The foreign program's name.
        program: String,
        /// Its id.
        id: u32,
        /// Where it is attached.
        path: PathBuf,
    },
    /// A system call of the loader was not permitted.
    #[error("EPERM at {operation}: {mend}")]
    NotPermitted {
        /// What was tried.
        operation: String,
        /// What to do.
        mend: &'static str,
    },
    /// The verifier or the kernel refused a program.
    #[error(
        "the kernel refused the program {program}: {reason}; please report this with the kernel's version, and start with --redirect=off meanwhile"
    )]
    Load {
        /// Its name.
        program: &'static str,
        /// The kernel's words.
        reason: String,
    },
    /// A program could not be attached.
    #[error(
        "cannot attach {program} to {target}: {reason}; the log at --log-level=debug has what the verifier said"
    )]
    Attach {
        /// Its name.
        program: &'static str,
        /// Cgroup or namespace.
        target: String,
        /// The kernel's words.
        reason: String,
    },
    /// A map operation failed.
    #[error(
        "map {map}: {reason}; the tables stay as they were up to this entry, and the next change tries again"
    )]
    Map {
        /// Its name.
        map: &'static str,
        /// The kernel's words.
        reason: String,
    },
    /// More entries than a map holds.
    #[error(
        "{wanted} {what} do not fit: the kernel's table holds {capacity}; aggregate them into larger networks"
    )]
    Full {
        /// Kind of entries.
        what: &'static str,
        /// How many are wanted.
        wanted: usize,
        /// How many fit.
        capacity: usize,
    },
    /// A route that cannot be.
    #[error("route {net} -> {token}: {reason}; nothing was changed")]
    Route {
        /// The edge network.
        net: IpNet,
        /// Its token.
        token: std::net::IpAddr,
        /// Why not.
        reason: String,
    },
    /// A token range that cannot be.
    #[error("{key}={range}: {reason}")]
    TokenRange {
        /// The flag.
        key: &'static str,
        /// Its value.
        range: IpNet,
        /// Why not.
        reason: &'static str,
    },
    /// rtnetlink failed.
    #[error("rtnetlink: cannot {operation}: {reason}; check CAP_NET_ADMIN and `ip route show table local`")]
    Netlink {
        /// What was tried.
        operation: String,
        /// The kernel's words.
        reason: String,
    },
    /// A listener cannot be used.
    #[error("the redirect's listener: {operation}: {source}")]
    Listener {
        /// What was tried.
        operation: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// The server's connection to itself through the hooks failed.
    #[error("the redirect does not work: {0}")]
    SelfTest(#[from] super::verify::Failure),
    /// After [`Redirect::stop`](super::Redirect::stop).
    #[error("the redirect has been stopped")]
    Stopped,
    /// Another server of this network namespace uses the route.
    #[error("another tunnel-server (program id {id}) redirects in this network namespace: stop it first")]
    InUse {
        /// Its sk_lookup program.
        id: u32,
    },
    /// Reading the system's state failed.
    #[error("{what}: {source}")]
    Io {
        /// What was read.
        what: String,
        /// Why not.
        source: io::Error,
    },
}
