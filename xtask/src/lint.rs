//! `cargo xtask lint`.
use anyhow::Result;

use crate::command::{cargo, need_cargo_tool, root, run};
use crate::tally::Tally;
use crate::{advisories, build_ebpf, circles, one_shot};

const DENY_VERSION: &str = "0.20.2";
/// Crates whose modules must not import each other in circles.
const LAYERED: &[&str] = &[
    "tunnel-abi",
    "tunnel-ebpf",
    "tunnel-runtime",
    "tunnel-link",
    "tunnel-kube",
    "tunnel-pki",
    "tunnel-doctor",
    "tunnel-routing",
    "tunnel-redirect",
    "tunnel-server",
    "tunnel-agent",
    "xtask",
];

pub(crate) fn run_lint(tally: &mut Tally) -> Result<()> {
    run(cargo().args(["fmt", "--all", "--", "--check"]))?;
    run(cargo().args(["fmt", "--manifest-path", "fuzz/Cargo.toml", "--", "--check"]))?;
    println!("import circles: {}", LAYERED.join(", "));
    let folders: Vec<_> = LAYERED.iter().map(|name| root().join(name)).collect();
    circles::check(&folders)?;
    one_shot::check(&root().join("tests/scenarios/src"))?;
    run(cargo().args(["clippy", "--all-targets", "--", "-D", "warnings"]))?;
    build_ebpf::clippy()?;
    deny(tally)
}

fn deny(tally: &mut Tally) -> Result<()> {
    need_cargo_tool("cargo-deny", DENY_VERSION)?;
    run(cargo().args(["deny", "--all-features", "check", "bans", "licenses", "sources"]))?;
    advisories::check(tally)
}

#[cfg(test)]
mod tests {
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
            let text = std::fs::read_to_string(path).unwrap();
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

    #[test]
    fn architecture_names_files_that_exist() {
        let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
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
        let text = std::fs::read_to_string(root().join("SECURITY.md")).unwrap();
        let (minor, _) = env!("CARGO_PKG_VERSION").rsplit_once('.').unwrap();
        assert!(text.contains(&format!("\n| {minor} | yes |\n")), "SECURITY.md does not support {minor}");
    }

    #[test]
    fn each_alert_has_its_runbook() {
        let read = |name: &str| std::fs::read_to_string(root().join(name)).unwrap();
        let (alerts, runbooks) = (read("deploy/prometheus/alerts.yml"), read("docs/operate/runbooks.md"));
        let alerts: Vec<_> =
            alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
        let sections: Vec<_> = runbooks.lines().filter_map(|line| line.strip_prefix("## ")).collect();
        assert_eq!(sections, alerts, "the same alerts in the same order");
    }

    #[test]
    fn security_names_tests_that_exist() {
        let text = std::fs::read_to_string(root().join("docs/security.md")).unwrap();
        let listed = program("git").args(["ls-files", "*.rs"]).output().unwrap().stdout;
        let files = String::from_utf8(listed).unwrap();
        let named = text.split('`').skip(1).step_by(2).filter(|word| word.contains("::"));
        for name in named {
            let parts: Vec<&str> = name.split("::").collect();
            let (function, case) = (format!("fn {}(", parts[parts.len() - 1]), format!("(\"{name}\", "));
            // A scenario, a case of the kernel tests, a test of that file or of a module in it.
            let exists = files.lines().any(|file| {
                let text = std::fs::read_to_string(root().join(file)).unwrap_or_default();
                text.contains(&case) || file.contains(parts[0]) && text.contains(&function)
            });
            assert!(exists, "docs/security.md names {name}");
        }
    }
}
