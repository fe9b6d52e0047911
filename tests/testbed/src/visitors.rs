//! Clients that connect at a steady rate, in one process per host: a redirect sees only connections of its own host's
//! processes.
use std::ffi::OsString;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use crate::client::visit;
use crate::percentiles::Times;
use crate::process::{Placement, Process};
use crate::topology::Testbed;
use crate::wait::wait_for;

/// Argument with which a program becomes the clients of one host; ADDRESS, RATE and LEAST follow.
pub const ARGUMENT: &str = "--visit";
/// Maximum number of concurrent visits: a machine too busy for the rate makes fewer.
const AT_ONCE: usize = 64;
/// Line printed after the first successful visit.
const BEGUN: &str = "the first visit was one";
/// Time limit for the first successful visit.
const BEGINS: Duration = Duration::from_secs(60);
/// Time limit for the remaining visits.
const ENDS: Duration = Duration::from_secs(120);
/// Interval of the check for failed processes.
const CHECK: Duration = Duration::from_millis(100);

/// Result of one host's clients, none of which failed.
#[derive(Debug, Serialize, Deserialize)]
pub struct Visits {
    pub count: usize,
    pub seconds: f64,
    /// Summary of their durations.
    pub times: String,
}

/// Runs one host's clients: `args` are ADDRESS, RATE (visits a second) and LEAST. Ends after SIGTERM and at least LEAST
/// visits, or with the first failed visit.
pub fn run(args: &[OsString]) -> Result<()> {
    fn value<T: FromStr>(args: &[OsString], at: usize) -> Result<T> {
        let text = args.get(at).and_then(|text| text.to_str());
        text.and_then(|text| text.parse().ok())
            .with_context(|| format!("{ARGUMENT} ADDRESS RATE LEAST: {args:?}"))
    }
    let (address, rate, least) = (value(args, 0)?, value(args, 1)?, value(args, 2)?);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("runtime")?;
    let visits = runtime.block_on(visit_all(address, rate, least))?;
    println!("{}", serde_json::to_string(&visits)?);
    Ok(())
}

async fn visit_all(address: SocketAddr, rate: u32, least: usize) -> Result<Visits> {
    ensure!(rate > 0, "a rate of 0");
    let mut stop = signal(SignalKind::terminate()).context("signals")?;
    wait_for("a first visit", BEGINS, async || Ok(visit(address).await.ok())).await?;
    println!("{BEGUN}");
    let began = Instant::now();
    let mut tick = tokio::time::interval(Duration::from_secs(1) / rate);
    tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let (mut visits, mut times) = (JoinSet::new(), Times::default());
    let (mut count, mut stopped) = (0, false);
    loop {
        let more = !stopped || count < least;
        if !more && visits.is_empty() {
            break;
        }
        tokio::select! {
            _ = tick.tick(), if more && visits.len() < AT_ONCE => {
                visits.spawn(visit(address));
                count += 1;
            }
            Some(visited) = visits.join_next() => {
                let visited = visited.context("a visit's task")?;
                times.add(visited.with_context(|| format!("one of {count} visits"))?);
            }
            _ = stop.recv(), if !stopped => stopped = true,
        }
    }
    Ok(Visits { count, seconds: began.elapsed().as_secs_f64(), times: times.summary() })
}

/// The clients of several hosts.
#[derive(Debug)]
pub struct Visitors {
    processes: Vec<Process>,
    least: usize,
}

impl Visitors {
    /// Starts this program on each of the hosts as clients of `address`, which together connect `rate` times a second,
    /// and each at least `least` times in all; waits until they reach it.
    pub async fn start(
        testbed: &Testbed,
        hosts: &[(&str, Placement<'_>)],
        address: SocketAddr,
        rate: u32,
        least: usize,
    ) -> Result<Self> {
        let program = std::env::current_exe().context("where this program is")?;
        let of_each = rate / u32::try_from(hosts.len()).context("the number of hosts")?;
        let mut visitors = Self { processes: Vec::new(), least };
        for (name, host) in hosts {
            let mut command = host.command(&program);
            command.arg(ARGUMENT).args([address.to_string(), of_each.to_string(), least.to_string()]);
            visitors.processes.push(Process::spawn(testbed.dir(), &format!("visitors-{name}"), command)?);
        }
        let begun = async || {
            visitors.expect_all_run()?;
            let outputs = visitors.processes.iter().map(Process::output).collect::<Result<Vec<_>>>()?;
            anyhow::Ok(outputs.iter().all(|output| output.contains(BEGUN)).then_some(()))
        };
        wait_for("every host's clients to get through", 2 * BEGINS, begun).await?;
        Ok(visitors)
    }

    /// Lets them connect while `work` runs, and returns the result of each host.
    ///
    /// # Errors
    /// The error of `work`, or a failed visit.
    pub async fn alongside<T>(mut self, work: impl Future<Output = Result<T>>) -> Result<(T, Vec<Visits>)> {
        let done = tokio::select! {
            done = work => done?,
            failed = self.failed() => return Err(failed),
        };
        self.expect_all_run()?;
        for process in &mut self.processes {
            process.signal(Signal::SIGTERM)?;
        }
        let mut all = Vec::new();
        for process in &mut self.processes {
            let status = process.wait_exit(ENDS).await?;
            let output = process.output()?;
            ensure!(status.success(), "{} ended with {status}: {output}", process.name());
            let last = output.lines().last().unwrap_or_default();
            let visits: Visits = serde_json::from_str(last).with_context(|| format!("it said {output:?}"))?;
            ensure!(visits.count >= self.least, "{} made {} visits only", process.name(), visits.count);
            all.push(visits);
        }
        Ok((done, all))
    }

    fn expect_all_run(&mut self) -> Result<()> {
        for process in &mut self.processes {
            if let Some(status) = process.ended()? {
                bail!("{} ended with {status}: {}", process.name(), process.output()?);
            }
        }
        Ok(())
    }

    async fn failed(&mut self) -> anyhow::Error {
        loop {
            tokio::time::sleep(CHECK).await;
            if let Err(error) = self.expect_all_run() {
                return error;
            }
        }
    }
}
