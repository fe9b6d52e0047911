//! Certificates for agents and redirectors, requested by CertificateSigningRequest (certificates.k8s.io/v1) from the
//! signer `postern.internal/agent`.
//!
//! The signer, in the terms of Kubernetes' documentation of signers:
//! * trust distribution: the certificate is followed by the roots that agents trust, the signing one first;
//! * permitted subjects: exactly `O=postern:agents` and `CN=postern:node:NODE`, and the requester must be that node:
//!   the user `system:node:NODE` in the group `system:nodes`, or the agents' ServiceAccount with a token bound to a pod
//!   on that node; or exactly `O=postern:redirectors` and `CN=postern:redirector:NODE`, only for the redirectors'
//!   ServiceAccount with such a token;
//! * extensions: none may be requested; usages: `client auth`, and optionally `digital signature`;
//! * lifetime: that of all agents' certificates; `spec.expirationSeconds` can shorten it;
//! * a revoked node (`tunnel-server agent revoke`) gets no certificate until it is readmitted, an edge node none of a redirector;
//! * everything else is denied with the reason. Requests for other signers are ignored.
//!
//! Requests are not deleted here: kube-controller-manager deletes those of every signer, finished ones after an hour,
//! others after a day.

mod judge;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::StreamExt;
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestCondition, CertificateSigningRequestStatus,
};
use kube::runtime::controller::{Action, Config as ControllerConfig, applier, trigger_self};
use kube::runtime::{WatchStreamExt, reflector, watcher};
use kube::{Api, ResourceExt};
use parking_lot::Mutex;
use tokio::sync::watch;
use tunnel_pki::pem_of_certificates;
use tunnel_runtime::backoff::jittered;

use judge::{Accounts, Approved, judge};
use tunnel_kube::{SIGNER, post, request};

use crate::kube::context::{KubeContext, WRITE_DEADLINE, becomes};
use crate::kube::error::ClusterError;
use crate::pki::{CaState, Denial, PkiError, PkiMetrics, Refusal, Standing};

const APPROVED: &str = "Approved";
const DENIED: &str = "Denied";
const FAILED: &str = "Failed";
const TRUE: &str = "True";

/// Maximum number of requests in work: a fleet that enrols at once must not overload the API server.
const CONCURRENT: u16 = 16;
/// Delay before a request is looked at again whose newer state the watch should have delivered.
const RETRY: Duration = Duration::from_secs(5);
/// Delays before a request that could not be answered is tried again, at least and at most.
const FAILED_RETRY: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];
/// Label of enrolments by CertificateSigningRequest in metrics and logs.
const CALL: &str = "csr";

/// Answers requests while this server leads, until the stop signal. Losing the lead ends work in progress; the next
/// leader starts it again.
pub async fn run(
    context: KubeContext,
    ca: watch::Receiver<Arc<CaState>>,
    standing: Standing,
    metrics: PkiMetrics,
) {
    let mut leader = context.leader.clone();
    let stop = context.stop.clone();
    let api = Api::all(context.client.clone());
    let (answered, failures) = Default::default();
    let reconciler = Arc::new(CsrReconciler { context, api, ca, standing, metrics, answered, failures });
    let leading = async {
        loop {
            becomes(&mut leader, true).await;
            tokio::select! {
                () = work(reconciler.clone()) => {}
                lost = leader.wait_for(|leads| !leads) => if lost.is_err() { return },
            }
        }
    };
    stop.run_until_cancelled(leading).await;
}

