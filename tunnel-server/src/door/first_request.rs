//! hyper ends an HTTP/1.1 connection that has read nothing yet as soon as it is told to shut down. A client that has just
//! connected would get no answer, and most do not ask again.

use std::time::Duration;

use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// How long a connection without a request yet may wait for one when connections are to end.
const LIMIT: Duration = Duration::from_secs(2);

/// The first request of a connection.
#[derive(Clone, Debug, Default)]
pub(crate) struct FirstRequest(CancellationToken);

impl FirstRequest {
    pub(crate) fn came(&self) {
        self.0.cancel();
    }

    /// Waits for it, before a connection is told to shut down. Who sends none is not waited for.
    pub(crate) async fn wait(&self) {
        let _ = timeout(LIMIT, self.0.cancelled()).await;
    }
}
