//! The running redirect: applies changes of the desired state, and reports its own state.

use std::collections::BTreeSet;
use std::fs::File;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use ipnet::IpNet;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tunnel_abi::LIST_CAPACITY;
use tunnel_routing::Desired;
use tunnel_runtime::log_once::LogOnce;

use super::by_route::{self, ByRoute, Wanted};
use super::cgroup::Cgroup;
use super::change::{Change, ComesIn};
use super::claim::Claim;
use super::config::{OrphanPolicy, RedirectConfig};
use super::error::RedirectError;
use super::kernel::Kernel;
use super::load::Programs;
use super::map_contents::{HostContext, MapContents};
use super::maps::{Counters, Heartbeat, Maps};
use super::preflight::Features;
use super::program_log::ProgramLog;
use super::range_use::own_address;
use super::self_test_addresses::SelfTestAddresses;

/// Number of entries that one [`Redirect::apply`] wrote.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Entries inserted or replaced.
    pub writes: usize,
    pub deletes: usize,
}

/// State of the redirect as of its last verification, or of the last change.
#[derive(Clone, Debug, Default)]
pub struct Health {
    /// The problem, if it does not work.
    pub problem: Option<String>,
    /// The reason, if the kernel's routes are out of date.
    pub stale: Option<String>,
    /// Time at which it last worked.
    pub verified: Option<Instant>,
    /// Number of times that something lost was restored.
    pub restored: u64,
    /// Number of cloud nodes' addresses without room in the kernel's list of exclusions.
    pub left_out: usize,
}

/// The running redirect. Dropping it, or [`stop`](Self::stop), detaches the programs and removes the redirect route.
pub struct Redirect {
    pub(super) config: RedirectConfig,
    pub(super) cgroup: Cgroup,
    pub(super) netns: File,
    /// IPv6 destinations are redirected too.
    pub ipv6: bool,
    /// Connections of other network namespaces are taken by route.
    pub routed: bool,
    /// The reason why they are not, with [`Pods::Auto`](super::Pods::Auto).
    pub not_routed: Option<String>,
    pub(super) features: Features,
    /// The reason why nothing is pinned, although configured.
    pub not_pinned: Option<String>,
    /// Notified when programs are missing.
    pub(super) lost: Notify,
    /// Never locked together with `inner`, which may be locked for longer than `--orphan-timeout`.
    pub(super) heartbeat: Mutex<Heartbeat>,
    pub(super) counters: Counters,
    pub(super) inner: Mutex<Inner>,
    pub(super) health: Mutex<Health>,
}

/// State that changes at run time.
pub(super) struct Inner {
    pub(super) programs: Programs,
    pub(super) maps: Maps,
    /// The routes that take connections of other namespaces; None if the hooks redirect these too.
    pub(super) by_route: Option<ByRoute>,
    /// Contents of `maps`.
    pub(super) contents: MapContents,
    /// True if `maps` match `desired`, `own` and `self_test_addresses`.
    pub(super) current: bool,
    pub(super) desired: Desired,
    /// This host's own addresses.
    pub(super) own: BTreeSet<IpAddr>,
    /// Interfaces that lead to other hosts, as in `maps`.
    pub(super) uplinks: BTreeSet<u32>,
    /// Hosts that these were read for.
    pub(super) uplinks_to: Option<BTreeSet<IpAddr>>,
    pub(super) uplinks_failed: LogOnce,
    pub(super) self_test_addresses: SelfTestAddresses,
    /// Port of the last self-test that passed.
    pub(super) verified_port: Option<u16>,
    pub(super) serving: bool,
    /// Another server has taken over; do not attach again.
    pub(super) released: bool,
    /// Claim on the redirect ranges.
    pub(super) claim: Claim,
    pub(super) stopped: bool,
    pub(super) program_log: Option<ProgramLog>,
}

impl std::fmt::Debug for Redirect {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Redirect")
            .field("cgroup", &self.cgroup.path)
            .field("ipv6", &self.ipv6)
            .field("features", &self.features)
            .finish_non_exhaustive()
    }
}

impl Redirect {
    /// Removes the rules and routes that dead servers have left. To be called when the nodes are known: until then they may
    /// refuse connections, as the orphan policy of those servers says. After an error the next verification does it if
    /// connections are taken by route.
    ///
    /// # Errors
    /// [`RedirectError::Netlink`]
    pub fn remove_dead_routes(&self) -> Result<(), RedirectError> {
        if !self.routed {
            // Nothing here restores rules, but a server before this one may have had some.
            return by_route::remove_leftovers().map(drop);
        }
        match &mut self.lock().by_route {
            Some(by_route) => by_route.nodes_are_known(),
            None => return Ok(()),
        }
        self.ensure_routes().map(drop)
    }

