//! Leader election: the holder of a Lease writes to the cluster.
//!
//! Only writing depends on it. A server that loses the Lease, or the API server, continues everything else and keeps
//! trying. Clocks of different servers are never compared: a Lease has expired when this server has seen it unchanged
//! for its whole duration.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::Api;
use kube::api::Patch;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tunnel_kube::{Attempts, RequestError, merge, post, request};

use crate::kube::context::{WRITE_DEADLINE, becomes};

/// Lease duration after a renewal, in seconds.
const LEASE_SECONDS: i32 = 15;
/// Interval between renewals, the same as in other controllers.
const RENEW: Duration = Duration::from_secs(2);
/// A holder that has not renewed for this long stops writing, because another server may soon take the Lease.
const RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// Interval at which another holder's Lease is checked, because it may be released early.
const CHECK: Duration = Duration::from_secs(3);
/// Maximum time for releasing the Lease at a stop.
const RELEASE: Duration = Duration::from_secs(1);

/// Takes part in the election for the Lease `lease` as `identity` while `eligible`, until `stop`; creates the Lease if
/// it is missing. Needs a tokio runtime.
///
/// The receiver is true while this server may write. It is closed once the Lease was released after `stop`; see
/// [`released`].
pub fn start(
    client: kube::Client,
    namespace: &str,
    lease: &str,
    identity: &str,
    eligible: watch::Receiver<bool>,
    stop: CancellationToken,
) -> watch::Receiver<bool> {
    let (leading, receiver) = watch::channel(false);
    let api = Api::namespaced(client, namespace);
    let (lease, identity) = (lease.to_owned(), identity.to_owned());
    let candidate = Candidate { api, lease, identity, may_hold: AtomicBool::new(false) };
    tokio::spawn(candidate.run(leading, eligible, stop));
    receiver
}

/// Waits until the Lease was released, about a second after the stop at most.
pub async fn released(mut leader: watch::Receiver<bool>) {
    while leader.changed().await.is_ok() {}
}

struct Candidate {
    api: Api<Lease>,
    lease: String,
    identity: String,
    /// True from the beginning of a write that takes the Lease, until it is known to be another server's.
    may_hold: AtomicBool,
}

/// Another server's Lease, and the time since which it is unchanged.
struct Seen {
    lease: LeaseSpec,
    since: Instant,
}

