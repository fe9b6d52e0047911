//! The eBPF redirect: loads the programs, feeds their maps, verifies them and mends what gets lost.
//!
//! Everything in the kernel is held by file descriptors of this process, so that it vanishes with it, even
//! after SIGKILL; only the token route stays, which is harmless and taken over by the next start.

mod cgroup;
mod checks;
mod desired;
mod end;
mod error;
mod feed;
mod listen;
mod load;
mod log;
mod maps;
mod metrics;
mod netlink;
mod query;
mod self_test;
mod tables;
#[cfg(test)]
mod tables_tests;
mod verify;
mod watch;

pub use checks::{Check, checks};
pub use desired::{Desired, RedirectConfig, RouteTarget};
pub use end::{Report, cleanup};
pub use error::RedirectError;
pub use feed::Feeder;
pub use listen::listen;
pub use metrics::RedirectMetrics;
pub use self_test::{reserved_tokens, reserved_tokens_v6};
pub use tunnel_abi::SOCKET_MARK;
pub use verify::Failure;
pub use watch::Health;

use std::collections::BTreeSet;
use std::fs::File;
use std::net::{IpAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::sys::socket::{setsockopt, sockopt};
use tunnel_abi::{LISTENER_V4, LISTENER_V6};

use cgroup::Cgroup;
use load::{Features, Programs};
use maps::Maps;
use self_test::SelfTest;
use tables::{Fixed, Tables};

/// Pairs of self-test addresses that are tried: another server may have taken the same one.
const SELF_TEST_ATTEMPTS: usize = 4;

/// What one [`Redirect::apply`] wrote.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Entries inserted or replaced.
    pub writes: usize,
    /// Entries removed.
    pub deletes: usize,
}

/// One loaded program.
#[derive(Clone, Debug)]
pub struct ProgramInfo {
    /// Where it is attached, such as `connect4`.
    pub hook: &'static str,
    /// The kernel's id.
    pub id: u32,
    /// Instructions that the verifier walked (5.16).
    pub verified_instructions: Option<u32>,
    /// Machine code, in bytes.
    pub jited_bytes: u32,
}

/// The running redirect. Dropping it, or [`stop`](Self::stop), detaches the programs and removes the token route.
pub struct Redirect {
    config: RedirectConfig,
    cgroup: Cgroup,
    netns: File,
    ipv6: bool,
    features: Features,
    inner: Mutex<Inner>,
    health: Mutex<Health>,
}

