//! The gRPC Enrollment service: issues a certificate for an enrolment token or a valid certificate.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use parking_lot::Mutex;
use rustls_pki_types::CertificateDer;
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;
use tonic::{Code, Request, Response, Status};
use tunnel_link::proto::enrollment_server::{Enrollment, EnrollmentServer};
use tunnel_link::proto::{EnrollRequest, EnrollResponse, RenewRequest};
use tunnel_pki::{CsrKey, Holder, IdentityError, holder_of_certificate, pem_of_certificates, validity};
use tunnel_runtime::blocking::blocking;
use tunnel_runtime::{NodeName, NodeNameError};

use super::ca::cluster_of;
use super::ca_state::CaState;
use super::error::PkiError;
use super::issued::IssuedLedger;
use super::metrics::PkiMetrics;
use super::request::{Denial, examine_request};
use super::standing::{Refusal, Standing};
use super::token::Token;
use super::token_store::{TokenRefusal, TokenStore};
use crate::admission::SourceBuckets;

/// Maximum size of a message in bytes; a CSR is under 2 KiB.
const MAX_MESSAGE: usize = 64 << 10;
/// Maximum number of concurrent calls. Signing and file access are quick; more calls would only wait for the lock.
const CONCURRENT: usize = 4;

/// Issues certificates for enrolment tokens, and renews certificates.
#[derive(Clone)]
pub struct EnrollService {
    inner: Arc<Inner>,
}

/// The Enrollment service for the client of one connection.
pub struct ForClient {
    inner: Arc<Inner>,
    source: IpAddr,
    /// As presented, verified in the TLS handshake.
    certificate: Option<CertificateDer<'static>>,
}

/// Rules for issuing certificates.
#[derive(Clone, Debug)]
pub struct EnrollPolicy {
    pub standing: Standing,
    /// True if tokens are accepted.
    pub tokens: bool,
}

struct Inner {
    policy: EnrollPolicy,
    ca: watch::Receiver<Arc<CaState>>,
    tokens: TokenStore,
    ledger: IssuedLedger,
    state_dir: PathBuf,
    metrics: PkiMetrics,
    failures: Mutex<SourceBuckets>,
    permits: Arc<Semaphore>,
}

#[derive(Debug, thiserror::Error)]
enum EnrollError {
    #[error("too many failed enrolments from this address; try again later")]
    RateLimited,
    #[error("{0}")]
    Invalid(String),
    #[error(transparent)]
    Token(#[from] TokenRefusal),
    #[error("enrolment by token is off at this server; --token-enrollment=on switches it on")]
    TokensOff,
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("{0}")]
    Certificate(String),
    /// The detail is for the server's log only: it may name files.
    #[error("the server failed to issue a certificate; see its log")]
    Internal(#[from] PkiError),
    #[error("the server failed to issue a certificate; see its log")]
    Panicked,
}

impl EnrollError {
    fn outcome(&self) -> &'static str {
        match self {
            Self::RateLimited => "rate_limited",
            Self::Invalid(_) => "invalid",
            Self::Token(TokenRefusal::Unknown) => "unknown_token",
            Self::Token(TokenRefusal::Expired(_)) => "expired_token",
            Self::Token(TokenRefusal::Used(_)) => "used_token",
            Self::Token(TokenRefusal::OtherNode { .. }) => "other_node",
            Self::Token(TokenRefusal::OtherHolder { .. }) => "other_holder",
            Self::Token(TokenRefusal::Void(_)) => "void_token",
            Self::TokensOff => "tokens_off",
            Self::Refused(refusal) => refusal.label(),
            Self::Certificate(_) => "bad_certificate",
            Self::Internal(_) | Self::Panicked => "internal",
        }
    }

    fn code(&self) -> Code {
        match self {
            Self::RateLimited => Code::ResourceExhausted,
            Self::Invalid(_) => Code::InvalidArgument,
            Self::Token(TokenRefusal::Unknown | TokenRefusal::Expired(_)) | Self::Certificate(_) => {
                Code::Unauthenticated
            }
            Self::Token(
                TokenRefusal::Used(_)
                | TokenRefusal::OtherNode { .. }
                | TokenRefusal::OtherHolder { .. }
                | TokenRefusal::Void(_),
            )
            | Self::TokensOff
            | Self::Refused(_) => Code::PermissionDenied,
            Self::Internal(_) | Self::Panicked => Code::Internal,
        }
    }

    /// True for an agent's fault, which counts against its address.
    fn counts(&self) -> bool {
        !matches!(self, Self::RateLimited | Self::Internal(_) | Self::Panicked)
    }
}

