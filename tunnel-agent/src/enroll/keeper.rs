use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use rand::Rng;
use rustls_pki_types::CertificateDer;
use tokio::sync::{Mutex as AsyncMutex, MutexGuard, watch};
use tokio_util::task::AbortOnDropHandle;
use tunnel_core::identity::{ALPN_GRPC, AgentIdentity, IdentityError, TrustBundle, agent_tls, create_csr};
use tunnel_core::proto::RenewRequest;

use super::backoff::Backoff;
use super::client::{Connection, Failure};
use super::files::IdentityFiles;
use super::{EnrollConfig, EnrollError, IdentityMetrics};

/// Sleeps are cut to this, so that a clock that was set, or a machine that slept, is noticed.
const LONGEST_SLEEP: Duration = Duration::from_secs(600);
/// Agents of one installation spread their renewals over this share of a life: 1/20 of it.
const JITTER_SHARE: u32 = 20;
/// After a rotation every agent is to renew soon, but not at once.
const ROTATION_JITTER: Duration = Duration::from_secs(60);
/// When a renewal did not bring a certificate of the newest root: no sooner again than this.
const ROTATION_RETRY: Duration = Duration::from_secs(300);

/// Keeps the agent's identity: renews the certificate at 80 % of its life, or early when another root signs now,
/// and takes in the roots that servers push. Sessions that are open go on; new connections use what is published.
pub struct IdentityKeeper {
    shared: Arc<Shared>,
    _task: AbortOnDropHandle<()>,
}

/// What an agent does whose certificate is of no use any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recovery {
    /// The operator starts it with a new token.
    Token,
    /// It enrols again through the API server.
    ApiServer,
}

struct Shared {
    config: EnrollConfig,
    recovery: Recovery,
    servers: Mutex<Vec<String>>,
    files: IdentityFiles,
    current: watch::Sender<Arc<AgentIdentity>>,
    /// Held while files and `current` change together.
    writing: AsyncMutex<()>,
    /// Held from the look at the pending key until what was issued for it is stored. Taken before `writing`.
    asking: AsyncMutex<()>,
    metrics: IdentityMetrics,
}

impl IdentityKeeper {
    /// Starts to keep an identity that [`super::ensure_identity`] returned for this configuration. Needs a tokio
    /// runtime; stops when dropped.
    pub fn start(config: EnrollConfig, identity: AgentIdentity, metrics: IdentityMetrics) -> Self {
        Self::with_recovery(config, identity, metrics, Recovery::Token)
    }

    /// [`IdentityKeeper::start`] for an identity that came from elsewhere.
    pub fn with_recovery(
        config: EnrollConfig,
        identity: AgentIdentity,
        metrics: IdentityMetrics,
        recovery: Recovery,
    ) -> Self {
        metrics.set_not_after(identity.not_after());
        let shared = Arc::new(Shared {
            servers: Mutex::new(config.servers.clone()),
            files: IdentityFiles::new(&config.state_dir),
            current: watch::Sender::new(Arc::new(identity)),
            writing: AsyncMutex::default(),
            asking: AsyncMutex::default(),
            config,
            recovery,
            metrics,
        });
        let task = AbortOnDropHandle::new(tokio::spawn(Arc::clone(&shared).run()));
        Self { shared, _task: task }
    }

    /// The identity to use for the next connection.
    pub fn current(&self) -> Arc<AgentIdentity> {
        Arc::clone(&self.shared.current.borrow())
    }

    /// Follows the identity.
    pub fn subscribe(&self) -> watch::Receiver<Arc<AgentIdentity>> {
        self.shared.current.subscribe()
    }

    /// Other servers to renew at: those that a server told of.
    pub fn set_servers(&self, servers: Vec<String>) {
        *self.shared.servers.lock().unwrap_or_else(PoisonError::into_inner) = servers;
    }

    /// Trusts other roots from now on, as a server that this agent has verified says; false when they are the
    /// present ones. `server_chain` is what that server showed in its TLS handshake, leaf first.
    ///
    /// # Errors
    /// The text is no bundle, or by it the very server that sent it would not be accepted; or the file cannot be
    /// written. The present roots stay then.
    pub async fn install_bundle(
        &self,
        pem: &str,
        server_chain: &[CertificateDer<'_>],
    ) -> Result<bool, EnrollError> {
        let bundle = TrustBundle::from_pem(pem)?;
        let _writing = self.shared.writing.lock().await;
        let current = self.current();
        if current.bundle == bundle {
            return Ok(false);
        }
        bundle.verify_server(server_chain)?;
        let identity = current.with_bundle(bundle);
        let (files, bundle) = (self.shared.files.clone(), identity.bundle.clone());
        run_blocking(move || files.store_bundle(&bundle)).await?;
        tracing::info!(roots = ?identity.bundle.hashes(), "the server's trusted roots have changed");
        let orphaned = identity.chain.first().is_none_or(|leaf| identity.bundle.issuer_of(leaf).is_none());
        if orphaned && self.shared.recovery == Recovery::Token {
            tracing::error!(
                node = %identity.node,
                "the root that signed this agent's certificate is trusted no longer: new connections will be refused \
                 until it is started once with the --token and --ca-hash that `tunnel-server token create --node {}` \
                 prints",
                identity.node
            );
        }
        self.shared.current.send_replace(Arc::new(identity));
        Ok(true)
    }

    /// Until the guard is dropped nothing is renewed: the pending key is the holder's.
    pub async fn alone(&self) -> MutexGuard<'_, ()> {
        self.shared.asking.lock().await
    }

