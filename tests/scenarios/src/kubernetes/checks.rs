//! A list of checks on one cluster: each runs, even if others fail.
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use postern_testbed::report::{progress, skipped};

use crate::runner::time_left;

/// Selects the checks whose name contains one of these strings (comma-separated).
const ONLY: &str = "POSTERN_CHECKS";
/// Time reserved at the end of the scenario for the summary and the removal of its resources.
const RESERVE: Duration = Duration::from_secs(10);
/// Default time limit of one check.
const LIMIT: Duration = Duration::from_secs(90);

/// Runs checks one after the other and collects their failures.
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

    /// Runs a check with its own time limit.
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
        // If the whole scenario were killed during a check, there would be no summary.
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

    /// Returns an error that names every failed check, if any.
    pub(super) fn finish(self) -> Result<()> {
        if self.left_out > 0 {
            skipped(&format!("{ONLY} leaves out {} checks", self.left_out));
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