/// What changes while running.
pub(crate) struct Inner {
    programs: Programs,
    maps: Maps,
    /// What the maps hold.
    held: Tables,
    desired: Desired,
    own: BTreeSet<IpAddr>,
    self_test: SelfTest,
    serving: bool,
    /// Another server has taken over; do not attach again.
    released: bool,
    stopped: bool,
    logger: Option<log::Logger>,
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
    /// Loads, attaches and verifies. Redirected connections arrive at the listeners with the token as local
    /// address; both get [`RedirectConfig::mark`], and so does what they accept.
    ///
    /// Blocks for some tens of milliseconds. Nothing is redirected until [`apply`](Self::apply).
    /// Without `v6`, or on a host without IPv6, IPv6 destinations are not redirected.
    ///
    /// # Errors
    /// See [`RedirectError`]; nothing is left behind.
    pub fn start(
        config: RedirectConfig,
        v4: &TcpListener,
        v6: Option<&TcpListener>,
    ) -> Result<Self, RedirectError> {
        let self_test = SelfTest::new(&config)?;
        load::embedded()?;
        let features = load::probe(&config)?;
        let cgroup = Cgroup::find(config.cgroup.as_deref())?;
        let netns_path = "/proc/thread-self/ns/net";
        let netns = File::open(netns_path)
            .map_err(|source| RedirectError::Io { what: format!("cannot open {netns_path}"), source })?;
        let v6 = v6.filter(|_| match checks::ipv6_usable() {
            Ok(()) => true,
            Err(reason) => {
                tracing::warn!("IPv6 destinations will not be redirected: {reason}");
                false
            }
        });

        load::raise_memlock();
        let log = log::wanted();
        let mut ebpf = load::open(&config, features, log)?;
        let logger = if log { Some(log::Logger::new(&mut ebpf)?) } else { None };
        let mut maps = Maps::take(&mut ebpf)?;
        // The maps must be open while the programs that use them are loaded.
        let programs = Programs::load(ebpf)?;
        for (slot, listener) in [(LISTENER_V4, Some(v4)), (LISTENER_V6, v6)] {
            let Some(listener) = listener else { continue };
            setsockopt(listener, sockopt::Mark, &config.mark).map_err(|error| RedirectError::Listener {
                operation: "cannot set SO_MARK",
                source: error.into(),
            })?;
            maps.set_listener(slot, listener)?;
        }
        maps.set_serving(true)?;

        let inner = Inner {
            programs,
            maps,
            held: Tables::default(),
            desired: Desired::default(),
            own: BTreeSet::new(),
            self_test,
            serving: true,
            released: false,
            stopped: false,
            logger,
        };
        // From here on, dropping it undoes what was done.
        let redirect = Self {
            config,
            cgroup,
            netns,
            ipv6: v6.is_some(),
            features,
            inner: Mutex::new(inner),
            health: Mutex::new(Health::default()),
        };
        redirect.ensure_routes()?;
        redirect.refresh_addresses()?;
        {
            let mut inner = redirect.lock();
            inner.programs.attach(&redirect.cgroup, &redirect.netns)?;
        }
        redirect.first_verification()?;
        tracing::info!(
            cgroup = %redirect.cgroup.path.display(),
            ipv6 = redirect.ipv6,
            fail_at_connect = redirect.features.set_retval,
            "redirect attached and verified"
        );
        Ok(redirect)
    }

    fn first_verification(&self) -> Result<(), RedirectError> {
        let mut result = self.verify_now();
        for _ in 1..SELF_TEST_ATTEMPTS {
            match result {
                Err(RedirectError::SelfTest(_))
                    if self.other_server()?.is_some_and(|other| other.certain) =>
                {
                    let mut inner = self.lock();
                    inner.self_test = SelfTest::new(&self.config)?;
                    self.rewrite(&mut inner)?;
                    drop(inner);
                    result = self.verify_now();
                }
                other => return other,
            }
        }
        result
    }

    /// Brings the maps to `desired`, writing only what differs. After an error the maps hold a part of the
    /// change, the next call writes the rest; an invalid `desired` changes nothing.
    ///
    /// # Errors
    /// [`RedirectError::Route`], [`RedirectError::Full`] before anything is written; [`RedirectError::Map`]. It shows
    /// in [`health`](Self::health) until a call succeeds.
    pub fn apply(&self, desired: &Desired) -> Result<Applied, RedirectError> {
        let applied = self.bring_to(desired);
        let stale = applied.as_ref().err().map(ToString::to_string);
        self.note(|health| health.stale = stale);
        applied
    }

    fn bring_to(&self, desired: &Desired) -> Result<Applied, RedirectError> {
        let mut inner = self.lock();
        if inner.stopped {
            return Err(RedirectError::Stopped);
        }
        let want = Tables::complete(desired, &self.fixed(&inner))?;
        inner.desired.clone_from(desired);
        inner.write(&want)
    }

    /// Brings the maps to what follows from the desired state, own addresses and self-test.
    fn rewrite(&self, inner: &mut Inner) -> Result<Applied, RedirectError> {
        let want = Tables::complete(&inner.desired, &self.fixed(inner))?;
        inner.write(&want)
    }

