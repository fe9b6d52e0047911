//! A list of checks on one cluster: each runs, whether or not others fail.
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use postern_testbed::report::progress;

use crate::runner::time_left;

/// Runs only checks whose name contains one of these (comma-separated).
const ONLY: &str = "POSTERN_CHECKS";
/// Left at the end of the scenario's time for the summary, and for what is removed.
const RESERVE: Duration = Duration::from_secs(10);
/// How long one check may take by default.
const LIMIT: Duration = Duration::from_secs(90);

/// Runs checks one after the other and collects failures.
#[derive(Debug, Default)]
pub(super) struct Checks {
    only: Vec<String>,
    passed: usize,
    left_out: usize,
    failed: Vec<String>,
}

impl Checks {
    pub(super) fn new() -> Self {
        let only = std::env::var(ONLY).unwrap_or_default();
        let only = only.split(',').filter(|part| !part.is_empty()).map(str::to_owned).collect();
        Self { only, ..Self::default() }
    }

    pub(super) async fn run(&mut self, name: &str, check: impl Future<Output = Result<()>>) {
        self.run_within(LIMIT, name, check).await;
    }

    /// Runs a check that may take longer.
    pub(super) async fn run_within(
        &mut self,
        limit: Duration,
        name: &str,
        check: impl Future<Output = Result<()>>,
    ) {
        if !self.only.is_empty() && !self.only.iter().any(|part| name.contains(part)) {
            self.left_out += 1;
            return;
        }
        let start = Instant::now();
        // Killed with the whole scenario, a check would take the summary with it.
        let limit = limit.min(time_left().saturating_sub(RESERVE));
        let result = match tokio::time::timeout(limit, check).await {
            Ok(result) => result.map_err(|error| format!("{error:#}")),
            Err(_) => Err(format!("not finished after {limit:?}")),
        };
        let took = start.elapsed();
        match result {
            Ok(()) => {
                progress(&format!("ok      {name} ({took:.1?})"));
                self.passed += 1;
            }
            Err(error) => {
                progress(&format!("FAILED  {name} ({took:.1?}): {error}"));
                self.failed.push(format!("{name}: {error}"));
            }
        }
    }

    /// An error that names every check that failed.
    pub(super) fn finish(self) -> Result<()> {
        if self.left_out > 0 {
            progress(&format!("{ONLY} left out {} checks", self.left_out));
        }
        ensure!(self.passed + self.failed.len() > 0, "no check has a name with {:?} ({ONLY})", self.only);
        if self.failed.is_empty() {
            progress(&format!("{} checks passed", self.passed));
            return Ok(());
        }
        bail!(
            "{} of {} checks failed:\n{}",
            self.failed.len(),
            self.failed.len() + self.passed,
            self.failed.join("\n")
        )
    }
}
