//! Archives that are the same for the same contents.
use std::path::Path;

use anyhow::Result;

use crate::command::{program, run};

/// Packs files reproducibly: the same files give the same bytes.
pub(crate) fn pack(epoch: u64, folder: &Path, archive: &Path, files: &[&str]) -> Result<()> {
    let mut tar = program("tar");
    tar.args(["--create", "--sort=name", "--format=ustar", "--owner=0", "--group=0", "--numeric-owner"]);
    // Not by a pipe of a shell, which does not notice that tar failed.
    tar.args(["--mode=u=rwX,go=rX", "--use-compress-program=gzip --no-name", &format!("--mtime=@{epoch}")]);
    run(tar.arg("--file").arg(archive).arg("--directory").arg(folder).args(files))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_without_one_of_its_files_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("there"), "").unwrap();
        let archive = folder.path().join("archive.tar.gz");
        pack(0, folder.path(), &archive, &["there"]).unwrap();
        pack(0, folder.path(), &archive, &["there", "absent"]).unwrap_err();
    }
}
