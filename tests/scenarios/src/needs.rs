//! Builds that scenarios need and that `cargo xtask test` makes while other scenarios run.
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

/// Folder in which a file appears for each kind of scenarios once its builds are ready; if unset, everything is built.
const VARIABLE: &str = "POSTERN_NEEDS";
/// Prefix of a file about a failed build.
const FAILED: &str = "failed: ";
/// File in the folder that is locked by the building process, and has its ID.
const RUNNING: &str = "running";

/// Time for which no scenario has run before the builds are no longer made at the lowest priority.
const IDLE: Duration = Duration::from_secs(10);
/// Priorities of nice(1).
const USUAL: i32 = 0;
const LOWEST: i32 = 19;

/// Waits until the builds for scenarios of this kind are ready. Returns the variables with their paths. `any_runs` tells
/// whether a scenario runs.
pub(crate) fn wait(kind: &str, any_runs: impl Fn() -> bool) -> Result<Vec<(String, String)>> {
    let Some(folder) = std::env::var_os(VARIABLE) else { return Ok(Vec::new()) };
    let folder = Path::new(&folder);
    wait_and_prioritise(folder, kind, IDLE, any_runs, |nice| prioritise(folder, nice))
}

fn wait_and_prioritise(
    folder: &Path,
    kind: &str,
    idle: Duration,
    any_runs: impl Fn() -> bool,
    mut prioritise: impl FnMut(i32),
) -> Result<Vec<(String, String)>> {
    let (mut since, mut raised) = (Instant::now(), false);
    let variables = wait_for(folder, kind, || {
        if any_runs() {
            since = Instant::now();
        } else if since.elapsed() >= idle {
            // Again and again: a scenario that has got what it waited for lowers it for those that still wait.
            (since, raised) = (Instant::now(), true);
            prioritise(USUAL);
        }
    });
    if raised {
        prioritise(LOWEST);
    }
    variables
}

/// Sets the priority of what builds. Failing, it takes longer.
fn prioritise(folder: &Path, nice: i32) {
    let Ok(id) = fs::read_to_string(folder.join(RUNNING)) else { return };
    let nice = nice.to_string();
    // Where the kernel groups processes by session, the group's priority counts (sched(7)).
    let _ = fs::write(format!("/proc/{id}/autogroup"), &nice);
    let _ = Command::new("renice").args(["-n", &nice, "-g", &id]).output();
}

fn wait_for(folder: &Path, kind: &str, mut waiting: impl FnMut()) -> Result<Vec<(String, String)>> {
    let (file, running) = (folder.join(kind), folder.join(RUNNING));
    loop {
        // Checked before the file is read, which may be the last that is built.
        let ended = has_ended(&running)?;
        if let Some(variables) = read(&file)? {
            return Ok(variables);
        }
        ensure!(!ended, "what builds {} has ended without it: see the log beside it", file.display());
        waiting();
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn has_ended(running: &Path) -> Result<bool> {
    let file = File::open(running).with_context(|| format!("opening {}", running.display()))?;
    // The lock is released at once.
    Ok(file.try_lock_shared().is_ok())
}

/// Reads the file; None: it is not built yet.
fn read(file: &Path) -> Result<Option<Vec<(String, String)>>> {
    let text = match fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("reading {}", file.display())),
    };
    if let Some(reason) = text.strip_prefix(FAILED) {
        bail!("what this scenario needs could not be built: {reason}");
    }
    let variable = |line: &str| line.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
    Ok(Some(text.lines().filter_map(variable).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_and_failures_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("images");
        assert_eq!(read(&file).unwrap(), None);
        fs::write(&file, "A=/b=c\nD=e\n").unwrap();
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(read(&file).unwrap(), Some(vec![pair("A", "/b=c"), pair("D", "e")]));
        fs::write(&file, "failed: no zig").unwrap();
        assert!(read(&file).unwrap_err().to_string().ends_with("no zig"));
        let running = File::create(folder.path().join(RUNNING)).unwrap();
        running.lock().unwrap();
        assert!(!has_ended(&folder.path().join(RUNNING)).unwrap());
        drop(running);
        // A process that another test starts has the locked file until it runs its own program (flock(2), fork(2)).
        let deadline = Instant::now() + Duration::from_secs(10);
        while !has_ended(&folder.path().join(RUNNING)).unwrap() {
            assert!(Instant::now() < deadline, "the lock was not released");
            std::thread::yield_now();
        }
    }

    #[test]
    fn who_waits_sets_the_priority_of_what_builds() {
        let folder = tempfile::tempdir().unwrap();
        let running = File::create(folder.path().join(RUNNING)).unwrap();
        running.lock().unwrap();
        let mut builds = Command::new("setsid").args(["sleep", "60"]).spawn().unwrap();
        // Its own session and group once setsid has made way for sleep.
        let stat = || fs::read_to_string(format!("/proc/{}/stat", builds.id())).unwrap();
        while !stat().contains("(sleep)") {
            std::thread::yield_now();
        }
        fs::write(folder.path().join(RUNNING), builds.id().to_string()).unwrap();
        let nice = || stat().rsplit(") ").next().unwrap().split(' ').nth(16).unwrap().to_owned();
        let mut waited = 0;
        let found = wait_for(folder.path(), "images", || {
            waited += 1;
            prioritise(folder.path(), LOWEST);
            assert_eq!(nice(), "19");
            fs::write(folder.path().join("images"), "A=b\n").unwrap();
        });
        builds.kill().unwrap();
        builds.wait().unwrap();
        assert_eq!((found.unwrap(), waited), (vec![("A".to_owned(), "b".to_owned())], 1));
    }

    #[test]
    fn who_still_waits_raises_it_again_after_another_one_has_lowered_it() {
        let folder = tempfile::tempdir().unwrap();
        let running = File::create(folder.path().join(RUNNING)).unwrap();
        running.lock().unwrap();
        let mut set = Vec::new();
        let found = wait_and_prioritise(
            folder.path(),
            "images",
            Duration::ZERO,
            || false,
            |nice| {
                set.push(nice);
                if set.len() == 2 {
                    fs::write(folder.path().join("images"), "").unwrap();
                }
            },
        );
        assert_eq!((found.unwrap(), set), (Vec::new(), vec![USUAL, USUAL, LOWEST]));
    }
}
