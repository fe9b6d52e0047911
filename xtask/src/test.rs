//! `cargo xtask test`: every test there is, counted.
use std::io::{BufRead as _, BufReader};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};

use crate::command::{built, cargo, is_root, program, shown};
use crate::{bench, build_ebpf, demo, fuzz, image, packages, peers};

/// How long each fuzz target runs here; `cargo xtask fuzz` runs them for longer.
const FUZZ_SECONDS: u32 = 10;

const WHY_ROOT: &str = "\
cargo xtask test needs root, because it
  - makes network namespaces and iptables rules inside them (a cloud host, a router with NAT, edge hosts),
  - makes child cgroups and attaches eBPF programs to those and to those namespaces, never to the machine's own,
  - starts the real tunnel-server, tunnel-agent, Prometheus, node exporters and a Kubernetes cluster in there,
  - installs Debian packages that are missing (iptables, iproute2, util-linux, g++, prometheus, prometheus-node-exporter,
    and for the cluster etcd-server, containerd, runc, containernetworking-plugins, conntrack, busybox-static).
Everything it makes is removed again, whether tests pass or fail.";

#[derive(clap::Args, Default)]
pub(crate) struct Options {
    /// Only unit tests and a handful of scenarios; says what it leaves out.
    #[arg(long)]
    quick: bool,
    /// Only tests whose name contains this.
    filter: Option<String>,
}

#[derive(Default)]
struct Tally {
    passed: u64,
    failed: u64,
    failures: Vec<String>,
}

impl Tally {
    fn fail(&mut self, what: String) {
        self.failed += 1;
        self.failures.push(what);
    }

    fn step(&mut self, what: &str, result: Result<()>) {
        match result {
            Ok(()) => self.passed += 1,
            Err(error) => {
                eprintln!("{what}: {error:#}");
                self.fail(what.to_owned());
            }
        }
    }
}