impl EnrollService {
    /// Creates the service. It signs with the CA that `ca` has at a call, and reads the tokens on each call.
    pub fn new(
        ca: watch::Receiver<Arc<CaState>>,
        state_dir: &Path,
        policy: EnrollPolicy,
        metrics: PkiMetrics,
    ) -> Self {
        Self {
            inner: Arc::new(Inner {
                policy,
                ca,
                tokens: TokenStore::new(state_dir),
                ledger: IssuedLedger::new(state_dir),
                state_dir: state_dir.to_owned(),
                metrics,
                failures: Mutex::new(SourceBuckets::of_failures()),
                permits: Arc::new(Semaphore::new(CONCURRENT)),
            }),
        }
    }

    /// The service for a connection from `source`, whose client has presented `certificate`; TLS has verified that.
    pub fn for_client(
        &self,
        source: IpAddr,
        certificate: Option<CertificateDer<'static>>,
    ) -> EnrollmentServer<ForClient> {
        let client = ForClient { inner: Arc::clone(&self.inner), source, certificate };
        EnrollmentServer::new(client).max_decoding_message_size(MAX_MESSAGE)
    }
}

impl ForClient {
    /// No call is refused by its address alone: an unauthenticated client behind the same NAT must not block renewals.
    async fn call(
        &self,
        call: &'static str,
        work: impl FnOnce(&Inner) -> Result<(NodeName, EnrollResponse), EnrollError> + Send + 'static,
    ) -> Result<Response<EnrollResponse>, Status> {
        let inner = Arc::clone(&self.inner);
        // The semaphore is never closed.
        let permit = Arc::clone(&self.inner.permits).acquire_owned().await;
        // Finished even if the agent gives up: a retry gets the same answer.
        let done = blocking(move || {
            let _permit = permit;
            work(&inner)
        });
        let result = done.await.unwrap_or(Err(EnrollError::Panicked));
        self.inner.finish(call, self.source, result)
    }
}

impl Inner {
    /// Logs and counts the outcome, and converts it to the response.
    fn finish(
        &self,
        call: &'static str,
        source: IpAddr,
        result: Result<(NodeName, EnrollResponse), EnrollError>,
    ) -> Result<Response<EnrollResponse>, Status> {
        let client = source.to_canonical().to_string();
        let failure = match result {
            Ok((node, response)) => {
                self.metrics.count(call, "issued");
                tracing::info!(call, %node, client, "certificate issued");
                return Ok(Response::new(response));
            }
            Err(failure) => failure,
        };
        // Counts the failure, unless the address has made too many recently.
        let failure = if failure.counts() && !self.failures.lock().take(source, Instant::now()) {
            // The refusals before the limit were logged as warnings.
            let outcome = failure.outcome();
            tracing::debug!(call, client, outcome, reason = %failure, "enrolment refused: rate limited");
            EnrollError::RateLimited
        } else {
            failure
        };
        self.metrics.count(call, failure.outcome());
        match &failure {
            EnrollError::RateLimited => {}
            EnrollError::Internal(error) => {
                tracing::error!(call, client, %error, "enrolment failed");
            }
            EnrollError::Panicked => {
                tracing::error!(call, client, error = "the call panicked", "enrolment failed");
            }
            other => {
                let outcome = other.outcome();
                tracing::warn!(call, client, outcome, reason = %other, "enrolment refused");
            }
        }
        Err(Status::new(failure.code(), failure.to_string()))
    }

    fn issue(
        &self,
        holder: Holder,
        node: NodeName,
        key: &CsrKey,
    ) -> Result<(NodeName, EnrollResponse), EnrollError> {
        let ca = Arc::clone(&self.ca.borrow());
        let after = self.policy.standing.issue_after(&node);
        let issued = ca.issue_for((holder, &node), key, Duration::MAX, after)?;
        if let Err(error) = self.ledger.record((holder, &node), &issued) {
            // Without a cluster roots are retired by the records, else by time.
            if !matches!(cluster_of(&self.state_dir), Ok(Some(_))) {
                return Err(error.into());
            }
            tracing::warn!(%holder, %node, %error, "failed to record a certificate, issuing it all the same");
        }
        let response = EnrollResponse {
            certificate_chain: pem_of_certificates(&issued.chain),
            trust_bundle: ca.bundle().to_pem(),
        };
        Ok((node, response))
    }

