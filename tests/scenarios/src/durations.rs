//! Durations of scenarios. At the end of a run it names the slowest, and says whether scenarios with or without a cluster
//! ended last. They are kept, and the next run begins with the longest: what is long and begins last ends last.
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, io};

use crate::scenario::Scenario;

/// Number of slowest scenarios that are named.
const NAMED: usize = 10;

/// A scenario that has ended, successfully or not.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Took {
    pub(crate) name: &'static str,
    pub(crate) cluster: bool,
    /// Time at which it got its slot.
    pub(crate) from: Instant,
    pub(crate) to: Instant,
    /// Processor time of its programs.
    pub(crate) used: Duration,
    pub(crate) passed: bool,
}

/// Seconds by scenario, of the last run of each.
pub(crate) struct Kept {
    file: PathBuf,
    seconds: BTreeMap<String, f64>,
}

impl Kept {
    /// Reads the file, which `cargo xtask test` reads too: a line for each, such as `12.3 path::by_name`.
    pub(crate) fn read(target: &Path) -> Self {
        let file = target.join("times/scenarios");
        let text = fs::read_to_string(&file).unwrap_or_default();
        let parse = |line: &str| {
            line.split_once(' ').and_then(|(time, name)| Some((name.to_owned(), time.parse().ok()?)))
        };
        Self { seconds: text.lines().filter_map(parse).collect(), file }
    }

    /// Returns the time that the scenario took, or a guess.
    pub(crate) fn expected(&self, scenario: &Scenario) -> Duration {
        let kept = self.seconds.get(scenario.name()).and_then(|kept| Duration::try_from_secs_f64(*kept).ok());
        kept.unwrap_or(scenario.limit / 4)
    }

    /// Keeps the times of those that have passed: others end early, or late.
    pub(crate) fn update(mut self, took: &[Took]) -> io::Result<()> {
        let passed = took.iter().filter(|one| one.passed);
        self.seconds.extend(passed.map(|one| (one.name.to_owned(), one.time().as_secs_f64())));
        let lines: String = self.seconds.iter().map(|(name, time)| format!("{time:.1} {name}\n")).collect();
        self.file.parent().map_or(Ok(()), fs::create_dir_all)?;
        fs::write(self.file, lines)
    }
}

impl Took {
    fn time(&self) -> Duration {
        self.to - self.from
    }
}

/// Summarises a run that began at `start`.
pub(crate) fn summary(start: Instant, mut took: Vec<Took>) -> String {
    took.sort_by_key(|one| Reverse(one.time()));
    let mut text = "the slowest scenarios:\n".to_owned();
    // Writing to a String cannot fail.
    for one in took.iter().take(NAMED) {
        let (time, used) = (one.time().as_secs_f32(), one.used.as_secs_f32());
        writeln!(text, "{time:>8.1} s, {used:>5.1} of a processor  {}", one.name).ok();
    }
    let used: Duration = took.iter().map(|one| one.used).sum();
    let time: Duration = took.iter().map(Took::time).sum();
    writeln!(text, "all took {} min, and {} of a processor", minutes(time), minutes(used)).ok();
    let end = |cluster: bool| took.iter().filter(|one| one.cluster == cluster).map(|one| one.to).max();
    if let Some(end) = end(true) {
        let busy: Duration = took.iter().filter(|one| one.cluster).map(Took::time).sum();
        writeln!(text, "clusters ran for {} of the first {} min", minutes(busy), minutes(end - start)).ok();
    }
    if let Some(end) = end(false) {
        writeln!(text, "the last scenario without a cluster ended after {} min", minutes(end - start)).ok();
    }
    text
}

/// Formats minutes and seconds.
fn minutes(time: Duration) -> String {
    let seconds = time.as_secs();
    format!("{}:{:02}", seconds / 60, seconds % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_come_first_and_times_are_kept() {
        let start = Instant::now();
        let took = |name, cluster, from, to| {
            let at = |seconds| start + Duration::from_secs(seconds);
            let used = Duration::from_secs(2);
            Took { name, cluster, from: at(from), to: at(to), used, passed: name != "a" }
        };
        let all = vec![took("a", false, 0, 5), took("b", true, 2, 70), took("c", true, 70, 80)];
        let expected = "\
the slowest scenarios:
    68.0 s,   2.0 of a processor  b
    10.0 s,   2.0 of a processor  c
     5.0 s,   2.0 of a processor  a
all took 1:23 min, and 0:06 of a processor
clusters ran for 1:18 of the first 1:20 min
the last scenario without a cluster ended after 0:05 min
";
        assert_eq!(summary(start, all), expected);
        assert!(!summary(start, vec![took("a", false, 0, 5)]).contains("clusters"));

        let target = tempfile::tempdir().unwrap();
        Kept::read(target.path()).update(&[took("a", false, 0, 5), took("plain::x", true, 2, 70)]).unwrap();
        Kept::read(target.path()).update(&[took("c", true, 70, 80)]).unwrap();
        let kept = Kept::read(target.path());
        assert_eq!(kept.seconds, BTreeMap::from([("plain::x".to_owned(), 68.0), ("c".to_owned(), 10.0)]));
        let new = &crate::plain::SCENARIOS[0];
        assert_eq!(kept.expected(new), new.limit / 4);
    }
}
