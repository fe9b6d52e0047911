//! The logs of a run: one per program, below `logs` in the run's folder.
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::snapshot;

/// Number of lines of each log that a failure shows.
const LINES_SHOWN: usize = 60;

/// Returns the end of every log, the scenario's own last.
pub fn ends(dir: &Path) -> String {
    let mut text = String::new();
    for (name, whole) in all(dir) {
        let lines: Vec<&str> = whole.lines().collect();
        let from = lines.len().saturating_sub(LINES_SHOWN);
        text.push_str(&format!("--- {name}: last {} of {} lines\n", lines.len() - from, lines.len()));
        for line in &lines[from..] {
            text.extend(line.chars().take(500));
            text.push('\n');
        }
    }
    text
}

/// Returns lines that report a panic, each with its log's name.
pub fn panics(dir: &Path) -> Vec<String> {
    lines(dir, |line| line.contains("panicked at"))
}

/// Returns lines of Postern's programs at level ERROR, each with its log's name.
pub fn errors(dir: &Path) -> Vec<String> {
    lines(dir, |line| line.contains(r#""level":"ERROR""#) || line.contains(" ERROR tunnel_"))
}

/// Copies the logs of a run, and what its hosts held when something was wrong, to `to`, replacing those of an earlier run.
pub fn keep(dir: &Path, to: &Path) -> Result<()> {
    // It may not exist.
    fs::remove_dir_all(to).ok();
    fs::create_dir_all(to).with_context(|| format!("creating {}", to.display()))?;
    for path in paths(dir).into_iter().chain(snapshot::files(dir)) {
        let Some(name) = path.file_name() else { continue };
        fs::copy(&path, to.join(name)).with_context(|| format!("copying {}", path.display()))?;
    }
    Ok(())
}

fn lines(dir: &Path, wanted: impl Fn(&str) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    for (name, whole) in all(dir) {
        found.extend(whole.lines().filter(|line| wanted(line)).map(|line| format!("{name}: {line}")));
    }
    found
}

fn all(dir: &Path) -> impl Iterator<Item = (String, String)> {
    paths(dir).into_iter().map(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        (name, String::from_utf8_lossy(&fs::read(&path).unwrap_or_default()).into_owned())
    })
}

fn paths(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir.join("logs")).into_iter().flatten().flatten();
    let mut paths: Vec<_> = entries.map(|entry| entry.path()).filter(|path| path.is_file()).collect();
    paths.sort_by_key(|path| (path.ends_with("scenario.log"), path.clone()));
    paths
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Id, Kind};

    #[test]
    fn what_went_wrong_is_found_and_kept() {
        let dir = Id::new(Kind::Test).dir();
        let to = dir.join("kept");
        fs::create_dir_all(dir.join("logs")).unwrap();
        fs::create_dir_all(&to).unwrap();
        fs::write(to.join("old.log"), "").unwrap();
        let server =
            "{\"level\":\"INFO\"}\n{\"level\":\"ERROR\",\"message\":\"panicked at a.rs:1:\\nboom\"}\n";
        fs::write(dir.join("logs/server.log"), server).unwrap();
        fs::write(dir.join("logs/kubelet.log"), "E1126 failed\nlast\n").unwrap();
        let found = (panics(&dir), errors(&dir), ends(&dir), keep(&dir, &to));
        let mut copies: Vec<_> = fs::read_dir(&to).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        copies.sort();
        fs::remove_dir_all(&dir).unwrap();
        let (panics, errors, ends, kept) = found;
        kept.unwrap();
        assert!(panics.len() == 1 && panics[0].starts_with("server.log: "), "{panics:?}");
        assert_eq!(errors, panics);
        assert!(ends.contains("kubelet.log: last 2 of 2 lines") && ends.contains("E1126 failed"), "{ends}");
        assert_eq!(copies, ["kubelet.log", "server.log"]);
    }
}