impl Candidate {
    async fn run(
        self,
        leading: watch::Sender<bool>,
        mut eligible: watch::Receiver<bool>,
        stop: CancellationToken,
    ) {
        while stop.run_until_cancelled(becomes(&mut eligible, true)).await.is_some() {
            let over = async {
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = becomes(&mut eligible, false) => {}
                }
            };
            self.campaign(&leading, over).await;
        }
    }

    /// Campaigns until `over`, then releases the Lease.
    async fn campaign(&self, leading: &watch::Sender<bool>, over: impl Future<Output = ()>) {
        let mut over = pin!(over);
        let mut attempts = Attempts::new("the election of the server that writes to the cluster");
        let mut expires: Option<Instant> = None;
        let mut seen: Option<Seen> = None;
        let mut next = Instant::now();
        loop {
            let pause = sleep_until(next);
            let attempt = async {
                pause.await;
                (Instant::now(), self.acquire_or_renew(&mut seen).await)
            };
            let mut attempt = pin!(attempt);
            let (began, outcome) = loop {
                tokio::select! {
                    () = &mut over => {
                        self.publish(leading, false);
                        if self.may_hold.load(Ordering::Relaxed) {
                            // A request that is on its way could take the Lease after it was given back.
                            if next <= Instant::now() {
                                let _ = timeout(RELEASE / 2, attempt).await;
                            }
                            self.give_back().await;
                        }
                        return;
                    }
                    () = sleep_until(expires.unwrap_or_else(Instant::now)), if expires.is_some() => {
                        expires = None;
                        self.publish(leading, false);
                    }
                    outcome = &mut attempt => break outcome,
                }
            };
            match outcome {
                Ok(held) => {
                    attempts.succeeded();
                    expires = held.then(|| began + RENEW_DEADLINE);
                    self.publish(leading, held);
                    next = if held { began + RENEW } else { Instant::now() + CHECK };
                }
                Err(error) => {
                    // After a conflict another server was first.
                    if !error.is_conflict() {
                        attempts.report(&error);
                    }
                    next = Instant::now() + attempts.next_delay().min(RENEW_DEADLINE);
                }
            }
        }
    }

    /// Returns true if this server holds the Lease now. Every write has the version that was read, so that only one of
    /// two competing servers gets it.
    async fn acquire_or_renew(&self, seen: &mut Option<Seen>) -> Result<bool, RequestError> {
        let now = Timestamp::now();
        let read = self.api.get_opt(&self.lease);
        let Some(lease) = request(WRITE_DEADLINE, "reading Lease", &self.lease, read).await? else {
            let lease = Lease {
                metadata: ObjectMeta { name: Some(self.lease.clone()), ..ObjectMeta::default() },
                spec: Some(LeaseSpec {
                    holder_identity: Some(self.identity.clone()),
                    lease_duration_seconds: Some(LEASE_SECONDS),
                    acquire_time: Some(MicroTime(now)),
                    renew_time: Some(MicroTime(now)),
                    lease_transitions: Some(1),
                    ..LeaseSpec::default()
                }),
            };
            let params = post();
            let create = self.api.create(&params, &lease);
            self.may_hold.store(true, Ordering::Relaxed);
            request(WRITE_DEADLINE, "creating Lease", &self.lease, create).await?;
            return Ok(true);
        };
        let known = lease.spec.unwrap_or_default();
        let version = lease.metadata.resource_version;
        let mut spec = json!({"renewTime": MicroTime(now), "leaseDurationSeconds": LEASE_SECONDS});
        if known.holder_identity.as_ref() != Some(&self.identity) {
            if known.holder_identity.is_some() && !has_ended(&known, seen) {
                self.may_hold.store(false, Ordering::Relaxed);
                return Ok(false);
            }
            spec["holderIdentity"] = json!(self.identity);
            spec["acquireTime"] = json!(MicroTime(now));
            spec["leaseTransitions"] = json!(known.lease_transitions.unwrap_or(0) + 1);
        }
        self.may_hold.store(true, Ordering::Relaxed);
        self.write(version, &spec).await?;
        Ok(true)
    }

    async fn write(&self, version: Option<String>, spec: &Value) -> Result<(), RequestError> {
        let patch = Patch::Merge(json!({"metadata": {"resourceVersion": version}, "spec": spec}));
        let params = merge();
        let patch = self.api.patch(&self.lease, &params, &patch);
        request(WRITE_DEADLINE, "changing Lease", &self.lease, patch).await?;
        Ok(())
    }

    async fn give_back(&self) {
        let released = json!({
            "holderIdentity": null, "acquireTime": null, "renewTime": null, "leaseDurationSeconds": null,
        });
        let work = async {
            loop {
                let read = self.api.get(&self.lease);
                let lease = request(WRITE_DEADLINE, "reading Lease", &self.lease, read).await?;
                let holder = lease.spec.and_then(|spec| spec.holder_identity);
                if holder.as_ref() != Some(&self.identity) {
                    return Ok::<_, RequestError>(false);
                }
                match self.write(lease.metadata.resource_version, &released).await {
                    // A renewal still in flight came first.
                    Err(error) if error.is_conflict() => {}
                    done => return done.map(|()| true),
                }
            }
        };
        match timeout(RELEASE, work).await {
            Ok(Ok(gave)) => {
                self.may_hold.store(false, Ordering::Relaxed);
                if gave {
                    tracing::info!(lease = self.lease, "released the Lease");
                }
            }
            Ok(Err(error)) => tracing::debug!(%error, "failed to release the Lease"),
            Err(_) => tracing::debug!(error = "timed out", "failed to release the Lease"),
        }
    }

    fn publish(&self, leading: &watch::Sender<bool>, leads: bool) {
        let changed = leading.send_if_modified(|leading| std::mem::replace(leading, leads) != leads);
        if changed && leads {
            tracing::info!(lease = self.lease, identity = self.identity, "started leading");
        } else if changed {
            tracing::info!(lease = self.lease, "stopped leading");
        }
    }
}

/// Returns true if the holder has not renewed the Lease for its whole duration. A Lease without a duration counts as
/// expired.
fn has_ended(lease: &LeaseSpec, seen: &mut Option<Seen>) -> bool {
    let valid = lease.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok()).unwrap_or(0);
    let unchanged = seen.take().filter(|seen| seen.lease == *lease);
    let seen = seen.insert(unchanged.unwrap_or_else(|| Seen { lease: lease.clone(), since: Instant::now() }));
    seen.since.elapsed() >= Duration::from_secs(valid)
}
