//! Where the programs of Kubernetes are.
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

/// Names the folder that `cargo xtask peers` built.
pub const VARIABLE: &str = "POSTERN_PEERS_KUBERNETES";

/// The folder of the programs; an error says how to get one.
pub fn folder() -> Result<PathBuf> {
    let folder = std::env::var_os(VARIABLE).with_context(|| {
        format!(
            "{VARIABLE} is not set: `cargo xtask test` and `cargo xtask demo --kubernetes` set it; by hand, set it to what `cargo xtask peers --only kubernetes` prints last"
        )
    })?;
    Ok(folder.into())
}

/// A program of Kubernetes.
pub fn program(folder: &Path, name: &str) -> Result<PathBuf> {
    let path = folder.join(name);
    ensure!(path.exists(), "{} is missing: run `cargo xtask peers --only kubernetes`", path.display());
    Ok(path)
}
