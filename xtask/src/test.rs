//! `cargo xtask test`: runs and counts tests. With names, builds only what these need, and installs only the Debian packages that
//! the kinds of these tests need.
use std::num::NonZeroUsize;
use std::process::{Command, ExitCode, Stdio};
use std::thread;

use anyhow::{Context as _, Result, anyhow, ensure};
use clap::ValueEnum as _;

use crate::beside::Beside;
use crate::chosen::Names;
use crate::command::{
    build_programs, built, cargo, is_root, name_of, output, program, run, shown, target_dir,
};
use crate::demo::PROGRAMS;
use crate::kernel::{self, Kernel};
use crate::needs::Need;
use crate::options::Options;
use crate::peer_tests::Show;
use crate::peers::Kubernetes;
use crate::scenarios::{self, Scenarios};
use crate::tally::Tally;
use crate::{bench, book, build_ebpf, demo, fleet, fuzz, mutants, packages, peer_tests, release, shell};

/// Seconds that each fuzz target runs here; `cargo xtask fuzz` runs them for longer.
const FUZZ_SECONDS: u32 = 10;
const BOOK: &str = "the book";
const SHELL: &str = "man pages and completion";
/// Packages whose tests are run by their programs.
const SCENARIOS: &str = "postern-scenarios";
const KERNEL_TESTS: &str = "postern-kernel-tests";
/// Program of the latter.
const REDIRECT_KERNEL: &str = "redirect_kernel";

fn why_root() -> String {
    use packages::{
        BENCH, CLUSTER, DEMO, FUZZ, NAT, PIP, QEMU_USER, SCENARIOS, SHELLS, TESTBED, VIRTUAL_MACHINE,
    };
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
    {} for the benchmark, {} for fuzz targets,
    {} for man pages and completion.
Everything it makes is removed again, whether tests pass or fail.",
        names(&[TESTBED]),
        names(&[NAT, SCENARIOS]),
        names(&[DEMO]),
        names(&[CLUSTER]),
        names(&[PIP, QEMU_USER, VIRTUAL_MACHINE]),
        names(&[NAT, BENCH]),
        names(&[FUZZ]),
        names(&[SHELLS]),
    )
}

pub(crate) fn run_tests(options: &Options, mut tally: Tally) -> Result<ExitCode> {
    let packages = options.names.packages()?;
    let programs = whole_programs(options);
    if options.list {
        return list(options, &packages, &programs);
    }
    if let Some(kernel) = options.kernel {
        need_root()?;
        tally.heading("building the programs");
        build_ebpf::run()?;
        build_programs(&kernel::programs())?;
        tally.heading(&format!("kernel {}", name_of(&kernel)));
        kernel::run(kernel, &options.names, &mut tally)?;
        tally.report(None);
        return Ok(exit_code(&tally));
    }
    if options.is_variant() {
        need_root()?;
        scenarios::run_variant(options, &mut tally)?;
        tally.report(None);
        return Ok(exit_code(&tally));
    }
    let mut beside = None;
    if !options.names.are_given() {
        need_root()?;
        if !options.all {
            // Go compiles it, so that it holds none of cargo's locks.
            beside = Some(Beside::start(&[Need::Cluster])?);
        }
        build_everything(&mut tally)?;
        if options.all {
            // Before other builds begin: it may install mdBook.
            tally.heading(BOOK);
            let programs = target_dir()?.join("debug");
            tally.step(BOOK, book::build(&programs).map(drop));
            tally.step(SHELL, shell::build(&programs).and_then(|target| shell::check(&target)));
        }
    }
    let (scenarios, kernel_tests) = choose(options, &packages, &mut tally)?;
    // A package that has another name now, or a list of another format, must not pass for one without tests.
    ensure!(
        options.names.restrict() || !(scenarios.names.is_empty() || kernel_tests.is_empty()),
        "no scenarios or no kernel tests were found"
    );
    let mut others = by_name(options, &programs)?;
    others.extend(kernel_tests.iter().map(|name| of_kernel(name)));
    ensure_known(options, &packages, others.iter().chain(&scenarios.names))?;
    if options.names.are_given()
        && !(scenarios.names.is_empty() && kernel_tests.is_empty() && programs.is_empty())
    {
        need_root()?;
        tally.heading("building the eBPF programs and the two programs");
        build_ebpf::run()?;
        build_programs(&[PROGRAMS, &[REDIRECT_KERNEL]].concat())?;
    }
    let others =
        |name: &String| scenarios.names.iter().chain(&kernel_tests).any(|test| test.contains(name.as_str()));
    if options.names.are_given() && options.names.given().iter().all(others) {
        tally
            .skip("unit tests", "every name is one of a scenario or kernel test: `cargo test -p CRATE NAME`");
    } else {
        run_units(options, &packages, &mut tally, &mut beside)?;
    }
    run_kernel_tests(options, &kernel_tests, &mut tally)?;
    scenarios::run(options, &scenarios, beside.as_ref(), &mut tally)?;
    if let Some(beside) = beside.as_mut().filter(|_| options.all) {
        scenarios::run_static(options, beside, &mut tally)?;
    }
    run_programs_and_peer_tests(options, &programs, beside.as_mut(), &mut tally);
    run_kernel(options, &mut tally);
    if let Some(beside) = &mut beside {
        tally.heading("the rest of what was built beside the scenarios");
        let result = beside.finish().map(|took| println!("{took}"));
        tally.step("what was built beside the scenarios", result);
    }
    run_fuzz_and_mutants(options, beside.as_ref(), &mut tally)?;
    skip_the_rest(options, &scenarios, &mut tally)?;
    tally.report(options.kind());
    ensure!(tally.passed + tally.failed > 0, "no test has a name with {:?}", options.names.given());
    Ok(exit_code(&tally))
}

