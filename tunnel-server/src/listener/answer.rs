//! Failures that this server answers itself, and their statuses.

use http::StatusCode;
use tunnel_link::outcome::Outcome;

use super::context::Failed;
use crate::caller::Refusal;

/// Returns the status for a failure on the way to the target.
pub(super) fn status_of(outcome: Outcome) -> StatusCode {
    match outcome {
        Outcome::NoTunnel | Outcome::Busy | Outcome::Shutdown => StatusCode::SERVICE_UNAVAILABLE,
        Outcome::TimedOut => StatusCode::GATEWAY_TIMEOUT,
        Outcome::Denied => StatusCode::FORBIDDEN,
        _ => StatusCode::BAD_GATEWAY,
    }
}

/// Reason for which this server answers a request itself.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(super) status: StatusCode,
    pub(super) reason: String,
    /// The access log's outcome, if the node was known.
    pub(super) outcome: Outcome,
}

impl Failure {
    pub(super) fn new(status: StatusCode, reason: impl Into<String>) -> Self {
        let outcome = match status {
            StatusCode::FORBIDDEN | StatusCode::UNAUTHORIZED | StatusCode::PROXY_AUTHENTICATION_REQUIRED => {
                Outcome::Denied
            }
            _ => Outcome::Protocol,
        };
        Self { status, reason: reason.into(), outcome }
    }

    pub(super) fn bad_request(reason: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, reason)
    }

    /// The same to a client of a proxy, for which credentials have another status.
    pub(super) fn at_proxy(self) -> Self {
        match self.status {
            StatusCode::UNAUTHORIZED => Self { status: StatusCode::PROXY_AUTHENTICATION_REQUIRED, ..self },
            _ => self,
        }
    }

    /// A failure of the tunnel or the target.
    pub(super) fn of_outcome(outcome: Outcome, reason: impl Into<String>) -> Self {
        Self { status: status_of(outcome), reason: reason.into(), outcome }
    }
}

impl From<Failed> for Failure {
    fn from(failed: Failed) -> Self {
        Self::of_outcome(failed.outcome, failed.reason)
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        let status = match refusal {
            Refusal::Unauthenticated(_) => StatusCode::UNAUTHORIZED,
            Refusal::Forbidden(_) => StatusCode::FORBIDDEN,
            Refusal::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
        };
        Self::new(status, refusal.to_string())
    }
}