async fn work(reconciler: Arc<CsrReconciler>) {
    reconciler.answered.lock().clear();
    reconciler.failures.lock().clear();
    let ours = watcher::Config::default().fields(&format!("spec.signerName={SIGNER}"));
    let (store, writer) = reflector::store();
    let health = &reconciler.context.health;
    let events = health.follow(reconciler.api.clone(), ours, "certificatesigningrequests");
    let shared = reconciler.clone();
    let events = events.inspect(move |event| forget(&mut shared.answered.lock(), event));
    let changed = reflector(writer, events.map(Ok::<_, watcher::Error>)).touched_objects();
    let queue = trigger_self(changed, ());
    let config = ControllerConfig::default().concurrency(CONCURRENT);
    let done = applier(
        |csr, reconciler: Arc<CsrReconciler>| {
            Box::pin(async move { reconciler.answer(csr.as_ref().clone()).await })
        },
        |csr: Arc<CertificateSigningRequest>, error, reconciler: Arc<CsrReconciler>| {
            reconciler.failed(&csr, error);
            Action::requeue(retry_after(&csr, SystemTime::now()))
        },
        reconciler,
        store,
        queue,
        config,
    );
    done.for_each(|_| async {}).await;
}

/// Drops what will not come back through the watch: the answer to a request that was deleted, and those that a list has.
fn forget(answered: &mut HashSet<String>, event: &watcher::Event<CertificateSigningRequest>) {
    match event {
        watcher::Event::Delete(csr) => {
            answered.remove(&csr.uid().unwrap_or_default());
        }
        watcher::Event::Init => answered.clear(),
        _ => {}
    }
}

/// Returns the delay after a failure: in proportion to the age of the request, so that delays grow, and later requests
/// do not wait for it.
fn retry_after(csr: &CertificateSigningRequest, now: SystemTime) -> Duration {
    let created = csr.creation_timestamp().map(|time| SystemTime::from(time.0));
    let age = created.and_then(|created| now.duration_since(created).ok()).unwrap_or_default();
    let [least, most] = FAILED_RETRY;
    jittered((age / 2).clamp(least, most), 0.5)
}

#[derive(Debug)]
enum Step {
    Approve(Approved),
    Sign(Approved),
    Refuse {
        /// True if somebody else has approved it, although it must not be signed.
        approved: bool,
        reason: &'static str,
        message: String,
    },
    /// Already answered, or for another signer.
    Ignore,
}

