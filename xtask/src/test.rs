//! `cargo xtask test`: runs and counts every test; with a filter, builds only what the filter needs, and
//! installs only the Debian packages that the kinds of its tests need.
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;

use anyhow::{Context as _, Result, anyhow, ensure};
use clap::ValueEnum as _;

use crate::beside::Beside;
use crate::command::{Package, build, built, cargo, default_packages, is_root, name_of, program, run};
use crate::demo::PROGRAMS;
use crate::kernel::{self, Kernel};
use crate::needs::Need;
use crate::peer_tests::Show;
use crate::tally::Tally;
use crate::{bench, build_ebpf, demo, fuzz, mutants, packages, peer_tests};

/// Seconds that each fuzz target runs here; `cargo xtask fuzz` runs them for longer.
const FUZZ_SECONDS: u32 = 10;
/// Number of unit tests that run at the same time: most of those that take long wait for programs that they have started.
const TEST_THREADS: (&str, &str) = ("RUST_TEST_THREADS", "12");

fn why_root() -> String {
    use packages::{BENCH, CLUSTER, DEMO, FUZZ, NAT, PIP, QEMU_USER, SCENARIOS, TESTBED, VIRTUAL_MACHINE};
    let names = packages::names;
    format!(
        "\
cargo xtask test needs root, because it
  - makes network namespaces and iptables rules inside them (a cloud host, a router with NAT, edge hosts),
  - makes child cgroups and attaches eBPF programs to those and to those namespaces, never to the machine's own,
  - starts the real tunnel-server, tunnel-agent, Prometheus, node exporters and a Kubernetes cluster in there,
  - installs Debian packages that are missing for the kinds of tests that are chosen, and neither starts nor enables their services:
    {} for all of them,
    {} for scenarios,
    {} for the demo,
    {} for the Kubernetes cluster,
    {} for images, arm64 and another kernel,
    {} for the benchmark, {} for fuzz targets.
Everything it makes is removed again, whether tests pass or fail.",
        names(&[TESTBED]),
        names(&[NAT, SCENARIOS]),
        names(&[DEMO]),
        names(&[CLUSTER]),
        names(&[PIP, QEMU_USER, VIRTUAL_MACHINE]),
        names(&[NAT, BENCH]),
        names(&[FUZZ]),
    )
}

#[derive(clap::Args, Default)]
pub(crate) struct Options {
    /// Only unit tests and a handful of scenarios; says what it leaves out.
    #[arg(long)]
    quick: bool,
    /// Only the kernel tests of the redirect, the demo and the systemd units, on another kernel in virtual machines. A whole run
    /// has 6.1.
    #[arg(long, value_enum, conflicts_with_all = ["quick", "filter"])]
    kernel: Option<Kernel>,
    /// Only tests whose name contains this, such as `path::` or `https::tls_ends_at_the_edge`.
    filter: Option<String>,
}

impl Options {
    fn runs_everything(&self) -> bool {
        !self.quick && self.filter.is_none() && self.kernel.is_none()
    }

    fn selects(&self, name: &str) -> bool {
        self.filter.as_ref().is_none_or(|filter| name.contains(filter))
    }
}

