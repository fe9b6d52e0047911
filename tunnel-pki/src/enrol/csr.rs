//! The first certificate in a cluster: by a CertificateSigningRequest that a server signs.

use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::{Api, Client};
use rand::Rng;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use tokio::time::Instant;
use tunnel_kube::{SIGNER, request};
use tunnel_runtime::NodeName;
use tunnel_runtime::backoff::jittered;
use tunnel_runtime::clock::Clock;
use tunnel_runtime::files::FileError;
use tunnel_runtime::log_once::LogOnce;
use tunnel_runtime::text::printable;

use crate::enrol::EnrollError;
use crate::enrol::attempt::{AttemptError, RETRIES, check_issued};
use crate::enrol::files::{IdentityFiles, on_disk};
use crate::{
    AgentIdentity, Holder, IdentityError, PrivateKey, TrustBundle, create_named_csr, pem_of_certificates,
};

const ANSWER: Duration = Duration::from_secs(15);
/// Maximum pause between two polls in a request's first minute. A working signer has answered by then.
const POLL: Duration = Duration::from_secs(10);
/// Maximum pause after the first minute: a fleet may wait for days.
const LATER_POLL: Duration = Duration::from_secs(120);
const FIRST_POLLS: Duration = Duration::from_secs(60);
/// Interval of the log message that a request is still waiting.
const REMIND: Duration = Duration::from_secs(60);
/// How often a clock by which the certificate has expired is looked at.
const CLOCK: Duration = Duration::from_secs(1);
/// Kubernetes' limit on a name (253), less the prefix and the suffix of [`request_name`].
const MAX_NODE_IN_NAME: usize = 230;

/// Delays of enrolments, with random parts that keep a fleet's agents apart.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Delay after a refusal. Half of it is random.
    pub refused: Duration,
    /// Time that the servers must have refused the certificate, or failed verification by the roots, before a new one
    /// is requested.
    pub patience: Duration,
    /// Maximum random wait before such a request, and before each retry while the API server is down: all agents notice
    /// a new CA, or that the API server is back, at the same moment.
    pub spread: Duration,
    /// Minimum time between two such requests.
    pub again: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            refused: Duration::from_secs(600),
            patience: Duration::from_secs(60),
            spread: Duration::from_secs(180),
            again: Duration::from_secs(600),
        }
    }
}

/// Requests one node's certificate through the API server.
pub struct CsrEnrolment {
    api: Client,
    holder: Holder,
    pub(crate) node: NodeName,
    files: IdentityFiles,
    state_dir: PathBuf,
    pub(crate) pace: Pace,
    pub clock: Clock,
}

impl CsrEnrolment {
    /// Keeps the key and the certificate in `state_dir`.
    pub fn new(api: Client, (holder, node): (Holder, NodeName), state_dir: PathBuf, pace: Pace) -> Self {
        let (files, clock) = (IdentityFiles::new(&state_dir, holder), Clock::default());
        Self { api, holder, node, files, state_dir, pace, clock }
    }

    /// Returns the identity on disk if it is this node's and has not expired, else a new one.
    ///
    /// # Errors
    /// The state directory cannot be written. All other failures are retried without limit.
    pub async fn ensure_identity(&self) -> Result<AgentIdentity, EnrollError> {
        let doubt = match self.files.load() {
            Ok(None) => return self.enrol().await,
            Ok(Some(identity)) if identity.node != self.node => {
                format!("the identity in {} is node {}'s", self.state_dir.display(), identity.node)
            }
            Ok(Some(identity)) if identity.validity.is_over(self.clock.now()) => {
                tracing::warn!(node = %self.node, reason = "the certificate has expired", "enrolling again");
                // Also without an answer: the clock may have been wrong.
                return tokio::select! {
                    enrolled = self.enrol() => enrolled,
                    () = self.has_time_for(&identity) => Ok(identity),
                };
            }
            Ok(Some(identity)) => return Ok(identity),
            Err(error @ IdentityError::File(FileError::Io { .. })) => return Err(error.into()),
            // The API server knows this node, so nothing is lost with unusable files.
            Err(error) => error.to_string(),
        };
        tracing::warn!(node = %self.node, reason = doubt, "enrolling again");
        self.enrol().await
    }

    /// Waits until the certificate has not expired by this node's clock, which may be set right.
    async fn has_time_for(&self, identity: &AgentIdentity) {
        while identity.validity.is_over(self.clock.now()) {
            tokio::time::sleep(CLOCK).await;
        }
    }

