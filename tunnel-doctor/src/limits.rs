//! Checks that a program in a pod has found the pod's limits.

use super::checkup::{Finding, Outcome};
use super::codes;

/// Judges the limits in `metrics`, which come from the running program. `in_pod` is true if it runs in a pod.
pub(super) fn judge_limits(metrics: &str, in_pod: bool) -> Outcome {
    let value = |name: &str| {
        let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix("{from=\""))?;
        line.split_once("\"} ")
    };
    let (Some((file, bytes)), Some((cpu_file, cpus))) =
        (value("postern_memory_limit_bytes"), value("postern_cpu_limit"))
    else {
        return Outcome::Skipped("the running program is of a version that does not say them".to_owned());
    };
    let found = format!("{bytes} bytes of memory ({file}), {cpus} CPUs ({cpu_file})");
    if in_pod && file == tunnel_runtime::limits::MACHINE {
        let fix = "set resources.limits.memory of its container; if it is set, mount the host's cgroups beside /sys/fs/cgroup as \
                   deploy/ does, and nothing over it";
        return Finding::new(&codes::MEMORY_LIMIT_UNSEEN, found, fix).into();
    }
    Outcome::Fine(found)
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;
    use tunnel_runtime::limits::{Limits, register_limits};

    use super::*;

    #[test]
    fn a_pod_without_a_limit_is_told() {
        let says = |file: &str| {
            format!(
                "# EOF\npostern_memory_limit_bytes{{from=\"{file}\"}} 1024\npostern_cpu_limit{{from=\"x\"}} 1.5\n"
            )
        };
        let judged = |metrics: &str, in_pod| match judge_limits(metrics, in_pod) {
            Outcome::Faults(findings) => (findings[0].code, findings[0].found.clone()),
            Outcome::Fine(found) => ("", found),
            Outcome::Skipped(reason) => ("skipped", reason),
        };
        let found = |file: &str| format!("1024 bytes of memory ({file}), 1.5 CPUs (x)");
        let (machine, own) = ("/proc/meminfo", "/sys/fs/cgroup/memory.max");
        assert_eq!(judged(&says(machine), true), ("memory-limit-unseen", found(machine)));
        assert_eq!(judged(&says(machine), false), ("", found(machine)));
        assert_eq!(judged(&says(own), true), ("", found(own)));
        assert_eq!(judged("postern_memory_limit_bytes 5\n", true).0, "skipped");
    }

    #[test]
    fn the_metrics_of_this_process_are_read() {
        let (mut registry, mut text) = (Registry::default(), String::new());
        register_limits(registry.sub_registry_with_prefix("postern"));
        encode(&mut text, &registry).unwrap();
        let Outcome::Fine(found) = judge_limits(&text, false) else { panic!("{text}") };
        let Limits { memory, .. } = Limits::of_process();
        assert!(found.starts_with(&format!("{} bytes of memory ({})", memory.amount, memory.from.display())));
    }
}
