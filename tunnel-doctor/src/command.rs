//! The `doctor` command of both programs, and the examination that it shares with `bundle`.

use std::fmt::Debug;
use std::io;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tunnel_runtime::config::ConfigError;
use tunnel_runtime::config::value::ListenAddress;
use tunnel_runtime::output::Output;
use tunnel_runtime::progress::Progress;

use super::checkup::{Checkup, Finding, Report};
use super::codes;
use super::running::{Asked, ask_at};

/// Flags of an examination. If the program is running, its own flags are used instead.
pub trait Examine: Args + Clone + Debug {
    type Status: DeserializeOwned + Serialize;
    /// The systemd units that run the program.
    const UNITS: &'static str;

    fn admin_address(&self) -> ListenAddress;

    /// Returns the report and the program's state directory.
    fn examine(&self, running: &Asked<Self::Status>) -> impl Future<Output = (Report, PathBuf)>;
}

#[derive(Args, Clone, Debug)]
pub struct DoctorCommand<F: Args> {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    flags: F,
}

/// Returns the report for wrong flags; nothing else can be examined then.
pub fn bad_flags(program: &'static str, version: &'static str, error: &ConfigError) -> Report {
    let mut checkup = Checkup::default();
    let fix = format!("correct the flag: `{program} --help` has its form");
    checkup.add("flags", Finding::new(&codes::BAD_FLAGS, error.to_string(), fix).into());
    checkup.report(program, version)
}

impl<F: Examine> DoctorCommand<F> {
    /// Examines and prints. Returns the exit code: 0 fine, 1 warnings, 2 broken.
    ///
    /// # Errors
    /// Fails if standard output fails.
    pub async fn run(&self) -> io::Result<u8> {
        let progress = Progress::start("doctor", "asking the running program");
        let running = ask_at(self.flags.admin_address()).await;
        drop(progress);
        let (report, _) = self.flags.examine(&running).await;
        report.print(self.output.output)?;
        Ok(report.exit_code())
    }
}
