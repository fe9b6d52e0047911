//! Certificates for agents, by CertificateSigningRequest (certificates.k8s.io/v1) of the signer
//! `postern.internal/agent`.
//!
//! The signer, in the words of Kubernetes' documentation of signers:
//! * trust: the certificate is followed by the roots that agents trust, the one that signs first;
//! * subjects: exactly `O=postern:agents` and `CN=postern:node:NODE`, and the requester must be that node: the user
//!   `system:node:NODE` in the group `system:nodes`, or the agents' ServiceAccount with a token that is bound to a pod
//!   on that node;
//! * extensions: none may be asked for; usages: `client auth`, and `digital signature` if one likes;
//! * life: that of all agents' certificates; `spec.expirationSeconds` can shorten it;
//! * everything else is denied with the reason. Other signers' requests are not even looked at.
//!
//! Requests that are done are removed an hour after they were made, others after a day, as Kubernetes itself does.

mod judge;

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestCondition, CertificateSigningRequestStatus,
};
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::runtime::controller::{Action, Config as ControllerConfig, applier, trigger_self};
use kube::runtime::{WatchStreamExt, reflector, watcher};
use kube::{Api, ResourceExt};
use tokio::sync::watch;
use tunnel_core::identity::pem_of_certificates;

pub use judge::{Approved, SIGNER, Verdict, judge};

use super::client::reason;
use super::watch::follow;
use super::{Cluster, MANAGER};
use crate::pki::{CaState, PkiError, PkiMetrics};

const APPROVED: &str = "Approved";
const DENIED: &str = "Denied";
const FAILED: &str = "Failed";
const TRUE: &str = "True";

/// How long a request is kept that is done.
const KEEP_DONE: Duration = Duration::from_secs(3600);
/// How long one is kept that is not.
const KEEP_PENDING: Duration = Duration::from_secs(86_400);
/// Requests that are worked on at once: a fleet that enrols together must not crowd the API server.
const CONCURRENT: u16 = 16;
/// Pause before a request is tried again that could not be answered.
const RETRY: Duration = Duration::from_secs(5);
/// How the enrolments by request are counted.
const CALL: &str = "csr";

/// Why a request could not be answered. It is tried again.
#[derive(Debug, thiserror::Error)]
enum CsrError {
    Api(#[from] kube::Error),
    Pki(#[from] PkiError),
}

impl fmt::Display for CsrError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Api(error) => f.write_str(&reason(error)),
            Self::Pki(error) => error.fmt(f),
        }
    }
}

/// Answers requests while this server leads, until the cluster's side stops. Losing the lead ends what is under way;
/// the next leader does it anew.
pub async fn run(cluster: Cluster, ca: watch::Receiver<Arc<CaState>>, metrics: PkiMetrics) {
    let mut leader = cluster.leader.clone();
    let stop = cluster.stop.clone();
    let api = Api::all(cluster.client.clone());
    let desk = Arc::new(Desk { cluster, api, ca, metrics, answered: Mutex::default() });
    loop {
        tokio::select! {
            leads = leader.wait_for(|leads| *leads) => if leads.is_err() { return },
            () = stop.cancelled() => return,
        }
        tokio::select! {
            () = work(desk.clone()) => {}
            lost = leader.wait_for(|leads| !*leads) => if lost.is_err() { return },
            () = stop.cancelled() => return,
        }
    }
}