fn exit_code(tally: &Tally) -> ExitCode {
    if tally.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Unit tests alone do not.
fn need_root() -> Result<()> {
    println!("{}", why_root());
    ensure!(is_root(), "not root: run `sudo -E cargo xtask test`");
    packages::install(&[packages::TESTBED])
}

/// Builds in one command: built one by one, packages have other features, and libraries are compiled several times.
fn build_everything(tally: &mut Tally) -> Result<()> {
    tally.heading("building everything");
    build_ebpf::run()?;
    run(cargo().args(["build", "--all-targets"]))
}

/// Prints the names of the tests that would be run.
fn list(options: &Options, packages: &[String], programs: &[(&str, Run)]) -> Result<ExitCode> {
    let (scenarios, kernel_tests) = choose(options, packages, &mut Tally::new())?;
    if !packages.is_empty() {
        run(units(options, packages).arg("--list"))?;
    }
    let others = by_name(options, programs)?;
    kernel_tests.into_iter().chain(scenarios.names).chain(others).for_each(|name| println!("{name}: test"));
    Ok(ExitCode::SUCCESS)
}

/// Returns the chosen ones of those that are only run by name or with `--all`, and are no scenarios.
fn by_name(options: &Options, programs: &[(&str, Run)]) -> Result<Vec<String>> {
    let fuzzed = fuzz::targets()?.into_iter().map(|target| fuzz::name_of(&target));
    let others = programs.iter().map(|(name, _)| (*name).to_owned()).chain(fuzzed);
    let others = others.chain(mutants::quick().map(|(name, _)| name));
    let others = others.chain([peer_tests::NAME.to_owned(), kernel_name()]);
    Ok(others.filter(|name| options.runs(name)).collect())
}

/// Fails if a name is in no chosen test's. `tests` has all but unit tests, which are listed only if a name may be one of
/// theirs.
fn ensure_known<'a>(
    options: &Options,
    packages: &[String],
    tests: impl Iterator<Item = &'a String>,
) -> Result<()> {
    let mut unknown = options.names.unknown(tests.map(String::as_str));
    if !unknown.is_empty() && !packages.is_empty() {
        println!("looking for {unknown:?} among the unit tests");
        let mut list = units(options, packages);
        list.arg("--list").stderr(Stdio::inherit());
        let listed = list.output().context("listing the unit tests")?;
        ensure!(listed.status.success(), "`{}` ended with {}", shown(&list), listed.status);
        let listed = String::from_utf8_lossy(&listed.stdout);
        let still = options.names.unknown(listed.lines().filter_map(|line| line.strip_suffix(": test")));
        unknown.retain(|name| still.contains(name));
    }
    ensure!(
        unknown.is_empty(),
        "no chosen test has a name with {unknown:?}: `cargo xtask test --list` names them, `cargo xtask mutants` and `--kernel` have others"
    );
    Ok(())
}

