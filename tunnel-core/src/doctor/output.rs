//! Output of `doctor`.

use std::io::{self, Write as _};

use clap::{Args, ValueEnum};

use super::checkup::Report;

#[derive(Args, Clone, Debug)]
pub struct DoctorOutput {
    /// text, or json: a document with every check and its findings.
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    output: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    Text,
    Json,
}

impl DoctorOutput {
    /// Prints a report.
    ///
    /// # Errors
    /// Fails if standard output fails, but not if it was closed.
    pub fn print(&self, report: &Report) -> io::Result<()> {
        let text = match self.output {
            Format::Text => report.to_text(),
            Format::Json => format!("{}\n", serde_json::to_string_pretty(report)?),
        };
        let mut out = io::stdout().lock();
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
            _ => Ok(()),
        }
    }
}