    async fn enrol(&self) -> Result<AgentIdentity, EnrollError> {
        let files = self.files.clone();
        let key = on_disk(move || files.prepare().and_then(|()| files.pending_key())).await?;
        let identity = self.obtain(&key, Duration::ZERO).await?;
        let files = self.files.clone();
        Ok(on_disk(move || files.store(&identity).map(|()| identity)).await?)
    }

    /// Obtains a new identity in place of one in use. Does not store it: as for a renewal the directory need not be
    /// writable.
    pub(crate) async fn obtain_again(&self, spread: Duration) -> Result<AgentIdentity, EnrollError> {
        let files = self.files.clone();
        let key = on_disk(move || {
            // A failure here recurs for the key and is logged there.
            let _ = files.prepare();
            files.pending_key_or_unsaved()
        });
        let key = key.await?;
        self.obtain(&key, spread).await
    }

    /// Obtains a new identity for the key. `spread` is the maximum random wait before a retry.
    async fn obtain(&self, key: &PrivateKey, spread: Duration) -> Result<AgentIdentity, EnrollError> {
        let pem = signing_request(key, self.holder, &self.node)?;
        let mut object = self.object(&pem);
        let mut backoff = RETRIES;
        loop {
            match self.attempt(key, &mut object).await {
                Ok(identity) => {
                    let pause = jittered(self.pace.refused, 0.5);
                    if identity.validity.is_over(self.clock.now()) {
                        let reason = "this node's clock is ahead of the end of the new certificate";
                        let retry_in_s = pause.as_secs();
                        tracing::error!(node = %self.node, reason, retry_in_s, "waiting for the right time");
                    }
                    if tokio::time::timeout(pause, self.has_time_for(&identity)).await.is_ok() {
                        tracing::info!(node = %self.node, "enrolled through the API server");
                        return Ok(identity);
                    }
                    object = self.object(&pem);
                }
                Err(AttemptError::Refused(reason)) => {
                    let pause = jittered(self.pace.refused, 0.5);
                    tracing::error!(node = %self.node, reason, retry_in_s = pause.as_secs(), "enrolment refused");
                    tokio::time::sleep(pause).await;
                    object = self.object(&pem);
                }
                Err(AttemptError::Transient(reason)) => {
                    tracing::warn!(node = %self.node, error = reason, "enrolment failed, retrying");
                    tokio::time::sleep(backoff.next_delay() + jittered(spread, 1.0)).await;
                }
            }
        }
    }

    /// Handles one request from its creation to its end, or goes on with one that an earlier attempt has created: after
    /// a passing failure the object has its name still.
    async fn attempt(
        &self,
        key: &PrivateKey,
        object: &mut CertificateSigningRequest,
    ) -> Result<AgentIdentity, AttemptError> {
        let requests = Api::<CertificateSigningRequest>::all(self.api.clone());
        let name = object.metadata.name.clone().unwrap_or_default();
        let params = PostParams::default();
        let create = requests.create(&params, object);
        match request(ANSWER, "creating CertificateSigningRequest", &name, create).await {
            // The name is random: the object is this one, created earlier.
            Err(error) if error.is_conflict() => {}
            created => {
                created.map_err(AttemptError::transient)?;
            }
        }
        tracing::info!(csr = name, "waiting for the certificate");
        let (mut pause, begin) = (Duration::from_millis(250), Instant::now());
        let (mut reminded, mut failures) = (begin, LogOnce::default());
        loop {
            tokio::time::sleep(jittered(pause, 0.5)).await;
            pause = (pause * 2).min(longest_pause(begin.elapsed()));
            match request(ANSWER, "reading CertificateSigningRequest", &name, requests.get(&name)).await {
                Ok(csr) => {
                    if let Some(outcome) = self.outcome(&csr, key) {
                        return outcome;
                    }
                }
                Err(error) if error.is_not_found() => {
                    object.metadata.name = Some(request_name(&self.node));
                    let reason = format!("CertificateSigningRequest {name} was deleted; creating a new one");
                    return Err(AttemptError::Transient(reason));
                }
                Err(error) => {
                    if failures.is_new(&error) {
                        tracing::warn!(%error, "failed to read CertificateSigningRequest, retrying");
                    }
                }
            }
            if reminded.elapsed() >= REMIND {
                tracing::warn!(
                    csr = name,
                    "certificate not issued yet, check that a tunnel-server with the right to sign is running"
                );
                reminded = Instant::now();
            }
        }
    }

