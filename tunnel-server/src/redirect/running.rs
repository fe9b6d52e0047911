//! The running redirect: writes changes of the desired state, and answers questions.

use std::collections::BTreeSet;
use std::fs::File;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ipnet::IpNet;
use tokio::sync::Notify;
use tunnel_abi::LIST_CAPACITY;

use super::cgroup::Cgroup;
use super::change::Change;
use super::claim::Claim;
use super::config::RedirectConfig;
use super::error::RedirectError;
use super::load::{ProgramInfo, Programs};
use super::map_contents::{HostContext, MapContents};
use super::maps::Maps;
use super::netlink;
use super::preflight::Features;
use super::program_log::ProgramLog;
use super::self_test_addresses::SelfTestAddresses;
use crate::route::{Desired, reserved_tokens, reserved_tokens_v6};

/// What one [`Redirect::apply`] wrote.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Entries inserted or replaced.
    pub writes: usize,
    pub deletes: usize,
}

/// State of the redirect as of its last verification.
#[derive(Clone, Debug, Default)]
pub struct Health {
    /// What does not work, if anything.
    pub problem: Option<String>,
    /// Why the kernel's routes are not the current ones, if so.
    pub stale: Option<String>,
    /// When it last worked.
    pub verified: Option<Instant>,
    /// How often something lost had to be restored.
    pub restored: u64,
}

/// The running redirect. Dropping it, or [`stop`](Self::stop), detaches the programs and removes the token route.
pub struct Redirect {
    pub(super) config: RedirectConfig,
    pub(super) cgroup: Cgroup,
    pub(super) netns: File,
    pub(super) ipv6: bool,
    pub(super) features: Features,
    pub(super) not_pinned: Option<String>,
    /// Told when programs are found to be missing.
    pub(super) lost: Notify,
    pub(super) inner: Mutex<Inner>,
    pub(super) health: Mutex<Health>,
}

/// What changes while running.
pub(super) struct Inner {
    pub(super) programs: Programs,
    pub(super) maps: Maps,
    /// What `maps` hold.
    pub(super) contents: MapContents,
    /// Whether they hold what follows from `desired`, `own` and `self_test_addresses`.
    pub(super) current: bool,
    pub(super) desired: Desired,
    /// This host's own addresses.
    pub(super) own: BTreeSet<IpAddr>,
    pub(super) self_test_addresses: SelfTestAddresses,
    /// Whose self-test passed last.
    pub(super) verified_port: Option<u16>,
    pub(super) serving: bool,
    /// Another server has taken over; do not attach again.
    pub(super) released: bool,
    /// On the token ranges.
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
    /// Brings the maps to what `desired` returns, writing only what differs. After an error the maps hold a part of the
    /// change, the next call writes the rest; an invalid state changes nothing. `desired` is called under the lock of the maps, so
    /// that a call that had to wait does not write a state that is older than the one before.
    ///
    /// # Errors
    /// [`RedirectError::Route`], [`RedirectError::Full`] before anything is written; [`RedirectError::Map`]. The error is
    /// part of [`health`](Self::health) until a call succeeds.
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
        inner.bring_to(&want)
    }

    /// Brings the maps to what follows from the desired state, this host's addresses and those of the self-test.
    pub(super) fn rewrite(&self, inner: &mut Inner) -> Result<Applied, RedirectError> {
        let want = MapContents::complete(&inner.desired, &self.host(inner))?;
        inner.bring_to(&want)
    }

    fn host<'a>(&'a self, inner: &'a Inner) -> HostContext<'a> {
        HostContext {
            config: &self.config,
            own: &inner.own,
            self_test: &inner.self_test_addresses,
            ipv6: self.ipv6,
        }
    }

    /// False makes every route count as down, in one map write.
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

    /// Where the links are pinned.
    pub fn pinned_in(&self) -> Option<PathBuf> {
        self.lock().programs.pinned_in().map(Path::to_path_buf)
    }

    /// Why they are pinned nowhere although they were to be.
    pub fn not_pinned(&self) -> Option<&str> {
        self.not_pinned.as_deref()
    }

    /// The addresses that are redirected, and the first token of each.
    pub fn tokens(&self) -> Vec<(IpNet, IpAddr)> {
        let inner = self.lock();
        inner.desired.table.routes.iter().map(|(net, route)| (*net, route.token)).collect()
    }

    /// Whether a connect to a node without a tunnel fails immediately with EHOSTUNREACH (kernel 6.1 or newer). If not,
    /// it is redirected, and the door must reset it.
    pub fn fails_at_connect(&self) -> bool {
        self.features.set_retval
    }

    /// Whether IPv6 destinations are redirected.
    pub fn ipv6(&self) -> bool {
        self.ipv6
    }

    /// Whether `token` is reserved for self-tests, of this server or of another: drop such a connection silently.
    pub fn is_self_test(&self, token: IpAddr) -> bool {
        match token {
            IpAddr::V4(token) => reserved_tokens(self.config.token_range).contains(&token),
            IpAddr::V6(token) => reserved_tokens_v6(self.config.token_range_v6).contains(&token),
        }
    }

    /// Counters since the start, `<hook>/<outcome>`.
    ///
    /// # Errors
    /// [`RedirectError::Map`]
    pub fn counters(&self) -> Result<Vec<(&'static str, u64)>, RedirectError> {
        self.lock().maps.counters()
    }

    pub fn program_info(&self) -> Vec<ProgramInfo> {
        self.lock().programs.info()
    }

    /// Cloud nodes' addresses for which the kernel's list of exclusions has no room.
    pub fn left_out(&self) -> usize {
        self.lock().contents.left_out
    }

    pub fn health(&self) -> Health {
        self.health.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn note(&self, change: impl FnOnce(&mut Health)) {
        change(&mut self.health.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Adds missing token routes; true when one was missing.
    pub(super) fn ensure_routes(&self) -> Result<bool, RedirectError> {
        // Held until they are there: a stop that removes them must not come in between.
        let inner = self.lock();
        if inner.stopped {
            return Err(RedirectError::Stopped);
        }
        // The successor keeps them, and removes them when it stops.
        if inner.released {
            return Ok(false);
        }
        let ranges = token_ranges(&self.config, self.ipv6);
        netlink::blocking(|handle| async move {
            let mut added = false;
            for range in ranges {
                added |= netlink::add_route(&handle, range).await?;
            }
            Ok(added)
        })
    }

    /// Reads this host's addresses and brings the maps up to date with them.
    pub(super) fn refresh_addresses(&self) -> Result<Applied, RedirectError> {
        let own = netlink::blocking(|handle| async move { netlink::own_addresses(&handle).await })?;
        let mut inner = self.lock();
        if inner.stopped {
            return Err(RedirectError::Stopped);
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
        // A panic elsewhere leaves the mirror at a written change: usable.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn bring_to(&mut self, want: &MapContents) -> Result<Applied, RedirectError> {
        let applied = self.write(self.contents.changes_to(want))?;
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
        0 => tracing::info!("the kernel's list of excluded addresses has room for all again"),
        left_out => tracing::warn!(
            left_out,
            "the kernel's list of excluded addresses has room for {LIST_CAPACITY} of each family: cloud nodes' addresses are \
             left out, which are direct all the same since no route has them; fewer ranges in --exclude make room"
        ),
    }
}

pub(super) fn token_ranges(config: &RedirectConfig, ipv6: bool) -> Vec<IpNet> {
    let v6 = ipv6.then(|| IpNet::V6(config.token_range_v6.trunc()));
    [Some(IpNet::V4(config.token_range.trunc())), v6].into_iter().flatten().collect()
}