    /// Brings the maps to the state that `desired` returns, writing only differences. After an error the maps hold a
    /// part of the change, and the next call writes the rest; an invalid state changes nothing. `desired` is called
    /// under the lock of the maps, so that a call that had to wait does not write an older state than the one before.
    ///
    /// # Errors
    /// [`RedirectError::Route`] or [`RedirectError::Full`] before anything is written; [`RedirectError::Map`].
    /// [`health`](Self::health) includes the error until a call succeeds.
    pub fn apply(&self, desired: impl FnOnce() -> Desired) -> Result<Applied, RedirectError> {
        let mut inner = self.lock();
        let applied = self.bring_to(&mut inner, desired);
        let stale = applied.as_ref().err().map(ToString::to_string);
        self.note(|health| health.stale = stale);
        applied
    }

    fn bring_to(
        &self,
        inner: &mut Inner,
        desired: impl FnOnce() -> Desired,
    ) -> Result<Applied, RedirectError> {
        if inner.stopped {
            return Err(RedirectError::Stopped);
        }
        let desired = desired();
        if let Some(flips) = desired.flips_since(&inner.desired).filter(|_| inner.current) {
            inner.desired = desired;
            let changes = inner.contents.changes_of(flips);
            return inner.write(changes);
        }
        let want = MapContents::complete(&desired, &self.host(inner))?;
        inner.desired = desired;
        self.write_all(inner, &want)
    }

    /// Brings the maps up to date with the desired state, this host's addresses and those of the self-test.
    pub(super) fn rewrite(&self, inner: &mut Inner) -> Result<Applied, RedirectError> {
        let want = MapContents::complete(&inner.desired, &self.host(inner))?;
        self.write_all(inner, &want)
    }

    fn write_all(&self, inner: &mut Inner, want: &MapContents) -> Result<Applied, RedirectError> {
        let refuse = self.config.orphan_policy == OrphanPolicy::Refuse;
        let ranges = self.config.ranges(self.ipv6);
        let routes = inner.by_route.is_some().then(|| {
            let wanted = Wanted::of(want, &ranges, refuse);
            if self.config.gateway { wanted.of_a_gateway() } else { wanted }
        });
        let applied = inner.bring_to(want, routes)?;
        self.note(|health| health.left_out = want.left_out);
        inner.refresh_uplinks(false);
        Ok(applied)
    }

    fn host<'a>(&'a self, inner: &'a Inner) -> HostContext<'a> {
        HostContext {
            config: &self.config,
            own: &inner.own,
            self_test: &inner.self_test_addresses,
            ipv6: self.ipv6,
        }
    }

    /// Sets whether routes may be up; false makes every route count as down, in one map write.
    ///
    /// # Errors
    /// [`RedirectError::Map`]
    pub fn set_serving(&self, serving: bool) -> Result<(), RedirectError> {
        let mut inner = self.lock();
        if inner.serving == serving {
            return Ok(());
        }
        inner.maps.set_serving(serving)?;
        inner.serving = serving;
        Ok(())
    }

    /// Directory of the pins.
    pub fn pinned_in(&self) -> Option<PathBuf> {
        self.lock().programs.pinned_in().map(Path::to_path_buf)
    }

    /// The redirected networks, each with its first virtual address.
    pub fn virtual_addresses(&self) -> Vec<(IpNet, IpAddr)> {
        let inner = self.lock();
        inner.desired.table.routes.iter().map(|(net, route)| (*net, route.virtual_address)).collect()
    }

    /// The virtual addresses reserved for self-tests of this or another server; drop such connections silently.
    pub fn self_tests(&self) -> [IpNet; 2] {
        self.config.self_tests()
    }

    /// Counters since the start, named `<hook>/<outcome>`. Waits for no change of the maps.
    ///
    /// # Errors
    /// [`RedirectError::Map`]
    pub fn counters(&self) -> Result<Vec<(&'static str, u64)>, RedirectError> {
        self.counters.all()
    }

    pub fn health(&self) -> Health {
        self.health.lock().clone()
    }

    pub(super) fn note(&self, change: impl FnOnce(&mut Health)) {
        change(&mut self.health.lock());
    }