/// Returns the chosen scenarios and kernel tests.
fn choose(options: &Options, packages: &[String], tally: &mut Tally) -> Result<(Scenarios, Vec<String>)> {
    let has = |name: &str| packages.iter().any(|package| package == name);
    let wanted = [(SCENARIOS, "scenarios"), (KERNEL_TESTS, REDIRECT_KERNEL)];
    let wanted: Vec<_> =
        wanted.iter().filter(|(package, _)| has(package)).map(|(_, program)| *program).collect();
    if (options.names.are_given() || options.list) && !wanted.is_empty() {
        tally.heading("building the scenarios and the kernel tests");
        build_programs(&wanted)?;
    }
    let scenarios = if has(SCENARIOS) { Scenarios::list(options)? } else { Scenarios::default() };
    Ok((scenarios, if has(KERNEL_TESTS) { kernel_tests(options)? } else { Vec::new() }))
}

/// Notes what this run leaves to others.
fn skip_the_rest(options: &Options, scenarios: &Scenarios, tally: &mut Tally) -> Result<()> {
    if options.names.are_given() {
        return Ok(());
    }
    if !options.all {
        let all = Scenarios::list(&Options::everything())?.names.len();
        let left = all - scenarios.names.len();
        let (kernel, units) = (kernel_name(), "the systemd units");
        let what = format!(
            "{left} of {all} scenarios, demo, demo::kubernetes, {SMOKE}, {NEW_SEEDS}, {}, {kernel}, {units}, fuzz targets, mutation tests",
            peer_tests::NAME
        );
        tally.skip(what, "`cargo xtask test --all` has them");
        return Ok(());
    }
    tally.skip(mutants::slow().join(", "), "an hour or two: `cargo xtask mutants`");
    let others = Kernel::value_variants().iter().filter(|kernel| **kernel != kernel::IN_EVERY_RUN);
    let others: Vec<_> = others.map(|kernel| format!("kernel::{}", name_of(kernel))).collect();
    tally.skip(others.join(", "), "on request: `cargo xtask test --kernel NAME`");
    let others =
        Kubernetes::value_variants().iter().map(|version| format!("Kubernetes {}", name_of(version)));
    let others: Vec<_> = others.collect();
    tally.skip(others.join(", "), "on request: `cargo xtask test --kubernetes VERSION`");
    tally.skip("release binaries", "those of the images are not optimised: `cargo xtask test --released`");
    Ok(())
}

/// The command that runs or lists unit, property and integration tests.
fn units(options: &Options, packages: &[String]) -> Command {
    let mut tests = cargo();
    tests.args(["test", "--no-fail-fast"]);
    if options.names.are_given() {
        // Unit tests, too.
        tests.arg("--tests").args(packages.iter().flat_map(|package| ["-p", package]));
    }
    tests.arg("--").args(options.names.arguments());
    tests
}

/// With `--all`, begins to build what scenarios need once cargo has nothing left to do for the tests. No later step compiles: what
/// builds holds cargo's locks.
fn run_units(
    options: &Options,
    packages: &[String],
    tally: &mut Tally,
    beside: &mut Option<Beside>,
) -> Result<()> {
    if packages.is_empty() {
        return Ok(());
    }
    tally.heading("unit and property tests");
    let mut tests = units(options, packages);
    let mut started = Ok(());
    tally.count_and(&mut tests, &mut || {
        if options.all && beside.is_none() && started.is_ok() {
            started = Beside::start(Need::value_variants()).map(|new| *beside = Some(new));
        }
    })?;
    started
}

/// Names of the chosen kernel tests.
fn kernel_tests(options: &Options) -> Result<Vec<String>> {
    let text = output(program(built(REDIRECT_KERNEL)?).arg("--list"))?;
    let names = text.lines().filter_map(|line| line.strip_suffix(": test"));
    Ok(names.filter(|name| options.names.select(&of_kernel(name))).map(str::to_owned).collect())
}

/// The name by which a kernel test is chosen: their program's name stands for all of them.
fn of_kernel(name: &str) -> String {
    format!("{REDIRECT_KERNEL} {name}")
}

fn run_kernel_tests(options: &Options, chosen: &[String], tally: &mut Tally) -> Result<()> {
    if chosen.is_empty() {
        return Ok(());
    }
    tally.heading("kernel tests of the redirect");
    for _ in 0..options.repeat.map_or(1, NonZeroUsize::get) {
        let mut tests = program(built(REDIRECT_KERNEL)?);
        // Most of them wait.
        tests.args(["--test-threads=12", "--exact"]).args(chosen);
        tally.count(&mut tests)?;
    }
    Ok(())
}

/// The argument is true if everything has been built.
type Run = fn(bool) -> Result<ExitCode>;

const SMOKE: &str = "bench::smoke";
const NEW_SEEDS: &str = "fleet::new_seeds";

