//! Many agents, many nodes, many connections: Postern alone, once in a run.
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::resource::{Resource, getrlimit};
use postern_testbed::Testbed;
use postern_testbed::inventory::{self, Inventory};
use postern_testbed::percentiles::Times;
use postern_testbed::server::Server;
use postern_testbed::wait::wait_until;

use crate::catalogue::{self, AGENTS, ROUTES};
use crate::dial::{Dialer, Stream};
use crate::line::{Group, Peer};
use crate::load::{self, Effort, as_f64, micros};
use crate::options::Options;
use crate::peers::{BEHIND_NAT, Running};
use crate::record::Record;
use crate::usage::{self, Part, Side};
use crate::{connect, fleet, peers, scale_fleet};

/// Connections held to one node.
const HELD: usize = 30_000;
/// Dials a second across all agents.
const DIALS: usize = 1_000;
/// The same while a server is replaced: agents and servers, on the same host, need most of it then.
const DIALS_MEANWHILE: usize = 200;
/// Edge nodes in the inventory of a server that starts.
const START_NODES: usize = 10_000;
/// Pause before each look at the number of sessions.
const LOOK: Duration = Duration::from_millis(100);
/// Maximum time for all agents to attach.
const ATTACH: Duration = Duration::from_secs(180);
/// Maximum time for 100,000 nodes to be read and put into the maps.
const READ: Duration = Duration::from_secs(180);

/// The fraction that is measured: a smoke run does a fiftieth.
#[derive(Clone, Copy)]
pub(crate) struct Size {
    divisor: usize,
    /// Time for which idle agents are watched: more than one period of their pings.
    pub(crate) idle: Duration,
    /// Time for which dials are paced.
    dials: Duration,
}

impl Size {
    pub(crate) fn of(smoke: bool) -> Self {
        if smoke {
            let (idle, dials) = (Duration::from_millis(200), Duration::from_millis(200));
            return Self { divisor: 50, idle, dials };
        }
        Self { divisor: 1, idle: Duration::from_secs(20), dials: Duration::from_secs(5) }
    }

    pub(crate) fn part(self, count: usize) -> usize {
        (count / self.divisor).max(1)
    }
}

/// Measures every line; a failure does not stop the rest.
pub(crate) async fn measure(
    testbed: &Testbed,
    options: &Options,
    effort: &Effort,
    record: &mut Record,
) -> Result<()> {
    let size = Size::of(options.smoke);
    let edge = &testbed.edge(BEHIND_NAT).ns;
    edge.ip(&format!("route add local {} dev lo", fleet::RANGE))?;
    let mut failed = Ok(());
    for agents in AGENTS {
        println!("  {} agents", size.part(agents));
        if let Err(error) = of_agents(testbed, agents, size, record).await {
            note_failure(record, &[&format!("-{agents}")], &error);
            failed = Err(error);
        }
    }
    println!("  a server that starts with {} nodes", size.part(START_NODES));
    if let Err(error) = of_start(testbed, size, record).await {
        note_failure(record, &["scale-start"], &error);
        failed = Err(error);
    }
    println!("  {} routes", size.part(ROUTES[ROUTES.len() - 1]));
    if let Err(error) = of_routes(testbed, effort, size, record).await {
        note_failure(record, &["scale-routes", "scale-connect"], &error);
        failed = Err(error);
    }
    println!("  agents that flap among {} nodes", size.part(ROUTES[ROUTES.len() - 1]));
    if let Err(error) = scale_fleet::of_flaps(testbed, size, record).await {
        note_failure(record, &["scale-flaps"], &error);
        failed = Err(error);
    }
    println!("  {} agents over three servers, one of which is killed", size.part(AGENTS[AGENTS.len() - 1]));
    if let Err(error) = scale_fleet::of_lost_server(testbed, size, record).await {
        note_failure(record, &["scale-lost"], &error);
        failed = Err(error);
    }
    println!("  {} connections", size.part(HELD));
    if let Err(error) = of_held(testbed, effort, size, record).await {
        note_failure(record, &["scale-held"], &error);
        failed = Err(error);
    }
    failed
}

