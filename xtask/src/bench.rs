//! `cargo xtask bench`: release builds of everything, the peers installed, then the `bench` program.
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{SigSet, SigmaskHow, Signal};

use crate::command::{cargo, is_root, program, root, run, shown, succeeds};
use crate::peers::{self, Peer};
use crate::{build_ebpf, packages};

const RATHOLE_VERSION: &str = "0.5.0";

#[derive(clap::Args, Default)]
pub(crate) struct Options {
    /// Only this group of lines or this peer; repeatable, and an unknown name lists what there is.
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// How often every peer is measured [default: 5, with --smoke 1].
    #[arg(long)]
    rounds: Option<u32>,
    /// Every line for a moment: whether it works, not how fast.
    #[arg(long)]
    smoke: bool,
    /// Writes the report into docs/benchmarks.md, with its plots beside it. Only for whole runs.
    #[arg(long, conflicts_with_all = ["only", "smoke"])]
    record: bool,
    /// Repeats the order of an earlier run, which printed it.
    #[arg(long)]
    seed: Option<u64>,
}

impl Options {
    /// As the program takes them, and as one types them.
    fn arguments(&self) -> Vec<String> {
        let mut arguments = Vec::new();
        for name in &self.only {
            arguments.extend(["--only".to_owned(), name.clone()]);
        }
        if let Some(rounds) = self.rounds {
            arguments.extend(["--rounds".to_owned(), rounds.to_string()]);
        }
        if self.smoke {
            arguments.push("--smoke".to_owned());
        }
        if let Some(seed) = self.seed {
            arguments.extend(["--seed".to_owned(), seed.to_string()]);
        }
        arguments
    }
}

/// Every line of every peer for a moment: for tests.
pub(crate) fn smoke() -> Result<ExitCode> {
    run_bench(&Options { smoke: true, ..Options::default() })
}

pub(crate) fn run_bench(options: &Options) -> Result<ExitCode> {
    ensure!(
        is_root(),
        "the benchmark needs root: it makes network namespaces and cgroups, attaches eBPF programs to those, and sets iptables rules in those. Run `sudo -E cargo xtask bench`."
    );
    packages::install(&[packages::TESTBED])?;
    // What cannot be installed is named in the tables, and everything else is measured.
    if let Err(error) = packages::install(&[packages::BENCH]) {
        println!("{error:#}");
    }
    build_ebpf::run()?;
    // Whether it works shows with the programs that tests use as well, and those are built already.
    let (profile, folder): (&[&str], _) =
        if options.smoke { (&[], "debug") } else { (&["--release"], "release") };
    let programs = ["-p", "tunnel-server", "-p", "tunnel-agent", "-p", "postern-bench"];
    run(cargo().arg("build").args(profile).args(programs))?;

    let target = build_ebpf::target_dir(&root())?;
    let typed = ["cargo xtask bench".to_owned()].into_iter().chain(options.arguments());
    let typed = typed.collect::<Vec<_>>().join(" ");
    let mut bench = Command::new(target.join(folder).join("bench"));
    bench.args(options.arguments()).args(["--command", &typed]);
    bench.arg("--out").arg(target.join("bench"));
    for (name, found) in
        [("haproxy", haproxy()), ("rathole", rathole()), ("konnectivity", peers::build(Peer::Konnectivity))]
    {
        match found {
            Ok(path) => bench.arg("--program").arg(format!("{name}={}", path.display())),
            Err(error) => {
                println!("{name} is left out: {error:#}");
                bench.arg("--missing").arg(format!("{name}={name} is missing: {error:#}"))
            }
        };
    }
    // Ctrl-C reaches the whole foreground group: the program removes everything, this process only waits for it.
    let mut mask = SigSet::empty();
    mask.add(Signal::SIGINT);
    let previous = mask.thread_swap_mask(SigmaskHow::SIG_BLOCK).context("holding back SIGINT")?;
    let status = bench.status().with_context(|| format!("starting {}", shown(&bench)))?;
    previous.thread_set_mask().context("taking SIGINT again")?;
    if options.record && status.success() {
        record(&target.join("bench"))?;
    }
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}

/// Below this line of docs/benchmarks.md stands the last run, and nothing else.
const LAST_RUN: &str = "## The last full run\n";

fn record(report: &Path) -> Result<()> {
    let docs = root().join("docs");
    let (document, plots) = (docs.join("benchmarks.md"), docs.join("benchmarks"));
    let read = |path: &Path| fs::read_to_string(path).with_context(|| format!("reading {}", path.display()));
    let text = read(&document)?;
    let (method, _) = text
        .split_once(LAST_RUN)
        .with_context(|| format!("{} has no heading {LAST_RUN:?}", document.display()))?;
    // A level below the heading.
    let run = read(&report.join("bench.md"))?.replace("\n## ", "\n### ");
    let mut names = Vec::new();
    for entry in fs::read_dir(report).with_context(|| format!("reading {}", report.display()))? {
        let path = entry.context("an entry of the report's folder")?.path();
        names.extend(
            path.file_name()
                .and_then(|name| name.to_str())
                .filter(|name| name.ends_with(".svg"))
                .map(str::to_owned),
        );
    }
    names.sort();
    fs::create_dir_all(&plots).with_context(|| format!("creating {}", plots.display()))?;
    for name in &names {
        fs::copy(report.join(name), plots.join(name)).with_context(|| format!("copying {name}"))?;
    }
    let shown: Vec<String> = names.iter().map(|name| format!("![{name}](benchmarks/{name})")).collect();
    let text = format!("{method}{LAST_RUN}\n{run}\n### Plots\n\n{}\n", shown.join("\n"));
    fs::write(&document, text).with_context(|| format!("writing {}", document.display()))?;
    println!("recorded in {}", document.display());
    Ok(())
}

fn haproxy() -> Result<PathBuf> {
    let found = succeeds(program("haproxy").arg("-v"));
    ensure!(found, "`apt-get install haproxy` (or your system's own way) brings it");
    Ok("haproxy".into())
}

/// Installs it where cargo's other tools are.
fn rathole() -> Result<PathBuf> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cargo")));
    let path = home.context("neither CARGO_HOME nor HOME is set")?.join("bin/rathole");
    if !succeeds(program(&path).arg("--version")) {
        println!("rathole is missing: installing it with `cargo install rathole`, which takes some minutes");
        let mut install = cargo();
        // Its own lock file does not compile with today's compilers. Built outside of the project's folder.
        install.args(["install", "rathole", "--version", RATHOLE_VERSION]).env_remove("CARGO_TARGET_DIR");
        run(install.current_dir("/"))?;
    }
    Ok(path)
}
