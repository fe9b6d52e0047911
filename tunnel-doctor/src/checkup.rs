//! Runs checks one after the other. A check is skipped, with the reason, if one that it needs has failed.

use std::fmt::Write as _;
use std::io;

use clap::builder::styling::{AnsiColor, Style};
use serde::Serialize;
use tunnel_runtime::output::{Format, is_coloured, print};
use tunnel_runtime::progress::Progress;
use tunnel_runtime::text::harmless;

use super::book::Page;
use super::code::{Code, Severity};

/// A detected fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub code: &'static str,
    pub severity: Severity,
    /// Details of this case.
    pub found: String,
    pub meaning: &'static str,
    /// Command that fixes it, or other advice.
    pub fix: String,
    /// URL of the section about the code.
    pub docs: String,
}

impl Finding {
    pub fn new(code: &'static Code, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self {
            code: code.id,
            severity: code.severity,
            found: found.into(),
            meaning: code.meaning,
            fix: fix.into(),
            docs: format!("{}#{}", Page::Troubleshooting.url(), code.id),
        }
    }
}

/// Result of a check.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// Summary in a few words.
    Fine(String),
    Faults(Vec<Finding>),
    /// The check does not apply or cannot be done, for this reason.
    Skipped(String),
}

impl Outcome {
    pub fn fine(found: impl Into<String>) -> Self {
        Self::Fine(found.into())
    }

    /// Returns the faults, or `found` if there are none.
    pub fn of(faults: Vec<Finding>, found: impl Into<String>) -> Self {
        if faults.is_empty() { Self::Fine(found.into()) } else { Self::Faults(faults) }
    }
}

impl From<Finding> for Outcome {
    fn from(finding: Finding) -> Self {
        Self::Faults(vec![finding])
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    Ok,
    Skipped,
    Warning,
    Broken,
}

/// A finished check.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    pub name: &'static str,
    pub state: State,
    /// Summary, or the reason for skipping; empty with findings.
    pub found: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<Finding>,
}

/// Checks done so far.
#[derive(Debug)]
pub struct Checkup {
    checks: Vec<Check>,
    progress: Progress,
}

impl Default for Checkup {
    fn default() -> Self {
        Self::of("doctor")
    }
}

impl Checkup {
    /// Begins the checks of this command.
    pub fn of(command: &'static str) -> Self {
        Self { checks: Vec::new(), progress: Progress::start(command, "examining") }
    }

    /// Begins checks that print no progress, because others run at the same time.
    pub fn silent() -> Self {
        Self { checks: Vec::new(), progress: Progress::none() }
    }

    /// Returns the reason for skipping a check that needs these checks, if there is one.
    pub fn blocked(&self, needs: &[&str]) -> Option<String> {
        let of = |name: &&str| self.checks.iter().find(|check| check.name == *name);
        needs.iter().filter_map(of).find_map(|check| match check.state {
            State::Broken => Some(format!("`{}` is broken", check.name)),
            State::Skipped => Some(format!("`{}` was skipped: {}", check.name, check.found)),
            State::Ok | State::Warning => None,
        })
    }

    /// Runs a check, unless one that it needs has failed.
    pub async fn run(&mut self, name: &'static str, needs: &[&str], check: impl AsyncFnOnce() -> Outcome) {
        let outcome = match self.blocked(needs) {
            Some(reason) => Outcome::Skipped(reason),
            None => {
                self.progress.set(format!("checking {name}"));
                check().await
            }
        };
        self.add(name, outcome);
    }

    /// Adds a finished check.
    pub fn add(&mut self, name: &'static str, outcome: Outcome) {
        let check = match outcome {
            Outcome::Fine(found) => Check { name, state: State::Ok, found, findings: Vec::new() },
            Outcome::Skipped(found) => Check { name, state: State::Skipped, found, findings: Vec::new() },
            Outcome::Faults(findings) => {
                let worst = findings.iter().map(|finding| finding.severity).max();
                let state = match worst {
                    Some(Severity::Broken) => State::Broken,
                    Some(Severity::Warning) => State::Warning,
                    None => State::Ok,
                };
                Check { name, state, found: String::new(), findings }
            }
        };
        self.checks.push(check);
    }

    pub fn report(self, program: &'static str, version: &'static str) -> Report {
        let result = self.checks.iter().map(|check| check.state).max().unwrap_or(State::Ok).max(State::Ok);
        let result = if result == State::Skipped { State::Ok } else { result };
        Report { program, version, result, checks: self.checks }
    }
}

/// Report printed by `doctor -o json`. Its field names are a public interface.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub program: &'static str,
    pub version: &'static str,
    /// Worst state of all checks; skipped checks do not count.
    pub result: State,
    pub checks: Vec<Check>,
}

impl Report {
    /// Returns 0 if all is fine, 1 with warnings, 2 if something is broken.
    pub fn exit_code(&self) -> u8 {
        match self.result {
            State::Ok | State::Skipped => 0,
            State::Warning => 1,
            State::Broken => 2,
        }
    }

