//! Files of a release, and archives that are the same for the same contents.
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

use crate::command::{program, run};

pub(crate) fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).map(drop).with_context(|| format!("copying {} to {}", from.display(), to.display()))
}

pub(crate) fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}

/// Packs files reproducibly: the same files give the same bytes.
pub(crate) fn pack(epoch: u64, folder: &Path, archive: &Path, files: &[&str]) -> Result<()> {
    let pack = "epoch=$1 folder=$2 archive=$3; shift 3; \
                tar --create --sort=name --format=ustar --mtime=\"@$epoch\" --owner=0 --group=0 --numeric-owner \
                --mode=u=rwX,go=rX --directory \"$folder\" \"$@\" | gzip --no-name > \"$archive\"";
    let mut tar = program("sh");
    tar.args(["-c", pack, "sh", &epoch.to_string()]).arg(folder).arg(archive).args(files);
    run(&mut tar)
}
