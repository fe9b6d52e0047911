//! The scenarios of `cargo xtask test`.
use std::process::Command;

use anyhow::{Result, ensure};
use clap::ValueEnum as _;

use crate::beside::Beside;
use crate::command::{build_programs, built, name_of, output, program};
use crate::cross::{self, Arch, Profile};
use crate::demo::PROGRAMS;
use crate::needs::Need;
use crate::options::Options;
use crate::tally::Tally;
use crate::{build_ebpf, packages, previous};

/// Environment variable that names the folder of the two programs to scenarios; without it, it is their own.
const FOLDER: &str = "POSTERN_PROGRAMS";
/// The scenarios of a cluster, those with the previous version, and the one of a release's images.
const OF_CLUSTERS: &str = "kubernetes::";
const OF_VERSIONS: &str = "versions::";
const OF_IMAGES: &str = "deploy::manifests_run_unchanged";
const LONG: &str = "it takes more than half a minute";
/// Those of a plain `cargo xtask test` that are not run a second time with the static programs.
const ONCE: [(&str, &str); 6] = [
    ("chaos::", LONG),
    ("soak::", LONG),
    ("kubernetes::", LONG),
    ("disks::", LONG),
    ("doctor::firewall::rules_of_other_programs_are_named", LONG),
    ("deploy::", "it runs no program of Postern, or those of the images anyway"),
];

/// The program `scenarios`, told what the options choose.
fn program_of(options: &Options) -> Result<Command> {
    let mut scenarios = program(built("scenarios")?);
    scenarios.args(options.is_short().then_some("--quick"));
    scenarios.args(options.names.arguments());
    Ok(scenarios)
}

/// The scenarios that the options select.
#[derive(Default)]
pub(crate) struct Scenarios {
    pub(crate) names: Vec<String>,
    /// Builds that some of them need.
    needs: Vec<Need>,
    /// Those that start no cluster.
    without_cluster: Vec<String>,
}

impl Scenarios {
    pub(crate) fn list(options: &Options) -> Result<Self> {
        Ok(Self::parse(&output(program_of(options)?.arg("--list"))?))
    }

    /// Parses lines such as `[cluster] kubernetes::in_cluster: test`.
    fn parse(list: &str) -> Self {
        let mut scenarios = Self::default();
        for line in list.lines().filter_map(|line| line.strip_suffix(": test")) {
            let (kind, name) =
                line.strip_prefix('[').and_then(|rest| rest.split_once("] ")).unwrap_or(("", line));
            let need = Need::value_variants().iter().copied().find(|need| name_of(need) == kind);
            if let Some(need) = need.filter(|need| !scenarios.needs.contains(need)) {
                scenarios.needs.push(need);
            }
            if !need.is_some_and(Need::has_cluster) {
                scenarios.without_cluster.push(name.to_owned());
            }
            scenarios.names.push(name.to_owned());
        }
        scenarios
    }
}

/// Runs the fast ones of a plain `cargo xtask test` once more, in a run of everything, with the static programs of the images:
/// these have the libc and the allocator of a release.
pub(crate) fn run_static(options: &Options, beside: &mut Beside, tally: &mut Tally) -> Result<()> {
    let heading = "fast scenarios with the static programs of the images";
    tally.heading(heading);
    if let Err(error) = beside.wait(Need::Images).and_then(|()| beside.result(&name_of(&Need::Images))) {
        tally.step(heading, Err(error));
        return Ok(());
    }
    for (name, reason) in ONCE {
        tally.skip(format!("{name} with the static programs"), reason);
    }
    let mut command = program(built("scenarios")?);
    command.args(["--quick", "--other-programs"]);
    command.args(ONCE.iter().flat_map(|(name, _)| ["--skip", name])).args(options.names.arguments());
    command.env(FOLDER, cross::folder(Arch::HOST, options.profile())?);
    tally.count(&mut command)
}

