//! A second server or agent on the same host takes over from the first; and the remains of a killed server.
mod agents;
pub(crate) mod ends;
mod pair;

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use postern_testbed::agent::{self, Agent};
use postern_testbed::client::{self, connect_error, echo, end_of, visit};
use postern_testbed::report::figure;
use postern_testbed::server::{self, Builder, Server};
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, Testbed};

use crate::common::{alongside, hold, longest_alongside, pause, server, target, within};
use crate::front;
use crate::web::Web;
use agents::{
    agents_are_replaced_while_earlier_ones_drain, an_agent_is_replaced, an_agent_leaves_no_listener_behind,
    an_agents_successor_dies, an_agents_successor_dies_while_the_first_one_drains,
};
use ends::{ENDS, LENGTH, Open, finishes, is_refused};
use pair::a_pair_and_its_agent_are_replaced_under_load;

scenarios! {
    nobody_notices(edges = 2, limit = 240, quick),
    a_pair_and_its_agent_are_replaced_under_load(limit = 240),
    a_successor_that_dies_is_replaced(edges = 2, limit = 180),
    a_successor_dies_while_the_first_one_drains(limit = 180),
    a_server_that_dies_as_it_hands_over_leaves_nothing(edges = 2, limit = 180),
    a_server_leaves_no_listener_behind(limit = 180),
    a_server_that_is_told_to_stop_waits_for_its_successor(edges = 2, limit = 180),
    a_server_that_waits_no_longer_leaves_the_redirect(edges = 2, limit = 180),
    an_agent_is_replaced(limit = 180),
    an_agent_leaves_no_listener_behind(limit = 180),
    agents_are_replaced_while_earlier_ones_drain(limit = 180),
    an_agents_successor_dies(limit = 180),
    an_agents_successor_dies_while_the_first_one_drains(limit = 180),
    killed_and_back(limit = 180),
    killed_and_gone(limit = 180),
    killed_and_refusing(limit = 180),
}

/// Limit of a visit during an upgrade, which normally takes milliseconds.
const STALL: Duration = Duration::from_secs(1);
/// Time limit of a connect to the address of a former listener. It is below the three seconds for which a successor checks
/// that the server before is dead.
const REFUSED: Duration = Duration::from_secs(1);
/// Time limit for removing the pins of a dead server: it counts as dead after three seconds without a sign of life.
const REMOVED: Duration = Duration::from_secs(10);

async fn agents<'a>(server: &Server<'a>, count: usize) -> Result<Vec<Agent<'a>>> {
    let mut agents = Vec::new();
    for n in 1..=count {
        agents.push(Agent::enrol(server, n).await?);
    }
    Ok(agents)
}

async fn nobody_notices(testbed: &Testbed) -> Result<()> {
    let mut first = Builder::new(testbed).flag("--drain-timeout=1m").start().await?;
    let agents = agents(&first, 2).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let on_other = target(testbed, 2, 10250, Behaviour::Echo)?;
    let source = target(testbed, 2, 9100, Behaviour::Source(21, LENGTH))?;
    visit(on_other.address).await?;
    let mut longest = Vec::new();
    for turn in 1..=3 {
        let before = first.id().await?;
        let open = Open::new(hold(on_edge.address, b"before").await?, &source).await?;
        let started = Instant::now();
        let (replaced, stall) = longest_alongside("a takeover, at one edge", on_edge.address, async {
            alongside("a takeover, at the other", on_other.address, async {
                let second = first.take_over().await?;
                figure(&format!("turn {turn}: took over after {:.1?}", started.elapsed()));
                // Connections of the first server go on.
                open.finish(&mut first.process).await?;
                pause(1).await?;
                anyhow::Ok(second)
            })
            .await
        })
        .await?;
        first.expect_every_access(|line| line.text("outcome") == "ok").await?;
        longest.push(stall);
        ensure!(replaced.id().await? != before, "the first server still answers");
        first = replaced;
    }
    // Beside other work a visit may take longer in one turn or two, but not in each.
    ensure!(longest.iter().any(|stall| *stall <= STALL), "a visit stood still in each takeover: {longest:?}");
    for edge in testbed.edges() {
        ensure!(first.is_connected(&edge.name).await?, "{} is not attached to the last server", edge.name);
    }
    for agent in &agents {
        // One server and three successors.
        agent.expect_metric("postern_agent_sessions_started_total", &[], 4.0).await?;
    }
    let status = first.process.stop().await?;
    ensure!(status.code() == Some(0), "the last server ended with {status}");
    nothing_is_left(testbed)
}

