//! Resources that a program holds, and the check that they do not grow.
use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::metrics::Metrics;

/// Makes resident memory match allocated memory: glibc's allocator keeps freed memory per thread (mallopt(3)).
pub(crate) const ALLOCATOR: [(&str, &str); 4] = [
    ("MALLOC_ARENA_MAX", "1"),
    ("MALLOC_TRIM_THRESHOLD_", "65536"),
    ("MALLOC_TOP_PAD_", "0"),
    ("MALLOC_MMAP_THRESHOLD_", "65536"),
];

/// Resources by name.
pub(crate) type Held = BTreeMap<String, f64>;

/// Returns the resources that a program reports in its metrics.
pub(crate) fn of_process(program: &str, metrics: &Metrics) -> Result<Held> {
    [
        ("memory", "process_resident_memory_bytes"),
        ("sockets", "process_open_fds"),
        ("threads", "process_threads"),
        ("tasks", "postern_tasks"),
    ]
    .map(|(what, metric)| Ok((format!("{program}'s {what}"), metrics.sum(metric, &[])?)))
    .into_iter()
    .collect()
}

/// Describes the growth; fails if a resource grew by more than 5 % plus its slack for fluctuations. Slack is found by
/// the end of the resource's name.
pub(crate) fn growth(before: &Held, after: &Held, slack: &[(&str, f64)]) -> Result<String> {
    let mut changes = Vec::new();
    for (what, before) in before {
        let after = *after.get(what).with_context(|| format!("{what} are not reported any more"))?;
        let slack = slack.iter().find(|(name, _)| what.ends_with(name)).map_or(0.0, |(_, slack)| *slack);
        ensure!(after <= before * 1.05 + slack, "{what} grew from {before:.0} to {after:.0}");
        changes.push(format!("{what} {before:.0} -> {after:.0}"));
    }
    Ok(changes.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_a_twentieth_and_the_slack_is_growth() {
        let held = |value: f64| Held::from([("server's sockets".to_owned(), value)]);
        assert!(growth(&held(100.0), &held(105.0), &[]).is_ok());
        assert!(growth(&held(100.0), &held(106.0), &[]).is_err());
        assert!(growth(&held(100.0), &held(115.0), &[("sockets", 10.0)]).is_ok());
        assert!(growth(&held(100.0), &held(116.0), &[("sockets", 10.0)]).is_err());
        assert!(growth(&held(100.0), &Held::new(), &[]).is_err(), "nobody knows");
    }
}
