//! The trust bundle that is sent to agents.

use std::sync::Arc;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tunnel_pki::TrustBundle;

use super::CaState;

/// Follows the trust bundle of `ca`. The receiver is notified only if the bundle differs, not on every CA change.
pub fn follow_bundle(
    mut ca: watch::Receiver<Arc<CaState>>,
    tasks: &TaskTracker,
    stop: CancellationToken,
) -> watch::Receiver<Arc<TrustBundle>> {
    let current = Arc::new(ca.borrow_and_update().bundle().clone());
    let (sender, receiver) = watch::channel(current);
    tasks.spawn(async move {
        loop {
            tokio::select! {
                changed = ca.changed() => if changed.is_err() { return },
                () = stop.cancelled() => return,
            }
            let bundle = Arc::new(ca.borrow_and_update().bundle().clone());
            sender.send_if_modified(|current| {
                let differs = **current != *bundle;
                *current = bundle;
                differs
            });
        }
    });
    receiver
}
