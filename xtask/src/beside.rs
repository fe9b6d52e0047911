//! Builds what scenarios need beside unit tests and scenarios, at the lowest priority: these mostly wait, so that the CPUs have
//! time for it. A scenario that needs a build waits until it is done, and raises the priority while no other one runs: something else
//! may keep the machine busy.
//!
//! A separate process builds one after the other. For each it leaves a file in its folder: the variables that tell
//! scenarios where the result is, or the error. The fuzz targets and the mutation tests run there too and leave their result.
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::{Pid, getpgrp, getppid};

use crate::command::{end_of, name_of, program, shown, target_dir};
use crate::cross::Profile;
use crate::needs::Need;
use crate::tally::minutes;
use crate::{files, fuzz, mutants, packages};

/// Environment variable that names the folder to scenarios.
const VARIABLE: &str = "POSTERN_NEEDS";
/// Prefix of a file about a failure.
const FAILED: &str = "failed: ";
/// Seconds that each fuzz target runs, on the CPU time that the scenarios leave.
const FUZZ_SECONDS: u32 = 15;
/// File that is locked while the process runs, so that scenarios do not wait for one that has crashed.
const RUNNING: &str = "running";

/// The process that builds. Dropping this ends it.
pub(crate) struct Beside {
    folder: PathBuf,
    child: Child,
}

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Gets a file for each.
    folder: PathBuf,
    needs: Vec<Need>,
}

impl Beside {
    /// Builds these, and if that is all of them, also runs the fuzz targets and the mutation tests.
    pub(crate) fn start(needs: &[Need]) -> Result<Self> {
        for need in needs {
            packages::install(need.packages())?;
        }
        let folder = target_dir()?.join("beside");
        fs::remove_dir_all(&folder).ok();
        files::create(&folder)?;
        let log = folder.join("log");
        let output = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
        let names: Vec<_> = needs.iter().map(|need| need.title()).collect();
        let all =
            if needs.contains(&Need::Fuzz) { ", the fuzz targets' runs, the mutation tests" } else { "" };
        println!("beside this, at the lowest priority: {}{all} (log: {})", names.join(", "), log.display());
        let mut command = program("setsid");
        command.args(["nice", "-n", "19"]);
        // Through /proc: cargo may have replaced the file since.
        command.arg(format!("/proc/{}/exe", std::process::id()));
        command.arg("beside").arg(&folder).args(needs.iter().map(name_of));
        command.stdout(output.try_clone().context("the log")?).stderr(output);
        let child = command.spawn().with_context(|| format!("starting {}", shown(&command)))?;
        let mut started = Self { folder, child };
        while !started.folder.join(RUNNING).exists() {
            if let Some(status) = started.child.try_wait().context("waiting for it")? {
                bail!("`{}` ended with {status}: see {}", shown(&command), log.display());
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(started)
    }

    /// Passes the folder to scenarios, which then wait for what they need.
    pub(crate) fn tell(&self, scenarios: &mut Command) {
        scenarios.env(VARIABLE, &self.folder);
    }

    /// Waits until `need` has been built, or has failed.
    pub(crate) fn wait(&mut self, need: Need) -> Result<()> {
        let file = self.folder.join(name_of(&need));
        if !file.exists() {
            self.raise();
        }
        loop {
            // Checked before the file: the process may end right after it has written that.
            let ended = self.child.try_wait().context("waiting for what is built beside the scenarios")?;
            if file.exists() {
                return Ok(());
            }
            ensure!(ended.is_none(), "what builds {} has ended without it", need.title());
            thread::sleep(Duration::from_millis(200));
        }
    }

    /// Gives it the usual priority, once nothing else is left to do. Failing, it takes longer.
    fn raise(&self) {
        let id = self.child.id().to_string();
        let _ = fs::write(format!("/proc/{id}/autogroup"), "0");
        let _ = program("renice").args(["-n", "0", "-g", &id]).output();
    }

    /// Waits until everything is done, and returns the time that each took.
    pub(crate) fn finish(&mut self) -> Result<String> {
        self.raise();
        let status = self.child.wait().context("waiting for what is built beside the scenarios")?;
        let log = fs::read_to_string(self.folder.join("log")).unwrap_or_default();
        ensure!(
            status.success(),
            "what was built beside the scenarios ended with {status}:\n{}",
            end_of(&log)
        );
        Ok(log.lines().filter_map(|line| line.strip_prefix(TOOK)).collect::<Vec<_>>().join(", "))
    }

    /// Result of the test of this name, which ran there.
    pub(crate) fn result(&self, name: &str) -> Result<()> {
        result(&self.folder, name)
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            if let Ok(pid) = i32::try_from(self.child.id()) {
                end_group(Pid::from_raw(pid));
            }
            // It has been killed: its status means nothing.
            let _ = self.child.wait();
        }
    }
}

/// Prefix of the log lines with the time that something took.
const TOOK: &str = "took: ";

/// Entry point of the process that builds.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let folder = &options.folder;
    let mut running = File::create(folder.join("running.tmp")).context("creating the lock")?;
    // Its session and process group have this ID too.
    write!(running, "{}", std::process::id()).context("writing the lock")?;
    running.lock().context("locking it")?;
    fs::rename(folder.join("running.tmp"), folder.join(RUNNING)).context("renaming it")?;
    follow_parent();
    // A kernel that groups processes by session gives each group an equal share, however idle its members are (sched(7)).
    let _ = fs::write("/proc/self/autogroup", "19");
    for &need in &options.needs {
        made(folder, &name_of(&need), || {
            let variables = need.make(Profile::Dev, None)?;
            let line = |(name, value): (String, PathBuf)| format!("{name}={}\n", value.display());
            Ok(variables.into_iter().map(line).collect())
        })?;
    }
    if options.needs.contains(&Need::Fuzz) {
        fuzz_and_mutate(folder)?;
    }
    drop(running);
    Ok(ExitCode::SUCCESS)
}

