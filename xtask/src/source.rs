//! The commit that is built, from which labels, times and notes are made.
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};

use crate::command::program;

pub(crate) struct Source {
    /// The commit's hash, with `-dirty` behind it when files differ from it. None if this is no clone.
    pub(crate) revision: Option<String>,
    /// Time of the commit, as RFC 3339 and in seconds since 1970: a build of the same commit has the same time.
    pub(crate) created: String,
    pub(crate) epoch: u64,
}

impl Source {
    pub(crate) fn read() -> Result<Self> {
        let Some(commit) = git(&["rev-parse", "HEAD"]) else {
            return Ok(Self { revision: None, created: "1970-01-01T00:00:00Z".into(), epoch: 0 });
        };
        let changed = git(&["status", "--porcelain", "--untracked-files=no"]).context("git status failed")?;
        let dirty = if changed.is_empty() { "" } else { "-dirty" };
        let format = "--date=format-local:%Y-%m-%dT%H:%M:%SZ";
        let created = git(&["log", "-1", "--format=%cd", format]).context("git log failed")?;
        let epoch = git(&["log", "-1", "--format=%ct"]).context("git log failed")?;
        let epoch = epoch.parse().with_context(|| format!("git calls the commit's time {epoch:?}"))?;
        Ok(Self { revision: Some(format!("{commit}{dirty}")), created, epoch })
    }

    /// Fails unless the files are those of a commit, and no others: helm and kubectl take whatever is in a folder.
    pub(crate) fn ensure_committed(&self) -> Result<()> {
        let revision = self.revision.as_deref().unwrap_or_default();
        ensure!(!revision.is_empty(), "this is no git clone: there is no commit to name");
        let changed =
            git(&["status", "--porcelain", "--untracked-files=normal"]).context("git status failed")?;
        ensure!(
            changed.is_empty() && !revision.ends_with("-dirty"),
            "files differ from the commit: commit, stash or remove them first:\n{changed}"
        );
        Ok(())
    }
}

/// Output of git, or None when it fails.
pub(crate) fn git(args: &[&str]) -> Option<String> {
    let mut command = program("git");
    let output = command.env("TZ", "UTC").args(args).stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
