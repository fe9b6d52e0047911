//! Dials the connections of one packet stream, and bounds the data that waits for their targets.

use std::sync::Arc;
use std::time::Duration;

use tunnel_link::konnectivity::{Bounds, Dial, Gone, Inbox, Outbox};

use super::dial::{Connected, Dialler, EgressClient};
use super::halves::LINGER;
use crate::listener::context::Failed;

/// Bounds of a stream. One with a single connection, as all of kube-apiserver's are, waits for its target as long as
/// necessary.
pub(super) const BOUNDS: Bounds = Bounds {
    // The listener's shares bound them.
    connections: usize::MAX,
    one: 1 << 20,
    patience: Duration::ZERO,
    callers_share: false,
    stalled: "its target took nothing of 1 MiB that waited for it, and other connections of this stream were not to wait too",
    linger: LINGER,
    early: "backend not initialized",
};

/// Dials for one caller.
#[derive(Clone)]
pub(super) struct CallerDialler {
    pub(super) dialler: Arc<Dialler>,
    pub(super) caller: EgressClient,
}

#[tonic::async_trait]
impl Dial for CallerDialler {
    type Connected = Connected;

    async fn dial(&self, address: &str, gone: &Gone) -> Result<Connected, String> {
        self.dialler.dial(address, &self.caller, gone.cut()).await.map_err(Failed::in_words_of_go)
    }

    async fn relay(
        &self,
        connected: Connected,
        inbox: &mut Inbox,
        outbox: &mut Outbox,
        gone: &Gone,
    ) -> Result<(), String> {
        connected.run(inbox, outbox, gone.wait()).await.map_err(Failed::in_words_of_go)
    }
}
