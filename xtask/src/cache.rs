//! Downloads and builds that every clone on this machine shares, in `~/.cache/postern`.
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use sha2::{Digest as _, Sha256};

use crate::command::user_folder;
use crate::files;

/// Returns the folder of `parts` below `area`, and has `fill` make it if it does not exist. It is complete or absent:
/// `fill` writes to a temporary folder. Other processes wait meanwhile.
pub(crate) fn once(
    area: &str,
    name: &str,
    parts: &[&str],
    fill: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let area = folder()?.join(area);
    let keyed = format!("{name}-{}", key(parts));
    let made = area.join(&keyed);
    if made.exists() {
        return Ok(made);
    }
    files::create(&area)?;
    let _lock = lock(&area.join(format!("{name}.lock")))?;
    if made.exists() {
        // Another process has made it while this one waited.
        return Ok(made);
    }
    let temporary = area.join(format!("{keyed}.tmp"));
    // Left by a run that was killed; no other process writes there while the lock is held.
    fs::remove_dir_all(&temporary).ok();
    files::create(&temporary)?;
    fill(&temporary)?;
    fs::rename(&temporary, &made).with_context(|| format!("renaming to {}", made.display()))?;
    Ok(made)
}

pub(crate) fn folder() -> Result<PathBuf> {
    Ok(user_folder("XDG_CACHE_HOME", ".cache")?.join("postern"))
}

/// Locks a file until it is closed, at the latest when the process ends.
pub(crate) fn lock(path: &Path) -> Result<File> {
    let file = File::create(path).with_context(|| format!("creating {}", path.display()))?;
    if file.try_lock().is_err() {
        println!("waiting for another process that holds {}", path.display());
        file.lock().with_context(|| format!("locking {}", path.display()))?;
    }
    Ok(file)
}

fn key(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part.len().to_le_bytes());
        hash.update(part);
    }
    hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_follows_every_part() {
        assert_eq!(key(&["a", "b"]).len(), 16);
        assert_ne!(key(&["a", "b"]), key(&["ab", ""]));
        assert_ne!(key(&["a", "b"]), key(&["a", "c"]));
    }
}
