//! Checks for operators: whether this host meets the requirements, and whether the redirect works.

use std::path::PathBuf;

use ipnet::IpNet;
use netlink_packet_route::route::RouteType;
use tunnel_runtime::kernel::release;

use super::attached::{self, AttachType};
use super::cgroup::Cgroup;
use super::config::RedirectConfig;
use super::error::RedirectError;
use super::kernel::Kernel;
use super::netlink::destination;
use super::netns::this_netns;
use super::{load, pins, preflight, range_use};

const FAILS: &str = "fails at connect()";

#[derive(Debug)]
pub struct HostCheck {
    pub name: &'static str,
    /// The finding, or the problem and its fix.
    pub outcome: Result<String, RedirectError>,
}

/// Checks everything that [`Redirect::start`](crate::Redirect::start) needs, without side effects.
pub fn host_checks(config: &RedirectConfig) -> Vec<HostCheck> {
    let check = |name, outcome| HostCheck { name, outcome };
    let mut all = vec![
        check("programs", load::embedded().map(|object| format!("embedded, {} bytes", object.len()))),
        check(
            "kernel",
            preflight::probe(config).map(|features| {
                let connect = if features.set_retval { FAILS } else { "is accepted and reset" };
                format!("{}; a connect to a node without a tunnel {connect}", release())
            }),
        ),
        check(
            "ipv6",
            Ok(match preflight::ipv6_usable() {
                Ok(()) => "on".into(),
                Err(reason) => format!("off ({reason}); IPv6 destinations are not redirected"),
            }),
        ),
    ];
    let ranges = range_use::check(config, preflight::ipv6_usable().is_ok());
    all.push(check("redirect range", ranges.map(|()| "no other user".into())));
    let cgroup = Cgroup::find(config.cgroup.as_deref());
    if let Ok(cgroup) = &cgroup {
        let foreign = AttachType::CGROUP.into_iter().find_map(|hook| attached::foreign(&cgroup.path, hook));
        all.push(check("other programs", foreign.map_or(Ok("none that excludes ours".into()), Err)));
    }
    all.push(check("cgroup", cgroup.map(|cgroup| cgroup.path.display().to_string())));
    all
}

/// Reports whether a result of the check `kernel` says that connects to a node without a tunnel fail at once.
pub fn fails_at_connect(kernel: &str) -> bool {
    kernel.ends_with(FAILS)
}

/// Foreign programs at this network namespace's sk_lookup hook, as text.
///
/// # Errors
/// They cannot be listed: CAP_NET_ADMIN is missing, or the kernel has no such hook. Or there are several whose names
/// only CAP_SYS_ADMIN may read.
pub fn foreign_lookups() -> Result<Vec<String>, RedirectError> {
    let listed = attached::foreign_lookups(&this_netns()?);
    listed.map_err(|source| RedirectError::Io { what: "cannot list the sk_lookup programs".into(), source })
}

/// The redirect ranges that this network namespace does not route to itself.
///
/// # Errors
/// The routes cannot be listed.
pub fn missing_range_routes(config: &RedirectConfig) -> Result<Vec<IpNet>, RedirectError> {
    let mut missing = config.ranges(preflight::ipv6_usable().is_ok());
    let local = Kernel::open()?.routes_of(RouteType::Local, |route| route.header.kind == RouteType::Local)?;
    missing.retain(|range| !local.iter().filter_map(destination).any(|route| route.contains(range)));
    Ok(missing)
}

/// Directories of pinned programs whose server is dead.
///
/// # Errors
/// The BPF file system cannot be read.
pub fn left_behind(config: &RedirectConfig) -> Result<Vec<PathBuf>, RedirectError> {
    config.pins.as_ref().map_or(Ok(Vec::new()), |pins| pins::dead(&pins.dir))
}