    fn enroll(&self, request: &EnrollRequest) -> Result<(NodeName, EnrollResponse), EnrollError> {
        // The request's form is checked first: that answer does not depend on the token.
        let invalid = |error: IdentityError| EnrollError::Invalid(error.to_string());
        let node: NodeName = request.node.parse().map_err(|error: NodeNameError| invalid(error.into()))?;
        let (holder, key) = Self::key(&request.csr, None, &node)?;
        if !self.policy.tokens {
            return Err(EnrollError::TokensOff);
        }
        let token: Token = request.token.parse().map_err(|_| TokenRefusal::Unknown)?;
        let standing = &self.policy.standing;
        // Checked before the token is bound to a key: it may be meant for the time after the readmission.
        standing.may_enrol((holder, &node))?;
        self.tokens.redeem(
            &token,
            (holder, &node),
            &key.hash,
            standing.tokens_void_until(&node),
            Timestamp::now(),
        )??;
        tracing::debug!(token_id = token.id(), %holder, %node, "token accepted");
        self.issue(holder, node, &key)
    }

    fn renew(
        &self,
        request: &RenewRequest,
        certificate: Option<&CertificateDer<'static>>,
    ) -> Result<(NodeName, EnrollResponse), EnrollError> {
        let certificate = certificate.ok_or_else(|| {
            EnrollError::Certificate(
                "a renewal needs the present certificate; enrol with a token instead".into(),
            )
        })?;
        let refuse = |error: IdentityError| EnrollError::Certificate(error.to_string());
        let (holder, node) = holder_of_certificate(certificate).map_err(refuse)?;
        // The handshake checked both, but a connection may outlive the certificate or its root.
        let validity = validity(certificate).map_err(refuse)?;
        if validity.is_over(self.ca.borrow().clock().now()) {
            return Err(EnrollError::Certificate("the certificate expired; enrol with a new token".into()));
        }
        if self.ca.borrow().bundle().issuer_of(certificate).is_none() {
            return Err(EnrollError::Certificate(
                "the certificate's root is no longer trusted; enrol with a new token".into(),
            ));
        }
        self.policy.standing.judge((holder, &node), validity.issued())?;
        let (holder, key) = Self::key(&request.csr, Some(holder), &node)?;
        self.issue(holder, node, &key)
    }

    /// Returns the key and the holder of a request. It may name no other node, and no other holder if one is known.
    /// Agents leave the subject empty.
    fn key(csr: &[u8], holder: Option<Holder>, node: &NodeName) -> Result<(Holder, CsrKey), EnrollError> {
        let asked = examine_request(csr).map_err(|Denial(_, message)| EnrollError::Invalid(message))?;
        match asked.subject {
            Some((_, other)) if other != *node => {
                Err(EnrollError::Invalid(format!("the request is for node {other}, not for {node}")))
            }
            Some((other, _)) if holder.is_some_and(|holder| holder != other) => {
                Err(EnrollError::Invalid(format!("the request is for the {other} of node {node}")))
            }
            Some((named, _)) => Ok((named, asked.key)),
            None => Ok((holder.unwrap_or_default(), asked.key)),
        }
    }
}

#[tonic::async_trait]
impl Enrollment for ForClient {
    async fn enroll(&self, request: Request<EnrollRequest>) -> Result<Response<EnrollResponse>, Status> {
        let message = request.into_inner();
        self.call("enroll", move |inner| inner.enroll(&message)).await
    }