async fn work(desk: Arc<Desk>) {
    desk.answered().clear();
    let ours = watcher::Config::default().fields(&format!("spec.signerName={SIGNER}"));
    let (store, writer) = reflector::store();
    let events = follow(desk.api.clone(), ours, "certificatesigningrequests", desk.cluster.health.clone());
    let changed = reflector(writer, events.map(Ok::<_, watcher::Error>)).touched_objects();
    let queue = trigger_self(changed, ());
    let config = ControllerConfig::default().concurrency(CONCURRENT);
    let done = applier(
        |csr, desk: Arc<Desk>| Box::pin(async move { desk.answer(csr.as_ref().clone()).await }),
        |csr: Arc<CertificateSigningRequest>, error, _| {
            let csr = csr.name_any();
            match error {
                // The watch says that the API server is away.
                CsrError::Api(error) if !matches!(error, kube::Error::Api(_)) => {
                    tracing::debug!(csr, %error, "a certificate request waits");
                }
                error => tracing::warn!(csr, %error, "a certificate request cannot be answered yet"),
            }
            Action::requeue(RETRY)
        },
        desk,
        store,
        queue,
        config,
    );
    done.for_each(|_| async {}).await;
}

/// What is to be done with a request now.
#[derive(Debug)]
enum Step {
    Approve(Approved),
    Sign(Approved),
    Deny {
        reason: &'static str,
        message: String,
    },
    /// Somebody else approved what must not be signed.
    Fail {
        reason: &'static str,
        message: String,
    },
    Remove,
    /// Nothing until then.
    Wait(Duration),
    Ignore,
}

/// `age`: since the request was made.
fn step(csr: &CertificateSigningRequest, age: Duration, namespace: &str, account: &str) -> Step {
    let verdict = judge(csr, namespace, account);
    if matches!(verdict, Verdict::NotOurs) || csr.metadata.deletion_timestamp.is_some() {
        return Step::Ignore;
    }
    let done = is_done(csr);
    let keep = if done { KEEP_DONE } else { KEEP_PENDING };
    if age >= keep {
        return Step::Remove;
    }
    match verdict {
        _ if done => Step::Wait(keep - age),
        Verdict::Approve(approved) if is(csr, APPROVED) => Step::Sign(approved),
        Verdict::Approve(approved) => Step::Approve(approved),
        Verdict::Deny { reason, message } if is(csr, APPROVED) => Step::Fail { reason, message },
        Verdict::Deny { reason, message } => Step::Deny { reason, message },
        Verdict::NotOurs => Step::Ignore,
    }
}

fn is_done(csr: &CertificateSigningRequest) -> bool {
    is(csr, DENIED) || is(csr, FAILED) || has_certificate(csr)
}

fn is(csr: &CertificateSigningRequest, condition: &str) -> bool {
    let conditions = csr.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    conditions.iter().any(|known| known.type_ == condition)
}

fn has_certificate(csr: &CertificateSigningRequest) -> bool {
    let certificate = csr.status.as_ref().and_then(|status| status.certificate.as_ref());
    certificate.is_some_and(|certificate| !certificate.0.is_empty())
}

/// The request with one more condition; the API server lets none go.
fn with_condition(
    mut csr: CertificateSigningRequest,
    condition: &str,
    reason: &str,
    message: String,
) -> CertificateSigningRequest {
    let status = csr.status.get_or_insert_with(CertificateSigningRequestStatus::default);
    status.conditions.get_or_insert_default().push(CertificateSigningRequestCondition {
        type_: condition.to_owned(),
        status: TRUE.to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message),
        ..CertificateSigningRequestCondition::default()
    });
    csr
}

struct Desk {
    cluster: Cluster,
    api: Api<CertificateSigningRequest>,
    ca: watch::Receiver<Arc<CaState>>,
    metrics: PkiMetrics,
    /// By uid, those whose answer has not come back by the watch yet.
    answered: Mutex<HashSet<String>>,
}

impl Desk {
    /// Every write carries the resourceVersion of what was judged: a request that changed meanwhile is judged anew.
    async fn answer(&self, csr: CertificateSigningRequest) -> Result<Action, CsrError> {
        let uid = csr.uid().unwrap_or_default();
        if self.answered().remove(&uid) && !is_done(&csr) {
            // Older than our answer.
            return Ok(Action::requeue(RETRY));
        }
        let done = self.advance(csr).await;
        match done {
            // Both mean that the watch brings something newer.
            Err(CsrError::Api(kube::Error::Api(status))) if [404, 409].contains(&status.code) => {
                Ok(Action::requeue(RETRY))
            }
            other => other,
        }
    }