/// Builds what they need, unless that is built beside them, and runs them.
pub(crate) fn run(
    options: &Options,
    scenarios: &Scenarios,
    beside: Option<&Beside>,
    tally: &mut Tally,
) -> Result<()> {
    if scenarios.names.is_empty() {
        return Ok(());
    }
    packages::install(&[packages::NAT, packages::SCENARIOS])?;
    let mut command = program_of(options)?;
    if let Some(error) = previous::check().err().filter(|_| options.all) {
        tally.skip(OF_VERSIONS, format!("{error:#}"));
        command.args(["--skip", OF_VERSIONS]);
    }
    command.args(options.keep.then_some("--keep"));
    command.args(options.repeat.map(|count| format!("--repeat={count}")));
    command.args(options.is_variant().then_some("--other-programs"));
    if options.released {
        command.env(FOLDER, cross::folder(Arch::HOST, Profile::Release)?);
    }
    match beside {
        Some(beside) => beside.tell(&mut command),
        None => {
            for need in &scenarios.needs {
                tally.heading(need.title());
                command.envs(need.make(options.profile(), options.kubernetes)?);
            }
        }
    }
    tally.heading("scenarios");
    tally.count(&mut command)
}

/// Runs the chosen ones with what a release has, or on another version of Kubernetes. Without names, these are a part and the one
/// of the images.
pub(crate) fn run_variant(options: &Options, tally: &mut Tally) -> Result<()> {
    tally.heading("building the programs and the scenarios");
    build_ebpf::run()?;
    build_programs(&[PROGRAMS, &["scenarios"]].concat())?;
    let parts = if options.names.are_given() {
        vec![options.clone()]
    } else {
        [options.kubernetes.map(|_| OF_CLUSTERS), Some(OF_IMAGES)].map(|name| options.part(name)).into()
    };
    let parts: Result<Vec<_>> = parts.into_iter().map(|part| Ok((Scenarios::list(&part)?, part))).collect();
    let parts = parts?;
    let all = || parts.iter().flat_map(|(scenarios, _)| &scenarios.names);
    let unknown = options.names.unknown(all().map(String::as_str));
    ensure!(
        unknown.is_empty(),
        "no scenario has a name with {unknown:?}: `cargo xtask test --list` has the names"
    );
    ensure!(all().next().is_some(), "--skip leaves no scenario");
    for (scenarios, _) in &parts {
        check(options, scenarios)?;
    }
    if options.released {
        tally.heading("building the binaries of a release");
        packages::install(&[packages::PIP])?;
        cross::build(Arch::HOST, options.profile(), PROGRAMS)?;
    }
    for (scenarios, part) in &parts {
        run(part, scenarios, None, tally)?;
    }
    Ok(())
}

/// Refuses scenarios that would not use the other programs.
fn check(options: &Options, scenarios: &Scenarios) -> Result<()> {
    ensure!(
        !(options.released && scenarios.needs.contains(&Need::Arm64)),
        "--released has this machine's programs only: leave out arm64::"
    );
    let without = &scenarios.without_cluster;
    ensure!(
        options.kubernetes.is_none() || without.is_empty(),
        "--kubernetes is for scenarios with a cluster, and these have none: {}",
        without.join(", ")
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::Kubernetes;

    #[test]
    fn a_listed_scenario_says_what_it_needs() {
        let plain = Scenarios::parse("path::bytes: test\nhttps::sni: test\n\n2 tests, 0 benchmarks\n");
        assert_eq!((plain.names.len(), plain.needs), (2, Vec::new()));
        let some = Scenarios::parse(
            "[cluster] kubernetes::kubectl: test\n[arm64] arm64::agent: test\n[cluster] kubernetes::cp: test\n",
        );
        assert_eq!((some.names[0].as_str(), some.names.len()), ("kubernetes::kubectl", 3));
        assert_eq!(some.needs, [Need::Cluster, Need::Arm64]);
        assert_eq!(some.without_cluster, ["arm64::agent"]);
        let on = |options| check(&options, &some).unwrap_err().to_string();
        assert!(on(Options { released: true, ..Options::default() }).contains("arm64::"));
        let kubernetes = Some(Kubernetes::Old);
        assert!(on(Options { kubernetes, ..Options::default() }).ends_with(": arm64::agent"));
        assert!(check(&Options::default(), &some).is_ok());
    }
}