fn step(csr: &CertificateSigningRequest, accounts: Accounts<'_>, standing: &Standing) -> Step {
    if csr.spec.signer_name != SIGNER || is_done(csr) || csr.metadata.deletion_timestamp.is_some() {
        return Step::Ignore;
    }
    let judged =
        judge(csr, accounts).and_then(|asked| match standing.may_enrol((asked.holder, &asked.node)) {
            Ok(()) => Ok(asked),
            Err(refusal) => {
                let reason = if matches!(refusal, Refusal::Edge(_)) { "EdgeNode" } else { "NodeRevoked" };
                Err(Denial(reason, refusal.to_string()))
            }
        });
    let approved = is(csr, APPROVED);
    match judged {
        Ok(asked) if approved => Step::Sign(asked),
        Ok(asked) => Step::Approve(asked),
        Err(Denial(reason, message)) => Step::Refuse { approved, reason, message },
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

/// Adds a condition to the request; the API server does not allow to remove any.
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

struct CsrReconciler {
    context: KubeContext,
    api: Api<CertificateSigningRequest>,
    ca: watch::Receiver<Arc<CaState>>,
    standing: Standing,
    metrics: PkiMetrics,
    /// UIDs of requests whose answer has not come back through the watch yet.
    answered: Mutex<HashSet<String>>,
    /// Kinds of failures, each logged once until a request is answered: a missing right fails all that a fleet has made.
    failures: Mutex<HashSet<String>>,
}

impl CsrReconciler {
    /// Answers a request. Every write has the resourceVersion that was judged, so a changed request is judged again.
    async fn answer(&self, csr: CertificateSigningRequest) -> Result<Action, ClusterError> {
        let uid = csr.uid().unwrap_or_default();
        if self.answered.lock().remove(&uid) && !is_done(&csr) {
            // This version is older than our answer.
            return Ok(Action::requeue(RETRY));
        }
        let done = self.advance(csr).await;
        match done {
            // In both cases the watch will deliver a newer state.
            Err(error) if error.is_conflict() || error.is_not_found() => Ok(Action::requeue(RETRY)),
            other => other,
        }
    }

    fn failed(&self, csr: &CertificateSigningRequest, error: &ClusterError) {
        let csr = csr.name_any();
        // The text names the request, except that of an error of this server's CA.
        let kind = match error {
            // The watch reports an unavailable API server.
            ClusterError::Request(error) if error.code.is_none() => None,
            ClusterError::Request(error) => error.code.map(|code| format!("{} {code}", error.action)),
            error => Some(error.to_string()),
        };
        if kind.is_some_and(|kind| self.failures.lock().insert(kind)) {
            tracing::warn!(csr, %error, "failed to answer CertificateSigningRequests, retrying");
        } else {
            tracing::debug!(csr, %error, "failed to answer a CertificateSigningRequest, retrying");
        }
    }

    fn answered(&self, uid: String, label: &'static str) {
        self.answered.lock().insert(uid);
        self.failures.lock().clear();
        self.metrics.count(CALL, label);
    }

    async fn advance(&self, mut csr: CertificateSigningRequest) -> Result<Action, ClusterError> {
        let name = csr.name_any();
        let user = csr.spec.username.clone().unwrap_or_default();
        let uid = csr.uid().unwrap_or_default();
        let names = &self.context.names;
        let accounts = Accounts {
            namespace: &self.context.namespace,
            agent: &names.agent_service_account,
            redirector: &names.redirector_service_account,
        };
        loop {
            match step(&csr, accounts, &self.standing) {
                Step::Approve(approved) => {
                    let message =
                        format!("the requester is the {} of node {}", approved.holder, approved.node);
                    let approved = with_condition(csr, APPROVED, "RequesterIsNode", message);
                    csr = self.write("approving CertificateSigningRequest", "approval", &approved).await?;
                }
                Step::Sign(approved) => {
                    let life = self.sign(&mut csr, &approved)?;
                    csr = self.write("signing CertificateSigningRequest", "status", &csr).await?;
                    self.answered(uid.clone(), "issued");
                    tracing::info!(call = CALL, holder = %approved.holder, node = %approved.node, csr = name, user, life_s = life.as_secs(), "certificate issued");
                }
                Step::Refuse { approved, reason, message } => {
                    // An approval cannot be denied any more.
                    let (condition, action, subresource, label) = match approved {
                        true => (FAILED, "failing CertificateSigningRequest", "status", "failed"),
                        false => (DENIED, "denying CertificateSigningRequest", "approval", "denied"),
                    };
                    let refused = with_condition(csr, condition, reason, message.clone());
                    csr = self.write(action, subresource, &refused).await?;
                    self.answered(uid.clone(), label);
                    tracing::warn!(
                        call = CALL,
                        csr = name,
                        user,
                        approved,
                        outcome = reason,
                        reason = message,
                        "enrolment refused"
                    );
                }
                Step::Ignore => return Ok(Action::await_change()),
            }
        }
    }

    async fn write(
        &self,
        action: &'static str,
        subresource: &str,
        csr: &CertificateSigningRequest,
    ) -> Result<CertificateSigningRequest, ClusterError> {
        let (params, name) = (post(), csr.name_any());
        let replace = self.api.replace_subresource(subresource, &name, &params, csr);
        Ok(request(WRITE_DEADLINE, action, &name, replace).await?)
    }

    /// Puts the certificate into the request and returns its lifetime.
    fn sign(&self, csr: &mut CertificateSigningRequest, approved: &Approved) -> Result<Duration, PkiError> {
        let ca = Arc::clone(&self.ca.borrow());
        let life = approved.life.unwrap_or(Duration::MAX);
        let issued = ca.issue_for(
            (approved.holder, &approved.node),
            &approved.key,
            life,
            self.standing.issue_after(&approved.node),
        )?;
        let pem = pem_of_certificates(&issued.chain) + &ca.bundle().to_pem();
        let status = csr.status.get_or_insert_with(CertificateSigningRequestStatus::default);
        status.certificate = Some(ByteString(pem.into_bytes()));
        Ok(issued.not_after.duration_since(SystemTime::now()).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests;