pub(crate) fn run_tests(options: &Options, mut tally: Tally) -> Result<ExitCode> {
    println!("{}", why_root());
    ensure!(is_root(), "not root: run `sudo -E cargo xtask test`");
    packages::install(&[packages::TESTBED])?;

    if let Some(kernel) = options.kernel {
        build_everything(&mut tally)?;
        tally.heading(&format!("kernel {}", name_of(&kernel)));
        kernel::run(kernel, &mut tally)?;
        tally.report();
        return Ok(if tally.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    if options.runs_everything() {
        build_everything(&mut tally)?;
    } else {
        tally.heading("building the scenarios");
        build(&["postern-scenarios"])?;
    }
    let scenarios = Scenarios::list(options)?;
    let packages = tested_packages(options)?;
    let programs: Vec<_> = if options.quick { Vec::new() } else { whole_programs(options) };
    let needed =
        !scenarios.names.is_empty() || !programs.is_empty() || packages.contains(&"tunnel-server".to_owned());
    if needed && !options.runs_everything() {
        tally.heading("building the eBPF programs and the two programs");
        build_ebpf::run()?;
        build(PROGRAMS)?;
    }
    run_units(options, &packages, &mut tally)?;
    // From here on no step compiles: the builds beside the scenarios hold cargo's locks.
    let mut beside = if options.runs_everything() { Some(Beside::start()?) } else { None };
    run_scenarios(options, &scenarios, beside.as_ref(), &mut tally)?;
    run_programs_and_peer_tests(options, &programs, beside.as_mut(), &mut tally);
    run_kernel(options, &mut tally);
    if options.quick {
        println!("\n{}", left_out(&scenarios)?);
    } else {
        if let Some(beside) = &mut beside {
            tally.heading("the rest of what was built beside the scenarios");
            let result = beside.finish().map(|took| println!("{took}"));
            tally.step("what was built beside the scenarios", result);
        }
        run_fuzz(options, beside.as_ref(), &mut tally)?;
        run_mutants(options, beside.as_ref(), &mut tally);
    }
    tally.report();
    ensure!(tally.passed + tally.failed > 0, "no test has a name with {:?}", options.filter);
    Ok(if tally.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Builds in one command: built one by one, packages have other features, and libraries are compiled several times.
fn build_everything(tally: &mut Tally) -> Result<()> {
    tally.heading("building everything");
    build_ebpf::run()?;
    run(cargo().args(["build", "--all-targets"]))
}

/// Packages that may have a test of such a name: their sources contain every part of it.
fn tested_packages(options: &Options) -> Result<Vec<String>> {
    let parts: Vec<&str> = options.filter.iter().flat_map(|filter| filter.split("::")).collect();
    let mut found = Vec::new();
    for package in default_packages()? {
        let mut text = String::new();
        for file in files_below(&package.folder)? {
            if file.extension().is_some_and(|extension| extension == "rs") {
                text += &file.to_string_lossy();
                text += &fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
            }
        }
        if parts.iter().all(|part| text.contains(part)) {
            found.push(package.name);
        }
    }
    Ok(found)
}

/// Files of one package: another package below it is not a part of it.
fn files_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let entries = fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))?;
    for entry in entries {
        let path = entry.with_context(|| format!("reading {}", folder.display()))?.path();
        if !path.is_dir() {
            files.push(path);
        } else if !path.join("Cargo.toml").exists() {
            files.extend(files_below(&path)?);
        }
    }
    Ok(files)
}

/// Describes the tests that `--quick` leaves out.
fn left_out(quick: &Scenarios) -> Result<String> {
    let all = Scenarios::list(&Options::default())?;
    let tests: Vec<_> = default_packages()?
        .into_iter()
        .flat_map(|package| {
            package.tests.into_iter().map(move |test| format!("{} of {}", test, package.name))
        })
        .collect();
    Ok(format!(
        "left out by --quick: the integration tests ({}), {} of {} scenarios, the demos, the benchmark's smoke run, konnectivity's own tests, the kernel in a virtual machine, the fuzz targets, the mutation tests",
        tests.join(", "),
        all.names.len() - quick.names.len(),
        all.names.len()
    ))
}

/// Reports whether one of the packages has a library: without any, `cargo test --lib` fails.
fn any_library(packages: &[String]) -> Result<bool> {
    let library = |package: &Package| package.folder.join("src/lib.rs").exists();
    Ok(default_packages()?.iter().any(|package| packages.contains(&package.name) && library(package)))
}

fn run_units(options: &Options, packages: &[String], tally: &mut Tally) -> Result<()> {
    if packages.is_empty() {
        return Ok(());
    }
    tally.heading("unit, property and kernel tests");
    let mut tests = cargo();
    tests.args(["test", "--no-fail-fast"]);
    let (threads, count) = TEST_THREADS;
    if std::env::var_os(threads).is_none() {
        tests.env(threads, count);
    }
    if options.quick || options.filter.is_some() {
        tests.args(any_library(packages)?.then_some("--lib")).arg("--bins");
    }
    if options.filter.is_some() && !options.quick {
        tests.arg("--tests");
    }
    if options.filter.is_some() {
        tests.args(packages.iter().flat_map(|package| ["-p", package]));
    }
    tests.arg("--").args(&options.filter);
    let names = tally.count(&mut tests)?;
    if options.filter.is_none()
        && !options.quick
        && !names.iter().any(|line| line.contains("redirect_kernel"))
    {
        tally.fail("the kernel tests of the redirect (redirect_kernel) did not run".to_owned());
    }
    Ok(())
}

/// The scenarios that the options select.
#[derive(Default)]
struct Scenarios {
    names: Vec<String>,
    /// Builds that some of them need.
    needs: Vec<Need>,
}

impl Scenarios {
    fn list(options: &Options) -> Result<Self> {
        let mut list = program(built("scenarios")?);
        list.args(options.quick.then_some("--quick")).arg("--list").args(&options.filter);
        let output = list.output().context("listing the scenarios")?;
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

fn run_scenarios(
    options: &Options,
    scenarios: &Scenarios,
    beside: Option<&Beside>,
    tally: &mut Tally,
) -> Result<()> {
    if scenarios.names.is_empty() {
        return Ok(());
    }
    packages::install(&[packages::NAT, packages::SCENARIOS])?;
    let mut command = program(built("scenarios")?);
    match beside {
        Some(beside) => beside.tell(&mut command),
        None => {
            for need in &scenarios.needs {
                tally.heading(need.title());
                command.envs(need.make()?);
            }
        }
    }
    tally.heading("scenarios");
    command.args(options.quick.then_some("--quick")).args(&options.filter);
    tally.count(&mut command)?;
    Ok(())
}

/// The argument is true if everything has been built.
type Run = fn(bool) -> Result<ExitCode>;

const SMOKE: &str = "bench::smoke";

/// Programs that are tests by their exit codes. The benchmark's only checks that every line still gets a value.
fn whole_programs(options: &Options) -> Vec<(&'static str, Run)> {
    let programs: [(&str, Run); 3] = [
        ("demo", |built| run_demo(built, false)),
        ("demo::kubernetes", |built| run_demo(built, true)),
        (SMOKE, bench::smoke),
    ];
    programs.into_iter().filter(|(name, _)| options.selects(name)).collect()
}

fn run_demo(built: bool, kubernetes: bool) -> Result<ExitCode> {
    demo::install(kubernetes)?;
    if !built {
        build(&["postern-demo"])?;
    }
    demo::run_demo_program(kubernetes)
}

fn run_programs(
    options: &Options,
    programs: &[(&str, Run)],
    mut beside: Option<&mut Beside>,
    tally: &mut Tally,
) {
    for (name, run) in programs {
        tally.heading(name);
        // The benchmark would install rathole at the same time.
        let waited = match &mut beside {
            Some(beside) if *name == SMOKE => beside.wait(Need::Rathole),
            _ => Ok(()),
        };
        let result = waited.and_then(|()| run(options.runs_everything())).and_then(|code| {
            ensure!(code == ExitCode::SUCCESS, "{name} ended with {code:?}");
            Ok(())
        });
        tally.step(name, result);
    }
}

/// Runs both, in a whole run at the same time: the peer's tests mostly wait, and use hardly any of the CPUs.
fn run_programs_and_peer_tests(
    options: &Options,
    programs: &[(&str, Run)],
    beside: Option<&mut Beside>,
    tally: &mut Tally,
) {
    let wanted = !options.quick && options.selects(peer_tests::NAME);
    thread::scope(|scope| {
        let meanwhile =
            (wanted && options.runs_everything()).then(|| scope.spawn(|| peer_tests::run_all(Show::Nothing)));
        run_programs(options, programs, beside, tally);
        if wanted {
            tally.heading(peer_tests::NAME);
            let report = match meanwhile {
                Some(thread) => thread.join().unwrap_or_else(|_| Err(anyhow!("its thread has panicked"))),
                None => build(&["tunnel-agent"]).and_then(|()| peer_tests::run_all(Show::Progress)),
            };
            match report {
                Ok(report) => report.count(tally),
                Err(error) => tally.step(peer_tests::NAME, Err(error)),
            }
        }
    });
}

fn run_kernel(options: &Options, tally: &mut Tally) {
    let name = format!("kernel::{}", name_of(&kernel::IN_EVERY_RUN));
    if options.quick || !options.selects(&name) || cfg!(not(target_arch = "x86_64")) {
        return;
    }
    tally.heading(&name);
    let built = if options.runs_everything() { Ok(()) } else { build_everything(tally) };
    if let Err(error) = built.and_then(|()| kernel::run(kernel::IN_EVERY_RUN, tally)) {
        tally.step(&name, Err(error));
    }
}

fn run_fuzz(options: &Options, beside: Option<&Beside>, tally: &mut Tally) -> Result<()> {
    let targets = fuzz::targets()?;
    let chosen: Vec<_> =
        targets.into_iter().filter(|target| options.selects(&fuzz::name_of(target))).collect();
    if chosen.is_empty() {
        return Ok(());
    }
    if let Some(beside) = beside {
        for target in chosen {
            let name = fuzz::name_of(&target);
            tally.step(&name, beside.result(&name));
        }
        return Ok(());
    }
    tally.heading(&format!("fuzz targets, {FUZZ_SECONDS} s each: {}", chosen.join(", ")));
    if let Err(error) = fuzz::prepare() {
        eprintln!("fuzz: {error:#}");
        for target in chosen {
            tally.fail(format!("{} (not built)", fuzz::name_of(&target)));
        }
        return Ok(());
    }
    // Two at a time: each has one thread.
    for pair in chosen.chunks(2) {
        let run = |target| fuzz::run_target(target, FUZZ_SECONDS, true);
        let results: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = pair.iter().map(|target| scope.spawn(move || run(target))).collect();
            threads.into_iter().map(thread::ScopedJoinHandle::join).collect()
        });
        for (target, result) in pair.iter().zip(results) {
            let result = result.unwrap_or_else(|_| Err(anyhow!("its thread has panicked")));
            tally.step(&fuzz::name_of(target), result);
        }
    }
    Ok(())
}

fn run_mutants(options: &Options, beside: Option<&Beside>, tally: &mut Tally) {
    let chosen: Vec<_> = mutants::quick().filter(|(name, _)| options.selects(name)).collect();
    if chosen.is_empty() {
        return;
    }
    if let Some(beside) = beside {
        for (name, _) in chosen {
            tally.step(&name, beside.result(&name));
        }
        return;
    }
    let names: Vec<_> = chosen.iter().map(|(name, _)| name.as_str()).collect();
    tally.heading(&format!("mutation tests: {}", names.join(", ")));
    let prepared = mutants::prepare();
    if let Err(error) = &prepared {
        eprintln!("mutants: {error:#}");
    }
    for (name, group) in chosen {
        match prepared {
            Ok(()) => tally.step(&name, mutants::run_quick(group)),
            Err(_) => tally.fail(format!("{name} (not started)")),
        }
    }
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

    /// Doctests are off: rustdoc would compile each library once more to find none.
    #[test]
    fn libraries_have_no_examples_that_nobody_runs() {
        for package in default_packages().unwrap() {
            let manifest = fs::read_to_string(package.folder.join("Cargo.toml")).unwrap();
            let library = package.folder.join("src/lib.rs").exists();
            assert_eq!(manifest.contains("\ndoctest = false\n"), library, "{}", package.name);
            for file in files_below(&package.folder.join("src")).unwrap() {
                let text = fs::read_to_string(&file).unwrap();
                let lines = text.lines().map(str::trim_start);
                let comments =
                    lines.filter_map(|line| line.strip_prefix("/// ").or_else(|| line.strip_prefix("//! ")));
                let mut opening = comments.filter(|line| line.starts_with("```")).step_by(2);
                assert!(opening.all(|line| line == "```text"), "{} has an example", file.display());
            }
        }
    }

    #[test]
    fn packages_without_a_library_are_told() {
        let any =
            |names: &[&str]| any_library(&names.iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap();
        assert!(!any(&["xtask", "postern-bench"]));
        assert!(any(&["xtask", "tunnel-link"]));
    }

    #[test]
    fn a_filter_selects_the_packages_whose_sources_have_its_words() {
        let packages = |filter: &str| {
            tested_packages(&Options { filter: Some(filter.to_owned()), ..Options::default() }).unwrap()
        };
        let own = packages("a_filter_selects_the_packages_whose_sources_have_its_words");
        assert_eq!(own, ["xtask"]);
        assert!(packages("circles::tests").contains(&"xtask".to_owned()));
    }
}
