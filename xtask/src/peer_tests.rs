//! `cargo xtask peers test`: konnectivity's own integration tests, from its Go module, with Postern's agent in place of theirs.
//! docs/parity.md says which pass; this fails where that is not true.
//!
//! The tests run in namespaces of their own: they dial a black hole, look up a name that nobody has, and may leave agents behind.
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::command::{build, built, is_root, program, root, shown, target_dir};
use crate::{cache, peers};

const MODULE: &str = "konnectivity-tests";
const PACKAGE: &str = "sigs.k8s.io/apiserver-network-proxy/tests";
/// The part of docs/parity.md with the table.
const HEADING: &str = "## konnectivity's own tests";
/// For all of them; they take some three minutes.
const LIMIT: &str = "20m";
/// Makes the namespace's loopback, and a route to their black hole on which nobody answers.
const NETWORK: &str = r#"ip link set lo up && ip route add 198.18.0.254/32 dev lo && exec "$0" "$@""#;

#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    build: peers::Options,
    #[command(subcommand)]
    command: Option<What>,
}

#[derive(clap::Subcommand)]
enum What {
    /// Runs konnectivity's own integration tests against tunnel-agent, and compares with the table in docs/parity.md.
    Test {
        /// Only tests whose names match this regular expression.
        #[arg(long, value_name = "REGEX")]
        run: Option<String>,
    },
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    match &options.command {
        None => peers::run_peers(&options.build),
        Some(What::Test { run }) => test(run.as_deref()),
    }
}

/// What became of a test, or what the table says of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Passes,
    Fails,
    /// Only of the table.
    NotYetRun,
}

impl Verdict {
    fn parse(text: &str) -> Option<Self> {
        match text {
            "passes" => Some(Self::Passes),
            "fails" => Some(Self::Fails),
            "not yet run" => Some(Self::NotYetRun),
            _ => None,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Passes => "passes",
            Self::Fails => "fails",
            Self::NotYetRun => "not yet run",
        }
    }
}

type Verdicts = BTreeMap<String, Verdict>;

