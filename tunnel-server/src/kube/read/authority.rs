//! The CA, kept in a Secret: every server signs with it and keeps a copy in files.
//!
//! The Secret's keys are the files of the directory `ca`: `ca.crt` and `<16 hex>.key` (see [`crate::pki`]). If the
//! Secret is deleted or broken, the last good copy stays in use, and the leader recreates a deleted Secret.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use futures_util::stream::select;
use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::Client;
use kube::runtime::watcher::Event;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tunnel_kube::{Attempts, named, post};
use tunnel_pki::Zeroizing;
use tunnel_runtime::blocking::blocking;

use crate::kube::context::KubeContext;
use crate::kube::error::ClusterError;
use crate::kube::object::ClusterObject;
use crate::kube::reconcile::{self, Reconcile, changes, inputs};
use crate::pki::{Ca, CaMaterial, CaState, KEY_SUFFIX, Lifetimes, PkiError, ROOTS};

/// Annotation with the time at which the signing root was activated; tells `ca retire` how long the old root is needed.
pub const ACTIVATED: &str = "postern.internal/ca-activated";

const RETRY: Duration = Duration::from_secs(2);
/// Interval between log messages while the start waits.
const REMIND: Duration = Duration::from_secs(60);

/// A Secret whose values are wiped from memory when it is dropped.
struct Wiped(Secret);

impl Wiped {
    /// Removes the CA's entries.
    fn clear(&mut self) {
        let known = self.0.data.get_or_insert_default();
        let gone = known.extract_if(.., |name, _| name == ROOTS || name.ends_with(KEY_SUFFIX));
        gone.for_each(|(_, value)| drop(Zeroizing::new(value.0)));
    }
}

impl Drop for Wiped {
    fn drop(&mut self) {
        for value in self.0.data.iter_mut().flat_map(BTreeMap::values_mut) {
            drop(Zeroizing::new(std::mem::take(&mut value.0)));
        }
    }
}

pub type CaSecret = ClusterObject<Secret>;

impl CaSecret {
    async fn present(&self) -> Result<Option<Wiped>, ClusterError> {
        Ok(self.get().await?.map(Wiped))
    }

    /// Extracts the CA from a Secret and checks it.
    fn material(&self, Wiped(secret): &Wiped) -> Result<CaMaterial, ClusterError> {
        let malformed = |reason: String| {
            let object = self.named();
            let fix = "restore it from a backup, or delete it: a server that has a good copy in its --state-dir makes it again";
            ClusterError::Malformed { object, reason, fix: fix.to_owned() }
        };
        let text = |name: &str, bytes: &ByteString| {
            String::from_utf8(bytes.0.clone()).map_err(|_| malformed(format!("{name}: it is not text")))
        };
        let data = secret.data.as_ref();
        let roots =
            data.and_then(|data| data.get(ROOTS)).ok_or_else(|| malformed(format!("{ROOTS}: missing")))?;
        let mut keys = BTreeMap::new();
        for (name, key) in data.into_iter().flatten().filter(|(name, _)| name.ends_with(KEY_SUFFIX)) {
            keys.insert(name.clone(), Zeroizing::new(text(name, key)?));
        }
        let material = CaMaterial::new(text(ROOTS, roots)?, keys);
        match material.state(Lifetimes::default()) {
            Ok(_) => Ok(material),
            Err(error) => Err(malformed(error.to_string())),
        }
    }

    /// Creates the Secret.
    ///
    /// # Errors
    /// A conflict if another server was first, with another CA.
    async fn create(&self, material: &CaMaterial) -> Result<(), ClusterError> {
        let secret = Wiped(Secret {
            metadata: self.metadata(),
            type_: Some("Opaque".to_owned()),
            data: Some(data(material)),
            ..Secret::default()
        });
        self.create_once(&secret.0).await
    }

    pub async fn read(&self) -> Result<StoredCa, ClusterError> {
        let secret = self.present().await?.ok_or_else(|| ClusterError::Missing(self.to_string()))?;
        let material = self.material(&secret)?;
        let annotations = secret.0.metadata.annotations.as_ref();
        let activated = annotations.and_then(|known| known.get(ACTIVATED)?.parse().ok());
        Ok(StoredCa { secret, material, activated })
    }

    /// Replaces the Secret unless it has changed since it was read.
    async fn replace(
        &self,
        mut secret: Wiped,
        material: &CaMaterial,
        activated: Option<Timestamp>,
    ) -> Result<(), ClusterError> {
        secret.clear();
        secret.0.data.get_or_insert_default().extend(data(material));
        let annotations = secret.0.metadata.annotations.get_or_insert_default();
        match activated {
            Some(at) => annotations.insert(ACTIVATED.to_owned(), format!("{at:.0}")),
            None => annotations.remove(ACTIVATED),
        };
        self.request("changing", self.api.replace(&self.name, &post(), &secret.0)).await?;
        Ok(())
    }

