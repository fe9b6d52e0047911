//! The agent's certificate, by CertificateSigningRequest.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::PostParams;
use rand::Rng;
use rcgen::{CertificateParams, KeyPair};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use tunnel_core::identity::{
    AgentIdentity, IdentityError, NodeName, TrustBundle, agent_distinguished_name, pem_of_certificates,
};
use tunnel_core::text::printable;
use tunnel_kube::{SIGNER, reason};

use super::ApiServer;
use crate::enroll::{Backoff, EnrollError, IdentityFiles, IdentityKeeper, Stored};
use crate::session::Links;

const ANSWER: Duration = Duration::from_secs(15);
/// The longest pause between two looks at a request in its first minute; a signer that works has answered by then.
const LOOK: Duration = Duration::from_secs(10);
/// The longest one after it: a fleet may wait for days.
const LATER_LOOK: Duration = Duration::from_secs(120);
const FIRST_LOOKS: Duration = Duration::from_secs(60);
/// How often it is looked whether the reason to enrol again has gone.
const REASON: Duration = Duration::from_secs(1);
/// How often it is said that a request waits.
const REMIND: Duration = Duration::from_secs(60);
/// Kubernetes' limit on a name, less what is around the node's name in a request's.
const MAX_NODE_IN_NAME: usize = 230;

/// How fast things are tried again; a fleet must not come at once.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// After a refusal, between half of it and all.
    pub refused: Duration,
    /// How long the servers must have refused the certificate, or not been verified by the roots, before a new one is
    /// asked for.
    pub patience: Duration,
    /// A random wait of up to this before that, and before each try after the API server was away: the fleets' agents
    /// notice a new CA, and that the API server is back, at the same moment.
    pub spread: Duration,
    /// No sooner again than this after that.
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

/// Asks the API server for certificates of one node.
pub struct CsrEnrolment {
    api: Arc<ApiServer>,
    node: NodeName,
    files: IdentityFiles,
    state_dir: PathBuf,
    pace: Pace,
}

/// Why one request brought nothing.
enum Failure {
    /// The same request would be refused again.
    Refused(String),
    /// Another time it may do better.
    Transient(String),
}

impl CsrEnrolment {
    /// The key and the certificate are kept in `state_dir`.
    pub fn new(api: Arc<ApiServer>, node: NodeName, state_dir: PathBuf, pace: Pace) -> Self {
        Self { api, node, files: IdentityFiles::new(&state_dir), state_dir, pace }
    }

    /// The identity on disk when it is this node's and has not ended; else a new one.
    ///
    /// # Errors
    /// A state directory that cannot be written. Everything else is tried again for as long as it takes.
    pub async fn ensure_identity(&self) -> Result<AgentIdentity, EnrollError> {
        let doubt = match self.files.load() {
            Ok(Stored::Nothing) => return self.enrol().await,
            Ok(Stored::Identity(identity)) if identity.node != self.node => {
                format!("the identity in {} is node {}'s", self.state_dir.display(), identity.node)
            }
            Ok(Stored::Identity(identity)) if identity.validity().is_over(SystemTime::now()) => {
                "the certificate has ended".to_owned()
            }
            Ok(Stored::Identity(identity)) => return Ok(*identity),
            // The API server knows this node, so nothing is lost with files that cannot be used.
            Err(error @ IdentityError::Io { .. }) => return Err(error.into()),
            Err(error) => error.to_string(),
        };
        tracing::warn!(node = %self.node, reason = doubt, "enrolling again");
        self.enrol().await
    }

    async fn enrol(&self) -> Result<AgentIdentity, EnrollError> {
        let identity = self.obtain(Duration::ZERO).await?;
        self.files.store(&identity)?;
        Ok(identity)
    }

    /// A new identity that is not stored yet, for the pending key. `spread`: the longest random wait before another try.
    async fn obtain(&self, spread: Duration) -> Result<AgentIdentity, EnrollError> {
        self.files.prepare()?;
        let key = self.files.pending_key()?;
        let request = request(&key, &self.node)?;
        let mut backoff = Backoff::default();
        loop {
            match self.attempt(&key, &request).await {
                Ok(identity) => {
                    tracing::info!(node = %self.node, "enrolled through the API server");
                    return Ok(identity);
                }
                Err(Failure::Refused(reason)) => {
                    let pause = jittered(self.pace.refused, 0.5);
                    tracing::error!(node = %self.node, reason, retry_in_s = pause.as_secs(), "enrolment refused");
                    tokio::time::sleep(pause).await;
                }
                Err(Failure::Transient(reason)) => {
                    self.api.failed();
                    tracing::warn!(node = %self.node, reason, "enrolment waits for the API server");
                    tokio::time::sleep(backoff.next_delay() + jittered(spread, 0.0)).await;
                }
            }
        }
    }

