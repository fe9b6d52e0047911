//! Comes by an identity, keeps it, and enrols again through the API server when a renewal can no longer help.

use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio::time::Instant;
use tunnel_runtime::backoff::jittered;

use crate::enrol::csr::{CsrEnrolment, Pace};
use crate::enrol::renew::{IdentityKeeper, Recovery};
use crate::enrol::token::{EnrollConfig, ensure_identity};
use crate::enrol::{EnrollError, IdentityMetrics};

/// Maximum interval of checks that the enrolment is still needed.
const RECHECK: Duration = Duration::from_secs(1);
/// Maximum random delay when a server asks for another enrolment: it asks this agent alone.
const ASKED_SPREAD: Duration = Duration::from_secs(2);

/// An identity that is kept, and the way to another one.
pub struct Enrolled {
    pub keeper: Arc<IdentityKeeper>,
    /// Set in a cluster.
    enrolment: Option<Arc<CsrEnrolment>>,
}

impl Enrolled {
    /// Loads the identity from the state directory, or enrols for a new one: at the API server, or by token if there is
    /// none. That may wait for them.
    ///
    /// # Errors
    /// Only the operator can fix these: files, or a refused token.
    pub async fn obtain(
        config: EnrollConfig,
        api: Option<Client>,
        metrics: IdentityMetrics,
    ) -> Result<Self, EnrollError> {
        let enrolment = api.map(|api| {
            let holder = (config.holder, config.node.clone());
            let mut enrolment = CsrEnrolment::new(api, holder, config.state_dir.clone(), Pace::default());
            enrolment.clock = config.clock;
            Arc::new(enrolment)
        });
        let (identity, recovery) = match &enrolment {
            Some(enrolment) => (enrolment.ensure_identity().await?, Recovery::ApiServer),
            None => (ensure_identity(&config).await?, Recovery::Token),
        };
        let keeper = Arc::new(IdentityKeeper::start(config, identity, metrics, recovery));
        Ok(Self { keeper, enrolment })
    }

    /// Enrols again when needed, as [`recover`] does. Returns at once without an API server.
    pub async fn recover(self, refused: impl Fn() -> Option<Refused>) {
        if let Some(enrolment) = self.enrolment {
            recover(enrolment, self.keeper, refused).await;
        }
    }
}

/// Refusals between the servers and this agent. The greater value is the stronger reason to enrol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Refused {
    /// Time from the first refusal to the last.
    For(Duration),
    /// A server that this agent has verified asks for another enrolment.
    EnrollAgain,
}

/// Time during which this agent and the server have refused each other's certificate: the first and the last refusal
/// since both were last accepted. Other failures in between do not count, because a server that refuses a certificate
/// may reset the connection before its reason arrives. Nor does the time since the last refusal, because an unreachable
/// server refuses nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Refusals {
    /// Times of the first and the last refusal.
    times: Option<(Instant, Instant)>,
    /// See [`Refused::EnrollAgain`].
    pub enroll_again: bool,
}

impl Refusals {
    pub fn add(&mut self, at: Instant) {
        self.times.get_or_insert((at, at)).1 = at;
    }

    pub fn strongest(self) -> Option<Refused> {
        if self.enroll_again {
            return Some(Refused::EnrollAgain);
        }
        self.times.map(|(first, last)| Refused::For(last - first))
    }
}

/// Enrols again once the certificate has expired, the servers and this agent have refused each other's certificate for
/// long enough, or a server asks for it. Runs until stopped.
pub async fn recover(
    enrolment: Arc<CsrEnrolment>,
    keeper: Arc<IdentityKeeper>,
    refused: impl Fn() -> Option<Refused>,
) {
    let pace = enrolment.pace;
    // Returns the reason and the maximum random wait.
    let needed = || {
        if keeper.current().validity.is_over(enrolment.clock.now()) {
            return Some(("the certificate has expired", pace.spread));
        }
        match refused() {
            Some(Refused::EnrollAgain) => Some((
                "requested by a server: the Node was created again or readmitted",
                pace.spread.min(ASKED_SPREAD),
            )),
            Some(Refused::For(time)) if time >= pace.patience => Some((
                "every server refuses the certificate, or is not signed by a trusted root: the CA may have been replaced",
                pace.spread,
            )),
            _ => None,
        }
    };
    loop {
        tokio::time::sleep((pace.patience / 10).min(Duration::from_secs(5))).await;
        let Some((_, spread)) = needed() else { continue };
        tokio::time::sleep(jittered(spread, 1.0)).await;
        // Renewals use the same pending key.
        let pending_key = keeper.hold_pending_key().await;
        let Some((reason, spread)) = needed() else { continue };
        tracing::warn!(node = %enrolment.node, reason, "enrolling again");
        let not_needed = async {
            while needed().is_some() {
                tokio::time::sleep((pace.patience / 10).min(RECHECK)).await;
            }
        };
        let obtained = tokio::select! {
            obtained = enrolment.obtain_again(spread) => obtained,
            () = not_needed => {
                tracing::info!(node = %enrolment.node, reason, "enrolment no longer needed");
                continue;
            }
        };
        // Not part of the select, because files and memory must change together.
        match obtained {
            Ok(identity) => keeper.replace(identity).await,
            Err(error) => tracing::error!(%error, "failed to enrol again"),
        }
        drop(pending_key);
        tokio::time::sleep(pace.again).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_after_the_last_refusal_does_not_count() {
        let mut refusals = Refusals::default();
        assert_eq!(refusals.strongest(), None);
        let first = Instant::now();
        refusals.add(first);
        assert_eq!(refusals.strongest(), Some(Refused::For(Duration::ZERO)), "however long ago it was");
        refusals.add(first + Duration::from_secs(61));
        assert_eq!(refusals.strongest(), Some(Refused::For(Duration::from_secs(61))));
        refusals.enroll_again = true;
        assert_eq!(refusals.strongest(), Some(Refused::EnrollAgain));
    }
}
