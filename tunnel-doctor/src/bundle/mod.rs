//! Support bundle: everything that others need to understand an installation, in one tar.gz without secrets.

mod archive;
mod facts;
mod redact;

pub use redact::redacted;
use tunnel_runtime::config::host_name;
use tunnel_runtime::progress::Progress;

use std::io;
use std::path::PathBuf;

use clap::Args;
use jiff::Timestamp;
use serde::Serialize;

use archive::{Part, STANDARD};

use crate::{Asked, Examine, Running, ask_at};

#[derive(Args, Clone, Debug)]
pub struct BundleCommand<F: Args> {
    /// The file to write, which must not exist; `-`: standard output [default: PROGRAM-HOST-TIME.tar.gz in this directory].
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Log files whose ends to add, `-` for standard input [default: the journal of the program's systemd units]; repeatable.
    #[arg(long, value_name = "FILE")]
    log: Vec<PathBuf>,
    #[command(flatten)]
    flags: F,
}

impl<F: Examine> BundleCommand<F> {
    /// Writes the file and prints the list of its parts.
    ///
    /// # Errors
    /// Fails if the file exists or cannot be written.
    pub async fn run(&self) -> io::Result<()> {
        let progress = Progress::start("bundle", "asking the running program");
        let running = ask_at(self.flags.admin_address()).await;
        drop(progress);
        let (report, state_dir) = self.flags.examine(&running).await;
        let ready = |running: &Running<_>| Ok(running.pending.clone().unwrap_or("ok".to_owned()) + "\n");
        let flags = |running: &Running<_>| {
            let flags = running.flags.as_ref().ok_or("its version has no /config")?;
            Ok(flags.join("\n") + "\n")
        };
        let mut parts = vec![
            Part::new("doctor.txt", "what doctor found", Ok(report.to_text(false))),
            Part::new("doctor.json", "the same", json(&report)),
            Part::new("status.json", "/status", answer(&running, |running| json(&running.status))),
            Part::new("metrics.txt", "/metrics", answer(&running, |running| Ok(running.metrics.clone()))),
            Part::new("readyz.txt", "/readyz", answer(&running, ready)),
            Part::new("flags.txt", "the flags in effect", answer(&running, flags)),
            facts::state_directory(&state_dir),
        ];
        let progress = Progress::start("bundle", "reading logs and facts of the host");
        parts.extend(facts::logs(&self.log, F::UNITS).await);
        parts.push(facts::kernel());
        parts.push(facts::network().await);
        drop(progress);

        let host = host_name().unwrap_or_else(|_| "host".to_owned());
        let name = format!("{}-{host}-{}", report.program, Timestamp::now().strftime("%Y%m%dT%H%M%SZ"));
        let path = self.file.clone().unwrap_or_else(|| PathBuf::from(format!("{name}.tar.gz")));
        let manifest = archive::write(&path, &name, &parts)
            .map_err(|error| io::Error::new(error.kind(), format!("--file={}: {error}", path.display())))?;
        if path.as_os_str() == STANDARD {
            eprintln!("{manifest}");
        } else {
            println!("{manifest}\nwritten to {}", path.display());
        }
        Ok(())
    }
}

/// Returns a text taken from the running program, or the reason for its absence.
fn answer<T>(
    running: &Asked<T>,
    text: impl Fn(&Running<T>) -> Result<String, String>,
) -> Result<String, String> {
    text(running.as_ref()?)
}

fn json(value: &impl Serialize) -> Result<String, String> {
    serde_json::to_string_pretty(value).map(|text| text + "\n").map_err(|error| error.to_string())
}
