//! Renews the certificate at a server over gRPC, using the present one, and installs the roots that servers announce.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use rustls_pki_types::CertificateDer;
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard, watch};
use tokio_util::task::AbortOnDropHandle;
use tunnel_link::proto::RenewRequest;
use tunnel_runtime::backoff::{Backoff, jittered};
use tunnel_runtime::clock::Clock;
use tunnel_runtime::config::HostPort;

use crate::enrol::attempt::{AttemptError, RETRIES, is_orphaned};
use crate::enrol::enrollment::Connection;
use crate::enrol::error::enrol_by_token;
use crate::enrol::files::{IdentityFiles, on_disk};
use crate::enrol::{EnrollConfig, EnrollError, IdentityMetrics};
use crate::{
    ALPN_GRPC, AgentIdentity, IdentityError, PrivateKey, TrustBundle, Validity, agent_tls, create_csr,
};

/// Maximum length of one sleep, so that a changed clock or a suspended machine is noticed.
const LONGEST_SLEEP: Duration = Duration::from_secs(600);
/// Renewals are spread over this share of the certificate's lifetime: 1/20.
const JITTER_SHARE: u32 = 20;
/// Spread of the renewals after a rotation of the root, when all agents renew soon.
const ROTATION_JITTER: Duration = Duration::from_secs(60);
/// Retry interval for files that a full or read-only disk did not take.
const STORE_RETRY: Duration = Duration::from_secs(10);
/// Maximum wait for the disk; a renewal then keeps its key in memory.
const PATIENCE: Duration = Duration::from_secs(30);
/// Minimum delay before another attempt if a renewal brought no certificate of the newest root.
const ROTATION_RETRY: Duration = Duration::from_secs(300);

/// Keeps the identity: renews the certificate at 80 % of its lifetime, or early when another root signs now, and
/// installs the roots that servers announce. Open sessions go on; new connections use the last published identity.
pub struct IdentityKeeper {
    renewer: Arc<Renewer>,
    _tasks: [AbortOnDropHandle<()>; 2],
}

/// Remedy when the agent's certificate can no longer be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recovery {
    /// The operator starts the agent with a new token.
    Token,
    /// The agent enrols again through the API server.
    ApiServer,
}

struct Renewer {
    config: EnrollConfig,
    recovery: Recovery,
    servers: Mutex<Vec<String>>,
    files: IdentityFiles,
    current: watch::Sender<Arc<AgentIdentity>>,
    /// Held while files and `current` change together. The value is true if the files are older than `current` because
    /// the disk is full or read-only: then only `current` is used.
    storing: AsyncMutex<bool>,
    /// Held from reading the pending key until the certificate issued for it is stored. Taken before `storing`.
    pending_key: Arc<AsyncMutex<()>>,
    metrics: IdentityMetrics,
}

impl IdentityKeeper {
    /// Starts to keep an identity that was obtained for this configuration. Needs a tokio runtime. Stops on drop.
    pub fn start(
        config: EnrollConfig,
        mut identity: AgentIdentity,
        metrics: IdentityMetrics,
        recovery: Recovery,
    ) -> Self {
        metrics.set_not_after(identity.validity.not_after);
        identity.clock = config.clock;
        let renewer = Arc::new(Renewer {
            servers: Mutex::new(config.servers.clone()),
            files: IdentityFiles::new(&config.state_dir, config.holder),
            current: watch::Sender::new(Arc::new(identity)),
            storing: AsyncMutex::default(),
            pending_key: Arc::default(),
            config,
            recovery,
            metrics,
        });
        let tasks =
            [tokio::spawn(Arc::clone(&renewer).run()), tokio::spawn(Arc::clone(&renewer).store_again())];
        Self { renewer, _tasks: tasks.map(AbortOnDropHandle::new) }
    }

    /// Returns the identity for the next connection.
    pub fn current(&self) -> Arc<AgentIdentity> {
        Arc::clone(&self.renewer.current.borrow())
    }

