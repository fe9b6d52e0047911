//! `cargo xtask release`: all that a release consists of, in one folder; docs/releases.md says how it is signed.
use std::collections::BTreeMap;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};

use crate::archive::pack;
use crate::book;
use crate::command::{name_of, output, program, root, run, target_dir};
use crate::cross::{self, Arch, Profile};
use crate::deb_rpm::{self, Programs, Stage};
use crate::files::{self, copy, write};
use crate::image::oci;
use crate::image::{self, Image, VERSION};
use crate::packages;
use crate::peers::{self, Peer};
use crate::plugin;
use crate::provenance::{Build, sums};
use crate::registry::Registry;
use crate::shell;
use crate::source::{Source, git};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// How the binaries are compiled. `dev` takes less time: for trying this command, not for others.
    #[arg(long, value_enum, default_value_t = Profile::Release)]
    profile: Profile,
    /// URI of who builds, for the provenance: a CI system has one of its own.
    #[arg(long, default_value = "urn:postern:local-build")]
    builder: String,
}

pub(crate) fn run_release(options: &Options) -> Result<ExitCode> {
    let source = Source::read()?;
    source.ensure_committed()?;
    let commit = source.revision.clone().unwrap_or_default();
    if options.profile == Profile::Release {
        check_tags(&commit)?;
    }
    let build = Build {
        builder: options.builder.clone(),
        commit: commit.clone(),
        lock: files::bytes(&root().join("Cargo.lock"))?,
        profile: name_of(&options.profile),
        // Cargo's processes inherit it; tunnel-doctor compiles it in.
        docs_url: env::var("POSTERN_DOCS_URL").ok(),
        compiler: output(program("rustc").arg("--version"))?.trim().to_owned(),
    };
    let done = target_dir()?.join(format!("postern-{VERSION}"));
    // It gets its name when it is complete.
    let out = done.with_file_name(format!("postern-{VERSION}.partial"));
    for folder in [&out, &done] {
        // Files of another attempt must not get into the checksums.
        remove(folder)?;
    }
    files::create(&out)?;

    // First whatever may fail within seconds: programs take half an hour.
    write(&out.join("NOTES.md"), &written_notes(&commit)?)?;
    manifests(&out)?;
    chart(&out, &source)?;
    plugin::write_release(&out, source.epoch)?;
    deb_rpm::need_tools()?;
    book::tool()?;
    for arch in Arch::ALL {
        cross::need_target(arch)?;
    }

    let archives = image::build(options.profile, &Image::ALL.map(|image| (image, Arch::ALL.as_slice())))?;
    let built = archives.first().and_then(|archive| archive.parent()).context("no archives")?;
    for archive in &archives {
        copy(archive, &out.join(archive.file_name().unwrap_or_default()))?;
    }
    let documents = shell::build(&cross::folder(Arch::HOST, options.profile)?)?;
    for arch in Arch::ALL {
        let folder = cross::folder(arch, options.profile)?;
        for image in Image::ALL {
            let name = format!("{}-linux-{}", image.name(), name_of(&arch));
            copy(&folder.join(image.name()), &out.join(&name))?;
            let sbom = format!("{name}.cdx.json");
            copy(&built.join(&sbom), &out.join(sbom))?;
            let programs = Programs {
                folder: &folder,
                arch,
                revision: 1,
                epoch: source.epoch,
                documents: Some(&documents),
            };
            let stage = Stage::new(image, &programs)?;
            stage.deb(&out)?;
            stage.rpm(&out)?;
        }
    }
    let programs = cross::folder(Arch::HOST, options.profile)?;
    let book = book::build(&programs)?;
    pack(source.epoch, &book, &out.join(format!("postern-book-{VERSION}.tar.gz")), &["."])?;
    let now = Source::read()?;
    now.ensure_committed()?;
    ensure!(now.revision == source.revision, "another commit was checked out during the build: start again");
    build.state(&out)?;
    write(&out.join("SHA256SUMS"), &checksums(&out)?)?;
    fs::rename(&out, &done).with_context(|| format!("renaming to {}", done.display()))?;
    println!("{}", done.display());
    Ok(ExitCode::SUCCESS)
}

fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", folder.display()))
        }
        _ => Ok(()),
    }
}

/// Fails if the history is incomplete, or if tags contradict the version.
fn check_tags(commit: &str) -> Result<()> {
    ensure!(
        git(&["rev-parse", "--is-shallow-repository"]).as_deref() == Some("false"),
        "this clone lacks history, of which NOTES.md is made: `git fetch --unshallow --tags`"
    );
    let of_version = git(&["rev-parse", "--verify", &format!("refs/tags/v{VERSION}^{{commit}}")]);
    let here = git(&["tag", "--points-at", commit, "--list", "v[0-9]*"]).context("git tag failed")?;
    judge_tags(commit, of_version.as_deref(), &here)?;
    if of_version.is_none() {
        println!("this commit has no tag v{VERSION}: publish the files only after it has (docs/releases.md)");
    }
    Ok(())
}

/// `of_version` is the commit that the version's tag names; `here` are the commit's tags, one per line.
fn judge_tags(commit: &str, of_version: Option<&str>, here: &str) -> Result<()> {
    let other = of_version.filter(|tagged| *tagged != commit);
    ensure!(
        other.is_none(),
        "version {VERSION} is commit {}: set the next one (docs/releases.md)",
        other.unwrap_or_default()
    );
    let wanted = format!("v{VERSION}");
    ensure!(
        here.is_empty() || here.lines().any(|tag| tag == wanted),
        "this commit is tagged {here}, but its version is {VERSION} (Cargo.toml)"
    );
    Ok(())
}

fn written_notes(commit: &str) -> Result<String> {
    let since = git(&["describe", "--tags", "--match", "v[0-9]*", "--abbrev=0", &format!("{commit}^")]);
    let range = since.as_ref().map_or_else(|| "HEAD".to_owned(), |tag| format!("{tag}..HEAD"));
    let log = git(&["log", "--no-merges", "--reverse", "--format=%s", &range]).context("git log failed")?;
    Ok(notes(&log, commit, since.as_deref()))
}

/// The base and every overlay as one file each, for those without Kustomize.
fn manifests(out: &Path) -> Result<()> {
    let kubectl = peers::build(Peer::Kubernetes)?.join("kubectl");
    let mut folders = vec![root().join("deploy/base")];
    folders.extend(files::paths_in(&root().join("deploy/overlays"))?);
    for folder in folders {
        let manifest = output(program(&kubectl).arg("kustomize").arg(&folder))?;
        files::write(&out.join(format!("postern-{}.yaml", files::file_name(&folder))), manifest)?;
    }
    Ok(())
}

/// The Helm chart, and an OCI archive of it for registries. `helm package` would store the present time with every file.
fn chart(out: &Path, source: &Source) -> Result<[PathBuf; 2]> {
    let helm = peers::build(Peer::Helm)?.join("helm");
    let charts = root().join("deploy/helm");
    run(program(&helm).args(["lint", "--strict"]).arg(charts.join("postern")))?;
    let archive = out.join(format!("postern-{VERSION}.tgz"));
    pack(source.epoch, &charts, &archive, &["postern"])?;
    // Fails unless the archive is a chart.
    let metadata = output(program(&helm).args(["show", "chart"]).arg(&archive))?;
    let metadata = serde_saphyr::from_str(&metadata).context("Chart.yaml")?;
    let layout = out.join(format!("postern-chart-{VERSION}.oci.tar"));
    files::write(&layout, oci::chart(&metadata, files::bytes(&archive)?, &source.created)?)?;
    Ok([archive, layout])
}