fn note_failure(record: &mut Record, of: &[&str], error: &anyhow::Error) {
    println!("  {error:#}");
    let lines = catalogue::lines(Group::Scale);
    let concerned = lines.iter().filter(|line| of.iter().any(|part| line.id.contains(part)));
    record.lines_failed(concerned, Peer::Postern, error);
}

pub(crate) fn open_files() -> Result<usize> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).context("reading the limit of open files")?;
    Ok(usize::try_from(hard).unwrap_or(usize::MAX))
}

/// The number of agents that are attached, after a moment: a scrape takes milliseconds with thousands of them.
pub(crate) async fn tunnels(server: &Server<'_>) -> Result<f64> {
    tokio::time::sleep(LOOK).await;
    server.metric("postern_tunnels", &[]).await
}

pub(crate) async fn wait_tunnels(server: &Server<'_>, count: usize) -> Result<()> {
    let expected = as_f64(count as u64);
    let what = format!("{count} agents to be attached");
    wait_until(&what, ATTACH, async || tunnels(server).await, |seen| *seen == expected).await?;
    Ok(())
}

async fn of_agents(testbed: &Testbed, nominal: usize, size: Size, record: &mut Record) -> Result<()> {
    let count = size.part(nominal);
    let limit = open_files()?;
    ensure!(count + 500 < limit, "the limit of open files here is {limit}");
    fleet::write_inventory(testbed, count)?;
    let mut server = peers::postern::default_server(testbed).start().await?;
    let before = usage::resident(&[Part::new(Side::Cloud, &server.process)])?.0;
    let mut fleet = fleet::start(testbed, BEHIND_NAT, count)?;
    wait_tunnels(&server, count).await?;

    let parts = [Part::new(Side::Cloud, &server.process)];
    tokio::time::sleep(size.idle).await;
    let cpu = usage::cpu_seconds(&parts)?;
    let watched = Instant::now();
    tokio::time::sleep(size.idle).await;
    let cpu = (usage::cpu_seconds(&parts)? - cpu) / watched.elapsed().as_secs_f64();
    record.value(&format!("scale-agents-cpu-{nominal}"), Peer::Postern, cpu * 1e3);
    let memory = (usage::resident(&parts)?.0 - before).max(0.0) * 1e6 / 1024.0 / as_f64(count as u64);
    record.value(&format!("scale-agents-memory-{nominal}"), Peer::Postern, memory);
    if nominal == AGENTS[AGENTS.len() - 1] {
        dials(count, size, record).await?;
        server = upgrade(server, count, size, record).await?;
    }

    for (line, resumed) in [("restart", "true"), ("restart-full", "false")] {
        if resumed == "false" {
            fleet::forget_sessions(&mut fleet).await?;
        }
        server.process.crash().await?;
        let start = Instant::now();
        server.start_again().await?;
        wait_tunnels(&server, count).await?;
        let took = start.elapsed().as_secs_f64();
        record.value(&format!("scale-agents-{line}-{nominal}"), Peer::Postern, took);
        let cpu = usage::cpu_seconds(&[Part::new(Side::Cloud, &server.process)])?;
        record.value(
            &format!("scale-agents-{line}-cpu-{nominal}"),
            Peer::Postern,
            cpu * 1e3 / as_f64(count as u64),
        );
        let handshakes = server.metric("postern_agent_tls_handshakes_total", &[("resumed", resumed)]).await?;
        // An attempt that was given up has used up its ticket: the agent's next handshake is a full one.
        ensure!(
            handshakes >= 0.75 * as_f64(count as u64),
            "{handshakes} handshakes of {count} agents have resumed={resumed}"
        );
    }
    drop(fleet);
    server.process.stop().await?;
    Ok(())
}

/// Connects to node after node, as [`visits`] does.
async fn dials(agents: usize, size: Size, record: &mut Record) -> Result<()> {
    let ((), mut visits) = visits(agents, DIALS, tokio::time::sleep(size.dials)).await?;
    visits.record("scale-dials-rate", as_f64(visits.asked as u64) / visits.took.as_secs_f64(), record);
    record.value("scale-dials-p50", Peer::Postern, micros(&mut visits.times, 0.5)?);
    record.value("scale-dials-p99", Peer::Postern, micros(&mut visits.times, 0.99)?);
    Ok(())
}

