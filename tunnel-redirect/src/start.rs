//! Starts the redirect: loads the programs, attaches them, and verifies that they work.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::net::TcpListener;

use aya::Ebpf;
use nix::libc;
use nix::net::if_::if_nametoindex;
use nix::sys::socket::{setsockopt, sockopt};
use parking_lot::Mutex;
use socket2::SockRef;
use tokio::sync::Notify;
use tunnel_abi::{INITIAL_NETNS, LISTENER_PRIORITY, LISTENER_V4, LISTENER_V6};
use tunnel_routing::Desired;
use tunnel_runtime::log_once::LogOnce;

use super::by_route::{self, ByRoute};
use super::cgroup::Cgroup;
use super::claim::Claim;
use super::config::{OrphanPolicy, Pods, RedirectConfig};
use super::error::RedirectError;
use super::load::{self, Programs};
use super::map_contents::MapContents;
use super::maps::{Counters, Heartbeat, Maps};
use super::netns::this_netns;
use super::pins::Pins;
use super::preflight;
use super::program_log::{self, ProgramLog};
use super::range_use;
use super::running::{Health, Inner, Redirect};
use super::self_test_addresses::SelfTestAddresses;

/// An interface that every host with Cilium has.
const CILIUM: &str = "cilium_host";
/// Maximum number of self-test pairs to try: another server may have taken the same one.
const SELF_TEST_ATTEMPTS: usize = 4;

impl Redirect {
    /// Loads, attaches and verifies the programs. Redirected connections arrive at the listeners with the virtual address as
    /// local address. Both listeners get a priority (`SO_PRIORITY`) that identifies them to other servers' programs.
    ///
    /// Blocks for tens of milliseconds. Nothing is redirected until [`apply`](Self::apply). Without `v6`, or on a host
    /// without IPv6, IPv6 destinations are not redirected.
    ///
    /// # Errors
    /// See [`RedirectError`]; nothing is left behind.
    pub fn start(
        config: RedirectConfig,
        v4: &TcpListener,
        v6: Option<&TcpListener>,
    ) -> Result<Self, RedirectError> {
        let self_test_addresses = SelfTestAddresses::new(&config);
        load::embedded()?;
        let features = preflight::probe(&config)?;
        let cgroup = Cgroup::find(config.cgroup.as_deref())?;
        let netns = this_netns()?;
        let v6 = v6.filter(|_| match preflight::ipv6_usable() {
            Ok(()) => true,
            Err(reason) => {
                tracing::warn!(%reason, "IPv6 destinations are not redirected");
                false
            }
        });

        let claim = Claim::take(&config, v6.is_some())?;
        range_use::check(&config, v6.is_some())?;
        let log = program_log::wanted();
        let (by_route, not_routed) = by_route(&config, v4, v6.is_some())?;
        let (by_route, host_netns) = by_route.unzip();
        let host_netns = host_netns.unwrap_or_default();
        let mut ebpf = load::open(&config, features, host_netns, log)?;
        let program_log = if log { Some(ProgramLog::new(&mut ebpf)?) } else { None };
        let (pins, not_pinned) = pins(&config, &netns, &ebpf);
        if let (OrphanPolicy::Refuse, Some(reason), Some(pinned)) =
            (config.orphan_policy, &not_pinned, &config.pins)
        {
            // Without pins a killed server's programs are gone at once.
            return Err(RedirectError::Pin { path: pinned.dir.clone(), reason: reason.clone() });
        }
        let mut maps = Maps::take(&mut ebpf)?;
        let mut heartbeat = Heartbeat::take(&mut ebpf)?;
        let counters = Counters::take(&mut ebpf)?;
        // The maps must be open while the programs that use them are loaded.
        let programs = Programs::load(ebpf, pins)?;
        for (slot, listener) in [(LISTENER_V4, Some(v4)), (LISTENER_V6, v6)] {
            let Some(listener) = listener else { continue };
            setsockopt(listener, sockopt::Priority, &(LISTENER_PRIORITY as libc::c_int)).map_err(
                |error| RedirectError::Listener { operation: "cannot set SO_PRIORITY", source: error.into() },
            )?;
            maps.set_listener(slot, listener)?;
        }
        heartbeat.beat()?;
        maps.set_serving(true)?;

        let inner = Inner {
            programs,
            maps,
            by_route,
            contents: MapContents::default(),
            current: false,
            desired: Desired::default(),
            own: BTreeSet::new(),
            uplinks: BTreeSet::new(),
            uplinks_to: None,
            uplinks_failed: LogOnce::default(),
            self_test_addresses,
            verified_port: None,
            serving: true,
            released: false,
            claim,
            stopped: false,
            program_log,
        };
        // From here on, dropping `redirect` undoes everything.
        let redirect = Self {
            config,
            cgroup,
            netns,
            ipv6: v6.is_some(),
            routed: inner.by_route.is_some(),
            not_routed,
            features,
            not_pinned,
            lost: Notify::new(),
            heartbeat: Mutex::new(heartbeat),
            counters,
            inner: Mutex::new(inner),
            health: Mutex::new(Health::default()),
        };
        redirect.ensure_routes()?;
        redirect.refresh_addresses(true)?;
        redirect.lock().programs.attach(&redirect.cgroup, &redirect.netns)?;
        redirect.first_verification()?;
        tracing::info!(
            cgroup = %redirect.cgroup.path.display(),
            ipv6 = redirect.ipv6,
            fail_at_connect = redirect.features.set_retval,
            pinned = redirect.pinned_in().is_some(),
            by_route = redirect.routed,
            "redirect attached and verified"
        );
        Ok(redirect)
    }