/// Returns the folders of pins.
fn pinned(testbed: &Testbed) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(testbed.bpffs().join("postern")).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

/// Waits until only one server has pins.
async fn wait_pinned_by_one(testbed: &Testbed) -> Result<()> {
    let what = "the pins of a server that died to be removed";
    wait_until(what, REMOVED, async || Ok(pinned(testbed)), |pinned| pinned.len() == 1).await.map(drop)
}

/// Fails if pins or IPv4 routes are left.
fn nothing_is_left(testbed: &Testbed) -> Result<()> {
    let left = pinned(testbed);
    ensure!(left.is_empty(), "pins are left: {left:?}");
    let routes = testbed.cloud.output("ip", "-4 route show table local 198.18.0.0/15")?;
    ensure!(routes.is_empty(), "routes are left: {routes}");
    for family in ["-4", "-6"] {
        let rules = testbed.cloud.output("ip", &format!("{family} rule show"))?;
        ensure!(!rules.contains("proto 201"), "rules are left: {rules}");
    }
    Ok(())
}

async fn a_successor_that_dies_is_replaced(testbed: &Testbed) -> Result<()> {
    let first = server(testbed).await?;
    let mut agents = agents(&first, 2).await?;
    let before = first.id().await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let mut held = hold(on_edge.address, b"before").await?;
    // This agent does not attach to the second server, which waits for it.
    agents[1].process.freeze().await?;
    let mut second = first.successor()?;
    first.wait_log("successor connected").await?;
    wait_sessions(&agents[0], 2.0).await.context("the first agent has a session with each server")?;
    second.process.crash().await?;
    first.wait_log("resuming service").await?;
    agents[1].process.signal(Signal::SIGCONT)?;
    for edge in testbed.edges() {
        first.wait_connected(&edge.name, true, agent::START).await?;
    }
    ensure!(first.id().await? == before, "another server answers");
    wait_sessions(&agents[0], 3.0).await.context("the first agent comes back")?;
    echo(&mut held, b"after").await.context("on the connection held")?;
    visit(on_edge.address).await?;
    wait_pinned_by_one(testbed).await?;
    // The next successor is accepted.
    let second = alongside("a takeover", on_edge.address, first.take_over()).await?;
    ensure!(second.id().await? != before, "the first server still answers");
    echo(&mut held, b"still").await.context("on the connection held")
}

/// The successor had taken over: a third server starts at once, whatever connections the first one still has.
async fn a_successor_dies_while_the_first_one_drains(testbed: &Testbed) -> Result<()> {
    let mut first = Builder::new(testbed).flag("--drain-timeout=2m").start().await?;
    let _agents = agents(&first, 1).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let held = hold(on_edge.address, b"before").await?;
    let mut second = alongside("a takeover", on_edge.address, first.take_over()).await?;
    second.process.crash().await?;
    second.start_again().await?;
    second.wait_connected("edge-1", true, agent::START).await?;
    visit(on_edge.address).await?;
    finishes(&mut first.process, held, on_edge.address).await
}

/// The next server has another `--insecure-port`, and the first one still has a connection.
async fn a_server_leaves_no_listener_behind(testbed: &Testbed) -> Result<()> {
    let at = |port: u16| (format!("--insecure-port={port}"), SocketAddr::from(([127, 0, 0, 1], port)));
    let (mut former, mut next) = (at(10264), at(11264));
    let first = Builder::new(testbed).flag("--drain-timeout=2m").flag(&former.0);
    let mut first = first.start().await?;
    let _agents = agents(&first, 1).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let _web = Web::start(testbed, 1, 9100)?;
    let mut draining = Vec::new();
    within("a connect to the former address", REFUSED, async || {
        let held = hold(on_edge.address, b"before").await?;
        let second = alongside("a takeover", on_edge.address, first.take_over_with(&next.0)).await?;
        let started = Instant::now();
        let connect = async || is_refused(client::attempt(former.1, client::PATIENCE).await).await;
        connect().await?;
        let took = started.elapsed();
        wait_until("connects to the former address to be refused", ENDS, connect, |refused| *refused).await?;
        ensure!(first.process.ended()?.is_none(), "it ended with a connection open");
        let request = b"GET / HTTP/1.0\r\nHost: edge-1:9100\r\n\r\n";
        let answer = front::ask(client::connect(next.1).await?, request).await?;
        ensure!(answer.contains(" 200 "), "at the new address: {answer:?}");
        draining.push((std::mem::replace(&mut first, second), held));
        std::mem::swap(&mut former, &mut next);
        Ok(took)
    })
    .await?;
    for (mut server, held) in draining {
        finishes(&mut server.process, held, on_edge.address).await?;
    }
    Ok(())
}

