//! While the redirect runs: verify and mend it, and follow this host's addresses.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use rtnetlink::MulticastGroup;
use tokio::time::{MissedTickBehavior, interval_at, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::{Redirect, RedirectError};

/// Between two verifications.
const PERIOD: Duration = Duration::from_secs(30);
/// Address changes come in bursts (an interface goes down with all of its addresses).
const SETTLE: Duration = Duration::from_millis(20);
/// Until a broken netlink subscription is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// State of the redirect as of its last verification.
#[derive(Clone, Debug, Default)]
pub struct Health {
    /// What does not work; none: all well.
    pub problem: Option<String>,
    /// Why the kernel does not hold the routes of the moment; none: it does.
    pub stale: Option<String>,
    /// When it last worked.
    pub verified: Option<Instant>,
    /// How often something lost had to be restored.
    pub mended: u64,
}

impl Redirect {
    /// State as of the last verification.
    pub fn health(&self) -> Health {
        self.health.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn note(&self, change: impl FnOnce(&mut Health)) {
        change(&mut self.health.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Verifies every 30 s, restores what got lost, follows this host's addresses, and passes on the
    /// programs' log, until `cancel`.
    pub async fn watch(self: Arc<Self>, cancel: CancellationToken) {
        let logger = self.lock().logger.take();
        let log = async {
            if let Some(logger) = logger {
                logger.run().await;
            }
            // Without a log there is still the rest to do.
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = cancel.cancelled() => {}
            () = self.verify_periodically() => {}
            () = self.follow_addresses() => {}
            () = log => {}
        }
    }

    async fn verify_periodically(self: &Arc<Self>) {
        let mut ticks = interval_at(tokio::time::Instant::now() + PERIOD, PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        self.note(|health| health.verified = Some(Instant::now()));
        loop {
            ticks.tick().await;
            self.verify_and_mend().await;
        }
    }

    /// One round of [`watch`](Self::watch): restores what is missing, then verifies. The outcome is in
    /// [`health`](Self::health) and in the log.
    pub async fn verify_and_mend(self: &Arc<Self>) {
        // Mending first: a look at what is attached costs less than a self-test that must time out.
        let mended = self.mend().await;
        let result = match mended {
            Ok(lost) => {
                if !lost.is_empty() {
                    tracing::warn!(lost = lost.join(", "), "restored what the redirect had lost");
                    self.note(|health| health.mended += 1);
                }
                self.verify().await
            }
            Err(error) => Err(error),
        };
        let before = self.health().problem;
        match result {
            Ok(()) => {
                if before.is_some() {
                    tracing::info!("the redirect works again");
                }
                self.note(|health| {
                    health.problem = None;
                    health.verified = Some(Instant::now());
                });
            }
            Err(RedirectError::Stopped) => {}
            Err(error) => {
                let problem = error.to_string();
                if before.as_ref() != Some(&problem) {
                    tracing::error!("{problem}");
                }
                self.note(|health| health.problem = Some(problem));
            }
        }
    }

    async fn follow_addresses(self: &Arc<Self>) {
        loop {
            match self.follow_once().await {
                Err(RedirectError::Stopped) => return,
                Err(error) => tracing::warn!(%error, "cannot follow this host's addresses; trying again"),
                Ok(()) => {}
            }
            sleep(RETRY).await;
        }
    }

    /// Subscribes, then reads all addresses on each change and every 30 s (a burst may overflow the socket).
    async fn follow_once(self: &Arc<Self>) -> Result<(), RedirectError> {
        let groups = [MulticastGroup::Ipv4Ifaddr, MulticastGroup::Ipv6Ifaddr];
        let (connection, _handle, mut messages) =
            rtnetlink::new_multicast_connection(&groups).map_err(|error| RedirectError::Netlink {
                operation: "subscribe to address changes".into(),
                reason: error.to_string(),
            })?;
        let _connection = AbortOnDrop(tokio::spawn(connection));
        loop {
            let applied = self.offload(Self::refresh_addresses).await?;
            if applied.writes + applied.deletes > 0 {
                tracing::info!(
                    added = applied.writes,
                    removed = applied.deletes,
                    "this host's addresses changed"
                );
            }
            match timeout(PERIOD, messages.next()).await {
                Err(_) => {}
                Ok(None) => return Ok(()),
                Ok(Some(_)) => {
                    // Until it is quiet for a moment; bounded, so that a flapping link cannot starve us.
                    let burst = async { while let Ok(Some(_)) = timeout(SETTLE, messages.next()).await {} };
                    drop(timeout(SETTLE * 10, burst).await);
                }
            }
        }
    }
}

struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}
