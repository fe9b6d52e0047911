//! hyper ends an HTTP/1.1 connection that has not read anything as soon as it is told to shut down. A client that has
//! just connected would get no answer, and most clients do not retry.

use std::time::Duration;

use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// Maximum wait for the first request of a connection that is about to be shut down.
const LIMIT: Duration = Duration::from_secs(2);

/// Signals the first request of a connection.
#[derive(Clone, Debug, Default)]
pub(crate) struct FirstRequest(CancellationToken);

impl FirstRequest {
    pub(crate) fn came(&self) {
        self.0.cancel();
    }

    /// Waits for the first request, before a connection is told to shut down. Gives up on a client that sends none.
    pub(crate) async fn wait(&self) {
        let _ = timeout(LIMIT, self.0.cancelled()).await;
    }
}