/// The successor goes on, and removes the dead server's pins.
async fn a_server_that_dies_as_it_hands_over_leaves_nothing(testbed: &Testbed) -> Result<()> {
    let mut first = server(testbed).await?;
    let mut agents = agents(&first, 2).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    visit(on_edge.address).await?;
    // This agent does not attach to the second server, which waits for it.
    agents[1].process.freeze().await?;
    let mut second = first.successor()?;
    first.wait_log("successor connected").await?;
    wait_sessions(&agents[0], 2.0).await.context("the first agent has a session with each server")?;
    ensure!(pinned(testbed).len() == 2, "the pins of two servers: {:?}", pinned(testbed));
    first.process.crash().await?;
    second.wait_log("it ended during the takeover").await?;
    agents[1].process.signal(Signal::SIGCONT)?;
    second.wait_connected("edge-2", true, agent::START).await?;
    visit(on_edge.address).await?;
    wait_pinned_by_one(testbed).await?;
    alongside("the programs of one server only", on_edge.address, pause(1)).await?;
    let status = second.process.stop().await?;
    ensure!(status.code() == Some(0), "the second server ended with {status}");
    nothing_is_left(testbed)
}

/// Tells a server to stop in the middle of a takeover. `waits`: true if its drain timeout leaves it the time to wait for
/// its successor.
async fn stopped_in_a_takeover(testbed: &Testbed, first: Builder<'_>, waits: bool) -> Result<()> {
    let mut first = first.start().await?;
    let mut agents = agents(&first, 2).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    visit(on_edge.address).await?;
    agents[1].process.freeze().await?;
    let second = alongside("a stop in the middle of a takeover", on_edge.address, async {
        let second = first.successor()?;
        first.wait_log("successor connected").await?;
        if !waits {
            wait_sessions(&agents[0], 2.0).await.context("the first agent has a session with each server")?;
        }
        first.process.signal(Signal::SIGTERM)?;
        let status = first.process.wait_exit(ENDS).await?;
        ensure!(status.code() == Some(0), "the first server ended with {status}");
        if !waits {
            second.wait_log("it ended during the takeover").await?;
        }
        anyhow::Ok(second)
    })
    .await?;
    agents[1].process.signal(Signal::SIGCONT)?;
    second.wait_connected("edge-2", true, agent::START).await
}

async fn a_server_that_is_told_to_stop_waits_for_its_successor(testbed: &Testbed) -> Result<()> {
    stopped_in_a_takeover(testbed, Builder::new(testbed), true).await
}

/// The first server's drain timeout is shorter than its successor's wait for an agent, and it cannot read the names of
/// the other's programs.
async fn a_server_that_waits_no_longer_leaves_the_redirect(testbed: &Testbed) -> Result<()> {
    let first = Builder::new(testbed).flag("--drain-timeout=2s").without_sys_admin();
    stopped_in_a_takeover(testbed, first, false).await
}

/// Waits until the agent has begun this number of sessions.
async fn wait_sessions(agent: &Agent<'_>, count: f64) -> Result<()> {
    agent.wait_metric("postern_agent_sessions_started_total", &[], |begun| begun >= count).await.map(drop)
}

/// Expects that connects are refused at once, and never go to the edge's own network.
async fn expect_refused(address: SocketAddr) -> Result<Duration> {
    let start = Instant::now();
    let error = connect_error(address, Duration::from_secs(2)).await?;
    ensure!(error.kind() == ErrorKind::ConnectionRefused, "connect() to {address}: {error:?}");
    Ok(start.elapsed())
}

/// Returns the virtual address and port of a redirected connection to the target.
pub(crate) fn tokens(testbed: &Testbed, target: &Target) -> Result<String> {
    // The local address of the server's end of a redirected connection is the virtual address.
    let sockets = testbed.cloud.output("ss", "-Htn state established")?;
    let port = format!(":{}", target.address.port());
    let token = sockets
        .lines()
        .flat_map(str::split_whitespace)
        .find(|field| field.starts_with("198.18.") && field.ends_with(&port));
    Ok(token.with_context(|| format!("no redirected connection among {sockets}"))?.to_owned())
}