    /// First step of a rotation: adds a new root. Returns its hash.
    pub async fn introduce(&self) -> Result<String, ClusterError> {
        let stored = self.read().await?;
        let (next, hash) = stored.material.introduce()?;
        self.replace(stored.secret, &next, None).await?;
        Ok(hash)
    }

    /// Second step: the new root starts to sign. Returns its hash.
    pub async fn activate(&self) -> Result<String, ClusterError> {
        let stored = self.read().await?;
        let (next, hash) = stored.material.activate()?;
        self.replace(stored.secret, &next, Some(Timestamp::now())).await?;
        Ok(hash)
    }

    /// Last step: removes the old root from the trusted ones. Returns its hash.
    ///
    /// # Errors
    /// [`PkiError::Rotation`] until every certificate of the old root has expired, unless `force`.
    pub async fn retire(&self, force: bool, lifetimes: Lifetimes) -> Result<String, ClusterError> {
        let stored = self.read().await?;
        let (next, hash) = stored.material.retire()?;
        if !force {
            let wait = "agents renew by themselves long before. `ca retire --force` does not wait: an agent that is \
                        left on the old root enrols again through the API server";
            match stored.retirable(lifetimes) {
                None => {
                    let text = format!(
                        "it is not known since when the new root signs: annotation {ACTIVATED} of Secret {self} is missing; {wait}"
                    );
                    return Err(PkiError::Rotation(text).into());
                }
                Some(at) if at > Timestamp::now() => {
                    let text = format!(
                        "certificates of the old root may be in use until {at:.0}, which is when the last one \
                         expires; {wait}"
                    );
                    return Err(PkiError::Rotation(text).into());
                }
                Some(_) => {}
            }
        }
        self.replace(stored.secret, &next, None).await?;
        Ok(hash)
    }
}

/// The CA as it was read from its Secret.
pub struct StoredCa {
    secret: Wiped,
    material: CaMaterial,
    /// Time at which the signing root was activated.
    pub activated: Option<Timestamp>,
}

impl StoredCa {
    pub fn state(&self, lifetimes: Lifetimes) -> Result<CaState, PkiError> {
        self.material.state(lifetimes)
    }

    /// The time from which no certificate of the old root can be valid. Adds a tenth of a lifetime for servers that
    /// learn late that another root signs.
    pub fn retirable(&self, lifetimes: Lifetimes) -> Option<Timestamp> {
        let activated = SystemTime::from(self.activated?);
        Timestamp::try_from(activated + lifetimes.agent + lifetimes.agent / 10).ok()
    }
}

fn data(material: &CaMaterial) -> BTreeMap<String, ByteString> {
    let bytes = |text: &str| ByteString(text.as_bytes().to_vec());
    let keys = material.keys().iter().map(|(name, key)| (name.clone(), bytes(key)));
    keys.chain([(ROOTS.to_owned(), bytes(material.roots()))]).collect()
}

/// Returns the cluster's CA, copied to the state directory. Creates the Secret if it is missing: from the CA in the
/// state directory if there is one, else with a new CA.
///
/// While the API server is unavailable, uses the copy in the state directory; without a copy, waits. A copy whose signing
/// root the Secret's CA has is also used if the files cannot be written.
///
/// # Errors
/// If the Secret has no valid CA and there is no good copy, if the files cannot be used, or on `stop`.
pub async fn obtain(
    client: Client,
    namespace: &str,
    secret: &str,
    state_dir: &Path,
    lifetimes: Lifetimes,
    stop: &CancellationToken,
) -> Result<Ca, ClusterError> {
    let secret = CaSecret::new(client, namespace, secret);
    let copy = state_dir.join("ca").exists().then(|| Ca::open(state_dir, lifetimes));
    let mut logged: Option<Instant> = None;
    loop {
        let error = match material(&secret, state_dir, lifetimes).await {
            Ok(material) => {
                let wanted = material.state(lifetimes)?;
                let installed = install(state_dir.to_owned(), lifetimes, material, &secret).await;
                return match (installed, copy) {
                    (Ok((ca, _)), _) => Ok(ca),
                    // No server or agent would accept a certificate signed by a root that the Secret no longer has.
                    (Err(error), Some(Ok(copy)))
                        if copy.state().is_ok_and(|present| wanted.trusts(present.hash())) =>
                    {
                        tracing::error!(%error, %secret, "failed to copy the CA from its Secret, using the state directory's");
                        Ok(copy)
                    }
                    (Err(error), _) => Err(error.into()),
                };
            }
            // Another server was first: read its CA.
            Err(error) if error.is_conflict() => continue,
            Err(ClusterError::Pki(error)) => return Err(error.into()),
            Err(error) => error,
        };
        match &copy {
            Some(Ok(copy)) => {
                tracing::error!(%error, "failed to read the CA Secret, using the CA of the state directory");
                return Ok(copy.clone());
            }
            // The files cannot be used either; the Secret's error says how to restore it.
            Some(Err(_)) | None if matches!(error, ClusterError::Malformed { .. }) => return Err(error),
            Some(Err(_)) | None => {}
        }
        if logged.is_none_or(|logged| logged.elapsed() >= REMIND) {
            tracing::warn!(%error, "failed to read the CA Secret and the state directory has no copy yet, retrying");
            logged = Some(Instant::now());
        }
        tokio::select! {
            () = tokio::time::sleep(RETRY) => {}
            () = stop.cancelled() => return Err(ClusterError::Stopped(secret.to_string())),
        }
    }
}