fn test(filter: Option<&str>) -> Result<ExitCode> {
    let page = root().join("docs/parity.md");
    let page = fs::read_to_string(&page).with_context(|| format!("reading {}", page.display()))?;
    let expected = table(&page)?;
    let tests = build_tests()?;
    build(&["tunnel-agent"])?;
    let results = run_tests(&tests, filter)?;
    let wrong = compare(&expected, &results, filter.is_none());
    for (name, verdict) in &results {
        println!("{name} {}", verdict.as_str());
    }
    for line in &wrong {
        println!("docs/parity.md: {line}");
    }
    Ok(if wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The test program, built once for every clone.
fn build_tests() -> Result<PathBuf> {
    let module = root().join("tests/peers").join(MODULE);
    let read = |name: &str| {
        let path = module.join(name);
        fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
    };
    let (go_mod, sums) = (read("go.mod")?, read("go.sum")?);
    let folder = cache::once("peers", MODULE, &[&sums, &go_mod], |folder| {
        let (go, version) = peers::need_go(MODULE, &go_mod)?;
        println!("building konnectivity's tests with {version}, once for every clone on this machine");
        let mut command = program(&go);
        command
            .current_dir(&module)
            .env("CGO_ENABLED", "0")
            .args(["test", "-c", "-trimpath", "-mod=readonly", "-o"])
            .arg(folder.join("tests"))
            .arg(PACKAGE);
        let status = command.status().with_context(|| format!("starting {}", shown(&command)))?;
        ensure!(status.success(), "`{}` in {} ended with {status}", shown(&command), module.display());
        Ok(())
    })?;
    Ok(folder.join("tests"))
}

/// Their own output, and that of the agents, goes to a file.
fn run_tests(tests: &Path, filter: Option<&str>) -> Result<Verdicts> {
    let folder = target_dir()?.join("peer-tests");
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let log = folder.join("konnectivity.log");
    let errors = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
    println!("running konnectivity's tests; their log is {}", log.display());
    let mut command = in_namespace(tests);
    command
        .current_dir(&folder)
        .env("POSTERN_AGENT", built("tunnel-agent")?)
        .arg(format!("-agent-path={}", root().join("tests/peers").join(MODULE).join("agent.sh").display()))
        .args(["-test.v", &format!("-test.timeout={LIMIT}")])
        .stdout(Stdio::piped())
        .stderr(errors);
    for name in
        ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "NODE_NAME", "NODE_IP", "PROXY_AGENT_ID"]
    {
        command.env_remove(name);
    }
    if let Some(filter) = filter {
        command.arg(format!("-test.run={filter}"));
    }
    let mut child = command.spawn().with_context(|| format!("starting {}", shown(&command)))?;
    let output = child.stdout.take().context("it is piped")?;
    let mut results = Verdicts::new();
    for line in BufReader::new(output).lines() {
        let line = line.context("reading what the tests say")?;
        println!("{line}");
        results.extend(result(&line));
    }
    let status = child.wait().context("waiting for the tests")?;
    ensure!(
        !results.is_empty(),
        "no test has ended, and the program ended with {status}: see {}",
        log.display()
    );
    Ok(results)
}

/// A program in namespaces of its own, whose processes and network go with it.
fn in_namespace(name: &Path) -> Command {
    let mut command = program("unshare");
    if !is_root() {
        command.arg("--map-root-user");
    }
    command.args(["--net", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    command.args(["--", "sh", "-c", NETWORK]).arg(name);
    command
}

/// What a line says of a whole test; those of its parts are indented.
fn result(line: &str) -> Option<(String, Verdict)> {
    let (verdict, rest) = line.strip_prefix("--- ")?.split_once(": ")?;
    let verdict = match verdict {
        "PASS" => Verdict::Passes,
        "FAIL" => Verdict::Fails,
        _ => return None,
    };
    Some((rest.split(' ').next()?.to_owned(), verdict))
}

/// The rows `| test | verdict | why |` of the table.
fn table(page: &str) -> Result<Verdicts> {
    let (_, part) = page.split_once(HEADING).with_context(|| format!("docs/parity.md has no {HEADING:?}"))?;
    let part = part.split("\n## ").next().unwrap_or(part);
    let mut verdicts = Verdicts::new();
    for line in part.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [name, verdict, why] = cells[..] else {
            anyhow::bail!("docs/parity.md: not three cells: {line}");
        };
        let verdict = Verdict::parse(verdict).with_context(|| {
            format!("docs/parity.md: {verdict:?} is not passes, fails or not yet run: {line}")
        })?;
        ensure!(verdict != Verdict::Fails || !why.is_empty(), "docs/parity.md does not say why: {line}");
        let twice = verdicts.insert(name.trim_matches('`').to_owned(), verdict);
        ensure!(twice.is_none(), "docs/parity.md has {name} twice");
    }
    ensure!(!verdicts.is_empty(), "docs/parity.md has no rows below {HEADING:?}");
    Ok(verdicts)
}

/// What the table says wrongly. `all`: whether every test was run.
fn compare(expected: &Verdicts, results: &Verdicts, all: bool) -> Vec<String> {
    let mut wrong = Vec::new();
    for (name, result) in results {
        match expected.get(name) {
            None => wrong.push(format!("{name} {}, and has no row", result.as_str())),
            Some(said) if said != result => {
                wrong.push(format!("{name} {}, and is said to be \"{}\"", result.as_str(), said.as_str()));
            }
            Some(_) => {}
        }
    }
    let gone = expected.keys().filter(|name| all && !results.contains_key(*name));
    wrong.extend(gone.map(|name| format!("{name} has not ended, or does not exist")));
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdicts(of: &[(&str, Verdict)]) -> Verdicts {
        of.iter().map(|(name, verdict)| ((*name).to_owned(), *verdict)).collect()
    }

    #[test]
    fn results_are_those_of_whole_tests() {
        assert_eq!(result("--- PASS: TestA (0.01s)"), Some(("TestA".to_owned(), Verdict::Passes)));
        assert_eq!(result("--- FAIL: TestB (1.00s)"), Some(("TestB".to_owned(), Verdict::Fails)));
        for line in ["    --- FAIL: TestB/grpc (0.00s)", "=== RUN   TestA", "--- SKIP: TestC (0.00s)", "ok"] {
            assert_eq!(result(line), None, "{line}");
        }
    }

    #[test]
    fn the_table_is_compared_both_ways() {
        let page = format!(
            "a\n{HEADING}\n\n| test | result | why |\n|---|---|---|\n| `TestA` | passes | |\n| `TestB` | fails | of this |\n\n## next\n| `TestX` | x | |\n"
        );
        let expected = table(&page).unwrap();
        assert_eq!(expected, verdicts(&[("TestA", Verdict::Passes), ("TestB", Verdict::Fails)]));
        assert!(compare(&expected, &expected, true).is_empty());
        let results = verdicts(&[("TestA", Verdict::Fails), ("TestC", Verdict::Passes)]);
        assert_eq!(compare(&expected, &results, true).len(), 3);
        assert_eq!(compare(&expected, &results, false).len(), 2);
        assert!(
            table(&page.replace("of this", "")).is_err() && table(&page.replace("passes", "ok")).is_err()
        );
        assert!(table("nothing").is_err());
    }

    #[test]
    fn the_page_has_the_table() {
        let page = fs::read_to_string(root().join("docs/parity.md")).unwrap();
        assert!(table(&page).unwrap().contains_key("TestBasicProxy_GRPC"));
    }
}