    /// Adds missing redirect routes and what takes connections by route; returns the names of those that were missing.
    pub(super) fn ensure_routes(&self) -> Result<Vec<&'static str>, RedirectError> {
        // Locked until the routes are there: a stop that removes them must not intervene.
        let mut inner = self.lock();
        if inner.stopped {
            return Err(RedirectError::Stopped);
        }
        // The successor keeps them, and removes them when it stops.
        if inner.released {
            return Ok(Vec::new());
        }
        let ranges = self.config.ranges(self.ipv6);
        // First, and whatever becomes of the others: the host's own processes need these.
        let added = Kernel::open().and_then(|mut kernel| {
            let mut added = Ok(false);
            for range in ranges {
                let of_range = kernel.add_range_route(range);
                added = added.and_then(|added| Ok(added | of_range?));
            }
            added
        });
        let Inner { by_route, maps, .. } = &mut *inner;
        let taken = by_route.as_mut().map(|by_route| {
            let taken = by_route.restore();
            maps.set_device(by_route.device())?;
            taken
        });
        let added = added?.then_some("redirect route");
        Ok(added.into_iter().chain(taken.transpose()?.unwrap_or_default()).collect())
    }

    /// Rereads this host's addresses, and the interfaces that lead to other hosts if told so, and brings the maps up to date with
    /// them.
    pub(super) fn refresh_addresses(&self, uplinks: bool) -> Result<Applied, RedirectError> {
        // Not by getifaddrs(3), which does not tell that the list changed while it was read and may lack an address.
        let own = Kernel::open()?.addresses()?.iter().filter_map(own_address).collect();
        let mut inner = self.lock();
        if inner.stopped {
            return Err(RedirectError::Stopped);
        }
        if uplinks {
            inner.refresh_uplinks(true);
        }
        if inner.current && inner.own == own {
            return Ok(Applied::default());
        }
        inner.own = own;
        self.rewrite(&mut inner)
    }

    /// Runs `work` on a thread that may block.
    pub(super) async fn offload<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> Result<T, RedirectError> + Send + 'static,
    ) -> Result<T, RedirectError> {
        let this = Arc::clone(self);
        let joined = tokio::task::spawn_blocking(move || work(&this)).await;
        joined.unwrap_or(Err(RedirectError::Stopped))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic elsewhere leaves `contents` at the last written change, which is usable.
        self.inner.lock()
    }
}

impl Inner {
    /// Pods' packets come in by no interface that leads to other hosts. If these cannot be read, the last ones are kept: the
    /// host's own processes need the rest of a change. `always`: also if the hosts are the same, as there may be many routes to
    /// read.
    fn refresh_uplinks(&mut self, always: bool) {
        let Some(by_route) = &mut self.by_route else { return };
        let contents = &self.contents;
        let pods = |address: &IpAddr| {
            contents.clients.iter().any(|(net, from)| *from == ComesIn::Pods && net.contains(address))
        };
        let others: BTreeSet<IpAddr> = contents
            .excluded
            .iter()
            .filter(|net| net.prefix_len() == net.max_prefix_len())
            .map(IpNet::addr)
            // An address of --exclude may be a pod's of this host.
            .filter(|address| !self.own.contains(address) && !pods(address))
            .collect();
        if !always && self.uplinks_to.as_ref() == Some(&others) {
            return;
        }
        self.uplinks_to = None;
        let problem = match by_route.uplinks(&others).and_then(|found| {
            self.maps.set_uplinks(&found.interfaces, &self.uplinks)?;
            Ok(found)
        }) {
            Ok(found) => {
                self.uplinks = found.interfaces;
                self.uplinks_to = Some(others);
                found.incomplete
            }
            Err(error) => Some(error),
        };
        match problem {
            None => _ = self.uplinks_failed.clear(),
            Some(error) if self.uplinks_failed.is_new(&error) => {
                tracing::warn!(%error, "failed to list the interfaces that lead to other hosts, another host's packet with a pod's source address may count as a pod's");
            }
            Some(_) => {}
        }
    }

    fn bring_to(&mut self, want: &MapContents, routes: Option<Wanted>) -> Result<Applied, RedirectError> {
        // The maps are written whatever becomes of the routes: the host's own processes need them.
        let mut routed = Ok(());
        if let (Some(by_route), Some(routes)) = (&mut self.by_route, &routes) {
            routed = by_route.take_away(routes);
        }
        let applied = self.write(self.contents.changes_to(want))?;
        if let (Some(by_route), Some(routes)) = (&mut self.by_route, routes) {
            routed = routed.and(by_route.add(routes));
        }
        if let Err(error) = routed {
            self.current = false;
            return Err(error);
        }
        let left_out = std::mem::replace(&mut self.contents.left_out, want.left_out);
        if left_out != want.left_out {
            log_left_out(want.left_out);
        }
        Ok(applied)
    }

    fn write(&mut self, changes: Vec<Change>) -> Result<Applied, RedirectError> {
        let mut applied = Applied::default();
        self.current = false;
        for change in changes {
            self.maps.write(&change, &self.contents)?;
            self.contents.record(&change);
            if change.is_delete() {
                applied.deletes += 1;
            } else {
                applied.writes += 1;
            }
        }
        self.current = true;
        Ok(applied)
    }
}

fn log_left_out(left_out: usize) {
    match left_out {
        0 => tracing::info!("excluded addresses fit into the kernel's list again"),
        left_out => tracing::warn!(
            left_out,
            capacity = LIST_CAPACITY,
            fix = "use fewer ranges in --exclude",
            "excluded addresses do not fit into the kernel's list, addresses of cloud nodes are left out and stay direct"
        ),
    }
}
