//! Counts of passed, failed and skipped tests, and the time of each step.
use std::io::{BufRead as _, BufReader};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use crate::command::shown;
use crate::times::{self, Times};

/// Results of tests and steps.
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    failures: Vec<String>,
    /// Tests that were left out, with the reason.
    skipped: Vec<(String, String)>,
    start: Instant,
    /// Steps in the order of their start, and the start of each.
    steps: Vec<(String, Instant)>,
    /// Bound of the whole run's time, as text; it is printed, not enforced.
    bound: Option<&'static str>,
    /// Seconds of each test program.
    took: Times,
    /// Those of scenarios in the last run.
    scenarios: Times,
}

/// Results of a program, and its end.
pub(crate) struct Counted {
    pub(crate) status: ExitStatus,
    failed: u64,
    /// A test failed whose program did not end.
    pub(crate) uncounted: bool,
    /// The last one that is not empty.
    pub(crate) last_line: String,
}

/// Number of test programs that are listed as the slowest.
const SLOWEST: usize = 10;

impl Tally {
    pub(crate) fn new() -> Self {
        Self {
            passed: 0,
            failed: 0,
            failures: Vec::new(),
            skipped: Vec::new(),
            start: Instant::now(),
            steps: Vec::new(),
            bound: None,
            took: Times::new(),
            scenarios: times::file(SCENARIOS).map(|file| times::read(&file)).unwrap_or_default(),
        }
    }

    /// A tally that prints a bound beside the total time.
    pub(crate) fn bounded(bound: &'static str) -> Self {
        Self { bound: Some(bound), ..Self::new() }
    }

    /// Begins a step: its time runs until the next one begins.
    pub(crate) fn heading(&mut self, text: &str) {
        println!("\n=== {text}");
        self.steps.push((text.to_owned(), Instant::now()));
    }

    pub(crate) fn fail(&mut self, what: String) {
        self.failed += 1;
        self.failures.push(what);
    }

    /// Notes what is left out; the last line has it.
    pub(crate) fn skip(&mut self, what: impl Into<String>, reason: impl Into<String>) {
        self.skipped.push((what.into(), reason.into()));
    }

    /// Counts a step that is a test by itself.
    pub(crate) fn step(&mut self, what: &str, result: Result<()>) {
        match result {
            Ok(()) => self.passed += 1,
            Err(error) => {
                eprintln!("{what}: {error:#}");
                self.fail(format!("{what}: {}", format!("{error:#}").lines().next().unwrap_or_default()));
            }
        }
    }

    /// Prints how long each step took, what failed, and the counts on the last line. The times of a whole run, of which there
    /// is more than one `kind`, are compared with those of the last one of that kind.
    pub(crate) fn report(&self, kind: Option<&str>) {
        println!();
        let end = Instant::now();
        let ends = self.steps.iter().skip(1).map(|(_, start)| *start).chain([end]);
        let mut took = self.took.clone();
        for ((step, start), end) in self.steps.iter().zip(ends) {
            println!("{:>5} min  {step}", minutes(end - *start));
            took.insert(step.clone(), (end - *start).as_secs_f64());
        }
        let bound = self.bound.map(|bound| format!(" (bound: {bound})")).unwrap_or_default();
        println!("{:>5} min  in all{bound}", minutes(end - self.start));
        took.insert("in all".to_owned(), (end - self.start).as_secs_f64());
        if let Err(error) = self.compare(kind, &took) {
            println!("the times cannot be compared: {error:#}");
        }
        for failure in &self.failures {
            println!("FAILED: {failure}");
        }
        println!("{} passed, {} failed{}", self.passed, self.failed, skips(&self.skipped));
    }

    /// Says what takes longer than before, and keeps the times of a run without failures for the next one.
    fn compare(&self, kind: Option<&str>, took: &Times) -> Result<()> {
        let mut grown = times::grown(&self.scenarios, &times::read(&times::file(SCENARIOS)?));
        if let Some(kind) = kind {
            let file = times::file(kind)?;
            let last = times::read(&file);
            grown.extend(times::grown(&last, took));
            if self.failed == 0 {
                times::write(&file, &times::kept(&last, took))?;
            }
        }
        grown.iter().for_each(|line| println!("{line}"));
        Ok(())
    }

    /// Runs a program that reports as libtest does, shows its output and adds up its results.
    pub(crate) fn count(&mut self, command: &mut Command) -> Result<()> {
        self.count_and(command, &mut || {})
    }

    /// Does so, and calls `running` whenever a test binary begins to run.
    pub(crate) fn count_and(&mut self, command: &mut Command, running: &mut dyn FnMut()) -> Result<()> {
        let Counted { status, failed, .. } = self.counted(command, running)?;
        if !status.success() && failed == 0 {
            self.fail(format!(
                "`{}` ended with {status} and without a failed test: it did not compile, or crashed",
                shown(command)
            ));
        }
        Ok(())
    }

