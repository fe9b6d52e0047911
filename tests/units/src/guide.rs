//! Follows docs/install/systemd.md.
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::document;
use postern_testbed::process::program;

use crate::unit::output;

const DOCUMENT: &str = include_str!("../../../docs/install/systemd.md");
/// Folder in which the commands are run, as beside the downloaded files.
const FOLDER: &str = "/root/download";
/// Files in deploy/systemd.
const SHIPPED: [(&str, &str); 4] = [
    ("server.env", include_str!("../../../deploy/systemd/server.env")),
    ("agent.env", include_str!("../../../deploy/systemd/agent.env")),
    ("postern-server@.service", include_str!("../../../deploy/systemd/postern-server@.service")),
    ("postern-agent@.service", include_str!("../../../deploy/systemd/postern-agent@.service")),
];
/// Beginning of the command that only a server needs when it is removed.
const CLEANUP: &str = "tunnel-server cleanup";

/// The document's commands, which are for the server; "the same with `agent`" is for the agent.
#[derive(Debug)]
pub(crate) struct Guide {
    install: &'static str,
    upgrade: &'static str,
    remove: &'static str,
}

/// One of the programs, on its host.
pub(crate) struct Host<'a> {
    /// `server` or `agent`.
    pub(crate) program: &'static str,
    /// Makes a shell there.
    pub(crate) shell: &'a dyn Fn() -> Command,
}

impl Guide {
    pub(crate) fn read() -> Result<Self> {
        let blocks = document::blocks(DOCUMENT).into_iter();
        let blocks: Vec<_> =
            blocks.filter(|block| block.is_commands()).map(|block| (block.section, block.text)).collect();
        let [("Install", install), ("Upgrade", upgrade), ("Remove", remove)] = blocks[..] else {
            anyhow::bail!("docs/install/systemd.md has the commands {blocks:?}")
        };
        Ok(Self { install, upgrade, remove })
    }

    /// Makes the folder that the commands are run in.
    pub(crate) fn lay_out() -> Result<()> {
        let units = Path::new(FOLDER).join("deploy/systemd");
        fs::create_dir_all(&units).with_context(|| format!("creating {}", units.display()))?;
        for (name, text) in SHIPPED {
            fs::write(units.join(name), text).with_context(|| format!("writing {name}"))?;
        }
        for name in ["tunnel-server", "tunnel-agent"] {
            let link = Path::new(FOLDER).join(name);
            symlink(program(name)?, &link).with_context(|| format!("linking {}", link.display()))?;
        }
        Ok(())
    }

    /// Installs a program and edits its flags. Its unit is not started yet.
    pub(crate) async fn install(&self, host: &Host<'_>, edits: &[(&str, &str)]) -> Result<()> {
        let (files, _) = installation(self.install)?;
        host.run(files).await?;
        edit_flags(host.program, edits)
    }

    /// Enables and starts its unit.
    pub(crate) async fn start(&self, host: &Host<'_>) -> Result<()> {
        let (_, start) = installation(self.install)?;
        host.run(start).await.map(drop)
    }

    /// Puts the new program in place, and starts the unit's other instance.
    pub(crate) async fn upgrade(&self, host: &Host<'_>) -> Result<()> {
        let first = self.install.lines().next().unwrap_or_default();
        host.run(first).await?;
        host.run(self.upgrade).await.map(drop)
    }

    pub(crate) async fn remove(&self, host: &Host<'_>) -> Result<()> {
        let lines = self.remove.lines().filter(|line| host.program == "server" || !line.starts_with(CLEANUP));
        host.run(&lines.collect::<Vec<_>>().join("\n")).await.map(drop)
    }
}

impl Host<'_> {
    async fn run(&self, commands: &str) -> Result<String> {
        let mut command = (self.shell)();
        command.args(["-eux", "-c", &commands.replace("server", self.program)]).current_dir(FOLDER);
        output(command.into()).await
    }
}

/// The commands that bring the files, and those that start the unit: between them the flags are edited.
fn installation(commands: &str) -> Result<(&str, &str)> {
    let at = commands.find("\nsystemctl ").context("the program is not started")?;
    Ok((&commands[..at], &commands[at + 1..]))
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
        let (files, start) = installation(guide.install).unwrap();
        assert!(files.lines().all(|line| line.starts_with("install ")), "{files}");
        assert!(start.ends_with("systemctl enable --now postern-server@a"), "{start}");
        assert!(guide.upgrade.starts_with("systemctl enable --now postern-server@b"), "{}", guide.upgrade);
        assert_eq!(
            guide.remove.lines().filter(|line| line.starts_with(CLEANUP)).count(),
            1,
            "{}",
            guide.remove
        );
    }
}
