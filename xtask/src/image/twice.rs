//! Checks that another build of the same commit, in another folder, makes the same bytes.
use std::env;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};

use super::oci::digest;
use crate::command::{program, root, run};
use crate::files;

pub(super) fn check(archives: &[PathBuf]) -> Result<()> {
    let folder = tempfile::tempdir().context("a folder for the second build")?;
    let (clone, target) = (folder.path().join("clone"), folder.path().join("target"));
    run(program("git").args(["clone", "--quiet", "--shared"]).arg(root()).arg(&clone))?;
    // Runs this program for the other clone: see `command::root`.
    let mut again = program(env::current_exe().context("where this program is")?);
    again.current_dir(&clone).env("CARGO_MANIFEST_DIR", clone.join("xtask")).env("CARGO_TARGET_DIR", &target);
    // The flags of the first build.
    again.args(env::args_os().skip(1).filter(|arg| arg != "--twice"));
    run(&mut again)?;
    for archive in archives {
        let file = archive.file_name().context("an archive without a name")?;
        let other = target.join("image").join(file);
        let [first, second] = [files::bytes(archive)?, files::bytes(&other)?].map(|bytes| digest(&bytes));
        if first != second {
            let kept = folder.keep();
            bail!("{} is {first}, and built in {} it is {second}", archive.display(), kept.display());
        }
        println!("{}: {first}, twice", archive.display());
    }
    Ok(())
}
