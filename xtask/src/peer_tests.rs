//! `cargo xtask peers test`: konnectivity's own integration tests, from its Go module, with Postern's agent in place of theirs.
//! tests/peers/konnectivity.csv says which pass; this fails where that is not true.
//!
//! The tests run in namespaces of their own: they dial a black hole, look up a name that does not exist, and may
//! leave agents behind.
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context as _, Result, anyhow, ensure};
use clap::ValueEnum;

use crate::command::{
    build_as, built, is_root, name_of, program, root, run as run_command, shown, target_dir,
};
use crate::tally::Tally;
use crate::{cache, files, peers};

/// Name of the step in `cargo xtask test`.
pub(crate) const NAME: &str = "peers::konnectivity";
const MODULE: &str = "konnectivity-tests";
const PACKAGE: &str = "sigs.k8s.io/apiserver-network-proxy/tests";
/// The expected results: `test,result,why`.
const TABLE: &str = "tests/peers/konnectivity.csv";
const HEAD: &str = "test,result,why\n";
/// Time limit for all of them; they take a minute and a half, most of which one of them waits in any case.
const LIMIT: &str = "20m";
/// Maximum number of runs of a test whose result is a matter of chance.
const ATTEMPTS: usize = 10;
/// Sets up the namespace's loopback, and a route to the tests' black hole, on which nothing answers.
const NETWORK: &str = r#"ip link set lo up && ip route add 198.18.0.254/32 dev lo && exec "$0" "$@""#;

// Its group would have the name of the flattened one.
#[derive(clap::Args)]
#[group(skip)]
pub(crate) struct Options {
    #[command(flatten)]
    build: peers::Options,
    #[command(subcommand)]
    command: Option<What>,
}

#[derive(clap::Subcommand)]
enum What {
    /// Runs konnectivity's own integration tests against tunnel-agent, and compares with tests/peers/konnectivity.csv.
    Test {
        /// Only tests whose names match this regular expression.
        #[arg(long, value_name = "REGEX")]
        run: Option<String>,
    },
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    match &options.command {
        None => peers::run_peers(&options.build),
        Some(What::Test { run }) => {
            build_as("dev", &["tunnel-agent"])?;
            let report = test(run.as_deref(), Show::Progress)?;
            report.print();
            Ok(if report.wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
    }
}

/// Runs all tests.
pub(crate) fn run_all(show: Show) -> Result<Report> {
    test(None, show)
}

/// Output while the tests run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Show {
    Progress,
    /// Another step prints its own output meanwhile.
    Nothing,
}

/// Results of the tests.
pub(crate) struct Report {
    results: Results,
    /// Errors in the table, a line each.
    wrong: Vec<String>,
}

impl Report {
    fn print(&self) {
        for (name, (verdict, _)) in &self.results {
            println!("{name} {}", name_of(verdict));
        }
        for line in &self.wrong {
            println!("{TABLE}: {line}");
        }
    }

    /// Prints the report, and counts each test separately.
    pub(crate) fn count(&self, tally: &mut Tally) {
        self.print();
        let named = |name: &str| self.wrong.iter().any(|line| line.split(' ').next() == Some(name));
        tally.passed += self.results.keys().map(|name| u64::from(!named(name))).sum::<u64>();
        for line in &self.wrong {
            tally.fail(format!("{NAME}: {line}"));
        }
    }
}

/// Result of a test, expected or actual.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Verdict {
    Passes,
    Fails,
    /// Only in the table: it passes or fails by chance.
    Races,
}

type Verdicts = BTreeMap<String, Verdict>;
/// Results, each with the test's output.
type Results = BTreeMap<String, (Verdict, String)>;

fn test(filter: Option<&str>, show: Show) -> Result<Report> {
    let expected = table(&files::text(&root().join(TABLE))?)?;
    let tests = build_tests()?;
    fs::remove_file(log()?).ok();
    let mut results = run_tests(&tests, filter, show)?;
    for (name, expected) in &expected {
        for _ in 1..ATTEMPTS {
            if !results.get(name).is_some_and(|result| is_chance(*expected, result)) {
                break;
            }
            results.extend(run_tests(&tests, Some(&format!("^{name}$")), show)?);
        }
    }
    let wrong = compare(&expected, &results, filter.is_none());
    Ok(Report { results, wrong })
}

/// True if the test failed by chance. konnectivity's own server starts on ports that were free a moment ago.
fn is_chance(expected: Verdict, (result, said): &(Verdict, String)) -> bool {
    *result == Verdict::Fails && (expected == Verdict::Races || said.contains("server never came up"))
}

/// The test program, built once for every clone.
fn build_tests() -> Result<PathBuf> {
    let module = root().join("tests/peers").join(MODULE);
    let (go_mod, sums) = (files::text(&module.join("go.mod"))?, files::text(&module.join("go.sum"))?);
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
        run_command(&mut command).with_context(|| format!("in {}", module.display()))
    })?;
    Ok(folder.join("tests"))
}

/// Log of the tests' output, and that of the agents.
fn log() -> Result<PathBuf> {
    Ok(target_dir()?.join("peer-tests/konnectivity.log"))
}

