//! Which of the servers writes: the holder of a Lease.
//!
//! Nothing but writing depends on it. A server that loses the Lease, or the API server, carries on with everything else
//! and tries again for ever.

pub mod writer;

use std::pin::pin;
use std::time::Duration;

use http::{Method, Request};
use kube::client::Body;
use kube_lease_manager::{LeaseCreateMode, LeaseManager, LeaseManagerError, LeaseParams};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use writer::{Complaint, REQUEST, Retry};

/// How long the Lease is valid after it was renewed, in seconds.
const LEASE: u64 = 15;
/// How long before its end it is renewed, in seconds: every two seconds, as other controllers do.
const RENEW_BEFORE_END: u64 = LEASE - 2;
/// A holder that has not renewed for so long stops to write: another one may take the Lease soon.
const RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// How often the Lease of another holder is looked at: it may have been given back before its end.
const LOOK: Duration = Duration::from_secs(3);
/// How long a stop may be held up by giving the Lease back.
const RELEASE: Duration = Duration::from_secs(1);

/// Takes part in the election for the Lease `lease` under the name `identity`, until `stop`; the Lease is made if there
/// is none. Needs a tokio runtime.
///
/// The receiver has whether this server may write. It is closed when the Lease has been given back after `stop`: see
/// [`released`].
pub fn start(
    client: kube::Client,
    namespace: &str,
    lease: &str,
    identity: &str,
    stop: CancellationToken,
) -> watch::Receiver<bool> {
    let (leading, receiver) = watch::channel(false);
    let (renewed, renewals) = watch::channel(None);
    let election = Election {
        client: observed(client, renewed),
        namespace: namespace.to_owned(),
        lease: lease.to_owned(),
        identity: identity.to_owned(),
        holds: false,
        renewals,
        leading,
        complaint: Complaint::new("the election of the server that writes to the cluster"),
        retry: Retry::default(),
        over: None,
    };
    tokio::spawn(election.run(stop));
    receiver
}

/// Waits until the Lease has been given back, which takes about a second at most after the stop.
pub async fn released(mut leader: watch::Receiver<bool>) {
    while leader.changed().await.is_ok() {}
}

/// The client for the Lease: its requests end in time, and `renewed` is when the last one that was accepted began. The
/// library tells of gains and losses, but not that it could not renew.
fn observed(client: kube::Client, renewed: watch::Sender<Option<Instant>>) -> kube::Client {
    let namespace = client.default_namespace().to_owned();
    let service = tower::service_fn(move |request: Request<Body>| {
        let (client, renewed) = (client.clone(), renewed.clone());
        async move {
            let began = Instant::now();
            let writes = request.method() == Method::PATCH;
            let late = || kube::Error::Service(format!("no answer within {} s", REQUEST.as_secs()).into());
            let response = timeout(REQUEST, client.send(request)).await.map_err(|_| late())??;
            if writes && response.status().is_success() {
                renewed.send_replace(Some(began));
            }
            Ok::<_, kube::Error>(response)
        }
    });
    kube::Client::new(service, namespace)
}

/// Whether this server holds the Lease, when that has changed.
async fn next(manager: &LeaseManager, pause: Duration) -> Result<bool, LeaseManagerError> {
    tokio::time::sleep(pause).await;
    manager.changed().await
}

fn is_missing(error: &LeaseManagerError) -> bool {
    match error {
        LeaseManagerError::NonexistentLease(_) => true,
        LeaseManagerError::KubeError(kube::Error::Api(status)) => status.code == 404,
        _ => false,
    }
}

struct Election {
    client: kube::Client,
    namespace: String,
    lease: String,
    identity: String,
    /// Whether this server holds the Lease as far as it knows.
    holds: bool,
    renewals: watch::Receiver<Option<Instant>>,
    leading: watch::Sender<bool>,
    complaint: Complaint,
    retry: Retry,
    /// When an error that has not come again is over: who waits for another server's Lease to end writes nothing.
    over: Option<Instant>,
}

impl Election {
    async fn run(mut self, stop: CancellationToken) {
        loop {
            let manager = match stop.run_until_cancelled(self.manager()).await {
                None => return,
                Some(Ok(manager)) => manager,
                Some(Err(error)) => {
                    let delay = self.failed(&error);
                    if stop.run_until_cancelled(tokio::time::sleep(delay)).await.is_none() {
                        return;
                    }
                    continue;
                }
            };
            if self.follow(&manager, &stop).await.is_none() {
                self.leading.send_replace(false);
                if self.holds {
                    match timeout(RELEASE, manager.release()).await {
                        Ok(Ok(())) => tracing::info!(lease = self.lease, "gave the Lease back"),
                        Ok(Err(error)) => {
                            tracing::debug!(%error, "the Lease was not given back; it ends by itself");
                        }
                        Err(_) => tracing::debug!("the Lease was not given back in time; it ends by itself"),
                    }
                }
                return;
            }
        }
    }

    async fn manager(&self) -> Result<LeaseManager, LeaseManagerError> {
        LeaseManager::new(
            self.client.clone(),
            &self.lease,
            &self.namespace,
            LeaseParams::new(&self.identity, LEASE, RENEW_BEFORE_END),
            LeaseCreateMode::AutoCreate,
        )
        .await
    }

    /// Until the stop (None), or until the Lease has to be looked at afresh: it was deleted, or another one held it for a
    /// while. The library itself looks again only when the Lease ends.
    async fn follow(&mut self, manager: &LeaseManager, stop: &CancellationToken) -> Option<()> {
        // Kept until it is done: one that is dropped between its requests does not know what it wrote.
        let mut changed = pin!(next(manager, Duration::ZERO));
        let look = Instant::now() + LOOK;
        loop {
            let deadline = self.renewals.borrow_and_update().map(|renewed| renewed + RENEW_DEADLINE);
            let in_time = deadline.filter(|deadline| *deadline > Instant::now());
            self.publish(self.holds && in_time.is_some());
            tokio::select! {
                () = stop.cancelled() => return None,
                () = sleep_until(look), if !self.holds => return Some(()),
                // Only looks at the time again.
                () = sleep_until(in_time.unwrap_or_else(Instant::now)), if in_time.is_some() => {}
                () = sleep_until(self.over.unwrap_or_else(Instant::now)), if self.over.is_some() => self.works(),
                renewed = self.renewals.changed() => if renewed.is_ok() { self.works() },
                result = &mut changed => {
                    let pause = match result {
                        Ok(holds) => {
                            self.holds = holds;
                            Duration::ZERO
                        }
                        Err(error) if is_missing(&error) => {
                            self.holds = false;
                            self.publish(false);
                            return Some(());
                        }
                        Err(error) => self.failed(&error),
                    };
                    changed.set(next(manager, pause));
                }
            }
        }
    }

    fn publish(&self, leads: bool) {
        let changed = self.leading.send_if_modified(|leading| std::mem::replace(leading, leads) != leads);
        if changed && leads {
            tracing::info!(lease = self.lease, identity = self.identity, "this server writes to the cluster");
        } else if changed {
            tracing::info!(lease = self.lease, "this server no longer writes to the cluster");
        }
    }

    fn failed(&mut self, error: &LeaseManagerError) -> Duration {
        match error {
            LeaseManagerError::KubeError(error) => self.complaint.error(&super::client::reason(error)),
            other => self.complaint.error(other),
        };
        let pause = self.retry.next_delay().min(RENEW_DEADLINE);
        self.over = Some(Instant::now() + pause + RENEW_DEADLINE);
        pause
    }

    fn works(&mut self) {
        self.complaint.fine();
        self.retry.reset();
        self.over = None;
    }
}
