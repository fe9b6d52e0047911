//! The two programs of the previous version, for the scenarios `versions::`: built once for every clone on this machine.
//!
//! They are compiled from that version's sources, with its own eBPF programs, among the compiled dependencies of this clone.
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};

use crate::command::{building, program, root, run, target_dir};
use crate::demo::PROGRAMS;
use crate::files::{self, copy};
use crate::source::git;
use crate::{build_ebpf, cache};

/// Names the commit that counts as the previous version until a tag does.
const BASE: &str = "tests/versions/base";
/// Environment variable that names the folder to scenarios.
const FOLDER: &str = "POSTERN_PREVIOUS";
const FETCH: &str = "in a shallow clone, or one without tags, `git fetch --unshallow --tags` brings it";

/// Builds them and returns the variable that tells scenarios where they are.
pub(crate) fn variable() -> Result<(String, PathBuf)> {
    let (name, commit) = find()?;
    let folder = cache::once("previous", &name, &[&commit], |folder| build(folder, &name, &commit))?;
    Ok((FOLDER.to_owned(), folder))
}

/// Fails if this clone does not have the previous version, and says what brings it.
pub(crate) fn check() -> Result<()> {
    find().map(drop)
}

/// The previous version's tag, or its short hash, and its commit.
fn find() -> Result<(String, String)> {
    ensure!(
        git(&["rev-parse", "HEAD"]).is_some(),
        "this is no git clone, which alone has the previous version"
    );
    let name = match (tagged()?, base()?) {
        (Some(version), _) => version.tag(),
        (None, Some(base)) => base,
        (None, None) => bail!("no tag of a version before this one: {FETCH}"),
    };
    let commit = commit(&name)?;
    Ok((if commit == name { name.chars().take(8).collect() } else { name }, commit))
}

/// The hash of a commit, if this clone has that.
fn commit(name: &str) -> Result<String> {
    let found = git(&["rev-parse", "--verify", "--quiet", &format!("{name}^{{commit}}")]);
    found.with_context(|| format!("this clone has no commit {name}: {FETCH}"))
}

/// The commit in [`BASE`].
fn base() -> Result<Option<String>> {
    let path = root().join(BASE);
    if !path.exists() {
        return Ok(None);
    }
    let text = files::text(&path)?;
    let commit = text.lines().find(|line| !line.starts_with('#'));
    commit.map(|commit| Some(commit.trim().to_owned())).with_context(|| format!("{BASE} names no commit"))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Version {
    major: u64,
    minor: u64,
    patch: u64,
}

impl Version {
    /// None for versions before a release, such as 1.0.0-rc.1.
    fn parse(text: &str) -> Option<Self> {
        let numbers: Option<Vec<u64>> = text.split('.').map(|number| number.parse().ok()).collect();
        let [major, minor, patch] = numbers?[..] else { return None };
        Some(Self { major, minor, patch })
    }

    fn tag(self) -> String {
        format!("v{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// The tag of the previous version, among those of commits before this one.
fn tagged() -> Result<Option<Version>> {
    let tags = git(&["tag", "--merged", "HEAD", "--no-contains", "HEAD"]).context("git tag failed")?;
    let tags: Vec<_> = tags.lines().filter_map(|tag| Version::parse(tag.strip_prefix('v')?)).collect();
    let own = Version::parse(env!("CARGO_PKG_VERSION")).context("this version is no release's")?;
    Ok(previous(own, &tags))
}

/// The newest version of a lower minor one. Once `own` has a tag, a commit behind that belongs to the next version.
fn previous(own: Version, tags: &[Version]) -> Option<Version> {
    let is_released = tags.contains(&own);
    let is_lower = |tag: &Version| is_released || (tag.major, tag.minor) < (own.major, own.minor);
    tags.iter().copied().filter(is_lower).max()
}

fn build(folder: &Path, name: &str, commit: &str) -> Result<()> {
    println!("building the programs of the previous version, {name}, once for every clone on this machine");
    let start = Instant::now();
    let work = folder.join("work");
    let (sources, made, archive) = (work.join("sources"), work.join("made"), work.join("sources.tar"));
    files::create(&sources)?;
    run(program("git").args(["archive", "--output"]).arg(&archive).arg(commit))?;
    // Cargo compares times: files with those of the commit would pass for the ones that it compiled last.
    run(program("tar")
        .args(["--extract", "--touch", "--directory"])
        .arg(&sources)
        .arg("--file")
        .arg(&archive))?;
    let object = build_ebpf::compile(&sources, &work.join("ebpf"))?;
    let mut build = building(PROGRAMS);
    for package in packages(&sources)? {
        // The number, which no other build has, gives what is compiled other names than this version's have in the same folder.
        let settings = ["opt-level=0", "codegen-units=255"];
        build.args(settings.map(|setting| format!("--config=profile.dev.package.{package}.{setting}")));
    }
    build.env("POSTERN_BPF_OBJECT", object);
    // The dependencies are where this version's are, the programs are not.
    build.env("CARGO_BUILD_BUILD_DIR", target_dir()?).env("CARGO_TARGET_DIR", &made);
    run(build.current_dir(&sources))?;
    for name in PROGRAMS {
        copy(&made.join("debug").join(name), &folder.join(name))?;
    }
    fs::remove_dir_all(&work).with_context(|| format!("removing {}", work.display()))?;
    println!("built the previous version in {:.0?}", start.elapsed());
    Ok(())
}

/// The packages that the programs are made of.
fn packages(sources: &Path) -> Result<Vec<String>> {
    let names = files::paths_in(sources)?.into_iter().map(|path| files::file_name(&path));
    Ok(names.filter(|name| name.starts_with("tunnel-")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(own: &str, tags: &[&str]) -> Option<String> {
        let tags: Vec<_> = tags.iter().filter_map(|tag| Version::parse(tag)).collect();
        previous(Version::parse(own).unwrap(), &tags).map(Version::tag)
    }

    #[test]
    fn the_previous_version_is_the_newest_of_a_lower_minor_one() {
        assert_eq!(of("0.1.0", &[]), None);
        assert_eq!(of("0.3.0", &["0.1.0", "0.2.0", "0.2.10", "0.2.9", "0.3.0-rc.1"]).unwrap(), "v0.2.10");
        assert_eq!(of("1.0.0", &["0.9.0", "0.10.1"]).unwrap(), "v0.10.1");
        // Patches of the version itself do not count.
        assert_eq!(of("0.2.1", &["0.1.3", "0.2.0"]).unwrap(), "v0.1.3");
    }

    #[test]
    fn what_follows_a_tag_belongs_to_the_next_version() {
        assert_eq!(of("0.1.0", &["0.1.0"]).unwrap(), "v0.1.0");
        assert_eq!(of("0.2.1", &["0.1.3", "0.2.0", "0.2.1"]).unwrap(), "v0.2.1");
    }

    #[test]
    fn a_commit_that_is_not_there_is_told_with_how_to_get_it() {
        let missing = "1".repeat(40);
        let error = commit(&missing).unwrap_err().to_string();
        assert!(error.contains(&missing) && error.contains("git fetch --unshallow"), "{error}");
    }

    #[test]
    fn the_base_goes_with_the_first_tag() {
        let tag = tagged().unwrap_or_default().map(Version::tag);
        assert!(tag.is_none() || base().unwrap().is_none(), "{tag:?} is the previous version: remove {BASE}");
    }
}