    pub fn findings(&self) -> impl Iterator<Item = &Finding> {
        self.checks.iter().flat_map(|check| &check.findings)
    }

    /// Prints the report.
    ///
    /// # Errors
    /// Fails if standard output fails, but not if it was closed.
    pub fn print(&self, format: Format) -> io::Result<()> {
        print(&format.show(self, || self.to_text(is_coloured()))?).map(drop)
    }

    /// Formats the report; `coloured` marks the states in the colours of a terminal.
    pub fn to_text(&self, coloured: bool) -> String {
        let mut text = format!("{} {}\n", self.program, self.version);
        let width = self.checks.iter().map(|check| check.name.len()).max().unwrap_or_default();
        for check in &self.checks {
            let (state, colour) = match check.state {
                State::Ok => ("ok", AnsiColor::Green),
                State::Skipped => ("SKIP", AnsiColor::Cyan),
                State::Warning => ("WARNING", AnsiColor::Yellow),
                State::Broken => ("BROKEN", AnsiColor::Red),
            };
            let style = if coloured { colour.on_default() } else { Style::new() };
            let (name, found) = (check.name, harmless(&check.found));
            // Writing to a String never fails.
            let _ = writeln!(text, "{style}{state:<8}{style:#} {name:<width$}  {found}");
            for finding in &check.findings {
                let _ = writeln!(text, "         {}: {}", finding.code, harmless(&finding.found));
                let _ = writeln!(text, "           means: {}", finding.meaning);
                let _ = writeln!(text, "           fix:   {}", harmless(&finding.fix));
                let _ = writeln!(text, "           see:   {}", finding.docs);
            }
        }
        let count = |state: State| self.checks.iter().filter(|check| check.state == state).count();
        let _ = writeln!(
            text,
            "{} ok, {} warnings, {} broken, {} skipped",
            count(State::Ok),
            count(State::Warning),
            count(State::Broken),
            count(State::Skipped)
        );
        text
    }
}

#[cfg(test)]
mod tests {
    use super::super::codes;
    use super::*;

    #[tokio::test]
    async fn what_needs_a_broken_check_is_skipped_with_the_reason() {
        let mut checkup = Checkup::default();
        checkup.run("kernel", &[], async || Outcome::fine("6.1")).await;
        let fault =
            Finding::new(&codes::CGROUP_UNUSABLE, "none\u{1b}", "mount -t cgroup2 none /sys/fs/cgroup");
        checkup.run("cgroup", &["kernel"], async || fault.into()).await;
        let unreachable = async || -> Outcome { unreachable!("it needs what is broken") };
        checkup.run("programs", &["kernel", "cgroup"], unreachable).await;
        checkup.run("self-test", &["programs"], async || -> Outcome { unreachable!("so is this") }).await;
        let report = checkup.report("tunnel-server", "1.0");
        assert_eq!((report.result, report.exit_code()), (State::Broken, 2));
        let text = report.to_text(false);
        for line in [
            "ok       kernel     6.1\n",
            "BROKEN   cgroup     \n",
            "         cgroup-unusable: none\u{fffd}\n",
            "           fix:   mount -t cgroup2 none /sys/fs/cgroup\n",
            concat!("/v", env!("CARGO_PKG_VERSION"), "/operate/troubleshooting.html#cgroup-unusable\n"),
            "SKIP     programs   `cgroup` is broken\n",
            "SKIP     self-test  `programs` was skipped: `cgroup` is broken\n",
            "1 ok, 0 warnings, 1 broken, 2 skipped\n",
        ] {
            assert!(text.contains(line), "{line}{text}");
        }
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["result"], "broken");
        assert_eq!(json["checks"][1]["findings"][0]["code"], "cgroup-unusable");
        assert_eq!(json["checks"][2]["state"], "skipped");
    }

    #[test]
    fn the_exit_code_tells_warnings_from_what_is_broken() {
        let of = |outcomes: Vec<Outcome>| {
            let mut checkup = Checkup::default();
            outcomes.into_iter().for_each(|outcome| checkup.add("check", outcome));
            checkup.report("tunnel-agent", "1.0").exit_code()
        };
        let warning = || Outcome::from(Finding::new(&codes::KERNEL_OLD, "5.10", "upgrade it"));
        let broken = || Outcome::from(Finding::new(&codes::NOT_RUNNING, "nobody", "start it"));
        assert_eq!(of(vec![]), 0);
        assert_eq!(of(vec![Outcome::fine("yes"), Outcome::Skipped("no redirect".into())]), 0);
        assert_eq!(of(vec![Outcome::Skipped("no redirect".into())]), 0);
        assert_eq!(of(vec![warning(), Outcome::fine("yes")]), 1);
        assert_eq!(of(vec![broken(), warning()]), 2);
    }
}