pub(crate) fn run_tests(options: &Options) -> Result<ExitCode> {
    println!("{WHY_ROOT}\n");
    ensure!(is_root(), "not root: run `sudo -E cargo xtask test`");
    let start = Instant::now();
    packages::install(&[packages::TESTBED])?;
    let mut scenarios = program(built("scenarios")?);
    if !options.quick {
        packages::install(&[packages::DEMO, packages::CLUSTER])?;
        heading("the programs of the test cluster");
        peers::for_cluster(&mut scenarios)?;
    }
    heading("building the eBPF programs and the two programs");
    build_ebpf::run()?;
    demo::build_programs(&["postern-scenarios", "postern-demo"])?;
    if !options.quick {
        heading("building the images");
        image::build(image::Profile::Dev, &[image::Image::Server, image::Image::Agent])?;
    }

    let mut tally = Tally::default();
    let filter: Vec<&str> = options.filter.as_deref().into_iter().collect();
    heading("unit, property, kernel and doc tests");
    let mut tests = cargo();
    tests.args(["test", "--no-fail-fast"]);
    if options.quick {
        tests.args(["--lib", "--bins"]);
    }
    tests.arg("--").args(&filter);
    let names = count(&mut tests, &mut tally)?;
    if !options.quick && !names.iter().any(|line| line.contains("redirect_kernel")) {
        tally.fail("the kernel tests of the redirect (redirect_kernel) did not run".to_owned());
    }

    heading("scenarios");
    scenarios.args(options.quick.then_some("--quick")).args(&filter);
    count(&mut scenarios, &mut tally)?;

    if options.quick {
        println!(
            "\nleft out by --quick: kernel and doc tests, most scenarios (everything on the real Kubernetes), the demos, the benchmark's smoke run, fuzz targets"
        );
    } else {
        run_programs(&filter, &mut tally);
        run_fuzz(&filter, &mut tally)?;
    }

    println!("\ntook {:.0?}", start.elapsed());
    for failure in &tally.failures {
        println!("FAILED: {failure}");
    }
    println!("{} passed, {} failed", tally.passed, tally.failed);
    ensure!(tally.passed + tally.failed > 0, "no test has a name with {:?}", options.filter);
    Ok(if tally.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Programs that end with success or without. Of the benchmark only whether every line still gets a value.
fn run_programs(filter: &[&str], tally: &mut Tally) {
    type Run = fn() -> Result<ExitCode>;
    let programs: [(&str, Run); 3] = [
        ("demo", || demo::run_demo_program(false, &[])),
        ("demo::kubernetes", || demo::run_demo_program(true, &[])),
        ("bench::smoke", bench::smoke),
    ];
    for (name, run) in programs {
        if !filter.iter().all(|filter| name.contains(filter)) {
            continue;
        }
        heading(name);
        let result = run().and_then(|code| {
            ensure!(code == ExitCode::SUCCESS, "{name} ended with {code:?}");
            Ok(())
        });
        tally.step(name, result);
    }
}

fn run_fuzz(filter: &[&str], tally: &mut Tally) -> Result<()> {
    let targets = fuzz::targets()?;
    let chosen: Vec<_> = targets
        .into_iter()
        .filter(|target| filter.iter().all(|filter| format!("fuzz::{target}").contains(filter)))
        .collect();
    if chosen.is_empty() {
        return Ok(());
    }
    heading(&format!("fuzz targets, {FUZZ_SECONDS} s each: {}", chosen.join(", ")));
    if let Err(error) = fuzz::prepare() {
        eprintln!("fuzz: {error:#}");
        for target in chosen {
            tally.fail(format!("fuzz::{target} (not built)"));
        }
        return Ok(());
    }
    for target in chosen {
        tally.step(&format!("fuzz::{target}"), fuzz::run_target(&target, FUZZ_SECONDS, true));
    }
    Ok(())
}

fn heading(text: &str) {
    println!("\n=== {text}");
}

/// Runs a program that reports as libtest does, shows its output and adds up its results. Returns the lines that name
/// test binaries.
fn count(command: &mut Command, tally: &mut Tally) -> Result<Vec<String>> {
    eprintln!("+ {}", shown(command));
    // Cargo names the test binaries ("Running …") on standard error: both are needed, in order.
    let (reader, writer) = std::io::pipe().context("pipe")?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(writer.try_clone().context("pipe")?)
        .stderr(writer)
        .spawn()
        .with_context(|| format!("starting {}", shown(command)))?;
    // The command keeps its own copies of the pipe's end: without these gone, the pipe never ends.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut binaries = Vec::new();
    let (mut failed, mut named) = (0, 0);
    for line in BufReader::new(reader).split(b'\n') {
        let line = line.context("reading the tests' output")?;
        let line = String::from_utf8_lossy(&line);
        println!("{line}");
        if let Some(result) = result_line(&line) {
            tally.passed += result.passed;
            failed += result.failed;
            if result.ignored > 0 {
                tally.fail(format!("{} tests are ignored, and nothing may be: {line}", result.ignored));
            }
        } else if line.trim_start().starts_with("Running ") || line.trim_start().starts_with("Doc-tests ") {
            binaries.push(line.trim().to_owned());
        } else if let Some(name) = line.strip_prefix("test ").and_then(failed_name) {
            named += 1;
            tally.failures.push(name.to_owned());
        }
    }
    tally.failed += failed;
    let status = child.wait().context("waiting for the tests")?;
    if !status.success() && failed == 0 {
        tally.fail(format!(
            "`{}` ended with {status} and without a failed test: it did not compile, or crashed",
            shown(command)
        ));
    } else if failed > named {
        tally.failures.push(format!("{} further tests of `{}`", failed - named, shown(command)));
    }
    Ok(binaries)
}

fn failed_name(rest: &str) -> Option<&str> {
    let (name, result) = rest.rsplit_once(" ... ")?;
    result.contains("FAILED").then_some(name.trim())
}

#[derive(Debug, PartialEq, Eq)]
struct ResultLine {
    passed: u64,
    failed: u64,
    ignored: u64,
}

fn result_line(line: &str) -> Option<ResultLine> {
    let rest = line.trim().strip_prefix("test result: ")?;
    let field = |name: &str| {
        rest.split([';', '.']).find_map(|part| part.trim().strip_suffix(name)?.trim().parse().ok())
    };
    Some(ResultLine { passed: field(" passed")?, failed: field(" failed")?, ignored: field(" ignored")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_libtest_are_read() {
        let line = "test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 7 filtered out; finished in 0.00s";
        assert_eq!(result_line(line), Some(ResultLine { passed: 12, failed: 3, ignored: 1 }));
        assert_eq!(result_line("test result: nonsense"), None);
        assert_eq!(result_line("test a ... ok"), None);
    }

    #[test]
    fn failed_tests_are_named() {
        assert_eq!(failed_name("a::b ... FAILED"), Some("a::b"));
        assert_eq!(failed_name("a::b ... ok"), None);
    }
}