/// Tries what a release adds to the programs: packages by Debian's and rpm's own tools, and the chart
/// by Helm, which pulls it from a registry on loopback.
pub(crate) fn check() -> Result<()> {
    packages::install(&[packages::PACKAGES])?;
    let dir = tempfile::tempdir().context("a folder for packages")?;
    let source = Source::read()?;
    let [packed, layout] = chart(dir.path(), &source)?;
    let registry = Registry::serve(&layout)?;
    let pulled = tempfile::tempdir().context("a folder for the chart")?;
    let helm = peers::build(Peer::Helm)?.join("helm");
    run(program(helm)
        .args(["pull", "--plain-http", "--version", VERSION, "--destination"])
        .arg(pulled.path())
        .arg(format!("oci://{}/postern", registry.address)))?;
    let archive = files::paths_in(pulled.path())?.pop().context("helm pulled nothing")?;
    ensure!(files::bytes(&archive)? == files::bytes(&packed)?, "helm pulled another chart");
    deb_rpm::check(dir.path(), source.epoch)
}

/// Checksums of the files in a folder, in the format of `sha256sum --check`.
fn checksums(folder: &Path) -> Result<String> {
    Ok(sums(folder)?.into_iter().map(|(name, sum)| format!("{sum}  {name}\n")).collect())
}

/// Release notes from the commits' subjects, `AREA: WHAT`, oldest first.
fn notes(log: &str, commit: &str, since: Option<&str>) -> String {
    const OTHER: &str = "other";
    let mut areas: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for subject in log.lines().filter(|subject| !subject.is_empty()) {
        let area = subject.split_once(": ").filter(|(area, _)| !area.contains(' '));
        let (area, what) = area.unwrap_or((OTHER, subject));
        areas.entry(area).or_default().push(what);
    }
    let mut text = format!("# Postern {VERSION}\n\nCommit {commit}. ");
    text += &match since {
        Some(tag) => format!("Changes since {tag}.\n"),
        None => "The first release.\n".to_owned(),
    };
    text += "\n`sha256sum --check SHA256SUMS` checks the files; docs/releases.md says how their signatures are checked.\n";
    let other = areas.remove(OTHER);
    for (area, changes) in areas.into_iter().chain(other.map(|changes| (OTHER, changes))) {
        // Writing to a String cannot fail.
        write!(text, "\n## {area}\n\n").ok();
        for change in changes {
            writeln!(text, "* {change}").ok();
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_the_commits_by_area() {
        let log = "route: a plan counts once\nCapacity without a cliff\ntests: less\nroute: a token\n";
        let text = notes(log, "abc", Some("v0.0.9"));
        let start = format!("# Postern {VERSION}\n\nCommit abc. Changes since v0.0.9.\n");
        assert!(text.starts_with(&start), "{text}");
        let end = "\n## route\n\n* a plan counts once\n* a token\n\n## tests\n\n* less\n\n## other\n\n* Capacity without a cliff\n";
        assert!(text.ends_with(end), "{text}");
        assert!(notes("", "abc", None).contains("The first release."));
    }

    #[test]
    fn a_version_is_one_commit() {
        let wanted = format!("v{VERSION}");
        judge_tags("abc", None, "").unwrap();
        judge_tags("abc", Some("abc"), &format!("v0.0.0-rc.1\n{wanted}")).unwrap();
        let error = judge_tags("abc", Some("def"), "").unwrap_err().to_string();
        assert!(error.contains("is commit def"), "{error}");
        let error = judge_tags("abc", None, "v9.0.0").unwrap_err().to_string();
        assert!(error.contains("is tagged v9.0.0, but its version is"), "{error}");
    }

    #[test]
    fn checksums_are_those_of_sha256sum() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("b"), "two").unwrap();
        fs::write(folder.path().join("a"), "one").unwrap();
        let sums = checksums(folder.path()).unwrap();
        write(&folder.path().join("SHA256SUMS"), &sums).unwrap();
        run(program("sha256sum").args(["--check", "--strict", "SHA256SUMS"]).current_dir(folder.path()))
            .unwrap();
        assert_eq!(sums.lines().count(), 2);
    }
}
