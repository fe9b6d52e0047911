//! `cargo xtask lint`.
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::command::{self, Package, cargo, cargo_home, need_cargo_tool, output, program, root, run};
use crate::tally::Tally;
use crate::{build_ebpf, cache, circles, files, one_shot, packages};

const DENY_VERSION: &str = "0.20.2";
/// Time for which the advisory database may be missing; that for which a copy counts is in deny.toml.
const LIMIT: Duration = Duration::from_secs(30 * 24 * 60 * 60);

pub(crate) fn run_lint(tally: &mut Tally) -> Result<()> {
    run(cargo().args(["fmt", "--all", "--", "--check"]))?;
    // The product's crates, and this one.
    let is_layered = |package: &Package| package.name.starts_with("tunnel-") || package.name == "xtask";
    let layered = command::packages()?.into_iter().filter(is_layered);
    let folders: Vec<_> = layered.map(|package| package.folder).collect();
    let names: Vec<_> = folders.iter().map(|folder| files::file_name(folder)).collect();
    println!("import circles: {}", names.join(", "));
    circles::check(&folders)?;
    one_shot::check(&root().join("tests/scenarios/src"))?;
    let mut clippy = cargo();
    clippy.args(["clippy", "--all-targets", "--workspace", "--exclude=tunnel-ebpf"]);
    // Nothing is linked: libFuzzer, in C++, need not be compiled.
    run(clippy.args(["--", "-D", "warnings"]).env("CUSTOM_LIBFUZZER_PATH", "/nowhere/libfuzzer.a"))?;
    build_ebpf::clippy()?;
    packages::install(&[packages::LINT])?;
    let scripts = ["kubectl-postern", "pods.sh", "check.sh", "bundle.sh", "kubectl_complete-postern"];
    run(program("shellcheck")
        .arg("--external-sources")
        .args(scripts)
        .current_dir(root().join("deploy/krew")))?;
    deny(tally)
}

fn deny(tally: &mut Tally) -> Result<()> {
    need_cargo_tool("cargo-deny", DENY_VERSION)?;
    run(cargo().args(["deny", "--all-features", "check", "bans", "licenses", "sources"]))?;
    advisories(tally)
}

/// Compares the dependencies with RustSec's database. Where it cannot be fetched, the copy of an earlier run counts, for as long
/// as deny.toml says.
fn advisories(tally: &mut Tally) -> Result<()> {
    let databases = cargo_home()?.join("advisory-dbs");
    if let Err(error) = output(cargo().args(["deny", "fetch", "db"])) {
        forget_attempts(&databases)?;
        let text = format!("{error:#}");
        let reason = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
        println!("advisories: the database cannot be fetched ({reason})");
    }
    let marker = cache::folder()?.join("no-advisories-since");
    if has_database(&databases) {
        fs::remove_file(marker).ok();
        // Offline: otherwise it fetches once more, and fails where that is impossible.
        return run(cargo().args(["deny", "--offline", "--all-features", "check", "advisories"]));
    }
    let reason = format!(
        "no database: run `cargo deny fetch db` where https://github.com/RustSec/advisory-db can be reached, and keep {} \
         between runs",
        databases.display()
    );
    println!("advisories: NOT CHECKED, {reason}");
    tolerate_none(&marker).context(reason.clone())?;
    tally.skip("advisories", reason);
    Ok(())
}

/// Fails once `marker`, which the first run without a database makes, is as old as a database may be.
fn tolerate_none(marker: &Path) -> Result<()> {
    let Ok(made) = fs::metadata(marker) else {
        fs::create_dir_all(marker.parent().unwrap_or(marker)).ok();
        return files::write(marker, "");
    };
    let age = made.modified()?.elapsed().unwrap_or_default();
    ensure!(age < LIMIT, "there has been none for 30 days: no known weakness would be noticed");
    Ok(())
}