fn fuzz_and_mutate(folder: &Path) -> Result<()> {
    let results = fuzz::in_pairs(&fuzz::targets()?, |target| fuzzed(folder, target));
    results.into_iter().collect::<Result<()>>()?;
    let prepared = mutants::prepare();
    for (name, group) in mutants::quick() {
        made(folder, &name, || {
            if let Err(error) = &prepared {
                bail!("{error:#}");
            }
            mutants::run_quick(group).map(|()| String::new())
        })?;
    }
    Ok(())
}

fn fuzzed(folder: &Path, target: &str) -> Result<()> {
    made(folder, &fuzz::name_of(target), || {
        result(folder, &name_of(&Need::Fuzz)).context("the fuzz targets were not built")?;
        fuzz::run_target(target, FUZZ_SECONDS, true).map(|()| String::new())
    })
}

/// Reads the result that [`made`] has left.
fn result(folder: &Path, name: &str) -> Result<()> {
    let path = folder.join(name);
    let text = files::text(&path)?;
    match text.strip_prefix(FAILED) {
        Some(reason) => bail!("{reason}"),
        None => Ok(()),
    }
}

/// Writes what `make` returns, or its error, to the file of this name: wholly or not at all.
fn made(folder: &Path, name: &str, make: impl FnOnce() -> Result<String>) -> Result<()> {
    let start = Instant::now();
    println!("=== {name}");
    let text = make().unwrap_or_else(|error| {
        println!("{name}: {error:#}");
        format!("{FAILED}{error:#}")
    });
    let temporary = folder.join(format!("{name}.tmp"));
    let write = || {
        fs::write(&temporary, text)?;
        fs::rename(&temporary, folder.join(name))
    };
    write().with_context(|| format!("writing {}", temporary.display()))?;
    println!("{TOOK}{name} {}", minutes(start.elapsed()));
    Ok(())
}

/// Ends this process and all that it has started once its parent is gone: its session gets no Ctrl-C.
fn follow_parent() {
    let parent = getppid();
    thread::spawn(move || {
        while getppid() == parent {
            thread::sleep(Duration::from_secs(1));
        }
        end_group(getpgrp());
    });
}

fn end_group(group: Pid) {
    // The group may have ended by itself.
    let _ = killpg(group, Signal::SIGTERM);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_says_what_was_made_or_why_not() {
        let folder = tempfile::tempdir().unwrap();
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
        made(folder.path(), "cluster", || Ok("A=/b\n".to_owned())).unwrap();
        assert_eq!(read("cluster"), "A=/b\n");
        made(folder.path(), "images", || bail!("no zig")).unwrap();
        assert_eq!(read("images"), "failed: no zig");
        assert_eq!(result(folder.path(), "images").unwrap_err().to_string(), "no zig");
        result(folder.path(), "cluster").unwrap();
    }
}