/// Another server takes over from this one with all its agents, while nodes are visited, as they are before. Returns the other
/// server.
async fn upgrade<'a>(
    mut server: Server<'a>,
    agents: usize,
    size: Size,
    record: &mut Record,
) -> Result<Server<'a>> {
    let ((), mut before) = visits(agents, DIALS_MEANWHILE, tokio::time::sleep(size.dials)).await?;
    let before = micros(&mut before.times, 0.99)?;
    let taken_over = async {
        // Its log tells the takeover after the agents have come, which takes longer than a test's server has for that.
        let successor = server.successor()?;
        let status = server.process.wait_exit(ATTACH).await?;
        ensure!(status.success(), "the server that was replaced ended with {status}");
        Ok(successor)
    };
    let (successor, mut visits) = visits(agents, DIALS_MEANWHILE, taken_over).await?;
    let successor = successor?;
    wait_tunnels(&successor, agents).await?;
    visits.record("scale-upgrade", visits.took.as_secs_f64(), record);
    record.value("scale-upgrade-p99", Peer::Postern, micros(&mut visits.times, 0.99)? / before);
    Ok(successor)
}

/// Connections that were opened at a fixed pace.
struct Visits {
    asked: usize,
    took: Duration,
    times: Times,
    failures: Vec<anyhow::Error>,
}

impl Visits {
    /// Records the value, or the failures if there are any.
    fn record(&self, line: &str, value: f64, record: &mut Record) {
        if let Some(error) = self.failures.first() {
            let reason = format!("{} of {} failed, as: {error:#}", self.failures.len(), self.asked);
            record.failed(line, Peer::Postern, &reason);
        } else {
            record.value(line, Peer::Postern, value);
        }
    }
}

/// Connects to node after node at a fixed pace, whether or not earlier connections are through, until `ends` does.
async fn visits<T>(agents: usize, each_second: usize, ends: impl Future<Output = T>) -> Result<(T, Visits)> {
    let mut visits = tokio::task::JoinSet::new();
    let start = Instant::now();
    let mut tick = tokio::time::interval(Duration::from_millis(10));
    // Late ticks are made up for, to keep the pace.
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Burst);
    let mut asked = 0_usize;
    let mut ends = std::pin::pin!(ends);
    let ended = loop {
        tokio::select! {
            ended = &mut ends => break ended,
            _ = tick.tick() => {}
        }
        for _ in 0..each_second / 100 {
            // A stride coprime to the number of agents visits all of them.
            let node = fleet::address((asked * 7919) % agents);
            asked += 1;
            visits.spawn(async move { load::visit(&Dialer::Tcp(node.into())).await });
        }
    };
    let (mut times, mut failures) = (Times::default(), Vec::new());
    while let Some(visit) = visits.join_next().await {
        match visit.context("a dialling task")? {
            Ok(time) => times.add(time),
            Err(error) => failures.push(error),
        }
    }
    Ok((ended, Visits { asked, took: start.elapsed(), times, failures }))
}

/// The redirect's programs are loaded and all routes are in the kernel when the server is ready.
async fn of_start(testbed: &Testbed, size: Size, record: &mut Record) -> Result<()> {
    connect::inventory_with(testbed, size.part(START_NODES))?.write()?;
    let start = Instant::now();
    let started = peers::postern::server_builder(testbed).start().await;
    let took = start.elapsed();
    Inventory::of(testbed)?;
    let status = started?.process.stop().await?;
    ensure!(status.success(), "the server ended with {status}");
    record.value("scale-start", Peer::Postern, took.as_secs_f64());
    Ok(())
}

async fn of_routes(testbed: &Testbed, effort: &Effort, size: Size, record: &mut Record) -> Result<()> {
    Inventory::of(testbed)?;
    let running = peers::postern::start(testbed).await?;
    let measured = routes(&running, testbed, effort, size, record).await;
    Inventory::of(testbed)?;
    measured.and(running.stop().await)
}