/// To be called after a fetch that failed, at which git writes FETCH_HEAD as well: cargo-deny takes its time for that of the copy.
/// Without the file it takes that of the last commit, or of HEAD, which git writes with the copy.
fn forget_attempts(databases: &Path) -> Result<()> {
    for database in fs::read_dir(databases).into_iter().flatten().flatten() {
        let file = database.path().join(".git/FETCH_HEAD");
        match fs::remove_file(&file) {
            Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                return Err(error).with_context(|| format!("removing {}", file.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

/// cargo-deny also keeps a lock there.
fn has_database(folder: &Path) -> bool {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path().join(".git")).any(|git| git.exists())
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::command::program;

    /// A clause in place of a subject ("What a server has") has to be read twice.
    #[test]
    fn comments_begin_with_a_subject_or_a_verb() {
        const CLAUSES: [&str; 5] = ["What ", "Whether ", "Who ", "Whom ", "Whose "];
        let listed = program("git").args(["ls-files", "*.rs"]).current_dir(root()).output().unwrap();
        let files = String::from_utf8(listed.stdout).unwrap();
        assert!(files.lines().count() > 500, "git lists {} files", files.lines().count());
        for file in files.lines() {
            let path = root().join(file);
            // One that is deleted and not committed yet.
            if !path.exists() {
                continue;
            }
            let text = fs::read_to_string(path).unwrap();
            for line in text.lines() {
                let comment = line.trim_start().trim_start_matches('/').trim_start_matches(['!', ' ']);
                let is_comment = line.trim_start().starts_with("//");
                assert!(
                    !is_comment || !CLAUSES.iter().any(|word| comment.starts_with(word)),
                    "{file}: {line}"
                );
            }
        }
    }

    /// Compiled with the others, a package has all features that any of them adds; alone, it has its own.
    #[test]
    fn features_of_shared_dependencies_are_in_the_workspaces_table() {
        // Of tests, and of our own crate.
        const ADDED: [&str; 2] = [r#"["test-util"]"#, r#"["user"]"#];
        let listed = program("git").args(["ls-files", "*/Cargo.toml"]).current_dir(root()).output().unwrap();
        let files = String::from_utf8(listed.stdout).unwrap();
        assert!(files.lines().count() > 20, "{files}");
        for file in files.lines() {
            let text = fs::read_to_string(root().join(file)).unwrap();
            for line in text.lines().filter(|line| line.contains("workspace = true")) {
                let added = line.split_once("features = ").map(|(_, added)| added);
                assert!(
                    added.is_none_or(|added| ADDED.iter().any(|own| added.starts_with(own))),
                    "{file}: {line}: the feature belongs into Cargo.toml of the workspace"
                );
            }
            let (_, dependencies) = text.split_once("[dependencies]\n").unwrap_or_default();
            let dependencies = dependencies.split("\n[").next().unwrap_or_default();
            let has =
                |name: &str| dependencies.lines().any(|line| line.starts_with(&format!("{name}.workspace")));
            assert!(
                !(has("kube") || has("kube-core")) || has("k8s-openapi"),
                "{file}: kube does not compile without k8s-openapi, which has the version of Kubernetes"
            );
        }
    }

    #[test]
    fn a_lock_is_no_database() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!has_database(&folder.path().join("none")));
        fs::write(folder.path().join("db.lock"), "").unwrap();
        assert!(!has_database(folder.path()));
        fs::create_dir_all(folder.path().join("advisory-db-1/.git")).unwrap();
        assert!(has_database(folder.path()));
    }

    #[test]
    fn a_failed_fetch_does_not_make_a_database_younger() {
        let folder = tempfile::tempdir().unwrap();
        let database = folder.path().join("advisory-db-1");
        fs::write(folder.path().join("db.lock"), "").unwrap();
        let git = |arguments: &[&str]| {
            let dates =
                [("GIT_AUTHOR_DATE", "2020-01-01T00:00:00Z"), ("GIT_COMMITTER_DATE", "2020-01-01T00:00:00Z")];
            program("git").arg("-C").arg(&database).args(arguments).envs(dates).output().unwrap()
        };
        fs::create_dir(&database).unwrap();
        assert!(git(&["init", "--quiet"]).status.success());
        let who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"];
        let commit = git(&[&who[..], &["commit", "--quiet", "--allow-empty", "--message=old"]].concat());
        assert!(commit.status.success(), "{commit:?}");
        git(&["remote", "add", "origin", "/nowhere/advisory-db"]);
        assert!(!git(&["fetch", "--depth=1", "-u", "origin", "HEAD"]).status.success());
        let fetched = database.join(".git/FETCH_HEAD");
        assert!(fetched.exists(), "git writes it in any case");
        forget_attempts(folder.path()).unwrap();
        assert!(!fetched.exists());
        // As often as it fails, and where there is no copy.
        forget_attempts(folder.path()).unwrap();
        forget_attempts(&folder.path().join("none")).unwrap();
    }

    #[test]
    fn a_missing_database_fails_after_thirty_days() {
        let folder = tempfile::tempdir().unwrap();
        let marker = folder.path().join("cache/no-advisories-since");
        tolerate_none(&marker).unwrap();
        let file = fs::File::options().write(true).open(&marker).unwrap();
        let day = LIMIT / 30;
        file.set_modified(SystemTime::now() - 29 * day).unwrap();
        tolerate_none(&marker).unwrap();
        file.set_modified(SystemTime::now() - 30 * day).unwrap();
        assert!(tolerate_none(&marker).unwrap_err().to_string().contains("30 days"));
        // A clock that was ahead.
        file.set_modified(SystemTime::now() + day).unwrap();
        tolerate_none(&marker).unwrap();
    }

    #[test]
    fn architecture_names_files_that_exist() {
        let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
        let listed = program("git").args(["ls-files"]).output().unwrap().stdout;
        let files = String::from_utf8(listed).unwrap();
        let named = text.split(|c: char| !(c.is_ascii_alphanumeric() || "_/.-".contains(c)));
        for name in named.filter(|word| word.len() > 3 && word.ends_with(".rs")) {
            let exists = files.lines().any(|file| file == name || file.ends_with(&format!("/{name}")));
            assert!(exists, "ARCHITECTURE.md names {name}");
        }
    }

    #[test]
    fn the_security_policy_names_this_version() {
        let text = fs::read_to_string(root().join("SECURITY.md")).unwrap();
        let (minor, _) = env!("CARGO_PKG_VERSION").rsplit_once('.').unwrap();
        assert!(text.contains(&format!("\n| {minor} | yes |\n")), "SECURITY.md does not support {minor}");
    }

    #[test]
    fn each_alert_has_its_runbook() {
        let read = |name: &str| fs::read_to_string(root().join(name)).unwrap();
        let (alerts, runbooks) = (read("deploy/prometheus/alerts.yml"), read("docs/operate/runbooks.md"));
        let of = |key: &str| {
            alerts
                .lines()
                .filter_map(|line| line.trim().strip_prefix(key))
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let sections: Vec<_> = runbooks.lines().filter_map(|line| line.strip_prefix("## ")).collect();
        assert_eq!(sections, of("- alert: "), "the same alerts in the same order");
        // mdbook's anchors.
        let page =
            concat!("https://example.org/postern/v", env!("CARGO_PKG_VERSION"), "/operate/runbooks.html");
        let urls: Vec<_> = sections.iter().map(|name| format!("{page}#{}", name.to_lowercase())).collect();
        assert_eq!(of("runbook_url: "), urls, "each alert leads to its section, of this version");
        let values = read("deploy/helm/postern/values.yaml");
        assert!(values.contains(&format!("\n  runbookUrl: {page}\n")), "the chart leads to another page");
    }

    #[test]
    fn security_names_tests_that_exist() {
        let text = fs::read_to_string(root().join("docs/boundaries.csv")).unwrap();
        let listed = program("git").args(["ls-files", "*.rs"]).output().unwrap().stdout;
        let files = String::from_utf8(listed).unwrap();
        let named: Vec<&str> = text.split([' ', ',', '\n']).filter(|word| word.contains("::")).collect();
        assert!(named.len() > 100, "{named:?}");
        for name in named {
            let parts: Vec<&str> = name.split("::").collect();
            let (function, case) = (format!("fn {}(", parts[parts.len() - 1]), format!("(\"{name}\", "));
            // A scenario, a case of the kernel tests, a test of that file or of a module in it.
            let exists = files.lines().any(|file| {
                let text = fs::read_to_string(root().join(file)).unwrap_or_default();
                text.contains(&case) || file.contains(parts[0]) && text.contains(&function)
            });
            assert!(exists, "docs/boundaries.csv names {name}");
        }
    }
}