    fn answered(&self) -> MutexGuard<'_, HashSet<String>> {
        self.answered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn advance(&self, mut csr: CertificateSigningRequest) -> Result<Action, CsrError> {
        let name = csr.name_any();
        let user = csr.spec.username.clone().unwrap_or_default();
        let uid = csr.uid().unwrap_or_default();
        let write = PostParams { field_manager: Some(MANAGER.to_owned()), ..PostParams::default() };
        loop {
            let (namespace, account) = (&self.cluster.namespace, &self.cluster.names.agent_service_account);
            match step(&csr, age(&csr), namespace, account) {
                Step::Approve(approved) => {
                    let message = format!("the requester is node {}", approved.node);
                    let approved = with_condition(csr, APPROVED, "RequesterIsNode", message);
                    csr = self.api.replace_subresource("approval", &name, &write, &approved).await?;
                }
                Step::Sign(approved) => {
                    let life = self.sign(&mut csr, &approved)?;
                    csr = self.api.replace_status(&name, &write, &csr).await?;
                    self.answered().insert(uid.clone());
                    self.metrics.count(CALL, "issued");
                    tracing::info!(call = CALL, node = %approved.node, csr = name, user, life_s = life.as_secs(), "certificate issued");
                }
                Step::Deny { reason, message } => {
                    tracing::warn!(
                        call = CALL,
                        csr = name,
                        user,
                        outcome = reason,
                        reason = message,
                        "enrolment refused"
                    );
                    let denied = with_condition(csr, DENIED, reason, message);
                    csr = self.api.replace_subresource("approval", &name, &write, &denied).await?;
                    self.answered().insert(uid.clone());
                    self.metrics.count(CALL, "denied");
                }
                Step::Fail { reason, message } => {
                    tracing::warn!(
                        call = CALL,
                        csr = name,
                        user,
                        outcome = reason,
                        reason = message,
                        "somebody approved a request that must not be signed; marking it as failed"
                    );
                    let failed = with_condition(csr, FAILED, reason, message);
                    csr = self.api.replace_status(&name, &write, &failed).await?;
                    self.answered().insert(uid.clone());
                    self.metrics.count(CALL, "failed");
                }
                Step::Remove => {
                    let preconditions =
                        Preconditions { uid: csr.uid(), resource_version: csr.resource_version() };
                    let delete = DeleteParams::default().preconditions(preconditions);
                    self.api.delete(&name, &delete).await?;
                    tracing::debug!(csr = name, "removed an old certificate request");
                    return Ok(Action::await_change());
                }
                Step::Wait(time) => return Ok(Action::requeue(time)),
                Step::Ignore => return Ok(Action::await_change()),
            }
        }
    }

    /// Puts the certificate into the request, and returns its life.
    fn sign(&self, csr: &mut CertificateSigningRequest, approved: &Approved) -> Result<Duration, PkiError> {
        let ca = Arc::clone(&self.ca.borrow());
        let life = approved.life.unwrap_or(Duration::MAX);
        let issued = ca.issue_agent_for(&approved.node, &approved.key, life)?;
        let pem = pem_of_certificates(&issued.chain) + &ca.bundle().to_pem();
        let status = csr.status.get_or_insert_with(CertificateSigningRequestStatus::default);
        status.certificate = Some(ByteString(pem.into_bytes()));
        Ok(issued.not_after.duration_since(std::time::SystemTime::now()).unwrap_or_default())
    }
}

/// Zero for one that comes from the future: clocks differ.
fn age(csr: &CertificateSigningRequest) -> Duration {
    let made = csr.metadata.creation_timestamp.as_ref();
    let age = made.and_then(|made| Duration::try_from(jiff::Timestamp::now().duration_since(made.0)).ok());
    age.unwrap_or_default()
}

#[cfg(test)]
mod tests;