/// Programs that are tests by their exit codes. The benchmark's only checks that every line still gets a value.
fn whole_programs(options: &Options) -> Vec<(&'static str, Run)> {
    let programs: [(&str, Run); 5] = [
        (NEW_SEEDS, fleet::run_new_seeds),
        ("demo", |built| run_demo(built, false)),
        ("demo::kubernetes", |built| run_demo(built, true)),
        (SMOKE, bench::smoke),
        ("release::packages_and_chart", |_| release::check().map(|()| ExitCode::SUCCESS)),
    ];
    programs.into_iter().filter(|(name, _)| options.runs(name)).collect()
}

fn run_demo(built: bool, kubernetes: bool) -> Result<ExitCode> {
    demo::install(kubernetes)?;
    if !built {
        build_programs(&["demo"])?;
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
        let result = waited.and_then(|()| run(options.all)).and_then(|code| {
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
    let wanted = options.runs(peer_tests::NAME);
    thread::scope(|scope| {
        let meanwhile = (wanted && options.all).then(|| scope.spawn(|| peer_tests::run_all(Show::Nothing)));
        run_programs(options, programs, beside, tally);
        if wanted {
            tally.heading(peer_tests::NAME);
            let report = match meanwhile {
                Some(thread) => thread.join().unwrap_or_else(|_| Err(anyhow!("its thread has panicked"))),
                None => build_programs(&["tunnel-agent"]).and_then(|()| peer_tests::run_all(Show::Progress)),
            };
            match report {
                Ok(report) => report.count(tally),
                Err(error) => tally.step(peer_tests::NAME, Err(error)),
            }
        }
    });
}

fn kernel_name() -> String {
    format!("kernel::{}", name_of(&kernel::IN_EVERY_RUN))
}

fn run_kernel(options: &Options, tally: &mut Tally) {
    let name = kernel_name();
    if !options.runs(&name) {
        return;
    }
    if cfg!(not(target_arch = "x86_64")) {
        tally.skip(name, "the virtual machine is an x86-64 one");
        return;
    }
    tally.heading(&name);
    let built = if options.all { Ok(()) } else { build_everything(tally) };
    if let Err(error) = built.and_then(|()| kernel::run(kernel::IN_EVERY_RUN, &Names::default(), tally)) {
        tally.step(&name, Err(error));
    }
}

/// Runs the fuzz targets and the mutation tests, unless they have run beside the scenarios.
fn run_fuzz_and_mutants(options: &Options, beside: Option<&Beside>, tally: &mut Tally) -> Result<()> {
    let mut targets = fuzz::targets()?;
    targets.retain(|target| options.runs(&fuzz::name_of(target)));
    let groups: Vec<_> = mutants::quick().filter(|(name, _)| options.runs(name)).collect();
    if let Some(beside) = beside {
        let fuzzed = targets.iter().map(|target| fuzz::name_of(target));
        for name in fuzzed.chain(groups.into_iter().map(|(name, _)| name)) {
            tally.step(&name, beside.result(&name));
        }
        return Ok(());
    }
    if !targets.is_empty() {
        run_fuzz(&targets, tally);
    }
    if !groups.is_empty() {
        run_mutants(&groups, tally);
    }
    Ok(())
}

fn run_fuzz(targets: &[String], tally: &mut Tally) {
    tally.heading(&format!("fuzz targets, {FUZZ_SECONDS} s each: {}", targets.join(", ")));
    if let Err(error) = fuzz::prepare() {
        eprintln!("fuzz: {error:#}");
        for target in targets {
            tally.fail(format!("{} (not built)", fuzz::name_of(target)));
        }
        return;
    }
    let results = fuzz::in_pairs(targets, |target| fuzz::run_target(target, FUZZ_SECONDS, true));
    for (target, result) in targets.iter().zip(results) {
        tally.step(&fuzz::name_of(target), result);
    }
}

fn run_mutants(groups: &[(String, &mutants::Group)], tally: &mut Tally) {
    let names: Vec<_> = groups.iter().map(|(name, _)| name.as_str()).collect();
    tally.heading(&format!("mutation tests: {}", names.join(", ")));
    let prepared = mutants::prepare();
    if let Err(error) = &prepared {
        eprintln!("mutants: {error:#}");
    }
    for (name, group) in groups {
        match prepared {
            Ok(()) => tally.step(name, mutants::run_quick(group)),
            Err(_) => tally.fail(format!("{name} (not started)")),
        }
    }
}