    /// None while the request is pending.
    fn outcome(
        &self,
        csr: &CertificateSigningRequest,
        key: &PrivateKey,
    ) -> Option<Result<AgentIdentity, AttemptError>> {
        let status = csr.status.as_ref()?;
        let conditions = status.conditions.as_deref().unwrap_or_default();
        if let Some(end) =
            conditions.iter().find(|known| ["Denied", "Failed"].contains(&known.type_.as_str()))
        {
            let because = end.message.as_deref().or(end.reason.as_deref()).unwrap_or("no reason is given");
            return Some(Err(AttemptError::Refused(format!("{}: {}", end.type_, printable(because, 1000)))));
        }
        let certificate = status.certificate.as_ref().filter(|certificate| !certificate.0.is_empty())?;
        let identity = identity_of(&certificate.0, key, self.holder, &self.node);
        Some(
            identity
                .map(|identity| AgentIdentity { clock: self.clock, ..identity })
                .map_err(|error| AttemptError::Refused(format!("the certificate cannot be used: {error}"))),
        )
    }

    fn object(&self, request: &str) -> CertificateSigningRequest {
        CertificateSigningRequest {
            metadata: ObjectMeta { name: Some(request_name(&self.node)), ..ObjectMeta::default() },
            spec: CertificateSigningRequestSpec {
                signer_name: SIGNER.to_owned(),
                usages: Some(vec!["digital signature".to_owned(), "client auth".to_owned()]),
                request: ByteString(request.as_bytes().to_vec()),
                ..CertificateSigningRequestSpec::default()
            },
            status: None,
        }
    }
}

fn longest_pause(waited: Duration) -> Duration {
    if waited < FIRST_POLLS { POLL } else { LATER_POLL }
}

/// `postern-NODE-RANDOM`, within Kubernetes' limit.
fn request_name(node: &NodeName) -> String {
    const LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    let mut random = rand::rng();
    let suffix: String = (0..8).map(|_| char::from(LETTERS[random.random_range(0..LETTERS.len())])).collect();
    let cut = node.as_str().get(..MAX_NODE_IN_NAME).unwrap_or(node.as_str()).trim_end_matches(['.', '-']);
    format!("postern-{cut}-{suffix}")
}

/// A PKCS #10 request in PEM that names only its holder and node.
fn signing_request(key: &PrivateKey, holder: Holder, node: &NodeName) -> Result<String, IdentityError> {
    create_named_csr(key, holder, node)?.pem().map_err(|error| IdentityError::Csr(error.to_string()))
}

/// Parses an answer: the certificate followed by the roots. It must be for this holder and this key, and signed by one of the
/// roots.
fn identity_of(
    pem: &[u8],
    key: &PrivateKey,
    holder: Holder,
    node: &NodeName,
) -> Result<AgentIdentity, IdentityError> {
    let mut certificates = CertificateDer::pem_slice_iter(pem)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| IdentityError::Parse(format!("not PEM: {error}")))?;
    if certificates.is_empty() {
        return Err(IdentityError::Parse("it has no certificate".into()));
    }
    let roots = TrustBundle::new(certificates.split_off(1))?;
    let identity = AgentIdentity::from_pem(&pem_of_certificates(&certificates), &key.to_pem(), roots)?;
    check_issued(identity, holder, node)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polls_become_rare() {
        let pause = |waited| jittered(longest_pause(Duration::from_secs(waited)), 0.5);
        assert!(pause(59) <= Duration::from_secs(10));
        for _ in 0..100 {
            assert!((Duration::from_secs(60)..=Duration::from_secs(120)).contains(&pause(60)));
        }
    }

    #[test]
    fn a_requests_name_is_valid_in_kubernetes() {
        for node in ["edge-1", &"a".repeat(253), &format!("{}.{}", "a".repeat(229), "b".repeat(20))] {
            let node: NodeName = node.parse().unwrap();
            let name = request_name(&node);
            assert!(name.parse::<NodeName>().is_ok(), "{name}");
            assert_ne!(name, request_name(&node));
        }
        assert!(request_name(&"edge-1".parse().unwrap()).starts_with("postern-edge-1-"));
    }
}