    pub fn subscribe(&self) -> watch::Receiver<Arc<AgentIdentity>> {
        self.renewer.current.subscribe()
    }

    /// Sets the servers (`host:port`) to renew at.
    pub fn set_servers(&self, servers: Vec<String>) {
        *self.renewer.servers.lock() = servers;
    }

    /// Follows the known servers to renew at. Keeps the earlier ones while none are known.
    pub async fn follow_servers<C>(self: Arc<Self>, mut known: watch::Receiver<Arc<C>>)
    where
        for<'a> &'a C: IntoIterator<Item = &'a HostPort>,
    {
        loop {
            let current = known.borrow_and_update().clone();
            let servers: Vec<_> = (&*current).into_iter().map(ToString::to_string).collect();
            if !servers.is_empty() {
                self.set_servers(servers);
            }
            if known.changed().await.is_err() {
                return;
            }
        }
    }

    /// Trusts the roots announced by a server that this agent has verified. Returns false if they are the present ones.
    /// `server_chain` holds the certificates that the server presented in its TLS handshake, leaf first.
    ///
    /// # Errors
    /// The text is not a bundle, or does not verify the server that sent it. The present roots stay then.
    pub async fn install_bundle(
        &self,
        pem: &str,
        server_chain: &[CertificateDer<'_>],
    ) -> Result<bool, EnrollError> {
        let bundle = TrustBundle::from_pem(pem)?;
        // Most are. The lock may be held for as long as a disk does not answer.
        if self.current().bundle == bundle {
            return Ok(false);
        }
        let mut unsaved = self.renewer.storing.lock().await;
        let current = self.current();
        if current.bundle == bundle {
            return Ok(false);
        }
        bundle.verify_server(server_chain, current.clock.now())?;
        let identity = Arc::new(current.with_bundle(bundle));
        // First, as a disk that does not answer must not keep the roots from use.
        self.renewer.current.send_replace(identity.clone());
        tracing::info!(roots = ?identity.bundle.hashes(), "trusted roots changed");
        if is_orphaned(&identity) && self.renewer.recovery == Recovery::Token {
            tracing::error!(
                node = %identity.node,
                fix = enrol_by_token(identity.holder, &identity.node),
                "certificate is signed by a root that is no longer trusted, new connections will be refused"
            );
        }
        if !*unsaved {
            let files = self.renewer.files.clone();
            *unsaved = is_unsaved(&on_disk(move || files.store_bundle(&identity.bundle)).await);
        }
        Ok(true)
    }

    /// Stops renewals until the guard is dropped. The caller may use the pending key meanwhile.
    pub async fn hold_pending_key(&self) -> OwnedMutexGuard<()> {
        self.renewer.pending_key.clone().lock_owned().await
    }

    /// Switches to the identity and the roots of a new enrolment. The caller must have held
    /// [`IdentityKeeper::hold_pending_key`] since it read the pending key.
    pub async fn replace(&self, identity: AgentIdentity) {
        let mut unsaved = self.renewer.storing.lock().await;
        self.renewer.store(identity, &mut unsaved).await;
    }
}

/// Logs a failure to store. Returns true if there was one.
fn is_unsaved(stored: &Result<(), IdentityError>) -> bool {
    if let Err(error) = stored {
        tracing::error!(
            %error,
            fix = "make room on the disk, or make the state directory writable",
            "failed to store the new certificate or trusted roots, retrying; a restart would use the old ones"
        );
    }
    stored.is_err()
}

/// Reason for a renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    Life,
    Rotation,
}

