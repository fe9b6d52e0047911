//! The file that remembers, across restarts, the first node with each address.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tunnel_runtime::state_file::StateFile;

use super::Router;
use super::claims::StoredClaims;

/// Changes within this time are written together.
const PAUSE: Duration = Duration::from_secs(2);

fn file(state_dir: &Path) -> Arc<StateFile<StoredClaims>> {
    StateFile::new(state_dir.join("address-claims.json"))
}

/// Takes over the claims of an earlier run. Without them the first inventory decides the first node of each address.
pub fn load_claims(router: &Router, state_dir: &Path) {
    let file = file(state_dir);
    let Some(stored) = file.load() else { return };
    if let Err(reason) = router.restore_claims(stored) {
        tracing::warn!(path = %file.path().display(), error = reason, "failed to restore address claims, starting without them");
    }
}

/// Writes changes to the state directory until `stop`, including the last ones.
pub async fn keep_claims(router: Arc<Router>, state_dir: PathBuf, stop: CancellationToken) {
    let mut changed = router.claims_changed();
    // The first inventory may have come before this task.
    changed.mark_changed();
    file(&state_dir).keep(changed, move || router.stored_claims(), PAUSE, stop).await;
}
