//! Durations of scenarios, for the end of a run: the slowest, and whether scenarios with or without a cluster ended
//! last.
use std::cmp::Reverse;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

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
        writeln!(text, "{:>8.1} s  {}", one.time().as_secs_f32(), one.name).ok();
    }
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
    fn the_slowest_come_first_and_the_place_of_clusters_is_told() {
        let start = Instant::now();
        let took = |name, cluster, from, to| {
            let at = |seconds| start + Duration::from_secs(seconds);
            Took { name, cluster, from: at(from), to: at(to) }
        };
        let all = vec![took("a", false, 0, 5), took("b", true, 2, 70), took("c", true, 70, 80)];
        let expected = "\
the slowest scenarios:
    68.0 s  b
    10.0 s  c
     5.0 s  a
clusters ran for 1:18 of the first 1:20 min
the last scenario without a cluster ended after 0:05 min
";
        assert_eq!(summary(start, all), expected);
        assert!(!summary(start, vec![took("a", false, 0, 5)]).contains("clusters"));
    }
}
