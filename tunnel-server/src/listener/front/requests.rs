//! The requests of a connection, which decide when it can end.

use std::time::Duration;

use http::Response;
use http_body_util::BodyExt as _;
use tokio::sync::watch;
use tokio::time::timeout;

use super::body::Body;

/// Maximum wait for the first request of a connection that is about to be shut down.
const FIRST: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
pub(super) struct Requests(watch::Sender<Count>);

#[derive(Debug, Default)]
struct Count {
    all: u64,
    open: u32,
}

/// A request until hyper has all of its answer.
#[derive(Debug)]
pub(super) struct InFlight(watch::Sender<Count>);

impl Requests {
    pub(super) fn open(&self) -> InFlight {
        self.0.send_modify(|count| {
            count.all += 1;
            count.open += 1;
        });
        InFlight(self.0.clone())
    }

    /// Waits for the first request. Call it before a graceful shutdown of the connection: hyper closes an HTTP/1.1
    /// connection that has read nothing, and most clients do not send a first request again.
    pub(super) async fn first(&self) {
        let _ = timeout(FIRST, self.0.subscribe().wait_for(|count| count.all > 0)).await;
    }

    /// Completes if there has never been a request, after `limit`.
    pub(super) async fn none_at_all(&self, limit: Duration) {
        if timeout(limit, self.0.subscribe().wait_for(|count| count.all > 0)).await.is_ok() {
            std::future::pending::<()>().await;
        }
    }

    /// Completes when there has been no request for `limit`.
    pub(super) async fn none_for(&self, limit: Duration) {
        let mut count = self.0.subscribe();
        loop {
            // This never fails, because `self` holds the sender.
            let _ = count.wait_for(|count| count.open == 0).await;
            if timeout(limit, count.changed()).await.is_err() {
                return;
            }
        }
    }
}

impl InFlight {
    /// Makes the request end with the body of its answer.
    pub(super) fn answered(self, answer: Response<Body>) -> Response<Body> {
        answer.map(|body| {
            let unfailing = move |error| {
                let _open = &self;
                error
            };
            body.map_err(unfailing).boxed_unsync()
        })
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.send_modify(|count| count.open -= 1);
    }
}