fn run_tests(tests: &Path, filter: Option<&str>, show: Show) -> Result<Results> {
    let log = log()?;
    let folder = log.parent().context("it is in a folder")?;
    files::create(folder)?;
    let errors = File::options().create(true).append(true).open(&log);
    let errors = errors.with_context(|| format!("creating {}", log.display()))?;
    if show == Show::Progress {
        println!("running konnectivity's tests; their log is {}", log.display());
    }
    let mut command = in_namespace(tests);
    command
        .current_dir(folder)
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
    let (mut results, mut said) = (Results::new(), Vec::new());
    for line in BufReader::new(output).lines() {
        let line = line.context("reading what the tests say")?;
        if show == Show::Progress {
            println!("{line}");
        }
        if let Some((name, verdict)) = result(&line) {
            results.insert(name, (verdict, said.join("; ")));
            said.clear();
        } else if line.starts_with(' ') {
            said.push(line.trim().to_owned());
        }
    }
    let status = child.wait().context("waiting for the tests")?;
    ensure!(
        !results.is_empty(),
        "no test has ended, and the program ended with {status}: see {}",
        log.display()
    );
    Ok(results)
}

/// Command of a program in namespaces of its own, with which its processes and network end.
fn in_namespace(name: &Path) -> Command {
    let mut command = program("unshare");
    if !is_root() {
        command.arg("--map-root-user");
    }
    command.args(["--net", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    command.args(["--", "sh", "-c", NETWORK]).arg(name);
    command
}

/// Result of a whole test in a line of output; the lines of its parts are indented.
fn result(line: &str) -> Option<(String, Verdict)> {
    let (verdict, rest) = line.strip_prefix("--- ")?.split_once(": ")?;
    let verdict = match verdict {
        "PASS" => Verdict::Passes,
        "FAIL" => Verdict::Fails,
        _ => return None,
    };
    Some((rest.split(' ').next()?.to_owned(), verdict))
}

/// Parses the rows of the table.
fn table(text: &str) -> Result<Verdicts> {
    let rows = text.strip_prefix(HEAD).with_context(|| format!("{TABLE} does not begin with {HEAD:?}"))?;
    let mut verdicts = Verdicts::new();
    for line in rows.lines() {
        let cells: Vec<&str> = line.splitn(3, ',').collect();
        let [name, verdict, why] = cells[..] else {
            anyhow::bail!("{TABLE}: not three cells: {line}");
        };
        let verdict = Verdict::from_str(verdict, false)
            .map_err(|_| anyhow!("{TABLE}: {verdict:?} is not passes, fails or races: {line}"))?;
        ensure!(verdict == Verdict::Passes || !why.is_empty(), "{TABLE} does not say why: {line}");
        let twice = verdicts.insert(name.to_owned(), verdict);
        ensure!(twice.is_none(), "{TABLE} has {name} twice");
    }
    ensure!(!verdicts.is_empty(), "{TABLE} has no rows");
    Ok(verdicts)
}

/// Returns the errors in the table. `all`: true if every test was run.
fn compare(expected: &Verdicts, results: &Results, all: bool) -> Vec<String> {
    let mut wrong = Vec::new();
    for (name, (result, said)) in results {
        let why = if *result == Verdict::Fails { format!(": {said}") } else { String::new() };
        let result = match (expected.get(name), result) {
            (None, result) => format!("{}, and has no row", name_of(result)),
            (Some(Verdict::Races), Verdict::Fails) => format!("fails {ATTEMPTS} times, and is said to race"),
            (Some(Verdict::Races), _) => continue,
            (Some(row), result) if row == result => continue,
            (Some(row), result) => format!("{}, and is said to be \"{}\"", name_of(result), name_of(row)),
        };
        wrong.push(format!("{name} {result}{why}"));
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
    fn a_port_that_is_taken_is_chance() {
        let result = |verdict, said: &str| (verdict, said.to_owned());
        let taken =
            result(Verdict::Fails, "reconnect_test.go:50: Failed to start: server never came up: timed out");
        assert!(is_chance(Verdict::Passes, &taken));
        assert!(!is_chance(Verdict::Passes, &result(Verdict::Fails, "agent never came up")));
        assert!(is_chance(Verdict::Races, &result(Verdict::Fails, "EOF")));
        assert!(!is_chance(Verdict::Races, &result(Verdict::Passes, "")));
    }

    #[test]
    fn the_table_is_compared_both_ways() {
        let text = format!("{HEAD}TestA,passes,\nTestB,fails,of this, and that\nTestR,races,with itself\n");
        let expected = table(&text).unwrap();
        let rows = [("TestA", Verdict::Passes), ("TestB", Verdict::Fails), ("TestR", Verdict::Races)];
        assert_eq!(expected, verdicts(&rows));
        let results = |of: &[(&str, Verdict)]| -> Results {
            verdicts(of)
                .into_iter()
                .map(|(name, verdict)| (name, (verdict, "f.go:1: no".to_owned())))
                .collect()
        };
        for race in [Verdict::Passes, Verdict::Fails] {
            let results = results(&[("TestA", Verdict::Passes), ("TestB", Verdict::Fails), ("TestR", race)]);
            assert_eq!(compare(&expected, &results, true).is_empty(), race == Verdict::Passes);
        }
        let results =
            results(&[("TestA", Verdict::Fails), ("TestB", Verdict::Passes), ("TestC", Verdict::Passes)]);
        let wrong = compare(&expected, &results, true);
        assert_eq!(wrong[0], "TestA fails, and is said to be \"passes\": f.go:1: no");
        assert_eq!(wrong[1], "TestB passes, and is said to be \"fails\"");
        assert_eq!(wrong.len(), 4, "{wrong:?}");
        assert_eq!(compare(&expected, &results, false).len(), 3);
        for (row, broken) in [("of this, and that", ""), ("with itself", ""), ("passes", "ok")] {
            assert!(table(&text.replace(row, broken)).is_err(), "{row}");
        }
        assert!(table("nothing").is_err());
    }

    #[test]
    fn the_table_is_well_formed() {
        let text = fs::read_to_string(root().join(TABLE)).unwrap();
        assert!(table(&text).unwrap().contains_key("TestBasicProxy_GRPC"));
    }
}
