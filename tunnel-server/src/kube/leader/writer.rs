//! What everything that writes to the API server has in common: requests that end, retries, and errors that are said
//! once.

use std::time::Duration;

use kube::runtime::watcher;

use crate::kube::client::reason;

/// How long one request may take. Together with the ten seconds after which a server that cannot renew the Lease stops
/// to write, it ends before another server may hold the Lease.
pub const REQUEST: Duration = Duration::from_secs(4);

const FIRST_RETRY: Duration = Duration::from_millis(500);
const LAST_RETRY: Duration = Duration::from_secs(30);

/// Why a request to the API server came to nothing, in its own words where it answered: a missing permission is named
/// there by verb, resource and namespace.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub struct RequestError {
    reason: String,
    /// The HTTP status of an answer that came.
    pub code: Option<u16>,
}

impl From<kube::Error> for RequestError {
    fn from(error: kube::Error) -> Self {
        let code = if let kube::Error::Api(status) = &error { Some(status.code) } else { None };
        Self { reason: reason(&error), code }
    }
}

/// One request, which ends in time.
///
/// # Errors
/// The request's, or that it took too long.
pub async fn request<T>(request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, RequestError> {
    match tokio::time::timeout(REQUEST, request).await {
        Ok(result) => result.map_err(RequestError::from),
        Err(_) => {
            Err(RequestError { reason: format!("no answer within {} s", REQUEST.as_secs()), code: None })
        }
    }
}

/// Delays between tries, ever longer, and never the same for two servers.
#[derive(Debug, Default)]
pub struct Retry {
    failures: u32,
}

impl Retry {
    /// How long to wait after one more failure.
    pub fn next_delay(&mut self) -> Duration {
        let delay = FIRST_RETRY.saturating_mul(1 << self.failures.min(6)).min(LAST_RETRY);
        self.failures = self.failures.saturating_add(1);
        delay.mul_f64(rand::random_range(0.5..=1.0))
    }

    /// After a success.
    pub fn reset(&mut self) {
        self.failures = 0;
    }
}

/// Says what is wrong once, until it changes or is over.
#[derive(Debug)]
pub struct Complaint {
    what: &'static str,
    said: Option<String>,
}

impl Complaint {
    /// `what` is what does not work while there is an error.
    pub const fn new(what: &'static str) -> Self {
        Self { what, said: None }
    }

    /// Whether this is something new.
    pub fn error(&mut self, error: &dyn std::fmt::Display) -> bool {
        let error = error.to_string();
        let new = self.said.as_ref() != Some(&error);
        if new {
            tracing::warn!(error, "{} does not work at present; it is tried again", self.what);
            self.said = Some(error);
        }
        new
    }

    /// It works.
    pub fn fine(&mut self) {
        if self.said.take().is_some() {
            tracing::info!("{} works again", self.what);
        }
    }
}

/// One object, as the events of a watch tell of it.
#[derive(Debug)]
pub struct Followed<K> {
    /// None: it does not exist, or it is not known yet.
    pub object: Option<K>,
    /// Whether it is known that it exists or not.
    pub known: bool,
    listed: Option<K>,
}

impl<K> Default for Followed<K> {
    fn default() -> Self {
        Self { object: None, known: false, listed: None }
    }
}

impl<K> Followed<K> {
    /// A list that is not complete yet changes nothing.
    pub fn apply(&mut self, event: watcher::Event<K>) {
        match event {
            watcher::Event::Init => self.listed = None,
            watcher::Event::InitApply(object) => self.listed = Some(object),
            watcher::Event::InitDone => {
                self.object = self.listed.take();
                self.known = true;
            }
            watcher::Event::Apply(object) => self.object = Some(object),
            watcher::Event::Delete(_) => self.object = None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_to_a_bound_and_start_over() {
        let mut retry = Retry::default();
        let first = retry.next_delay();
        assert!(first <= FIRST_RETRY && first >= FIRST_RETRY / 2, "{first:?}");
        let later = (0..20).map(|_| retry.next_delay()).last().unwrap();
        assert!(later <= LAST_RETRY && later >= LAST_RETRY / 2, "{later:?}");
        retry.reset();
        assert!(retry.next_delay() <= FIRST_RETRY);
    }

    #[test]
    fn an_error_is_said_once_until_it_changes_or_is_over() {
        let mut complaint = Complaint::new("a test");
        assert!(complaint.error(&"a"));
        assert!(!complaint.error(&"a"));
        assert!(complaint.error(&"b"));
        complaint.fine();
        assert!(complaint.error(&"b"));
    }

    #[test]
    fn an_object_is_replaced_when_a_list_is_complete() {
        let mut followed = Followed::default();
        followed.apply(watcher::Event::Init);
        followed.apply(watcher::Event::InitApply(1));
        assert_eq!((followed.object, followed.known), (None, false));
        followed.apply(watcher::Event::InitDone);
        assert_eq!((followed.object, followed.known), (Some(1), true));
        followed.apply(watcher::Event::Apply(2));
        assert_eq!(followed.object, Some(2));
        // A list that starts anew, and has nothing.
        followed.apply(watcher::Event::Init);
        assert_eq!(followed.object, Some(2));
        followed.apply(watcher::Event::InitDone);
        assert_eq!((followed.object, followed.known), (None, true));
    }
}
