//! Statuses of answers to a client whose connection fails before anything was relayed.

use http::StatusCode;
use tunnel_core::outcome::Outcome;

/// Returns the status for a failure on the way to the target.
pub(super) fn status_of(outcome: Outcome) -> StatusCode {
    match outcome {
        Outcome::NoTunnel | Outcome::Busy | Outcome::Shutdown => StatusCode::SERVICE_UNAVAILABLE,
        Outcome::TimedOut => StatusCode::GATEWAY_TIMEOUT,
        Outcome::Denied => StatusCode::FORBIDDEN,
        _ => StatusCode::BAD_GATEWAY,
    }
}