    /// Uses another identity, and other roots, from now on: those of a new enrolment. Whoever asks holds
    /// [`IdentityKeeper::alone`] since it took the pending key.
    ///
    /// # Errors
    /// The files cannot be written; the present identity stays then.
    pub async fn replace(&self, identity: AgentIdentity) -> Result<(), EnrollError> {
        let _writing = self.shared.writing.lock().await;
        let identity = Arc::new(identity);
        let (files, stored) = (self.shared.files.clone(), Arc::clone(&identity));
        run_blocking(move || files.store(&stored)).await?;
        self.shared.metrics.set_not_after(identity.not_after());
        self.shared.current.send_replace(identity);
        Ok(())
    }
}

/// An edge's disk may be slow to sync.
async fn run_blocking(
    work: impl FnOnce() -> Result<(), IdentityError> + Send + 'static,
) -> Result<(), IdentityError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|stopped| {
        // The write panicked, or the runtime is being shut down.
        Err(IdentityError::Key(format!("writing the identity was interrupted: {stopped}")))
    })
}

/// When to renew, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    Life,
    Rotation,
}

impl Shared {
    async fn run(self: Arc<Self>) {
        let mut identities = self.current.subscribe();
        let mut futile = false;
        loop {
            let identity = Arc::clone(&identities.borrow_and_update());
            let (at, due) = due(&identity, futile);
            tokio::select! {
                () = sleep_until(at) => {}
                // A pushed bundle may call for an early renewal.
                changed = identities.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    continue;
                }
            }
            tracing::info!(node = %identity.node, due = ?due, "renewing the certificate");
            let renewed = self.renew_until_done().await;
            futile = due == Due::Rotation && !renewed.is_signed_by_newest_root();
        }
    }

    /// Tries for as long as it takes: even after the certificate's end, because the clock may be what is wrong.
    async fn renew_until_done(&self) -> Arc<AgentIdentity> {
        let mut backoff = Backoff::default();
        loop {
            let servers = self.servers.lock().unwrap_or_else(PoisonError::into_inner).clone();
            for server in &servers {
                match self.renew_at(server).await {
                    Ok(identity) => {
                        self.metrics.count(true);
                        self.metrics.set_not_after(identity.not_after());
                        tracing::info!(node = %identity.node, server, "certificate renewed");
                        return identity;
                    }
                    Err(failure) => {
                        self.metrics.count(false);
                        tracing::warn!(server, reason = failure.reason(), "renewal failed, will try again");
                    }
                }
            }
            let identity = Arc::clone(&self.current.borrow());
            if identity.validity().is_over(SystemTime::now()) && self.recovery == Recovery::Token {
                tracing::error!(
                    node = %identity.node,
                    "the certificate has ended: start the agent again with the --token and --ca-hash that \
                     `tunnel-server token create --node {}` prints",
                    identity.node
                );
            }
            tokio::time::sleep(backoff.next_delay()).await;
        }
    }

    async fn renew_at(&self, server: &str) -> Result<Arc<AgentIdentity>, Failure> {
        let transient = |error: &dyn std::fmt::Display| Failure::Transient(error.to_string());
        let _alone = self.asking.lock().await;
        let old = Arc::clone(&self.current.borrow());
        let tls = agent_tls(&old, ALPN_GRPC).map_err(|error| transient(&error))?;
        let key = self.files.pending_key().map_err(|error| transient(&error))?;
        let csr = create_csr(&key).map_err(|error| transient(&error))?;
        let mut connection = Connection::open(server, &tls).await?;
        let response = connection
            .client
            .renew(RenewRequest { csr })
            .await
            .map_err(|status| Failure::of_status(&status))?;
        let mut identity = connection.identity_of(&response.into_inner(), &key, &self.config.node)?;
        let _writing = self.writing.lock().await;
        // Roots that were pushed while this was under way are newer than the answer's.
        let present = self.current.borrow().bundle.clone();
        if present != old.bundle {
            identity = identity.with_bundle(present);
        }
        let identity = Arc::new(identity);
        let (files, stored) = (self.files.clone(), Arc::clone(&identity));
        run_blocking(move || files.store(&stored)).await.map_err(|error| transient(&error))?;
        self.current.send_replace(Arc::clone(&identity));
        Ok(identity)
    }
}

fn due(identity: &AgentIdentity, futile: bool) -> (SystemTime, Due) {
    let now = SystemTime::now();
    let life = identity.validity().life();
    let at = identity.renew_at() + random_up_to(life / JITTER_SHARE);
    if identity.is_signed_by_newest_root() {
        return (at, Due::Life);
    }
    let soon = random_up_to(ROTATION_JITTER.min(life / JITTER_SHARE));
    let early = now + if futile { ROTATION_RETRY } else { Duration::ZERO } + soon;
    if early < at { (early, Due::Rotation) } else { (at, Due::Life) }
}

fn random_up_to(longest: Duration) -> Duration {
    longest.mul_f64(rand::rng().random_range(0.0..=1.0))
}

/// By the wall clock, which is what certificates go by.
async fn sleep_until(at: SystemTime) {
    while let Ok(left) = at.duration_since(SystemTime::now()) {
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left.min(LONGEST_SLEEP)).await;
    }
}
