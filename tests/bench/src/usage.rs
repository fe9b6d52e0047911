//! Memory and CPU time of a peer's programs.
use std::collections::BTreeMap;
use std::fs;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::process::{Process, StatField, resident_bytes_of, stat_field};

use crate::load::as_f64;

/// The host that a program runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Cloud,
    Edge,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) side: Side,
    pub(crate) pid: u32,
}

impl Part {
    pub(crate) fn new(side: Side, process: &Process) -> Self {
        Self { side, pid: process.pid() }
    }
}

/// Resident memory in MB (10^6 bytes), of the cloud's programs and the edge's.
pub(crate) fn resident(parts: &[Part]) -> Result<(f64, f64)> {
    let mut sums = (0.0, 0.0);
    for part in parts {
        let megabytes = as_f64(resident_bytes_of(part.pid)?) / 1e6;
        match part.side {
            Side::Cloud => sums.0 += megabytes,
            Side::Edge => sums.1 += megabytes,
        }
    }
    Ok(sums)
}

/// CPU seconds, in user and kernel mode, that the programs have used so far; whole hundredths each.
pub(crate) fn cpu_seconds(parts: &[Part]) -> Result<f64> {
    parts.iter().map(|part| cpu_seconds_of(part.pid)).sum()
}

fn cpu_seconds_of(pid: u32) -> Result<f64> {
    let ticks = stat_field(pid, StatField::UserTicks)? + stat_field(pid, StatField::SystemTicks)?;
    let per_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.context("no CLK_TCK")?;
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    let seconds = ticks as f64 / per_second as f64;
    Ok(seconds)
}

/// Minor page faults of the programs so far.
pub(crate) fn minor_faults(parts: &[Part]) -> Result<f64> {
    parts.iter().map(|part| stat_field(part.pid, StatField::MinorFaults).map(as_f64)).sum()
}

/// The CPU time of a process while something is measured.
#[derive(Debug)]
pub(crate) struct Share {
    pid: u32,
    since: Instant,
    seconds: f64,
}

impl Share {
    pub(crate) fn start(pid: u32) -> Result<Self> {
        Ok(Self { pid, since: Instant::now(), seconds: cpu_seconds_of(pid)? })
    }

    /// Percentage of one CPU.
    pub(crate) fn percent(&self) -> Result<f64> {
        Ok(100.0 * (cpu_seconds_of(self.pid)? - self.seconds) / self.since.elapsed().as_secs_f64())
    }
}

/// Voluntary context switches of the programs' threads: how often a task had to be woken.
pub(crate) fn voluntary_switches(parts: &[Part]) -> Result<u64> {
    let mut sum = 0;
    for part in parts {
        let folder = format!("/proc/{}/task", part.pid);
        for thread in fs::read_dir(&folder).with_context(|| format!("reading {folder}"))? {
            // The thread may have ended.
            let Ok(text) = fs::read_to_string(thread.context("a thread")?.path().join("status")) else {
                continue;
            };
            let line = text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            let count = line.and_then(|line| line.trim().parse::<u64>().ok());
            sum += count.with_context(|| format!("no voluntary_ctxt_switches in {folder}"))?;
        }
    }
    Ok(sum)
}

/// Memory of the BPF maps that a process holds, in MB (10^6 bytes), as the kernel counts it.
pub(crate) fn bpf_maps(pid: u32) -> Result<f64> {
    let folder = format!("/proc/{pid}/fdinfo");
    let mut maps = BTreeMap::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("reading {folder}"))? {
        // The descriptor may have been closed.
        let Ok(text) = fs::read_to_string(entry.context("a descriptor")?.path()) else { continue };
        let number = |name| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
        if let (Some(id), Some(bytes)) = (number("map_id:"), number("memlock:")) {
            maps.insert(id, bytes);
        }
    }
    ensure!(!maps.is_empty(), "{folder} shows no BPF map");
    Ok(as_f64(maps.values().sum()) / 1e6)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn this_process_uses_memory() {
        let part = Part { side: Side::Edge, pid: std::process::id() };
        let (cloud, edge) = resident(&[part]).unwrap();
        assert!(cloud == 0.0 && edge > 1.0, "{edge}");
        assert!(cpu_seconds(&[part]).unwrap() >= 0.0);
    }

    /// Measures a child: in this process threads of other tests end, and their counts go with them.
    #[test]
    fn waiting_is_a_voluntary_switch() {
        let mut cat =
            Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("starting cat");
        let (mut to, mut from) = (cat.stdin.take().unwrap(), cat.stdout.take().unwrap());
        let part = Part { side: Side::Edge, pid: cat.id() };
        let before = voluntary_switches(&[part]).unwrap();
        let start = Instant::now();
        while voluntary_switches(&[part]).unwrap() <= before {
            assert!(start.elapsed() < Duration::from_secs(30), "it waits for each byte");
            to.write_all(b"a").unwrap();
            from.read_exact(&mut [0]).unwrap();
        }
        drop(to);
        assert!(cat.wait().unwrap().success());
    }
}
