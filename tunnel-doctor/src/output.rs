//! Output of `doctor`.

use std::io;

use clap::Args;
use tunnel_runtime::output::{Format, print};

use super::checkup::Report;

#[derive(Args, Clone, Debug)]
pub struct DoctorOutput {
    /// text, or json: a document with every check and its findings.
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    output: Format,
}

impl DoctorOutput {
    /// True if JSON is requested.
    pub fn is_json(&self) -> bool {
        self.output == Format::Json
    }

    /// Prints a report.
    ///
    /// # Errors
    /// Fails if standard output fails, but not if it was closed.
    pub fn print(&self, report: &Report) -> io::Result<()> {
        let text = match self.output {
            Format::Text => report.to_text(),
            Format::Json => format!("{}\n", serde_json::to_string_pretty(report)?),
        };
        print(&text).map(drop)
    }
}
