//! The logs of a run: one per program, below `logs` in the run's folder.
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result, ensure};

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
fn panics(dir: &Path) -> Vec<String> {
    lines(dir, |line| line.contains("panicked at"))
}

/// Returns lines of Postern's programs at level ERROR, in either log format, each with its log's name; also warnings of a socket
/// option, because every kernel that is tested has all of them.
fn errors(dir: &Path) -> Vec<String> {
    lines(dir, |line| {
        let mut words = of_container(line).split_whitespace();
        let dated = words.next().is_some_and(|word| word.starts_with("20") && word.ends_with('Z'));
        let of_option = line.contains("failed to set a socket option");
        line.contains(r#""level":"ERROR""#) || (dated && words.next() == Some("ERROR")) || of_option
    })
}

/// Returns a line as its program wrote it: containerd puts the time, the stream and a tag before it.
fn of_container(line: &str) -> &str {
    let mut parts = line.splitn(4, ' ').skip(1);
    match (parts.next(), parts.next(), parts.next()) {
        (Some("stdout" | "stderr"), Some("F" | "P"), Some(text)) => text,
        _ => line,
    }
}

/// The ERROR lines that a scenario provokes.
#[derive(Debug, Default)]
pub(crate) struct Announced(Mutex<Vec<Announcement>>);

#[derive(Debug)]
struct Announcement {
    text: String,
    /// True if it may be missing, because a race determines whether it is logged.
    optional: bool,
}

impl Announced {
    pub(crate) fn add(&self, text: &str, optional: bool) {
        let announcement = Announcement { text: text.to_owned(), optional };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(announcement);
    }

    /// Fails if a program panicked, logged an ERROR without an announced text, or did not log an announced one.
    pub(crate) fn judge(&self, dir: &Path) -> Result<()> {
        let panics = panics(dir);
        ensure!(panics.is_empty(), "a program panicked:\n{}", panics.join("\n"));
        let (announced, errors) = (self.0.lock().unwrap_or_else(PoisonError::into_inner), errors(dir));
        let surprises: Vec<_> =
            errors.iter().filter(|line| !announced.iter().any(|one| line.contains(&one.text))).collect();
        ensure!(surprises.is_empty(), "ERROR lines that no `expect_error` announces:\n{surprises:#?}");
        let missing = announced
            .iter()
            .filter(|one| !one.optional && !errors.iter().any(|line| line.contains(&one.text)));
        let missing: Vec<_> = missing.map(|one| &one.text).collect();
        ensure!(missing.is_empty(), "announced by `expect_error`, but not logged: {missing:?}");
        Ok(())
    }
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
        let judged = Announced::default().judge(&dir);
        let mut copies: Vec<_> = fs::read_dir(&to).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        copies.sort();
        fs::remove_dir_all(&dir).unwrap();
        let (panics, errors, ends, kept) = found;
        kept.unwrap();
        assert!(panics.len() == 1 && panics[0].starts_with("server.log: "), "{panics:?}");
        assert_eq!(errors, panics);
        assert!(judged.unwrap_err().to_string().contains("a program panicked"));
        assert!(ends.contains("kubelet.log: last 2 of 2 lines") && ends.contains("E1126 failed"), "{ends}");
        assert_eq!(copies, ["kubelet.log", "server.log"]);
    }

    #[test]
    fn an_error_is_announced_and_an_announced_one_comes() {
        let dir = Id::new(Kind::Test).dir();
        fs::create_dir_all(dir.join("logs")).unwrap();
        let write = |text: &str| fs::write(dir.join("logs/agent.log"), text).unwrap();
        let judged = |texts: &[(&str, bool)]| {
            let announced = Announced::default();
            texts.iter().for_each(|(text, optional)| announced.add(text, *optional));
            announced.judge(&dir).map_err(|error| error.to_string())
        };
        write("2026-11-27T08:00:00Z  WARN tunnel_agent: no ERROR yet\nscenarios: ERROR of another program\n");
        let quiet = [judged(&[]), judged(&[("expired", true)]), judged(&[("expired", false)])];
        write("2026-11-27T08:00:00Z ERROR session{node=a}: tunnel_agent: certificate has expired\n");
        let loud = [judged(&[]), judged(&[("expired", false)]), judged(&[("refused", true)])];
        let line = fs::read_to_string(dir.join("logs/agent.log")).unwrap();
        write(&format!("2026-11-27T08:00:00.5Z stderr F {line}"));
        let of_pod = judged(&[]);
        fs::remove_dir_all(&dir).unwrap();
        assert!(quiet[0].is_ok() && quiet[1].is_ok(), "{quiet:?}");
        assert!(quiet[2].as_ref().is_err_and(|error| error.contains("not logged")), "{quiet:?}");
        assert!(loud[1].is_ok(), "{loud:?}");
        for surprise in [&loud[0], &loud[2], &of_pod] {
            assert!(surprise.as_ref().is_err_and(|error| error.contains("certificate has")), "{loud:?}");
        }
    }
}