/// Returns the Secret's CA; creates the Secret if it is missing.
async fn material(
    secret: &CaSecret,
    state_dir: &Path,
    lifetimes: Lifetimes,
) -> Result<CaMaterial, ClusterError> {
    if let Some(present) = secret.present().await? {
        return secret.material(&present);
    }
    // A CA whose files cannot be read must not be silently replaced by a new one.
    let material = match state_dir.join("ca").exists() {
        true => Ca::open(state_dir, lifetimes)?.material()?,
        false => CaMaterial::generate()?,
    };
    secret.create(&material).await?;
    tracing::info!(%secret, "created the CA Secret");
    Ok(material)
}

/// Writes the files, on a blocking thread because syncing them to disk may take a while.
async fn install(
    state_dir: PathBuf,
    lifetimes: Lifetimes,
    material: CaMaterial,
    secret: &CaSecret,
) -> Result<(Ca, bool), PkiError> {
    let name = secret.to_string();
    let work = move || Ca::install(&state_dir, lifetimes, &material, &name);
    blocking(work)
        .await
        .unwrap_or_else(|stopped| Err(PkiError::Sign(format!("writing the CA was interrupted: {stopped}"))))
}

/// Keeps the copy current until the context's stop signal. The server's certificate and sessions follow the copy.
pub async fn follow(context: KubeContext, state_dir: PathBuf) {
    let secret = CaSecret::new(context.client.clone(), &context.namespace, &context.names.ca_secret);
    let events = context.health.follow(secret.api.clone(), named(&secret.name), "secrets");
    let leader = inputs(changes(&context.leader), |_: &mut Copy, ()| {});
    let inputs = select(inputs(events, Copy::apply), leader);
    let (leader, listed, due) = (context.leader, false, Due::Nothing);
    let copy = Copy { secret, state_dir, leader, listed, due };
    let attempts = Attempts::new("copying the CA from its Secret");
    reconcile::run(copy, inputs, Duration::ZERO, attempts, context.stop).await;
}

struct Copy {
    secret: CaSecret,
    state_dir: PathBuf,
    leader: watch::Receiver<bool>,
    /// True if the list being read has the Secret.
    listed: bool,
    due: Due,
}

enum Due {
    Nothing,
    /// The Secret's CA, to be written to the files.
    Install(CaMaterial),
    /// The Secret cannot be used.
    Report(ClusterError),
    /// The Secret was deleted.
    Restore,
}

impl Copy {
    fn apply(&mut self, event: Event<Secret>) {
        match event {
            Event::Init => self.listed = false,
            Event::InitApply(secret) | Event::Apply(secret) => {
                self.listed = true;
                self.due = match self.secret.material(&Wiped(secret)) {
                    Ok(material) => Due::Install(material),
                    Err(error) => Due::Report(error),
                };
            }
            Event::InitDone if self.listed => {}
            Event::InitDone | Event::Delete(_) => {
                self.due = Due::Restore;
                tracing::error!(secret = %self.secret, "CA Secret was deleted, the leader creates it again from its state directory");
            }
        }
    }
}

impl Reconcile for Copy {
    async fn reconcile(
        &mut self,
        attempts: &mut Attempts,
    ) -> Result<Option<tokio::time::Instant>, ClusterError> {
        match &self.due {
            Due::Nothing => return Ok(None),
            Due::Report(error) => {
                attempts.report(error);
                self.due = Due::Nothing;
                return Ok(None);
            }
            Due::Install(material) => {
                let (state_dir, material) = (self.state_dir.clone(), material.clone());
                let (_, changed) = install(state_dir, Lifetimes::default(), material, &self.secret).await?;
                if changed {
                    tracing::info!(secret = %self.secret, "installed the CA from the Secret");
                }
            }
            // Only the leader restores it, so not while this server drains.
            Due::Restore if !*self.leader.borrow() => return Ok(None),
            Due::Restore => {
                let material = Ca::open(&self.state_dir, Lifetimes::default())?.material()?;
                match self.secret.create(&material).await {
                    Ok(()) => tracing::warn!(secret = %self.secret, "created the CA Secret again"),
                    // Another server or the operator was first.
                    Err(error) if error.is_conflict() => {}
                    Err(error) => return Err(error),
                }
            }
        }
        self.due = Due::Nothing;
        attempts.succeeded();
        Ok(None)
    }
}
