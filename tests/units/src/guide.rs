//! Follows docs/install/systemd.md: the server comes from its package, the agent without one.
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::document;
use postern_testbed::process::program;

use crate::unit::output;

const DOCUMENT: &str = include_str!("../../../docs/install/systemd.md");
/// Folder in which the commands are run, with the package, and beside it one with a newer package.
const FOLDER: &str = "/root/download";
const NEWER: &str = "/root/download/new";

/// The document's commands, in its order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guide {
    pub(crate) install: &'static str,
    pub(crate) start: &'static str,
    pub(crate) copy: &'static str,
    pub(crate) upgrade: &'static str,
    pub(crate) copy_again: &'static str,
    pub(crate) purge: &'static str,
    pub(crate) remove: &'static str,
}

/// Makes a shell on a program's host.
pub(crate) type Shell<'a> = &'a dyn Fn() -> Command;

impl Guide {
    pub(crate) fn read() -> Result<Self> {
        let blocks = document::blocks(DOCUMENT).into_iter().filter(|block| block.is_commands());
        let blocks: Vec<_> = blocks.map(|block| (block.section, block.text)).collect();
        let [
            ("Install", install),
            ("Install", start),
            ("Without a package", copy),
            ("Upgrade", upgrade),
            ("Upgrade", copy_again),
            ("Remove", purge),
            ("Remove", remove),
        ] = blocks[..]
        else {
            anyhow::bail!("docs/install/systemd.md has the commands {blocks:?}")
        };
        Ok(Self { install, start, copy, upgrade, copy_again, purge, remove })
    }
}

/// Puts the agent beside the packages.
pub(crate) fn lay_out() -> Result<()> {
    for folder in [FOLDER, NEWER] {
        let link = Path::new(folder).join("tunnel-agent");
        symlink(program("tunnel-agent")?, &link).with_context(|| format!("linking {}", link.display()))?;
    }
    Ok(())
}

/// Runs commands of the document.
pub(crate) async fn run(shell: Shell<'_>, commands: &str) -> Result<String> {
    run_in(FOLDER, shell, commands).await
}

/// Runs them where the newer files are.
pub(crate) async fn run_newer(shell: Shell<'_>, commands: &str) -> Result<String> {
    run_in(NEWER, shell, commands).await
}

async fn run_in(folder: &str, shell: Shell<'_>, commands: &str) -> Result<String> {
    let mut command = shell();
    command.args(["-eux", "-c", commands]).current_dir(folder);
    output(command.into()).await
}

/// Changes the file of a program's flags, which nobody else may read.
pub(crate) fn edit_flags(program: &str, edits: &[(&str, &str)]) -> Result<()> {
    let path = format!("/etc/postern/{program}.env");
    let mode = fs::metadata(&path).with_context(|| format!("{path} was not installed"))?.permissions().mode();
    ensure!(mode & 0o777 == 0o600, "{path} has the mode {mode:o}");
    let mut text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    for (from, to) in edits {
        ensure!(text.matches(from).count() == 1, "{path} does not have {from:?} once");
        text = text.replace(from, to);
    }
    fs::write(&path, text).with_context(|| format!("writing {path}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_says_how_to_install_upgrade_and_remove() {
        let guide = Guide::read().unwrap();
        assert!(guide.start.starts_with("systemctl enable --now postern-server@a\n"), "{}", guide.start);
        assert!(guide.copy_again.ends_with("tunnel-agent service upgrade"), "{}", guide.copy_again);
    }
}
