//! The scenarios of `cargo xtask test`.
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum as _;

use crate::beside::Beside;
use crate::command::{build_programs, built, name_of, program};
use crate::cross::{self, Arch, Profile};
use crate::demo::PROGRAMS;
use crate::image::{self, Image};
use crate::needs::Need;
use crate::options::Options;
use crate::tally::Tally;
use crate::{build_ebpf, packages};

/// Environment variable that names the folder of the two programs to scenarios; without it, it is their own.
const FOLDER: &str = "POSTERN_PROGRAMS";
/// The scenarios of a cluster, and the one of a release's images.
const OF_CLUSTERS: &str = "kubernetes::";
const OF_IMAGES: &str = "deploy::manifests_run_unchanged";

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
}

impl Scenarios {
    pub(crate) fn list(options: &Options) -> Result<Self> {
        let output = program_of(options)?.arg("--list").output().context("listing the scenarios")?;
        ensure!(output.status.success(), "`scenarios --list` ended with {}", output.status);
        Ok(Self::parse(&String::from_utf8_lossy(&output.stdout)))
    }

    /// Parses lines such as `[cluster] kubernetes::in_cluster: test`.
    fn parse(list: &str) -> Self {
        let mut scenarios = Self::default();
        for line in list.lines().filter_map(|line| line.strip_suffix(": test")) {
            let (kind, name) =
                line.strip_prefix('[').and_then(|rest| rest.split_once("] ")).unwrap_or(("", line));
            if let Some(need) = Need::value_variants().iter().copied().find(|need| name_of(need) == kind)
                && !scenarios.needs.contains(&need)
            {
                scenarios.needs.push(need);
            }
            scenarios.names.push(name.to_owned());
        }
        scenarios
    }
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
    command.args(options.keep.then_some("--keep"));
    command.args(options.repeat.map(|count| format!("--repeat={count}")));
    if options.released {
        command.env(FOLDER, cross::folder(Arch::HOST, Profile::Release)?);
    }
    match beside {
        Some(beside) => beside.tell(&mut command),
        None => {
            for need in &scenarios.needs {
                tally.heading(need.title());
                command.envs(need.make(options.profile())?);
            }
        }
    }
    if let Some(version) = options.kubernetes {
        let (name, folder) = version.variable()?;
        command.env(name, folder);
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
    if options.released {
        tally.heading("building the binaries and images of a release");
        packages::install(Need::Images.packages())?;
        image::build(options.profile(), &Image::ALL.map(|image| (image, &[Arch::HOST][..])))?;
    }
    if options.names.are_given() {
        return run(options, &Scenarios::list(options)?, None, tally);
    }
    for name in [options.kubernetes.map(|_| OF_CLUSTERS), Some(OF_IMAGES)] {
        let part = options.part(name);
        let scenarios = Scenarios::list(&part)?;
        ensure!(!scenarios.names.is_empty(), "no scenario has a name with {:?}", part.names.given());
        run(&part, &scenarios, None, tally)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listed_scenario_says_what_it_needs() {
        let plain = Scenarios::parse("path::bytes: test\nhttps::sni: test\n\n2 tests, 0 benchmarks\n");
        assert_eq!((plain.names.len(), plain.needs), (2, Vec::new()));
        let some = Scenarios::parse(
            "[cluster] kubernetes::kubectl: test\n[arm64] arm64::agent: test\n[cluster] kubernetes::cp: test\n",
        );
        assert_eq!((some.names[0].as_str(), some.names.len()), ("kubernetes::kubectl", 3));
        assert_eq!(some.needs, [Need::Cluster, Need::Arm64]);
    }
}