    /// Does so, and leaves it to the caller how the program ended.
    pub(crate) fn counted(&mut self, command: &mut Command, running: &mut dyn FnMut()) -> Result<Counted> {
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
        let mut binaries: Vec<String> = Vec::new();
        let mut took: Vec<(f64, String)> = Vec::new();
        let (mut failed, mut named) = (0, 0);
        let mut last_line = String::new();
        for line in BufReader::new(reader).split(b'\n') {
            let line = line.context("reading the tests' output")?;
            let line = String::from_utf8_lossy(&line);
            println!("{line}");
            if let Some((name, reason)) = failed_check(&line) {
                // Counted with its scenario; without this, the end of a long log would not name it.
                self.failures.push(format!("{name}: {reason}"));
            } else if let Some((name, reason)) = skipped_check(&line) {
                self.skip(name, reason);
            } else if is_passed_check(&line) {
                self.passed += 1;
            } else if let Some(result) = result_line(&line) {
                self.passed += result.passed;
                failed += result.failed;
                took.extend(seconds(&line).zip(binaries.last().cloned()));
                if result.ignored > 0 {
                    self.fail(format!("{} tests are ignored, and nothing may be: {line}", result.ignored));
                }
            } else if line.trim_start().starts_with("Running ") {
                binaries.push(line.trim().to_owned());
                running();
            } else if let Some(name) = line.strip_prefix("test ").and_then(failed_name) {
                named += 1;
                self.failures.push(name.to_owned());
            }
            // The last one of a machine that was ended is qemu's own.
            if !line.trim().is_empty() && !line.contains("terminating on signal") {
                last_line = line.trim().to_owned();
            }
        }
        self.took.extend(took.iter().map(|(seconds, name)| (test_program(name), *seconds)));
        if took.len() > 1 {
            took.sort_by(|(one, _), (other, _)| other.total_cmp(one));
            println!("\nthe slowest of {} test programs:", took.len());
            for (seconds, name) in took.iter().take(SLOWEST) {
                println!("{seconds:>8.1} s  {name}");
            }
        }
        self.failed += failed;
        let status = child.wait().context("waiting for the tests")?;
        if failed > named {
            self.failures.push(format!("{} further tests of `{}`", failed - named, shown(command)));
        }
        Ok(Counted { status, failed, uncounted: named > failed, last_line })
    }
}

/// Formats a time as minutes and seconds.
pub(crate) fn minutes(time: Duration) -> String {
    let seconds = time.as_secs();
    format!("{}:{:02}", seconds / 60, seconds % 60)
}

/// Name of the kept times that `scenarios` writes.
const SCENARIOS: &str = "scenarios";

/// Formats what was left out.
fn skips(skipped: &[(String, String)]) -> String {
    if skipped.is_empty() {
        return String::new();
    }
    let list: Vec<_> = skipped.iter().map(|(what, reason)| format!("{what} ({reason})")).collect();
    format!(", {} skipped: {}", skipped.len(), list.join("; "))
}

/// Name of a test program, from a line such as `Running tests/cli.rs (target/debug/deps/cli-2ef024fd85f1481c)`: without the
/// part that other sources change.
fn test_program(line: &str) -> String {
    line.rsplit_once('-').map_or(line, |(name, _)| name).rsplit('/').next().unwrap_or(line).to_owned()
        + line.split(" (").next().unwrap_or_default().trim_start_matches("Running")
}

/// Scenario and text of a line about a scenario's progress.
fn progress(line: &str) -> Option<(&str, &str)> {
    let (_, rest) = line.strip_prefix("  [")?.split_once(" s] ")?;
    rest.split_once(": ")
}

/// Reports whether the line is about a passed check of a cluster's scenario.
fn is_passed_check(line: &str) -> bool {
    progress(line).is_some_and(|(_, text)| text.starts_with("ok      "))
}

/// The scenario that has failed, or of which a check has failed, and the reason.
fn failed_check(line: &str) -> Option<(&str, &str)> {
    let (scenario, text) = progress(line)?;
    Some((scenario, text.strip_prefix("FAILED  ")?))
}

/// A scenario that has left something out, and the reason.
fn skipped_check(line: &str) -> Option<(&str, &str)> {
    let (scenario, text) = progress(line)?;
    Some((scenario, text.strip_prefix("SKIPPED ")?))
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

/// Seconds that a test program took, from the line with its results.
fn seconds(line: &str) -> Option<f64> {
    line.trim().rsplit_once("finished in ")?.1.strip_suffix('s')?.parse().ok()
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
        assert_eq!(seconds(line), Some(0.0));
        assert_eq!(seconds("test result: nonsense"), None);
        assert_eq!(result_line("test a ... ok"), None);
    }

    #[test]
    fn checks_of_clusters_are_counted() {
        assert!(is_passed_check("  [ 12.3 s] kubernetes::outages: ok      port lists are followed (1.2s)"));
        assert!(!is_passed_check(
            "  [ 12.3 s] kubernetes::outages: FAILED  port lists are followed (1.2s): no"
        ));
        assert_eq!(
            failed_check("  [ 12.3 s] kubernetes::outages: FAILED  port lists are followed (1.2s): no"),
            Some(("kubernetes::outages", "port lists are followed (1.2s): no"))
        );
        assert!(!is_passed_check("  [ 12.3 s] kubernetes::outages: the cluster runs"));
        assert_eq!(failed_check("  [ 12.3 s] kubernetes::outages: the cluster runs"), None);
        assert!(!is_passed_check("test path::half_close ... ok"));
    }

    #[test]
    fn what_is_left_out_is_on_the_last_line() {
        let line = "  [  1.3 s] wan::bbr: SKIPPED this kernel has no BBR";
        assert_eq!(skipped_check(line), Some(("wan::bbr", "this kernel has no BBR")));
        let skipped = [("a".to_owned(), "of this".to_owned()), ("b".to_owned(), "of that".to_owned())];
        assert_eq!(skips(&skipped), ", 2 skipped: a (of this); b (of that)");
        assert_eq!(skips(&[]), "");
    }

    #[test]
    fn test_programs_have_one_name_in_every_run() {
        let name =
            |hash: &str| test_program(&format!("Running tests/a-b/main.rs (/t-1/deps/kube_api-{hash})"));
        assert_eq!(name("2ef024fd85f1481c"), "kube_api tests/a-b/main.rs");
        assert_eq!(name("1"), name("2"));
    }

    #[test]
    fn failed_tests_are_named() {
        assert_eq!(failed_name("a::b ... FAILED"), Some("a::b"));
        assert_eq!(failed_name("a::b ... ok"), None);
    }
}
