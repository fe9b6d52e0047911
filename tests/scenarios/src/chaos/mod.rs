//! Random faults under load, both determined by a seed: relayed bytes are correct or the connection fails, one that no
//! fault touches does not fail, and after the faults every edge is reached by every way, and no program holds more
//! resources than at the start. `cargo xtask chaos` runs it for minutes, and for several seeds.
mod felt;
mod fleet;
mod load;
mod nodes;
mod plan;
mod rotation;
mod stream;

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::report::{figure, progress};

use self::fleet::{EDGES, Fleet, SERVERS};
use self::load::Clients;
use self::plan::Plan;
use self::stream::{Patience, Targets, Wrong};
use crate::common::THIRD;
use crate::held::growth;
use crate::https::KUBELET;

scenarios! {
    nothing_is_wrong_after_everything_went_wrong(edges = 4, limit = 420, quick),
}

/// Minimum duration in seconds; `cargo xtask chaos` sets it. The runner adds it to the scenario's limit.
const SECONDS: &str = "POSTERN_CHAOS_SECONDS";
/// Seed of the faults and of the load; each run has its own unless it is set.
const SEED: &str = "POSTERN_CHAOS_SEED";
/// Duration of the load before resources are measured.
const CALM: Duration = Duration::from_secs(5);
/// Slack for fluctuating resources: the allocator's pages, threads for blocking calls, a connection of the admin port
/// and its task, and up to seven additional links of each session with their tasks, because on a busy machine a path
/// seems long. A release's server has 7 to 22 MB that no file backs, as many after four minutes as after one. `soak::` has
/// the narrow bound, under the same load all the time.
const SLACK: [(&str, f64); 4] = [("memory", 12e6), ("sockets", 32.0), ("tasks", 96.0), ("threads", 8.0)];

/// Returns the requested duration.
pub(crate) fn asked() -> Option<Duration> {
    std::env::var(SECONDS).ok()?.parse().ok().map(Duration::from_secs)
}

fn seed() -> Result<u64> {
    match std::env::var(SEED) {
        Ok(text) => text.parse().with_context(|| format!("{SEED}={text}: not a number")),
        Err(_) => Ok(SystemTime::now().duration_since(UNIX_EPOCH).context("this machine's clock")?.as_secs()),
    }
}

async fn nothing_is_wrong_after_everything_went_wrong(testbed: &Testbed) -> Result<()> {
    let seed = seed()?;
    let outcome = go_wrong(testbed, seed, asked().unwrap_or_default()).await;
    outcome.with_context(|| format!("seed {seed}: `cargo xtask chaos --seed {seed}` repeats faults and load"))
}

async fn go_wrong(testbed: &Testbed, seed: u64, length: Duration) -> Result<()> {
    let (second, third) = (testbed.add_neighbour()?, testbed.add_to_cloud_lan("third", THIRD)?);
    let wrong = Wrong::default();
    let _targets = Targets::start(testbed, KUBELET, &wrong)?;
    progress(&format!("seed {seed}"));
    let mut fleet = Fleet::start(testbed, [&second, &third]).await?;
    fleet.works(&wrong).await.context("before anything went wrong")?;
    let before = calm(&fleet, seed, &wrong).await?;

    let clients = Clients::start(fleet.clients(), Patience::SHORT, seed, fleet.felt(), &wrong);
    let (mut plan, mut rounds, mut longest) = (Plan::new(seed, SERVERS, EDGES), 0, Duration::ZERO);
    let begin = Instant::now();
    while rounds < plan::ALL || begin.elapsed() < length {
        rounds += 1;
        for step in plan.round() {
            tokio::time::sleep(step.pause).await;
            progress(&format!("seed {seed}, round {rounds}: {step}"));
            fleet.apply(step.change).await?;
            fleet.supervise()?;
            wrong.expect_none()?;
            clients.expect_explained()?;
        }
        let took = fleet.works(&wrong).await.with_context(|| format!("after round {rounds}"))?;
        progress(&format!("seed {seed}, round {rounds}: all works again after {took:.1?}"));
        longest = longest.max(took);
        wrong.expect_none()?;
    }
    clients.expect_explained()?;
    let (whole, failed, never) = clients.stop().await?;
    wrong.expect_none()?;
    ensure!(never.is_empty(), "no connection was whole: {never:?}");
    let after = calm(&fleet, seed, &wrong).await?;
    figure(&format!(
        "seed {seed}: {rounds} rounds, all worked again after {longest:.1?} at most; {whole} connections were whole, {failed} failed; {} programs were started again; {}",
        fleet.restarts,
        growth(&before, &after, &SLACK)?
    ));
    Ok(())
}

/// Returns the resources held after a time of load without faults, in which no connection may fail.
async fn calm(fleet: &Fleet<'_>, seed: u64, wrong: &Wrong) -> Result<crate::held::Held> {
    let clients = Clients::start(fleet.clients(), Patience::LONG, seed, fleet.felt(), wrong);
    tokio::time::sleep(CALM).await;
    let (whole, failed, never) = clients.stop().await?;
    ensure!(
        failed == 0 && never.is_empty(),
        "{failed} of {whole} connections failed, {never:?}: nothing was wrong"
    );
    fleet.held().await
}