    /// One request, from its creation to its end.
    async fn attempt(&self, key: &KeyPair, request: &str) -> Result<AgentIdentity, Failure> {
        let transient = |error: &dyn std::fmt::Display| Failure::Transient(error.to_string());
        let api = || async {
            let client = self.api.client().await.map_err(|error| transient(&error))?;
            Ok(Api::<CertificateSigningRequest>::all(client))
        };
        let object = self.object(request);
        let name = object.metadata.name.clone().unwrap_or_default();
        answered(
            "creating a CertificateSigningRequest",
            api().await?.create(&PostParams::default(), &object),
        )
        .await
        .map_err(|error| Failure::Transient(error.0))?;
        tracing::info!(csr = name, "waiting for the certificate");
        let (mut pause, begin) = (Duration::from_millis(250), Instant::now());
        let mut told = begin;
        let mut complaint = None;
        loop {
            tokio::time::sleep(jittered(pause, 0.5)).await;
            pause = (pause * 2).min(longest_look(begin.elapsed()));
            let what = format!("CertificateSigningRequest {name}");
            match answered(&what, api().await?.get(&name)).await {
                Ok(csr) => {
                    if let Some(done) = self.judge(&csr, key) {
                        return done;
                    }
                }
                Err((_, true)) => {
                    return Err(Failure::Transient(format!("{what} has gone; another one is made")));
                }
                Err((reason, false)) => {
                    self.api.failed();
                    if complaint.as_ref() != Some(&reason) {
                        tracing::warn!(reason, "waiting for the certificate");
                        complaint = Some(reason);
                    }
                }
            }
            if told.elapsed() >= REMIND {
                tracing::warn!(
                    csr = name,
                    "still waiting for the certificate: is a tunnel-server running with the rights to sign?"
                );
                told = Instant::now();
            }
        }
    }

