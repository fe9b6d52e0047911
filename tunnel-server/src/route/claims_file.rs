//! The file that remembers, across restarts, which node had an address first.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tunnel_core::identity::files::{PRIVATE_FILE, write_atomically};
use tunnel_core::log_once::LogOnce;
use tunnel_core::text::printable;

use super::Router;

const NAME: &str = "address-claims.json";
/// Larger files are neither written nor read. 100,000 nodes with two addresses each are some 10 MiB.
const MAX_BYTES: u64 = 64 << 20;
/// Changes within this time are written once.
const DEBOUNCE: Duration = Duration::from_secs(2);

/// Takes over what an earlier run left in the state directory. A file that cannot be used is reported; then the first
/// inventory says who has what.
pub fn load_claims(router: &Router, state_dir: &Path) {
    let path = state_dir.join(NAME);
    let restored = match read_bounded(&path, MAX_BYTES) {
        Ok(text) => router.restore_claims(&text),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return,
        Err(error) => Err(error.to_string()),
    };
    if let Err(reason) = restored {
        let reason = printable(&reason, 200);
        tracing::warn!(
            file = %path.display(),
            "which node had an address first is not known, and is learnt again from the present nodes: {reason}"
        );
    }
}

/// Reads a regular file of at most `most` bytes.
pub(crate) fn read_bounded(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    // Only the owner of the directory can put anything other than a file there, but opening a FIFO would never return.
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let mut text = Vec::new();
    File::open(path)?.take(most + 1).read_to_end(&mut text)?;
    if text.len() as u64 > most {
        return Err(io::Error::other(format!("more than {most} bytes")));
    }
    Ok(text)
}

/// Writes changes to the state directory until stopped, the last ones too.
pub async fn keep_claims(router: Arc<Router>, state_dir: PathBuf, stop: CancellationToken) {
    let path = state_dir.join(NAME);
    let mut changed = router.claims_changed();
    // An inventory may have been there before this task.
    changed.mark_changed();
    let mut failures = LogOnce::default();
    loop {
        tokio::select! {
            // What came before the end is written.
            biased;
            known = changed.changed() => if known.is_err() { return },
            () = stop.cancelled() => return,
        }
        let (router, file) = (router.clone(), path.clone());
        let written = tokio::task::spawn_blocking(move || write(&router, &file)).await;
        match written.unwrap_or_else(|error| Err(io::Error::other(error))) {
            Ok(()) => drop(failures.clear()),
            Err(error) => {
                if failures.is_new(&error) {
                    let file = path.display();
                    tracing::warn!(%file, %error, "after a restart it is not known which node had an address first");
                }
                if stop.is_cancelled() {
                    return;
                }
                changed.mark_changed();
            }
        }
        tokio::select! {
            () = tokio::time::sleep(DEBOUNCE) => {}
            () = stop.cancelled() => {}
        }
    }
}

fn write(router: &Router, path: &Path) -> io::Result<()> {
    let Some(text) = router.stored_claims().map_err(io::Error::other)? else { return Ok(()) };
    if text.len() as u64 > MAX_BYTES {
        return Err(io::Error::other(format!("{} bytes are too many", text.len())));
    }
    write_atomically(path, &text, PRIVATE_FILE)
}