async fn killed_and_back(testbed: &Testbed) -> Result<()> {
    let mut server = server(testbed).await?;
    let mut agents = agents(&server, 1).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let on_cloud = Target::start(&testbed.cloud, CLOUD, 9100, Behaviour::Echo)?;
    let mut held = hold(on_edge.address, b"before").await?;
    let token = tokens(testbed, &on_edge)?;
    server.process.crash().await?;
    let end = end_of(&mut held, client::PATIENCE).await?;
    ensure!(end == client::End::Reset, "the connection held ended with {end:?}");
    let took = expect_refused(on_edge.address).await?;
    figure(&format!("refused after {took:.1?} while the server is dead"));
    // Cloud addresses are always direct.
    visit(on_cloud.address).await?;
    server.start_again().await?;
    let start = Instant::now();
    server.wait_connected("edge-1", true, agent::START).await?;
    figure(&format!("the agent is back {:.1?} after the server is ready again", start.elapsed()));
    visit(on_edge.address).await?;
    visit(on_cloud.address).await?;
    let held = hold(on_edge.address, b"after").await?;
    ensure!(tokens(testbed, &on_edge)? == token, "the node has another virtual address than before");
    drop(held);
    ensure!(agents.remove(0).process.stop().await?.success(), "the agent");
    server.process.stop().await?;
    nothing_is_left(testbed)
}

async fn killed_and_gone(testbed: &Testbed) -> Result<()> {
    let mut server = Builder::new(testbed).flag("--orphan-timeout=5s").start().await?;
    let _agents = agents(&server, 1).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    visit(on_edge.address).await?;
    let alive = server::run(testbed, &["cleanup", &bpffs(testbed)])?;
    ensure!(!alive.status.success(), "cleanup beside a server that runs");
    visit(on_edge.address).await.context("after a cleanup that was refused")?;

    server.process.crash().await?;
    expect_refused(on_edge.address).await?;
    let killed = Instant::now();
    // Without a server connects to the address are direct, and get no answer.
    let direct = async || {
        let error = connect_error(on_edge.address, Duration::from_millis(500)).await?;
        Ok(error.kind())
    };
    wait_until("the programs to step aside", Duration::from_secs(15), direct, |kind| {
        *kind == ErrorKind::TimedOut
    })
    .await?;
    figure(&format!("the programs step aside {:.1?} after the server was killed", killed.elapsed()));

    let cleaned = server::run(testbed, &["cleanup", &bpffs(testbed)])?;
    let said = String::from_utf8_lossy(&cleaned.stdout);
    ensure!(cleaned.status.success() && said.contains("removed the programs pinned in"), "cleanup: {said}");
    nothing_is_left(testbed)?;
    server.start_again().await?;
    server.wait_connected("edge-1", true, agent::START).await?;
    visit(on_edge.address).await.map(drop)
}

/// Where the cloud's network has the addresses of edge nodes too, a connect must never go there.
async fn killed_and_refusing(testbed: &Testbed) -> Result<()> {
    let server = Builder::new(testbed).flag("--orphan-timeout=5s").flag("--orphan-policy=refuse");
    let mut server = server.start().await?;
    let _agents = agents(&server, 1).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    visit(on_edge.address).await?;
    server.process.crash().await?;
    expect_refused(on_edge.address).await?;
    let kind = async || Ok(connect_error(on_edge.address, Duration::from_millis(500)).await?.kind());
    // Before Linux 6.1 a program cannot choose the error.
    wait_until("the programs to count the server as gone", Duration::from_secs(15), kind, |kind| {
        *kind == ErrorKind::HostUnreachable
    })
    .await?;
    let cleaned = server::run(testbed, &["cleanup", &bpffs(testbed)])?;
    ensure!(cleaned.status.success(), "cleanup: {}", String::from_utf8_lossy(&cleaned.stderr));
    let kind = kind().await?;
    ensure!(kind == ErrorKind::TimedOut, "after the cleanup connect() ended with {kind:?}");
    nothing_is_left(testbed)
}

fn bpffs(testbed: &Testbed) -> String {
    format!("--bpffs={}", testbed.bpffs().display())
}
