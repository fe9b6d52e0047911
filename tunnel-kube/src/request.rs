//! Requests with a deadline, and retries of one action.

use std::fmt::Display;
use std::time::Duration;

use tunnel_runtime::backoff::Backoff;
use tunnel_runtime::log_once::LogOnce;

use crate::client::reason;

const FIRST_RETRY: Duration = Duration::from_millis(500);
const LAST_RETRY: Duration = Duration::from_secs(30);

/// A failed request.
#[derive(Debug, thiserror::Error)]
#[error("{action} {object}: {reason}")]
pub struct RequestError {
    /// For example `reading Secret`.
    pub action: &'static str,
    /// Name of the object, with the namespace where that is not obvious.
    pub object: String,
    /// The text of [`reason`].
    pub reason: String,
    /// The HTTP status, if there was an answer.
    pub code: Option<u16>,
}

impl RequestError {
    /// True if the object has changed since it was read, or another one was created first.
    pub fn is_conflict(&self) -> bool {
        self.code == Some(409)
    }

    pub fn is_not_found(&self) -> bool {
        self.code == Some(404)
    }
}

/// Sends one request and gives up after `deadline`.
///
/// # Errors
/// The request's error, or that it took too long.
pub async fn request<T>(
    deadline: Duration,
    action: &'static str,
    object: &str,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, RequestError> {
    let (reason, code) = match tokio::time::timeout(deadline, request).await {
        Ok(Ok(answer)) => return Ok(answer),
        Ok(Err(error)) => {
            let code = if let kube::Error::Api(status) = &error { Some(status.code) } else { None };
            (reason(&error), code)
        }
        Err(_) => (format!("no answer within {} s", deadline.as_secs()), None),
    };
    Err(RequestError { action, object: object.to_owned(), reason, code })
}

/// Retries of one action: logs an error once until it changes or is over, and spaces the attempts by 0.25 s to 30 s.
#[derive(Debug)]
pub struct Attempts {
    what: &'static str,
    errors: LogOnce,
    backoff: Backoff,
}

impl Attempts {
    /// `what` names the action in the log.
    pub fn new(what: &'static str) -> Self {
        Self { what, errors: LogOnce::default(), backoff: Backoff::new(FIRST_RETRY, LAST_RETRY) }
    }

    /// Logs a failure. Returns true if it differs from the last one.
    pub fn report(&mut self, error: &dyn Display) -> bool {
        let new = self.errors.is_new(error);
        if new {
            tracing::warn!(action = self.what, %error, "action failed, retrying");
        }
        new
    }

    /// Returns the delay before the next attempt.
    pub fn next_delay(&mut self) -> Duration {
        self.backoff.next_delay()
    }

    pub fn succeeded(&mut self) {
        self.backoff.reset();
        if self.errors.clear() {
            tracing::info!(action = self.what, "action succeeded again");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_request_without_an_answer_ends() {
        let never = std::future::pending::<kube::Result<()>>();
        let error = request(Duration::from_secs(4), "reading Node", "edge-1", never).await.unwrap_err();
        let expected = "reading Node edge-1: no answer within 4 s";
        assert_eq!((error.to_string().as_str(), error.code), (expected, None));
    }

    #[test]
    fn a_success_resets_the_delay_and_the_error() {
        let mut attempts = Attempts::new("a test");
        assert!(attempts.report(&"a"));
        assert!(!attempts.report(&"a"));
        let later = (0..20).map(|_| attempts.next_delay()).last().unwrap();
        assert!(later <= LAST_RETRY && later >= LAST_RETRY / 2, "{later:?}");
        attempts.succeeded();
        assert!(attempts.report(&"a"));
        assert!(attempts.next_delay() <= FIRST_RETRY);
    }
}