async fn routes(
    running: &Running<'_>,
    testbed: &Testbed,
    effort: &Effort,
    size: Size,
    record: &mut Record,
) -> Result<()> {
    let server = running.server().context("Postern without a server")?;
    let mut medians = Vec::new();
    for nominal in ROUTES {
        let start = Instant::now();
        connect::with_nodes(testbed, server, size.part(nominal), READ).await?;
        if nominal == ROUTES[ROUTES.len() - 1] {
            record.value("scale-routes-load", Peer::Postern, start.elapsed().as_secs_f64());
        }
        let (mut own, _) = connect::postern_connects(running, testbed, server, effort).await?;
        let p50 = micros(&mut own, 0.5)?;
        record.value(&format!("scale-routes-connect-{nominal}"), Peer::Postern, p50);
        medians.push(p50);
    }
    if let (Some(first), Some(last)) = (medians.first(), medians.last()) {
        record.value("scale-connect-100000", Peer::Postern, last / first);
    }
    let own = [Part::new(Side::Cloud, &server.process)];
    record.value("scale-routes-memory", Peer::Postern, usage::resident(&own)?.0);
    record.value("scale-routes-maps", Peer::Postern, usage::bpf_maps(server.process.pid())?);

    let nodes = size.part(ROUTES[ROUTES.len() - 1]);
    let mut inventory = connect::inventory_with(testbed, nodes)?;
    let added = fleet::address(nodes + 1);
    inventory.nodes.push(inventory::node("added", true, &[added.into()], &[]));
    let cpu = usage::cpu_seconds(&own)?;
    let start = Instant::now();
    inventory.write()?;
    let written = start.elapsed();
    connect::wait_known(added, READ).await?;
    let took = start.elapsed().saturating_sub(written);
    record.value("scale-routes-update", Peer::Postern, took.as_secs_f64() * 1e3);
    record.value("scale-routes-update-cpu", Peer::Postern, (usage::cpu_seconds(&own)? - cpu) * 1e3);
    Ok(())
}

async fn of_held(testbed: &Testbed, effort: &Effort, size: Size, record: &mut Record) -> Result<()> {
    Inventory::of(testbed)?;
    let running = peers::postern::start(testbed).await?;
    let measured = held(&running, testbed, effort, size, record).await;
    measured.and(running.stop().await)
}

async fn held(
    running: &Running<'_>,
    testbed: &Testbed,
    effort: &Effort,
    size: Size,
    record: &mut Record,
) -> Result<()> {
    let server = running.server().context("Postern without a server")?;
    let (mut own, _) = connect::postern_connects(running, testbed, server, effort).await?;
    record.value("scale-held-connect-empty", Peer::Postern, micros(&mut own, 0.5)?);
    // The redirect has 11 of 32 open files, and one source a third of those; 200 are left for the connects beside them.
    let limit = open_files()?;
    let count = size.part(HELD).min((limit / 32 * 11 / 3).saturating_sub(200));
    if count < size.part(HELD) {
        let reason = format!(
            "with {count} connections: more of one source need a higher limit of open files than {limit}"
        );
        for line in ["scale-held-memory", "scale-held-connect"] {
            record.missing(line, Peer::Postern, &reason);
        }
    }
    let (cloud, edge) = usage::resident(&running.parts)?;
    let streams = load::hold(&running.dialer, count).await?;
    tokio::time::sleep(effort.idle).await;
    let (cloud_now, edge_now) = usage::resident(&running.parts)?;
    let memory = (cloud_now + edge_now - cloud - edge).max(0.0) * 1e6 / 1024.0 / as_f64(count as u64);
    record.value("scale-held-memory", Peer::Postern, memory);
    let (mut own, _) = connect::postern_connects(running, testbed, server, effort).await?;
    record.value("scale-held-connect", Peer::Postern, micros(&mut own, 0.5)?);
    load::concurrently(streams.into_iter().map(Stream::close)).await?;
    Ok(())
}