impl Renewer {
    async fn run(self: Arc<Self>) {
        let mut identities = self.current.subscribe();
        let (mut futile, mut pauses) = (false, RETRIES);
        loop {
            let identity = Arc::clone(&identities.borrow_and_update());
            let (at, due) = due(&identity, futile);
            tokio::select! {
                () = sleep_until(at, identity.clock) => {}
                // An announced bundle may call for an early renewal.
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
            if let Some(pause) = pause_after(renewed.validity.renew_at(), renewed.clock.now(), &mut pauses) {
                tracing::warn!(
                    node = %renewed.node,
                    retry_in_s = pause.as_secs_f64(),
                    "new certificate is already due for renewal, check this host's clock"
                );
                tokio::time::sleep(pause).await;
            }
        }
    }

    /// Retries without limit, even after the certificate has expired: the clock may be wrong. Ends early if an enrolment has
    /// brought another certificate meanwhile.
    async fn renew_until_done(&self) -> Arc<AgentIdentity> {
        let mut backoff = RETRIES;
        // Set once no server has issued a certificate that is valid already: this host's clock is behind theirs.
        let mut behind = false;
        loop {
            let servers = self.servers.lock().clone();
            let mut early = false;
            for server in &servers {
                let pending_key = self.pending_key.lock().await;
                // Only now: an enrolment holds the lock until its certificate is stored.
                let current = Arc::clone(&self.current.borrow());
                if current.is_signed_by_newest_root() && current.validity.renew_at() > current.clock.now() {
                    tracing::info!(node = %current.node, "renewal no longer needed");
                    return current;
                }
                let renewed = self.renew_from(server, behind).await;
                drop(pending_key);
                self.metrics.count(matches!(renewed, Ok(Some(_))));
                match renewed {
                    Ok(Some(identity)) => {
                        tracing::info!(node = %identity.node, server, "certificate renewed");
                        return identity;
                    }
                    Ok(None) => {
                        early = true;
                        tracing::warn!(
                            server,
                            fix = "check the clocks of the server and of this host",
                            "new certificate is not valid yet, asking the other servers first"
                        );
                    }
                    Err(error) => {
                        tracing::warn!(
                            server,
                            error = error.reason(),
                            "failed to renew the certificate, retrying"
                        );
                    }
                }
            }
            if early && !behind {
                behind = true;
                continue;
            }
            let identity = Arc::clone(&self.current.borrow());
            if identity.validity.is_over(identity.clock.now()) && self.recovery == Recovery::Token {
                tracing::error!(
                    node = %identity.node,
                    fix = enrol_by_token(identity.holder, &identity.node),
                    "certificate has expired"
                );
            }
            tokio::time::sleep(backoff.next_delay()).await;
        }
    }

    /// Stores the new certificate and returns it. Returns `None`, and stores nothing, if it is not valid yet. With `behind`, this
    /// host's clock is taken to be wrong, and the certificate to be valid. The caller holds `pending_key`.
    async fn renew_from(
        &self,
        server: &str,
        behind: bool,
    ) -> Result<Option<Arc<AgentIdentity>>, AttemptError> {
        let old = Arc::clone(&self.current.borrow());
        let tls = agent_tls(&old, ALPN_GRPC).map_err(AttemptError::transient)?;
        let key = self.pending_key().await.map_err(AttemptError::transient)?;
        let csr = create_csr(&key).map_err(AttemptError::transient)?;
        let mut connection = Connection::open(&self.config.reach, server, &tls).await?;
        let response = Connection::answer(connection.client.renew(RenewRequest { csr })).await?;
        let mut identity = connection.issued_identity(
            &response,
            &key,
            (self.config.holder, &self.config.node),
            old.clock,
        )?;
        if !behind && is_early(identity.validity, old.validity, old.clock.now()) {
            return Ok(None);
        }
        let mut unsaved = self.storing.lock().await;
        // Roots that were announced meanwhile are newer than the answer's.
        let present = self.current.borrow().bundle.clone();
        if present != old.bundle {
            identity = identity.with_bundle(present);
        }
        Ok(Some(self.store(identity, &mut unsaved).await))
    }

    /// The key to request a certificate for; one in memory if the disk fails or does not answer.
    async fn pending_key(&self) -> Result<PrivateKey, IdentityError> {
        let files = self.files.clone();
        let key = on_disk(move || files.pending_key_or_unsaved());
        tokio::time::timeout(PATIENCE, key).await.unwrap_or_else(|_| {
            let waited_s = PATIENCE.as_secs();
            tracing::warn!(
                waited_s,
                "disk does not answer, keeping the key of the new certificate in memory"
            );
            PrivateKey::generate()
        })
    }

    /// Publishes the identity, and then stores it, which may fail or take long. `unsaved` is the value of `storing`.
    async fn store(&self, identity: AgentIdentity, unsaved: &mut bool) -> Arc<AgentIdentity> {
        let identity = Arc::new(identity);
        self.current.send_replace(Arc::clone(&identity));
        *unsaved = is_unsaved(&self.write(&identity).await);
        self.metrics.set_not_after(identity.validity.not_after);
        identity
    }

    async fn store_again(self: Arc<Self>) {
        loop {
            tokio::time::sleep(STORE_RETRY).await;
            let mut unsaved = self.storing.lock().await;
            let identity = Arc::clone(&self.current.borrow());
            if *unsaved && self.write(&identity).await.is_ok() {
                *unsaved = false;
                tracing::info!("stored the certificate and the trusted roots");
            }
        }
    }

    async fn write(&self, identity: &Arc<AgentIdentity>) -> Result<(), IdentityError> {
        let (files, identity) = (self.files.clone(), Arc::clone(identity));
        on_disk(move || files.store(&identity)).await
    }
}

/// True for a certificate of a server whose clock is ahead, while the present one is valid: the other servers would refuse it
/// until it is valid.
fn is_early(new: Validity, present: Validity, now: SystemTime) -> bool {
    new.not_before > now && !present.is_over(now)
}

/// Time and reason of the next renewal. `futile`: the last renewal for a rotation still brought a certificate of the
/// old root.
fn due(identity: &AgentIdentity, futile: bool) -> (SystemTime, Due) {
    let now = identity.clock.now();
    let life = identity.validity.life();
    let at = identity.validity.renew_at() + jittered(life / JITTER_SHARE, 1.0);
    if identity.is_signed_by_newest_root() {
        return (at, Due::Life);
    }
    let soon = jittered(ROTATION_JITTER.min(life / JITTER_SHARE), 1.0);
    let early = now + if futile { ROTATION_RETRY } else { Duration::ZERO } + soon;
    if early < at { (early, Due::Rotation) } else { (at, Due::Life) }
}

/// Pause before renewing a certificate that is due as soon as it arrives: this clock is ahead of the servers'.
fn pause_after(renew_at: SystemTime, now: SystemTime, pauses: &mut Backoff) -> Option<Duration> {
    if renew_at > now {
        pauses.reset();
        return None;
    }
    Some(pauses.next_delay())
}

/// Sleeps by the wall clock, because certificates use it.
async fn sleep_until(at: SystemTime, clock: Clock) {
    while let Ok(left) = at.duration_since(clock.now()) {
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left.min(LONGEST_SLEEP)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_of_the_future_is_early_while_the_present_one_is_valid() {
        let now = SystemTime::now();
        let (hour, day) = (Duration::from_secs(3600), Duration::from_secs(86_400));
        let present = Validity { not_before: now - day, not_after: now + hour };
        let of = |not_before| Validity { not_before, not_after: not_before + day };
        assert!(!is_early(of(now - hour), present, now));
        assert!(is_early(of(now + hour), present, now));
        let over = Validity { not_after: now - hour, ..present };
        assert!(!is_early(of(now + hour), over, now), "there is no better one");
    }

    #[test]
    fn with_a_clock_that_is_ahead_the_renewals_become_rare() {
        let (now, mut pauses) = (SystemTime::now(), RETRIES);
        let mut pause = |renew_at| pause_after(renew_at, now, &mut pauses);
        let day = Duration::from_secs(86_400);
        assert_eq!(pause(now + day), None);
        let first = pause(now - day).unwrap();
        let mut later = first;
        for _ in 0..20 {
            later = pause(now - day).unwrap();
        }
        assert!(later >= Duration::from_secs(30) && first < Duration::from_secs(1), "{first:?} {later:?}");
        assert_eq!(pause(now + day), None);
        assert!(pause(now).unwrap() < Duration::from_secs(1));
    }
}