    async fn renew(&self, request: Request<RenewRequest>) -> Result<Response<EnrollResponse>, Status> {
        let (message, certificate) = (request.into_inner(), self.certificate.clone());
        self.call("renew", move |inner| inner.renew(&message, certificate.as_ref())).await
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::mpsc;
    use std::time::SystemTime;

    use tokio::time::timeout;
    use tunnel_pki::{PrivateKey, create_csr, public_key_of_csr};
    use tunnel_runtime::files::DirectoryLock;

    use super::*;
    use crate::pki::{Ca, LOCK, Lifetimes};

    /// A service without revocations and inventory. It has the CA's state of now until the sender has another.
    fn service_of(ca: &Ca) -> (watch::Sender<Arc<CaState>>, EnrollService) {
        let (told, state) = watch::channel(Arc::new(ca.state().unwrap()));
        let standing = Standing::new(watch::channel(Arc::default()).1, watch::channel(None).1, true);
        let policy = EnrollPolicy { standing, tokens: true };
        (told, EnrollService::new(state, ca.state_dir(), policy, PkiMetrics::default()))
    }

    #[test]
    fn a_renewal_needs_its_record_only_without_a_cluster() {
        let directory = tempfile::tempdir().unwrap();
        let ca = Ca::load_or_create(&directory.path().join("server"), Lifetimes::default()).unwrap();
        let csr = create_csr(&PrivateKey::generate().unwrap()).unwrap();
        let (key, node) = (public_key_of_csr(&csr).unwrap(), "edge-1".parse::<NodeName>().unwrap());
        let certificate = ca.state().unwrap().issue_agent(&node, &key).unwrap().chain[0].clone();
        let renew = || {
            let (_told, service) = service_of(&ca);
            service.inner.renew(&RenewRequest { csr: csr.clone() }, Some(&certificate))
        };
        // Like a full disk, but it stops root too.
        fs::write(ca.state_dir().join("issued"), "").unwrap();
        let refused = renew().unwrap_err();
        assert!(matches!(refused, EnrollError::Internal(_)), "{refused}");
        // The directory becomes the copy of a Secret.
        let material = ca.material().unwrap();
        Ca::install(ca.state_dir(), Lifetimes::default(), &material, "kube-system/tunnel-server-ca").unwrap();
        assert_eq!(renew().unwrap().0, node);
    }

    #[test]
    fn a_certificate_that_ended_during_the_connection_is_not_renewed() {
        let directory = tempfile::tempdir().unwrap();
        let ca = Ca::load_or_create(&directory.path().join("ca"), Lifetimes::default()).unwrap();
        let (told, service) = service_of(&ca);
        let csr = create_csr(&PrivateKey::generate().unwrap()).unwrap();
        let (key, node) = (public_key_of_csr(&csr).unwrap(), "edge-1".parse::<NodeName>().unwrap());
        let issue = |life| {
            let state = ca.state().unwrap();
            let issued = state.issue_for((Holder::Agent, &node), &key, life, SystemTime::UNIX_EPOCH);
            issued.unwrap().chain[0].clone()
        };
        let renew = |certificate: Option<&CertificateDer<'static>>| {
            service.inner.renew(&RenewRequest { csr: csr.clone() }, certificate).map(|(node, _)| node)
        };
        let refused = |certificate: Option<&CertificateDer<'static>>, reason: &str| {
            let error = renew(certificate).unwrap_err();
            assert!(matches!(error, EnrollError::Certificate(_)), "{error}");
            assert!(error.to_string().contains(reason), "{error}");
        };
        let (valid, expired) = (issue(Duration::MAX), issue(Duration::ZERO));
        assert_eq!(renew(Some(&valid)).unwrap(), node);
        refused(Some(&expired), "the certificate expired");
        refused(None, "needs the present certificate");
        ca.introduce().unwrap();
        ca.activate().unwrap();
        told.send_replace(Arc::new(ca.state().unwrap()));
        assert_eq!(renew(Some(&valid)).unwrap(), node, "its root is still trusted");
        ca.retire(true).unwrap();
        told.send_replace(Arc::new(ca.state().unwrap()));
        refused(Some(&valid), "root is no longer trusted");
    }

    /// As when an operator's command waits for a disk while it has the lock.
    #[tokio::test]
    async fn an_enrolment_that_waits_for_another_process_delays_no_connection_and_no_renewal() {
        let directory = tempfile::tempdir().unwrap();
        let ca = Ca::load_or_create(&directory.path().join("server"), Lifetimes::default()).unwrap();
        let (_told, service) = service_of(&ca);
        let csr = create_csr(&PrivateKey::generate().unwrap()).unwrap();
        let (key, node) = (public_key_of_csr(&csr).unwrap(), "edge-1".parse::<NodeName>().unwrap());
        let certificate = ca.state().unwrap().issue_agent(&node, &key).unwrap().chain[0].clone();
        let tokens = TokenStore::new(ca.state_dir());
        let (token, _) =
            tokens.create((Holder::Agent, &node), Duration::from_secs(3600), Timestamp::now()).unwrap();
        let client = |certificate| ForClient {
            inner: service.inner.clone(),
            source: [10, 0, 0, 1].into(),
            certificate,
        };
        let (enrols, renews) = (client(None), client(Some(certificate)));

        let lock = DirectoryLock::acquire(ca.state_dir(), LOCK).unwrap();
        let (release, released) = mpsc::channel::<()>();
        // In time also if this thread waits for it.
        let other = std::thread::spawn(move || {
            let _ = released.recv_timeout(Duration::from_secs(10));
            drop(lock);
        });
        let request = EnrollRequest { node: "edge-1".to_owned(), token: token.expose(), csr: csr.clone() };
        let mut enrolling = enrols.enroll(Request::new(request));
        let early = timeout(Duration::from_millis(50), enrolling.as_mut()).await;
        assert!(early.is_err(), "two processes write at a time");
        renews.renew(Request::new(RenewRequest { csr })).await.unwrap();
        release.send(()).expect("this thread waited for the lock");
        enrolling.await.unwrap();
        other.join().unwrap();
    }
}
