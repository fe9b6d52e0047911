//! `cargo xtask bench`: Postern and its alternatives, measured on one testbed in one run.
//!
//! As with scenarios, a worker process on the cloud host does the measuring; its supervisor removes everything afterwards.
#![forbid(unsafe_code)]

mod accept;
mod by_tonic;
mod catalogue;
mod connect;
mod counts;
mod dial;
mod disturbance;
mod fleet;
mod grpc;
mod line;
mod load;
mod machine;
mod options;
mod peers;
mod pods;
mod record;
mod report;
mod run;
mod scale;
mod scale_fleet;
mod usage;
mod wan;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use postern_testbed::id::{Id, Kind};
use postern_testbed::{Shape, load_target, supervisor};

use line::Group;
use options::Options;
use record::Record;

/// Edge 1 is behind NAT, edge 2 can be dialled.
const EDGES: u8 = 2;
const LIMIT: Duration = Duration::from_secs(4 * 3600);

/// See [`Options`]; `--run ID …`, `--target`, `--fleet …` and `--tonic-… …` are for the processes that it starts itself.
fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let rest = args.get(1..).unwrap_or_default();
    let result = match args.first().and_then(|arg| arg.to_str()) {
        Some(load_target::ARGUMENT) => load_target::run().map(|()| ExitCode::SUCCESS),
        Some("--fleet") => fleet::run(rest).map(|()| ExitCode::SUCCESS),
        Some("--tonic-cloud") => by_tonic::cloud::run(rest).map(|()| ExitCode::SUCCESS),
        Some("--tonic-edge") => by_tonic::edge::run(rest).map(|()| ExitCode::SUCCESS),
        Some("--run") => work(rest).map(|()| ExitCode::SUCCESS),
        _ => supervise(&args),
    };
    result.unwrap_or_else(|error| {
        eprintln!("bench: {error:#}");
        ExitCode::FAILURE
    })
}

fn supervise(args: &[OsString]) -> Result<ExitCode> {
    supervisor::ensure_root("the benchmark")?;
    let options = Options::parse(args.iter().cloned())?;
    // The seed is drawn here, so that it is printed even when the run fails.
    println!("seed {}, {} rounds", options.seed, options.rounds);
    let machine = machine::Machine::read(&options)?;
    let folder = Id::new(Kind::Test).dir();
    std::fs::create_dir(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let measured = measure(&options, args, &folder);
    std::fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))?;
    match measured? {
        Ok(record) => report::write(&options, machine, &record).map(|()| ExitCode::SUCCESS),
        Err(interrupted) => Ok(interrupted),
    }
}

/// The values, or the code with which an interrupted run ended.
fn measure(options: &Options, args: &[OsString], folder: &Path) -> Result<Result<Record, ExitCode>> {
    let mut record = Record::default();
    if Group::ALL.into_iter().any(|group| group.is_on_host() && options.wants_group(group)) {
        let id = Id::new(Kind::Test);
        let values = folder.join("host.json");
        let mut command = supervisor::this_program(["--run", &id.to_string()])?;
        command.args(args).args(["--seed", &options.seed.to_string()]).arg("--values").arg(&values);
        let code = supervisor::supervise("the run", &id, command, LIMIT, false)?;
        if code != ExitCode::SUCCESS {
            return Ok(Err(code));
        }
        record.add(Record::load(&values)?);
    }
    if options.wants_group(Group::Wan) {
        match wan::run_all(options, args, folder) {
            Ok(values) => record.add(values),
            Err(interrupted) => return Ok(Err(interrupted)),
        }
    }
    Ok(Ok(record))
}

fn work(args: &[OsString]) -> Result<()> {
    let id = args.first().and_then(|id| id.to_str()).context("--run ID")?.parse()?;
    let options = Options::parse(args[1..].iter().cloned())?;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).context("reading the limit of open files")?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).context("raising the limit of open files")?;
    let testbed = supervisor::enter_run(id, Shape { edges: EDGES, twin: false })?;
    // One thread: the load generator shares the machine with what it measures.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("runtime")?;
    runtime.block_on(async {
        let neighbour = testbed.add_neighbour()?;
        let mut bench = run::Bench::new(&testbed, &neighbour, &options).await?;
        match options.place {
            Some(place) => bench.wide_area(place).await?,
            None => bench.run().await,
        }
        bench.record.save(&options.values)
    })
}