    /// None while the request is not answered.
    fn judge(
        &self,
        csr: &CertificateSigningRequest,
        key: &KeyPair,
    ) -> Option<Result<AgentIdentity, Failure>> {
        let status = csr.status.as_ref()?;
        let conditions = status.conditions.as_deref().unwrap_or_default();
        if let Some(end) =
            conditions.iter().find(|known| ["Denied", "Failed"].contains(&known.type_.as_str()))
        {
            let because = end.message.as_deref().or(end.reason.as_deref()).unwrap_or("no reason is given");
            return Some(Err(Failure::Refused(format!("{}: {}", end.type_, printable(because, 1000)))));
        }
        let certificate = status.certificate.as_ref().filter(|certificate| !certificate.0.is_empty())?;
        let identity = identity_of(&certificate.0, key, &self.node);
        Some(identity.map_err(|error| Failure::Refused(format!("the certificate is of no use: {error}"))))
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

fn longest_look(waited: Duration) -> Duration {
    if waited < FIRST_LOOKS { LOOK } else { LATER_LOOK }
}

/// The answer in time; else why there is none, and whether the object is not there.
async fn answered<T>(
    what: &str,
    work: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, (String, bool)> {
    match tokio::time::timeout(ANSWER, work).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => {
            let gone = matches!(&error, kube::Error::Api(status) if status.is_not_found());
            Err((format!("{what}: {}", reason(&error)), gone))
        }
        Err(_) => Err((format!("{what}: no answer within {} s", ANSWER.as_secs()), false)),
    }
}

/// Between `least` of a time and all of it: a fleet must not ask in step.
fn jittered(time: Duration, least: f64) -> Duration {
    time.mul_f64(rand::rng().random_range(least..=1.0))
}

/// `postern-NODE-RANDOM`, within Kubernetes' limit.
fn request_name(node: &NodeName) -> String {
    const LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    let mut random = rand::rng();
    let suffix: String = (0..8).map(|_| char::from(LETTERS[random.random_range(0..LETTERS.len())])).collect();
    let cut = node.as_str().get(..MAX_NODE_IN_NAME).unwrap_or(node.as_str()).trim_end_matches(['.', '-']);
    format!("postern-{cut}-{suffix}")
}

/// A PKCS #10 request as PEM that names the node and asks for nothing else.
fn request(key: &KeyPair, node: &NodeName) -> Result<String, IdentityError> {
    let fail = |error: rcgen::Error| IdentityError::Csr(error.to_string());
    let mut params = CertificateParams::default();
    params.distinguished_name = agent_distinguished_name(node);
    params.serialize_request(key).map_err(fail)?.pem().map_err(fail)
}

/// The certificate, and behind it the roots, if they are what was asked for: our node, our key, valid now, and signed by
/// one of the roots.
fn identity_of(pem: &[u8], key: &KeyPair, node: &NodeName) -> Result<AgentIdentity, IdentityError> {
    let mut certificates = CertificateDer::pem_slice_iter(pem)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| IdentityError::Parse(format!("not PEM: {error}")))?;
    if certificates.is_empty() {
        return Err(IdentityError::Parse("it has no certificate".into()));
    }
    let roots = TrustBundle::new(certificates.split_off(1))?;
    let identity = AgentIdentity::from_pem(&pem_of_certificates(&certificates), &key.serialize_pem(), roots)?;
    if identity.node != *node {
        return Err(IdentityError::OtherNode { expected: node.clone(), found: identity.node });
    }
    if certificates.first().is_none_or(|leaf| identity.bundle.issuer_of(leaf).is_none()) {
        return Err(IdentityError::Bundle("no root of it signed the certificate".into()));
    }
    if identity.validity().is_over(SystemTime::now()) {
        return Err(IdentityError::Parse("it has ended: is this node's clock right?".into()));
    }
    Ok(identity)
}

/// Enrols again when renewing at a server cannot help any more: the certificate has ended, or no server takes it or is
/// verified by the roots. Runs for ever.
pub async fn recover(enrolment: Arc<CsrEnrolment>, keeper: Arc<IdentityKeeper>, links: Arc<Links>) {
    let pace = enrolment.pace;
    let hopeless = || {
        if keeper.current().validity().is_over(SystemTime::now()) {
            return Some("the certificate has ended");
        }
        links.refused_for().is_some_and(|time| time >= pace.patience).then_some(
            "no server takes the certificate or is verified by the roots: the CA may have been replaced",
        )
    };
    loop {
        tokio::time::sleep((pace.patience / 10).min(Duration::from_secs(5))).await;
        if hopeless().is_none() {
            continue;
        }
        tokio::time::sleep(jittered(pace.spread, 0.0)).await;
        // The renewing uses the same pending key.
        let alone = keeper.alone().await;
        let Some(reason) = hopeless() else { continue };
        tracing::warn!(node = %enrolment.node, reason, "enrolling again");
        let hope = async {
            while hopeless().is_some() {
                tokio::time::sleep((pace.patience / 10).min(REASON)).await;
            }
        };
        let obtained = tokio::select! {
            obtained = enrolment.obtain(pace.spread) => obtained,
            () = hope => {
                tracing::info!(node = %enrolment.node, reason, "no need to enrol again any more");
                continue;
            }
        };
        // Not cut short: files and memory change together.
        let kept = match obtained {
            Ok(identity) => keeper.replace(identity).await,
            Err(error) => Err(error),
        };
        drop(alone);
        if let Err(error) = kept {
            tracing::error!(%error, "the new identity cannot be kept");
        }
        tokio::time::sleep(pace.again).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_become_rare() {
        let looks = |waited| jittered(longest_look(Duration::from_secs(waited)), 0.5);
        assert!(looks(59) <= Duration::from_secs(10));
        for _ in 0..100 {
            assert!((Duration::from_secs(60)..=Duration::from_secs(120)).contains(&looks(60)));
        }
    }

    #[test]
    fn a_requests_name_is_one_of_kubernetes() {
        for node in ["edge-1", &"a".repeat(253), &format!("{}.{}", "a".repeat(229), "b".repeat(20))] {
            let node: NodeName = node.parse().unwrap();
            let name = request_name(&node);
            assert!(name.parse::<NodeName>().is_ok(), "{name}");
            assert_ne!(name, request_name(&node));
        }
        assert!(request_name(&"edge-1".parse().unwrap()).starts_with("postern-edge-1-"));
    }
}
