//! Fuzz targets: parsers that meet the network, and state machines that others drive, in fuzz/ (cargo-fuzz's layout).
use std::process::{Command, ExitCode};
use std::thread;

use anyhow::{Context as _, Result, anyhow, bail, ensure};

use crate::archive::pack;
use crate::command::{cargo, end_of, need_cargo_tool, root, run, shown, target_dir};
use crate::files;
use crate::packages;

const VERSION: &str = "0.13.2";

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Only this target (`--list` names them).
    target: Option<String>,
    /// How long each target runs.
    #[arg(long, default_value_t = 60, value_name = "N")]
    seconds: u32,
    /// Names the targets and does nothing else.
    #[arg(long)]
    list: bool,
    /// Instead of looking for more inputs, keeps the fewest that reach the same code, in fuzz/corpus.tar.gz.
    #[arg(long, conflicts_with_all = ["target", "seconds"])]
    minimise: bool,
}

/// Inputs found so far, about two thousand, checked in as one file.
const CORPUS: &str = "fuzz/corpus.tar.gz";

pub(crate) fn run_all(options: &Options) -> Result<ExitCode> {
    let targets = targets()?;
    if options.list {
        println!("{}", targets.join("\n"));
        return Ok(ExitCode::SUCCESS);
    }
    let chosen: Vec<String> = match &options.target {
        Some(name) => {
            ensure!(targets.contains(name), "no fuzz target {name:?}: there are {}", targets.join(", "));
            vec![name.clone()]
        }
        None => targets,
    };
    prepare()?;
    if options.minimise {
        return minimise(&chosen).map(|()| ExitCode::SUCCESS);
    }
    for target in chosen {
        run_target(&target, options.seconds, false)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Names of the targets, from their files.
pub(crate) fn targets() -> Result<Vec<String>> {
    let paths = files::paths_in(&root().join("fuzz/fuzz_targets"))?;
    Ok(paths.iter().filter_map(|path| path.file_stem()?.to_str().map(str::to_owned)).collect())
}

/// Installs what is missing and compiles all targets.
pub(crate) fn prepare() -> Result<()> {
    packages::install(&[packages::FUZZ])?;
    need_cargo_tool("cargo-fuzz", VERSION)?;
    let mut unpack = Command::new("tar");
    unpack.args(["--extract", "--gzip", "--skip-old-files", "--file"]).arg(root().join(CORPUS));
    run(unpack.arg("--directory").arg(root().join("fuzz")))?;
    run(cargo_fuzz("build")?.args(["--sanitizer", "none"]))
}

/// Replaces the checked-in inputs with the fewest that reach the same code.
fn minimise(targets: &[String]) -> Result<()> {
    let dir = tempfile::tempdir().context("a folder for the inputs")?;
    for target in targets {
        let kept = dir.path().join("corpus").join(target);
        files::create(&kept)?;
        let mut merge = cargo_fuzz("run")?;
        merge.args(["--sanitizer", "none", target]).arg(&kept);
        merge.args(["corpus", "seeds"].map(|from| root().join("fuzz").join(from).join(target)));
        // Inputs that only change how often a branch is taken are not kept.
        run(merge.args(["--", "-merge=1", "-use_counters=0", "-max_len=4096"]))?;
    }
    // The same inputs give the same file.
    pack(0, dir.path(), &root().join(CORPUS), &["corpus"])
}

/// Name of a target among the tests.
pub(crate) fn name_of(target: &str) -> String {
    format!("fuzz::{target}")
}

/// Runs one target from its checked-in seeds; failing inputs stay in fuzz/artifacts. `quietly`: shows its output only
/// if it fails, and gives an input more time, because others may have the CPUs for seconds.
pub(crate) fn run_target(target: &str, seconds: u32, quietly: bool) -> Result<()> {
    // New inputs go to the first folder, which is not checked in.
    let corpus = root().join("fuzz/corpus").join(target);
    let seeds = root().join("fuzz/seeds").join(target);
    files::create(&corpus)?;
    ensure!(seeds.is_dir(), "{} is missing: every target has seeds", seeds.display());
    let mut command = cargo_fuzz("run")?;
    command.args(["--sanitizer", "none", target]).args([&corpus, &seeds]);
    command.args([
        "--",
        &format!("-max_total_time={seconds}"),
        "-print_final_stats=1",
        if quietly { "-timeout=60" } else { "-timeout=10" },
        "-rss_limit_mb=2048",
    ]);
    if !quietly {
        return run(&mut command);
    }
    let output = command.output().with_context(|| format!("starting {}", shown(&command)))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("`{}` ended with {}:\n{}", shown(&command), output.status, end_of(&said));
    }
    let count = said.lines().find_map(|line| line.strip_prefix("stat::number_of_executed_units:"));
    let count: u64 = count.and_then(|count| count.trim().parse().ok()).unwrap_or_default();
    ensure!(count > 0, "`{}` tried no input:\n{}", shown(&command), end_of(&said));
    println!("{}: {count} inputs in {seconds} s", name_of(target));
    Ok(())
}

/// Runs these targets, two at a time: each has one thread. Returns a result for each.
pub(crate) fn in_pairs(targets: &[String], run: impl Fn(&str) -> Result<()> + Sync) -> Vec<Result<()>> {
    let (run, mut results) = (&run, Vec::new());
    for pair in targets.chunks(2) {
        thread::scope(|scope| {
            let runs: Vec<_> = pair.iter().map(|target| scope.spawn(move || run(target))).collect();
            let panicked = |_| Err(anyhow!("its thread has panicked"));
            results.extend(runs.into_iter().map(|run| run.join().unwrap_or_else(panicked)));
        });
    }
    results
}

/// `cargo fuzz SUBCOMMAND`. The code is safe Rust (`forbid(unsafe_code)`), so the targets run without a sanitizer:
/// panics, endless loops and memory use are all they can do wrong.
fn cargo_fuzz(subcommand: &str) -> Result<Command> {
    // A separate target folder: the flags differ from those of other builds.
    let target_dir = target_dir()?.join("fuzz");
    // The toolchain that builds everything else, with nightly options allowed: a separately installed nightly may be
    // older or newer and compile something else.
    let mut command = cargo();
    // Its .cargo/config.toml has the profile.
    command.current_dir(root().join("fuzz"));
    command.env("RUSTC_BOOTSTRAP", "1");
    // The targets need no BPF object.
    command.env("POSTERN_WITHOUT_BPF", "1");
    command.env("CARGO_TARGET_DIR", target_dir);
    // Without this option it turns on debug assertions everywhere; the profile says where they are wanted.
    command.args(["fuzz", subcommand, "--release"]);
    Ok(command)
}