    fn first_verification(&self) -> Result<(), RedirectError> {
        let mut tried = Vec::new();
        let mut result = self.verify_now();
        for _ in 1..SELF_TEST_ATTEMPTS {
            match result {
                // The programs of another server run first, also of a dead one.
                Err(RedirectError::SelfTest(_)) if self.lock().programs.have_others(&self.netns)? => {
                    let mut inner = self.lock();
                    tried.push(inner.self_test_addresses);
                    inner.self_test_addresses = SelfTestAddresses::besides(&tried, &self.config);
                    self.rewrite(&mut inner)?;
                    drop(inner);
                    result = self.verify_now();
                }
                other => return other,
            }
        }
        result
    }
}

/// The device, and the reason why there is none.
type Opened = (Option<(ByRoute, u64)>, Option<String>);

/// Makes the device for routes, if connections are to be taken by them, and returns it with the cookie of this namespace;
/// else the reason why they cannot be, with [`Pods::Auto`].
fn by_route(config: &RedirectConfig, listener: &TcpListener, ipv6: bool) -> Result<Opened, RedirectError> {
    let netns = || by_route::host_netns(listener);
    match config.pods {
        Pods::Connect => Ok((None, None)),
        Pods::Route => Ok((Some((open_by_route(listener, ipv6)?, netns().unwrap_or(INITIAL_NETNS))), None)),
        Pods::Auto => match by_route_where_possible(listener, netns(), ipv6) {
            Ok(opened) => Ok((Some(opened), None)),
            Err((reason, fix)) => {
                tracing::warn!(reason, fix, "connections of pods are redirected at connect(), not by route");
                Ok((None, Some(reason)))
            }
        },
    }
}

fn open_by_route(listener: &TcpListener, ipv6: bool) -> Result<ByRoute, RedirectError> {
    let mut by_route = ByRoute::open(ipv6)?;
    // To answer from addresses that are not this host's own. IPv6 asks for no permission.
    SockRef::from(listener)
        .set_ip_transparent_v4(true)
        .map_err(|source| RedirectError::Listener { operation: "cannot set IP_TRANSPARENT", source })?;
    // Here a kernel whose answers cannot be read is found in time.
    by_route.restore()?;
    Ok(by_route)
}

/// Returns the reason and its mend if connections of pods cannot be taken by route.
fn by_route_where_possible(
    listener: &TcpListener,
    netns: Option<u64>,
    ipv6: bool,
) -> Result<(ByRoute, u64), (String, &'static str)> {
    let netns = netns.ok_or_else(|| {
        let reason = "the kernel does not tell this process its network namespace (Linux 5.14 does)";
        (reason.to_owned(), "upgrade the kernel, or set --redirect-pods=connect")
    })?;
    if has_cilium() {
        let reason = "Cilium is on this host, whose eBPF host routing ignores rules for ports";
        let fix = "set --redirect-pods=route if Cilium has bpf.hostLegacyRouting=true, else =connect";
        return Err((reason.to_owned(), fix));
    }
    let opened = open_by_route(listener, ipv6).map_err(|error| match error {
        RedirectError::Tun { source } => (format!("cannot make a TUN device: {source}"), tun_fix(&source)),
        error => (error.to_string(), "set --redirect-pods=connect"),
    })?;
    Ok((opened, netns))
}

/// True if Cilium is on this host.
pub fn has_cilium() -> bool {
    if_nametoindex(CILIUM).is_ok()
}

/// The usual cause for which no TUN device can be made.
fn tun_fix(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOENT) => {
            "give this process the host's /dev/net/tun (in a pod a volume of /dev/net; `modprobe tun` if the host has none), or \
             set --redirect-pods=connect"
        }
        Some(libc::EPERM | libc::EACCES) => {
            "permit /dev/net/tun (systemd: DeviceAllow=; runc 1.2.0 to 1.2.3 forbid it to containers: upgrade it; SELinux: \
             seLinuxOptions), or set --redirect-pods=connect"
        }
        _ => "use a kernel with CONFIG_TUN, or set --redirect-pods=connect",
    }
}

/// Creates the pins, or returns the reason that they cannot be created.
fn pins(config: &RedirectConfig, netns: &File, ebpf: &Ebpf) -> (Option<Pins>, Option<String>) {
    let Some(wanted) = &config.pins else { return (None, None) };
    match Pins::create(wanted, netns, ebpf) {
        Ok(pins) => (Some(pins), None),
        Err(reason) => {
            tracing::warn!(
                path = %wanted.dir.display(),
                reason,
                fix = "set --bpffs to a BPF file system that this process may write to, or to off",
                "failed to pin the BPF programs, connects to edge nodes are not refused if this process is killed"
            );
            (None, Some(reason))
        }
    }
}