    fn fixed<'a>(&'a self, inner: &'a Inner) -> Fixed<'a> {
        Fixed { config: &self.config, own: &inner.own, self_test: &inner.self_test, ipv6: self.ipv6 }
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

    /// Whether a connect to a node without a tunnel fails at once with EHOSTUNREACH (kernel 5.18 or newer). If
    /// not, it is redirected, and whoever accepts it must reset it.
    pub fn fails_at_connect(&self) -> bool {
        self.features.set_retval
    }

    /// Whether IPv6 destinations are redirected.
    pub fn ipv6(&self) -> bool {
        self.ipv6
    }

    /// Whether `token` is reserved for self-tests, of this server or of another: such a connection is to be
    /// dropped silently.
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

    /// The loaded programs.
    pub fn program_info(&self) -> Vec<ProgramInfo> {
        self.lock().programs.info()
    }

    /// What can be said about the running redirect, for `doctor`.
    pub fn checks(&self) -> Vec<Check> {
        let mut all = checks(&self.config);
        let inner = self.lock();
        let lost = inner.programs.lost(&self.cgroup, &self.netns);
        drop(inner);
        all.push(Check {
            name: "attached",
            outcome: match lost {
                Ok(lost) if lost.is_empty() => Ok("every hook".into()),
                Ok(lost) => {
                    Err(format!("missing from {}: the next verification attaches again", lost.join(", ")))
                }
                Err(error) => Err(error.to_string()),
            },
        });
        let health = self.health();
        all.push(Check { name: "self-test", outcome: health.problem.map_or(Ok("passed".into()), Err) });
        all
    }

    /// Reads this host's addresses and brings the maps up to date with them.
    fn refresh_addresses(&self) -> Result<Applied, RedirectError> {
        let own = netlink::blocking(|handle| async move { netlink::own_addresses(&handle).await })?;
        let mut inner = self.lock();
        if inner.stopped {
            return Err(RedirectError::Stopped);
        }
        inner.own = own;
        self.rewrite(&mut inner)
    }

    /// Connects to itself through every hook.
    fn verify_now(&self) -> Result<(), RedirectError> {
        let plan = {
            let inner = self.lock();
            if inner.stopped {
                return Err(RedirectError::Stopped);
            }
            if inner.released {
                return Ok(());
            }
            let cgroup = self.cgroup.path.display().to_string();
            verify::Plan::new(&inner, self.ipv6, self.features.set_retval, cgroup)
        };
        plan.run(|index| self.lock().maps.counter(index))
    }

    /// Attaches and adds again what got lost; names what was.
    fn mend_now(&self) -> Result<Vec<&'static str>, RedirectError> {
        let mut mended = Vec::new();
        if self.ensure_routes()? {
            mended.push("token route");
        }
        let mut inner = self.lock();
        if inner.stopped {
            return Err(RedirectError::Stopped);
        }
        if !inner.released {
            mended.extend(inner.programs.lost(&self.cgroup, &self.netns)?);
            inner.programs.attach(&self.cgroup, &self.netns)?;
        }
        Ok(mended)
    }

    /// Connects to itself through every hook; call it whenever in doubt, [`watch`](Self::watch) does so every 30 s.
    ///
    /// # Errors
    /// [`RedirectError::SelfTest`] says what does not work.
    pub async fn verify(self: &Arc<Self>) -> Result<(), RedirectError> {
        self.offload(Self::verify_now).await
    }

    /// Adds a lost token route and attaches lost programs again; returns what was missing.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub async fn mend(self: &Arc<Self>) -> Result<Vec<&'static str>, RedirectError> {
        self.offload(Self::mend_now).await
    }

    async fn offload<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> Result<T, RedirectError> + Send + 'static,
    ) -> Result<T, RedirectError> {
        let this = Arc::clone(self);
        let joined = tokio::task::spawn_blocking(move || work(&this)).await;
        joined.unwrap_or(Err(RedirectError::Stopped))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic elsewhere leaves the mirror at a written change: usable.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn write(&mut self, want: &Tables) -> Result<Applied, RedirectError> {
        let mut applied = Applied::default();
        for change in self.held.changes_to(want) {
            self.maps.write(&change, &self.held)?;
            self.held.record(&change);
            if change.is_delete() {
                applied.deletes += 1;
            } else {
                applied.writes += 1;
            }
        }
        Ok(applied)
    }
}
