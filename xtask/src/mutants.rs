//! Mutation tests: cargo-mutants changes one operator, branch or result at a time in code that decides, and the unit
//! tests have to notice. `.cargo/mutants.toml` has the changes that are left out, each with its reason.
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use crate::command::{cargo, end_of, need_cargo_tool, root, shown, target_dir};
use crate::files;

const VERSION: &str = "27.1.0";

/// Files of one package, and its tests that run against them: every change costs a build and a run of these.
pub(crate) struct Group {
    name: &'static str,
    package: &'static str,
    /// Arguments of `cargo test`, and of the test program.
    target: &'static str,
    tests: &'static [&'static str],
    files: &'static [&'static str],
    /// True if they are few and fast enough for CI.
    quick: bool,
}

const GROUPS: [Group; 5] = [
    Group {
        name: "verdict",
        package: "tunnel-abi",
        target: "--test=verdict",
        tests: &[],
        files: &["tunnel-abi/src/verdict.rs", "tunnel-abi/src/counter.rs", "tunnel-abi/src/lib.rs"],
        quick: true,
    },
    Group {
        name: "relay",
        package: "tunnel-link",
        target: "--lib",
        tests: &["relay::"],
        files: &["tunnel-link/src/relay/frame.rs", "tunnel-link/src/relay/stall.rs"],
        quick: false,
    },
    Group {
        name: "policy",
        package: "tunnel-agent",
        target: "--lib",
        tests: &["policy::", "session::"],
        files: &["tunnel-agent/src/policy.rs", "tunnel-agent/src/session/epoch.rs"],
        quick: false,
    },
    Group {
        name: "judge",
        package: "tunnel-server",
        target: "--lib",
        tests: &[
            "pki::standing::",
            "pki::revocations::",
            "kube::write::csr::",
            "session::registry::",
            "caller::identity::",
            "agent_port::konnectivity::identity::",
        ],
        files: &[
            "tunnel-server/src/session/registry.rs",
            "tunnel-server/src/pki/standing.rs",
            "tunnel-server/src/pki/request.rs",
            "tunnel-server/src/pki/revocations.rs",
            "tunnel-server/src/kube/write/csr/judge.rs",
            "tunnel-server/src/caller/identity.rs",
        ],
        quick: false,
    },
    Group {
        name: "route",
        package: "tunnel-routing",
        target: "--lib",
        // Without the tests of the maximum number of nodes: they take long, and others test the same.
        tests: &["--skip=among_100_000", "--skip=what_fits_into_the_kernel"],
        files: &[
            "tunnel-routing/src/claims.rs",
            "tunnel-routing/src/conflict.rs",
            "tunnel-routing/src/desired.rs",
            "tunnel-routing/src/plan.rs",
            "tunnel-routing/src/planner.rs",
            "tunnel-routing/src/router.rs",
            "tunnel-routing/src/snapshot.rs",
            "tunnel-routing/src/virtual_addresses.rs",
        ],
        quick: false,
    },
];

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Only what CI runs.
    #[arg(long)]
    quick: bool,
    /// Only files whose path contains this.
    file: Option<String>,
}

