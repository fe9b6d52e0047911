//! `cargo xtask bench`: release builds of everything, the peers installed, then the `bench` program.
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, ensure};

use crate::command::{
    build_as, is_root, need_program, program, root, run_in_foreground, succeeds, target_dir,
};
use crate::demo::PROGRAMS;
use crate::peers::{self, Peer};
use crate::source::git;
use crate::{build_ebpf, files, packages};

const RATHOLE_VERSION: &str = "0.5.0";

#[derive(clap::Args, Default)]
pub(crate) struct Options {
    /// Only this group of lines or this peer; repeatable, and an unknown name lists what there is.
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Only this wide-area path; repeatable, and an unknown name lists what there is.
    #[arg(long, value_name = "NAME")]
    path: Vec<String>,
    /// How often every peer is measured [default: 5, with --smoke 1].
    #[arg(long)]
    rounds: Option<u32>,
    /// Every kind of line for a moment: whether it works, not how fast.
    #[arg(long)]
    smoke: bool,
    /// Writes a page of the main ratios, a CSV of all figures and the plots into docs/benchmarks: with `--only host` or
    /// `--only wan` that part alone. It takes at least five rounds (three for `--only wan`), no --smoke, and a tree without
    /// changes; with --path the part about wide-area paths has just these. Wide-area paths that were measured before such a
    /// run was interrupted are not measured again, as long as the commit is the same.
    #[arg(long, conflicts_with = "smoke")]
    record: bool,
    /// How many wide-area paths are measured at the same time, as far as the CPUs suffice [default: 8].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    at_once: Option<u32>,
    /// Fails when a peer is not installed or gives no value.
    #[arg(long)]
    all_peers: bool,
    /// Repeats the order of an earlier run, which printed it.
    #[arg(long)]
    seed: Option<u64>,
}

/// Measures every kind of line of every peer briefly, with the debug build that tests use as well.
/// `built`: a whole run has built it already.
pub(crate) fn smoke(built: bool) -> Result<ExitCode> {
    let options = Options { smoke: true, all_peers: true, ..Options::default() };
    install(&options)?;
    if !built {
        build_all(&options)?;
    }
    measure(&options, &["--smoke".to_owned(), "--all-peers".to_owned()], &Commit::read())
}

/// Parts of the report: measurements on one machine, and over wide-area paths.
const PARTS: [&str; 2] = ["host", "wan"];
/// Minimum number of rounds of a recorded run; each figure is the median of its rounds.
const RECORDED_ROUNDS: u32 = 5;
/// The same over wide-area paths, whose delay and rate are the same in each round.
const RECORDED_WAN_ROUNDS: u32 = 3;

/// Returns the parts to record; fails when the run would not measure one as a whole.
fn recorded(options: &Options, commit: &Commit) -> Result<Vec<&'static str>> {
    if !options.record {
        return Ok(Vec::new());
    }
    ensure!(
        !commit.changed,
        "--record, but the tree differs from commit {}: commit the changes first, so that others can measure the same",
        commit.name
    );
    let parts = whole_parts(options)?;
    let least = if parts == ["wan"] { RECORDED_WAN_ROUNDS } else { RECORDED_ROUNDS };
    if let Some(rounds) = options.rounds {
        ensure!(rounds >= least, "--record with --rounds {rounds}: it takes {least} at least");
    }
    Ok(parts)
}

fn whole_parts(options: &Options) -> Result<Vec<&'static str>> {
    if !options.path.is_empty() {
        ensure!(
            options.only.iter().all(|only| only == "wan"),
            "--record with --path and --only {}: --path records wide-area paths with every peer",
            options.only.join(" --only ")
        );
        return Ok(vec!["wan"]);
    }
    let parts: Vec<_> =
        PARTS.into_iter().filter(|part| options.only.iter().any(|only| only == part)).collect();
    if options.only.is_empty() {
        return Ok(PARTS.to_vec());
    }
    ensure!(
        parts.len() == options.only.len(),
        "--record with --only {}: it takes whole parts, which are {}",
        options.only.join(" --only "),
        PARTS.join(" and ")
    );
    Ok(parts)
}

/// The commit that is measured.
struct Commit {
    name: String,
    /// True if the tree has changes that are not in it.
    changed: bool,
}

impl Commit {
    fn read() -> Self {
        match (git(&["rev-parse", "--short=12", "HEAD"]), git(&["status", "--porcelain"])) {
            (Some(name), Some(changes)) => Self { name, changed: !changes.is_empty() },
            // Not a clone.
            _ => Self { name: "unknown".to_owned(), changed: true },
        }
    }

    fn title(&self) -> String {
        format!("{}{}", self.name, if self.changed { " with changes" } else { "" })
    }
}

pub(crate) fn run_bench(options: &Options) -> Result<ExitCode> {
    ensure!(
        is_root(),
        "the benchmark needs root: it makes network namespaces and cgroups, attaches eBPF programs to those, and sets iptables rules in those. Run `sudo -E cargo xtask bench`."
    );
    let commit = Commit::read();
    let recorded = recorded(options, &commit)?;
    install(options)?;
    build_all(options)?;
    let arguments: Vec<String> = env::args().skip(2).filter(|arg| arg != "--record").collect();
    let code = measure(options, &arguments, &commit)?;
    if code == ExitCode::SUCCESS {
        for part in recorded {
            record(&target_dir()?.join("bench"), part)?;
        }
    }
    if code == ExitCode::SUCCESS && options.record {
        let kept = kept(&commit)?;
        fs::remove_dir_all(&kept).with_context(|| format!("removing {}", kept.display()))?;
    }
    Ok(code)
}

