//! Times of steps and tests in seconds. They are kept in cargo's target folder, and the next run says what has grown.
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::command::target_dir;
use crate::files;

/// Seconds by name.
pub(crate) type Times = BTreeMap<String, f64>;

/// Growth in seconds that is not worth a line.
const LEAST: f64 = 5.0;

/// File of this kind of run. `scenarios` writes its own.
pub(crate) fn file(kind: &str) -> Result<PathBuf> {
    Ok(target_dir()?.join("times").join(kind))
}

/// Reads lines such as `12.3 scenarios`; a file that does not exist has none.
pub(crate) fn read(file: &Path) -> Times {
    let text = fs::read_to_string(file).unwrap_or_default();
    let parse = |line: &str| {
        line.split_once(' ').and_then(|(time, name)| Some((name.to_owned(), time.parse().ok()?)))
    };
    text.lines().filter_map(parse).collect()
}

pub(crate) fn write(file: &Path, times: &Times) -> Result<()> {
    let lines: String = times.iter().map(|(name, time)| format!("{time:.1} {name}\n")).collect();
    files::write(file, lines)
}

/// Returns a line for each that takes a fifth more than before.
pub(crate) fn grown(last: &Times, now: &Times) -> Vec<String> {
    let both = now.iter().filter_map(|(name, now)| Some((name, *last.get(name)?, *now)));
    let grown = both.filter(|(_, last, now)| *now > last * 1.2 && now - last >= LEAST);
    grown.map(|(name, last, now)| format!("GROWN: {name} took {now:.0} s, and {last:.0} s before")).collect()
}

/// Returns what the next run is compared with. Growth by a little in each run adds up.
pub(crate) fn kept(last: &Times, now: &Times) -> Times {
    let kept = |(name, now): (&String, &f64)| {
        (name.clone(), last.get(name).map_or(*now, |last| now.min(last * 1.02)))
    };
    now.iter().map(kept).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_a_fifth_more_is_told() {
        let times = |of: &[(&str, f64)]| -> Times {
            of.iter().map(|(name, time)| ((*name).to_owned(), *time)).collect()
        };
        let last = times(&[("a step", 100.0), ("b", 100.0), ("short", 1.0), ("gone", 9.0)]);
        let now = times(&[("a step", 121.0), ("b", 119.0), ("short", 5.0), ("new", 90.0)]);
        assert_eq!(grown(&last, &now), ["GROWN: a step took 121 s, and 100 s before"]);
        assert_eq!(
            kept(&last, &now),
            times(&[("a step", 102.0), ("b", 102.0), ("short", 1.02), ("new", 90.0)])
        );
        assert_eq!(kept(&now, &last)["a step"], 100.0);
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("times/test");
        assert_eq!(read(&file), Times::new());
        write(&file, &last).unwrap();
        assert_eq!(read(&file), last);
    }
}
