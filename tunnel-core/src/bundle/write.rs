//! The `bundle` command of both programs.

use std::path::{Path, PathBuf};

use clap::Args;
use jiff::Timestamp;
use serde::Serialize;

use super::archive::{Bundle, BundleError, STANDARD};
use super::facts::{add_host, add_logs, add_state_directory};
use crate::config::host_name;
use crate::doctor::{Report, Running};

#[derive(Args, Clone, Debug)]
pub struct BundleArgs {
    /// The file to write, which must not exist; `-`: standard output [default: PROGRAM-HOST-TIME.tar.gz in this directory].
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Log files whose ends to add, `-` for standard input [default: the journal of the program's systemd units]; repeatable.
    #[arg(long, value_name = "FILE")]
    log: Vec<PathBuf>,
}

/// Writes the bundle and prints what is in it. `logs` has the systemd units, and where a pod's log is.
///
/// # Errors
/// The file exists or cannot be written.
pub async fn write<T: Serialize>(
    args: &BundleArgs,
    report: &Report,
    running: Result<&Running<T>, &str>,
    state_dir: &Path,
    logs: (&str, &str),
) -> Result<(), BundleError> {
    let host = host_name().unwrap_or_else(|_| "host".to_owned());
    let time = Timestamp::now().strftime("%Y%m%dT%H%M%SZ").to_string();
    let name = format!("{}-{host}-{time}", report.program);
    let path = args.file.clone().unwrap_or_else(|| PathBuf::from(format!("{name}.tar.gz")));
    let mut bundle = Bundle::create(&path, &name)?;
    bundle.add("doctor.txt", "what doctor found", Ok(report.to_text()))?;
    bundle.add("doctor.json", "the same", json(report))?;
    let part = |part: &dyn Fn(&Running<T>) -> Result<String, String>| match running {
        Ok(running) => part(running),
        Err(reason) => Err(reason.to_owned()),
    };
    bundle.add("status.json", "/status", part(&|running| json(&running.status)))?;
    bundle.add("metrics.txt", "/metrics", part(&|running| Ok(running.metrics.clone())))?;
    let ready = |running: &Running<T>| Ok(running.pending.clone().unwrap_or_else(|| "ok".to_owned()) + "\n");
    bundle.add("readyz.txt", "/readyz", part(&ready))?;
    let flags = |running: &Running<T>| {
        running
            .flags
            .as_ref()
            .map(|flags| flags.join("\n") + "\n")
            .ok_or_else(|| "its version has no /config".to_owned())
    };
    bundle.add("flags.txt", "the flags in effect", part(&flags))?;
    add_state_directory(&mut bundle, state_dir)?;
    add_logs(&mut bundle, &args.log, logs.0, logs.1).await?;
    add_host(&mut bundle).await?;
    let manifest = bundle.finish()?;
    if path.as_os_str() == STANDARD {
        eprintln!("{manifest}");
    } else {
        println!("{manifest}\nwritten to {}", path.display());
    }
    Ok(())
}

fn json(value: &impl Serialize) -> Result<String, String> {
    serde_json::to_string_pretty(value).map(|text| text + "\n").map_err(|error| error.to_string())
}