fn install(options: &Options) -> Result<()> {
    packages::install(&[packages::TESTBED, packages::NAT])?;
    // A peer that cannot be installed is named in the tables, and everything else is measured.
    match packages::install(&[packages::BENCH]) {
        Err(error) if options.all_peers => return Err(error),
        Err(error) => println!("{error:#}"),
        Ok(()) => {}
    }
    Ok(())
}

fn build_all(options: &Options) -> Result<()> {
    build_ebpf::run()?;
    build_as(if options.smoke { "dev" } else { "release" }, &[PROGRAMS, &["postern-bench"]].concat())
}

/// Folder of the values that interrupted runs of this commit have left.
fn kept(commit: &Commit) -> Result<PathBuf> {
    Ok(target_dir()?.join("bench-kept").join(&commit.name))
}

/// Runs the `bench` program.
fn measure(options: &Options, arguments: &[String], commit: &Commit) -> Result<ExitCode> {
    let target = target_dir()?;
    let typed = format!("cargo xtask bench {}", arguments.join(" "));
    let profile = if options.smoke { "debug" } else { "release" };
    let mut bench = Command::new(target.join(profile).join("bench"));
    bench.args(arguments).args(["--command", typed.trim_end(), "--commit", &commit.title()]);
    bench.arg("--out").arg(target.join("bench"));
    for (name, found) in
        [("haproxy", haproxy()), ("rathole", rathole()), ("konnectivity", peers::build(Peer::Konnectivity))]
    {
        match found {
            Ok(path) => bench.arg("--program").arg(format!("{name}={}", path.display())),
            Err(error) if options.all_peers => return Err(error.context(format!("{name} is missing"))),
            Err(error) => {
                println!("{name} is left out: {error:#}");
                bench.arg("--missing").arg(format!("{name}={name} is missing: {error:#}"))
            }
        };
    }
    if options.record {
        let kept = kept(commit)?;
        files::create(&kept)?;
        bench.arg("--keep").arg(&kept);
    }
    run_in_foreground(&mut bench)
}

/// Replaces a part's page, CSV and plots in docs/benchmarks.
fn record(report: &Path, part: &str) -> Result<()> {
    let docs = root().join("docs/benchmarks");
    let plots = docs.join(part);
    if plots.exists() {
        fs::remove_dir_all(&plots).with_context(|| format!("emptying {}", plots.display()))?;
    }
    files::create(&plots)?;
    for name in [format!("{part}.md"), format!("{part}.csv")] {
        files::copy(&report.join("recorded").join(&name), &docs.join(&name))?;
    }
    for drawn in files::paths_in(&report.join(part))? {
        files::copy(&drawn, &plots.join(files::file_name(&drawn)))?;
    }
    println!("recorded in {}", docs.join(format!("{part}.md")).display());
    Ok(())
}

fn haproxy() -> Result<PathBuf> {
    let found = succeeds(program("haproxy").arg("-v"));
    ensure!(found, "`apt-get install haproxy` (or your system's own way) brings it");
    Ok("haproxy".into())
}

/// Path of rathole. Without --locked: its lock file does not compile with today's compilers.
pub(crate) fn rathole() -> Result<PathBuf> {
    need_program("rathole", RATHOLE_VERSION, &[])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(only: &[&str], rounds: Option<u32>, changed: bool) -> Result<Vec<&'static str>> {
        let only = only.iter().map(|&name| name.to_owned()).collect();
        let options = Options { only, rounds, record: true, ..Options::default() };
        recorded(&options, &Commit { name: "1234".to_owned(), changed })
    }

    #[test]
    fn only_whole_parts_of_a_commit_are_recorded() {
        assert_eq!(parts(&[], None, false).unwrap(), PARTS);
        assert_eq!(parts(&["wan"], Some(3), false).unwrap(), ["wan"]);
        for (only, rounds, changed, says) in [
            (&["bulk"][..], None, false, "--only bulk"),
            (&["wan", "postern"], None, false, "--only wan --only postern"),
            (&["wan"], Some(2), false, "--rounds 2"),
            (&["host"], Some(4), false, "--rounds 4"),
            (&[], Some(4), false, "--rounds 4"),
            (&["wan"], None, true, "1234"),
        ] {
            let error = parts(only, rounds, changed).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        let of_path = |only: &[&str]| {
            let only = only.iter().map(|&name| name.to_owned()).collect();
            let options = Options { only, path: vec!["lte".to_owned()], record: true, ..Options::default() };
            recorded(&options, &Commit { name: "1234".to_owned(), changed: false })
        };
        assert_eq!(of_path(&["wan"]).unwrap(), ["wan"]);
        assert!(of_path(&["postern"]).unwrap_err().to_string().contains("--only postern"));
    }
}
