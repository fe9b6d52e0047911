//! Known weaknesses of dependencies: cargo-deny compares them with RustSec's database. Where it cannot be fetched, the copy of
//! an earlier run counts, and its age is told.
use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, anyhow, bail};

use crate::cache;
use crate::command::{cargo, cargo_home, output, program, run};
use crate::tally::Tally;

/// Days after which a database says too little.
const LIMIT: u64 = 30;
const DAY: u64 = 24 * 60 * 60;
const DATABASE: &str = "https://github.com/RustSec/advisory-db";

/// Result of a run's look at advisories.
#[derive(Debug, PartialEq, Eq)]
enum Known {
    /// There is a database whose newest commit is this many days old.
    Database(u64),
    /// There is none yet, and so many days are left to get one.
    Nothing(u64),
}

/// Checks the advisories; cargo-deny must have downloaded the dependencies already, because it runs offline.
pub(crate) fn check(tally: &mut Tally) -> Result<()> {
    let databases = cargo_home()?.join("advisory-dbs");
    // Through `output`, for the reason, which is its last line.
    if let Err(error) = output(cargo().args(["deny", "fetch", "db"])) {
        let text = format!("{error:#}");
        let reason = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
        println!("advisories: the database cannot be fetched ({reason})");
    }
    let newest = newest_commit(&databases)?;
    let marker = cache::folder()?.join("no-advisories-since");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?.as_secs();
    let known = judge(newest, missing_since(&marker, newest, now)?, now);
    match known.map_err(|reason| anyhow!("{reason}: {}", fix(&databases)))? {
        Known::Database(days) => {
            println!("advisories: the newest in the database is {days} days old");
            // Offline: otherwise it fetches once more, and fails where that is impossible.
            run(cargo().args(["deny", "--offline", "--all-features", "check", "advisories"]))
        }
        Known::Nothing(days) => {
            let reason = format!(
                "no database yet, after {days} more days without one this fails: {}",
                fix(&databases)
            );
            println!("advisories: NOT CHECKED, {reason}");
            tally.skip("advisories", reason);
            Ok(())
        }
    }
}

fn fix(databases: &Path) -> String {
    format!(
        "run `cargo deny fetch db` where {DATABASE} can be reached, and keep {} between runs",
        databases.display()
    )
}

/// The rule: a database must be fresh, and may be missing only for as long as one would be.
fn judge(newest: Option<u64>, missing_since: u64, now: u64) -> Result<Known> {
    let days = |since: u64| now.saturating_sub(since) / DAY;
    match newest.map(days) {
        Some(age) if age > LIMIT => {
            bail!("the advisory database is {age} days old, and may be {LIMIT}: later weaknesses are unknown")
        }
        Some(age) => Ok(Known::Database(age)),
        None => match LIMIT.saturating_sub(days(missing_since)) {
            0 => bail!(
                "there has been no advisory database for {LIMIT} days: no known weakness would be noticed"
            ),
            left => Ok(Known::Nothing(left)),
        },
    }
}

/// Time of the newest commit of the databases in `folder`: files have the time at which a cache was restored.
fn newest_commit(folder: &Path) -> Result<Option<u64>> {
    let Ok(entries) = fs::read_dir(folder) else { return Ok(None) };
    let clones = entries.flatten().map(|entry| entry.path().join(".git")).filter(|git| git.exists());
    let times: Result<Vec<u64>> = clones.map(|git| time_of_commit(&git)).collect();
    Ok(times?.into_iter().max())
}

fn time_of_commit(git: &Path) -> Result<u64> {
    let mut log = program("git");
    log.arg("--git-dir").arg(git).args(["log", "-1", "--format=%ct", "HEAD"]);
    let damaged = || format!("{} is damaged: remove it", git.display());
    output(&mut log).and_then(|text| Ok(text.trim().parse()?)).with_context(damaged)
}

/// Since when this machine has had no database, as `marker` has it.
fn missing_since(marker: &Path, newest: Option<u64>, now: u64) -> Result<u64> {
    if newest.is_some() {
        fs::remove_file(marker).ok();
        return Ok(now);
    }
    match fs::read_to_string(marker) {
        Ok(text) => {
            let since: u64 = text.trim().parse().with_context(|| {
                format!("{} has {text:?} instead of seconds since 1970: remove it", marker.display())
            })?;
            // A clock that was ahead must not lengthen it.
            Ok(since.min(now))
        }
        Err(_) => {
            fs::create_dir_all(marker.parent().unwrap_or(marker)).ok();
            fs::write(marker, now.to_string()).with_context(|| format!("writing {}", marker.display()))?;
            Ok(now)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000;

    #[test]
    fn a_database_that_is_missing_or_old_fails_after_thirty_days() {
        let ago = |days: u64| NOW - days * DAY;
        assert_eq!(judge(Some(ago(0)), NOW, NOW).unwrap(), Known::Database(0));
        assert_eq!(judge(Some(ago(30)), NOW, NOW).unwrap(), Known::Database(30));
        // Of a clock that is behind.
        assert_eq!(judge(Some(NOW + DAY), NOW, NOW).unwrap(), Known::Database(0));
        let old = judge(Some(ago(31)), NOW, NOW).unwrap_err().to_string();
        assert!(old.contains("31 days old") && old.contains("30"), "{old}");

        assert_eq!(judge(None, NOW, NOW).unwrap(), Known::Nothing(30));
        assert_eq!(judge(None, ago(29), NOW).unwrap(), Known::Nothing(1));
        let missing = judge(None, ago(30), NOW).unwrap_err().to_string();
        assert!(missing.contains("no advisory database for 30 days"), "{missing}");
    }

    #[test]
    fn the_age_of_a_database_is_that_of_its_newest_commit() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(newest_commit(&folder.path().join("none")).unwrap(), None);
        // cargo-deny's lock, without a database.
        fs::write(folder.path().join("db.lock"), "").unwrap();
        assert_eq!(newest_commit(folder.path()).unwrap(), None);
        let clone = folder.path().join("advisory-db-1");
        fs::create_dir(&clone).unwrap();
        let git = |args: &[&str]| {
            let mut git = program("git");
            git.current_dir(&clone).args(["-c", "user.name=t", "-c", "user.email=t@example.org"]).args(args);
            git.env("GIT_COMMITTER_DATE", "1700000000 +0000");
            output(&mut git).unwrap();
        };
        git(&["init", "--quiet"]);
        let error = format!("{:#}", newest_commit(folder.path()).unwrap_err());
        assert!(error.contains("advisory-db-1") && error.contains("remove it"), "{error}");
        git(&["commit", "--quiet", "--allow-empty", "--message=x"]);
        assert_eq!(newest_commit(folder.path()).unwrap(), Some(1_700_000_000));
    }

    #[test]
    fn how_long_a_database_is_missing_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let marker = folder.path().join("since");
        assert_eq!(missing_since(&marker, None, NOW).unwrap(), NOW);
        assert_eq!(missing_since(&marker, None, NOW + DAY).unwrap(), NOW);
        assert_eq!(missing_since(&marker, None, NOW - DAY).unwrap(), NOW - DAY);
        missing_since(&marker, Some(NOW), NOW).unwrap();
        assert!(!marker.exists());
        fs::write(&marker, "soon").unwrap();
        let error = missing_since(&marker, None, NOW).unwrap_err().to_string();
        assert!(error.contains("remove it"), "{error}");
    }
}
