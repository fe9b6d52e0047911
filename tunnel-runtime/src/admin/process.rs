//! `postern_build_info` and the `process_*` metrics that dashboards expect from every program.

use std::fs;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use tokio::runtime::Handle;

use crate::gauges::register_gauges;

/// Registers `postern_build_info{version}` and the process metrics under their usual names, so `registry` must have no
/// prefix.
pub fn register_process_metrics(registry: &mut Registry, version: &'static str) {
    registry.register("postern_build", "The version that runs", Info::new(vec![("version", version)]));
    registry.register_collector(Box::new(Process));
}

/// Registers `tasks`: the number of live tasks on these runtimes. `registry` has the prefix `postern`.
pub fn register_tasks(registry: &mut Registry, runtimes: Vec<Handle>) {
    register_gauges(registry, move |gauges| {
        let alive: usize = runtimes.iter().map(|runtime| runtime.metrics().num_alive_tasks()).sum();
        gauges.count("tasks", "Asynchronous tasks that have not ended", None, alive)
    });
}

#[derive(Debug)]
struct Process;

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let start = "When the process started, in seconds since the epoch";
        for (name, help, value) in [
            ("process_resident_memory_bytes", "Resident memory in bytes", resident_bytes()),
            ("process_open_fds", "Open file descriptors", open_fds()),
            ("process_threads", "Threads", stat_field(20).map(|count| count as f64)),
            ("process_start_time_seconds", start, start_seconds()),
        ] {
            let Some(value) = value else { continue };
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        if let Some(seconds) = cpu_seconds() {
            let counter = ConstCounter::new(seconds);
            let (name, help) = ("process_cpu_seconds", "CPU time used in seconds, user and system");
            counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)?;
        }
        Ok(())
    }
}

fn resident_bytes() -> Option<f64> {
    let statm = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_ascii_whitespace().nth(1)?.parse().ok()?;
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok()??;
    Some(pages as f64 * page as f64)
}

fn open_fds() -> Option<f64> {
    // One of the entries belongs to the listing itself.
    Some(fs::read_dir("/proc/self/fd").ok()?.count().saturating_sub(1) as f64)
}

/// Returns a field of `/proc/self/stat`, numbered as in proc(5). Works from the third field on, because the second,
/// the name, may contain blanks.
fn stat_field(number: usize) -> Option<u64> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(number - 3)?.parse().ok()
}

fn ticks_per_second() -> Option<f64> {
    Some(nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok()?? as f64)
}

fn cpu_seconds() -> Option<f64> {
    Some((stat_field(14)? + stat_field(15)?) as f64 / ticks_per_second()?)
}

/// Read each time: the kernel's boot time follows when the clock is set, as on an edge node without a battery.
fn start_seconds() -> Option<f64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    let boot: f64 = stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    Some(boot + stat_field(22)? as f64 / ticks_per_second()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_from_proc_are_plausible() {
        assert!(resident_bytes().unwrap() > 1e6);
        assert!(open_fds().unwrap() >= 3.0);
        assert!(stat_field(20).unwrap() >= 1);
        assert!(cpu_seconds().unwrap() >= 0.0);
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
        let start = start_seconds().unwrap();
        assert!((now - 86400.0..=now + 5.0).contains(&start), "{start} {now}");
    }
}
