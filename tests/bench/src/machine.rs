//! The machine and the program versions of a run.
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use serde::Serialize;

use crate::options::Options;
use crate::wan;

/// The machine and the versions of everything that ran.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    pub(crate) cpu: String,
    pub(crate) cpus: usize,
    /// In GB.
    pub(crate) memory: f64,
    pub(crate) kernel: String,
    /// TCP's congestion control, and the one of paths that are called loss-based.
    pub(crate) congestion: String,
    pub(crate) loss_based: Option<&'static str>,
    /// Load average of the last minute at the start of the run.
    pub(crate) load_at_start: String,
    /// The same at its end.
    pub(crate) load_at_end: String,
    /// Programs that ran, and their versions.
    pub(crate) versions: Vec<(String, String)>,
}

impl Machine {
    pub(crate) fn read(options: &Options) -> Result<Self> {
        let cpuinfo = read("/proc/cpuinfo")?;
        let memory = read("/proc/meminfo")?;
        let kib = field(&memory, "MemTotal:").and_then(|text| text.split(' ').next()?.parse::<f64>().ok());
        let mut versions = vec![
            ("Postern".to_owned(), format!("commit {}", options.commit)),
            ("iptables".to_owned(), version(Path::new("iptables"), &["--version"])),
        ];
        for (name, flag) in [("haproxy", "-v"), ("rathole", "--version")] {
            let version = match options.programs.path(name) {
                Ok(path) => version(&path, &[flag]),
                Err(reason) => reason,
            };
            versions.push((name.to_owned(), version));
        }
        let konnectivity = options.programs.path("konnectivity").map(|_| "v0.36.0, built from its Go module");
        versions.push(("konnectivity".to_owned(), konnectivity.map_or_else(|why| why, str::to_owned)));
        Ok(Self {
            cpu: field(&cpuinfo, "model name\t:").unwrap_or("unknown").to_owned(),
            cpus: std::thread::available_parallelism().context("number of CPUs")?.get(),
            memory: kib.context("no MemTotal in /proc/meminfo")? * 1024.0 / 1e9,
            kernel: read("/proc/sys/kernel/osrelease")?.trim().to_owned(),
            congestion: read("/proc/sys/net/ipv4/tcp_congestion_control")?.trim().to_owned(),
            loss_based: wan::loss_based(),
            load_at_start: load()?,
            load_at_end: String::new(),
            versions,
        })
    }

    /// Records the load average at the end.
    pub(crate) fn finish(&mut self) -> Result<()> {
        self.load_at_end = load()?;
        Ok(())
    }
}

fn load() -> Result<String> {
    Ok(read("/proc/loadavg")?.split(' ').next().unwrap_or_default().to_owned())
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("reading {path}"))
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// The first line with a version in a program's output.
fn version(program: &Path, args: &[&str]) -> String {
    let Ok(output) = Command::new(program).args(args).output() else { return "unknown".to_owned() };
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    // Some print a build date first.
    let numbered = |line: &&str| {
        line.split(' ')
            .any(|word| word.contains('.') && !word.contains(':') && word.contains(char::is_numeric))
    };
    let line = text.lines().find(numbered).unwrap_or("unknown");
    line.split(" - ").next().unwrap_or(line).trim().to_owned()
}