pub(crate) fn run_all(options: &Options) -> Result<ExitCode> {
    let wanted = |file: &str| options.file.as_ref().is_none_or(|part| file.contains(part));
    let groups: Vec<_> = GROUPS.iter().filter(|group| group.quick || !options.quick).collect();
    ensure!(
        groups.iter().any(|group| group.files.iter().any(|file| wanted(file))),
        "no file with {:?} in its path is among those that are tested so",
        options.file
    );
    prepare()?;
    let mut complete = true;
    for group in groups {
        let files: Vec<_> = group.files.iter().copied().filter(|file| wanted(file)).collect();
        if files.is_empty() {
            continue;
        }
        if let Err(error) = test(group, &files, false).and_then(|results| judge(group.name, &results)) {
            eprintln!("{error:#}");
            complete = false;
        }
    }
    Ok(if complete { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Groups that CI runs, by name.
pub(crate) fn quick() -> impl Iterator<Item = (String, &'static Group)> {
    GROUPS.iter().filter(|group| group.quick).map(|group| (format!("mutants::{}", group.name), group))
}

/// Names of the other groups.
pub(crate) fn slow() -> Vec<String> {
    GROUPS.iter().filter(|group| !group.quick).map(|group| format!("mutants::{}", group.name)).collect()
}

pub(crate) fn run_quick(group: &Group) -> Result<()> {
    judge(group.name, &test(group, group.files, true)?)
}

/// Installs what is missing and brings the copy of the sources up to date.
pub(crate) fn prepare() -> Result<()> {
    need_cargo_tool("cargo-mutants", VERSION)?;
    let inputs = ["corpus", "artifacts"].map(|name| root().join("fuzz").join(name));
    let skipped = [[root().join(".git"), root().join("target"), target_dir()?].as_slice(), &inputs].concat();
    mirror(&root(), &source()?, &skipped)
}

/// Folder in which the changes are made. It is kept with its build: cargo-mutants' own copies have a new path each time,
/// for which everything of the workspace is built again and kept.
fn source() -> Result<PathBuf> {
    Ok(build_dir()?.join("source"))
}

/// A separate target directory: the profile differs from those of other builds, which could use nothing in there.
fn build_dir() -> Result<PathBuf> {
    Ok(target_dir()?.join("mutation"))
}

/// Returns the folder of the results.
fn test(group: &Group, files: &[&str], quietly: bool) -> Result<PathBuf> {
    for file in files {
        ensure!(root().join(file).is_file(), "{file} is missing: mutants.rs has the list of files");
    }
    let output = build_dir()?.join(format!("{}-results", group.name));
    files::create(&output)?;
    let mut command = cargo();
    command.env("CARGO_TARGET_DIR", build_dir()?);
    // The decisions need no BPF object.
    command.env("POSTERN_WITHOUT_BPF", "1");
    // A failure is enough, and finding its smallest input takes long; every run has the same inputs.
    command.env("PROPTEST_MAX_SHRINK_ITERS", "0").env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "1");
    command.env("PROPTEST_CASES", "64").env("PROPTEST_RNG_SEED", "1");
    // Seconds for the tests of one change. On a busy machine they may take several times as long as usual.
    command.env("CARGO_MUTANTS_MINIMUM_TEST_TIMEOUT", "60");
    command.args(["mutants", "--in-place", "--profile=mutants", "--dir"]).arg(source()?);
    command.arg("--output").arg(&output);
    command.args([&format!("--package={}", group.package), &format!("--cargo-arg={}", group.target)]);
    command.args(files.iter().map(|file| format!("--file={file}")));
    command.args(["--"].iter().chain(group.tests).map(|arg| format!("--cargo-test-arg={arg}")));
    let status = if quietly {
        command.output().with_context(|| format!("starting {}", shown(&command)))?.status
    } else {
        eprintln!("+ {}", shown(&command));
        command.status().with_context(|| format!("starting {}", shown(&command)))?
    };
    let results = output.join("mutants.out");
    // 2: some were missed, 3: some made the tests hang, which is as good as failing.
    if !matches!(status.code(), Some(0 | 2 | 3)) {
        let log = fs::read_to_string(results.join("log/baseline.log")).unwrap_or_default();
        let end = end_of(&log);
        bail!("`{}` ended with {status}; the tests without any change:\n{end}", shown(&command));
    }
    Ok(results)
}

fn read(results: &Path, name: &str) -> Result<String> {
    let path = results.join(name);
    files::text(&path)
}

/// Prints the counts; fails if no test has noticed one of the changes.
fn judge(name: &str, results: &Path) -> Result<()> {
    let outcomes: Value = serde_json::from_str(&read(results, "outcomes.json")?).context("outcomes.json")?;
    let count =
        |name: &str| outcomes[name].as_u64().with_context(|| format!("outcomes.json has no {name:?}"));
    let (total, missed) = (count("total_mutants")?, count("missed")?);
    let (caught, hung, unviable) = (count("caught")?, count("timeout")?, count("unviable")?);
    println!(
        "mutants::{name}: {total} changes: {caught} made a test fail, {hung} made one hang, {unviable} do not compile, {missed} went unnoticed"
    );
    ensure!(total > 0, "cargo-mutants found nothing to change");
    ensure!(
        missed == 0,
        "mutants::{name}: no test notices these changes. Write one, or list them in .cargo/mutants.toml with the reason:\n{}",
        read(results, "missed.txt")?.trim_end()
    );
    Ok(())
}

/// Makes `to` a copy of `from`. Files that are the same stay untouched, so that cargo sees no change.
fn mirror(from: &Path, to: &Path, skipped: &[PathBuf]) -> Result<()> {
    files::create(to)?;
    let mut kept = Vec::new();
    for path in files::paths_in(from)? {
        let Some(name) = path.file_name().filter(|_| !skipped.contains(&path)) else { continue };
        let copy = to.join(name);
        kept.push(name.to_owned());
        if path.is_dir() {
            mirror(&path, &copy, skipped)?;
            continue;
        }
        let text = files::bytes(&path)?;
        if fs::read(&copy).ok().as_ref() != Some(&text) {
            files::copy(&path, &copy)?;
        }
    }
    for path in files::paths_in(to)? {
        if path.file_name().is_some_and(|name| kept.iter().any(|kept| kept == name)) {
            continue;
        }
        let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.with_context(|| format!("removing {}", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_that_are_changed_exist() {
        for file in GROUPS.iter().flat_map(|group| group.files) {
            assert!(root().join(file).is_file(), "{file}");
        }
    }
}
