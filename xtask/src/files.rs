//! Files and folders, with errors that name them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

pub(crate) fn text(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
}

pub(crate) fn bytes(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("reading {}", path.display()))
}

/// Writes a file, and makes its folder if there is none.
pub(crate) fn write(path: &Path, contents: impl AsRef<[u8]>) -> Result<()> {
    path.parent().map_or(Ok(()), create)?;
    fs::write(path, contents).with_context(|| format!("writing {}", path.display()))
}

pub(crate) fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).map(drop).with_context(|| format!("copying {} to {}", from.display(), to.display()))
}

pub(crate) fn create(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))
}

/// Paths in a folder, in order.
pub(crate) fn paths_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let reading = || format!("reading {}", folder.display());
    let entries = fs::read_dir(folder).with_context(reading)?;
    let paths: Result<Vec<_>> = entries.map(|entry| Ok(entry.with_context(reading)?.path())).collect();
    let mut paths = paths?;
    paths.sort();
    Ok(paths)
}

/// Files of one package, or of a folder of it: another package below it is not a part of it.
pub(crate) fn files_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths_in(folder)? {
        if !path.is_dir() {
            files.push(path);
        } else if !path.join("Cargo.toml").exists() {
            files.extend(files_below(&path)?);
        }
    }
    Ok(files)
}

/// The last part of a path.
pub(crate) fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
