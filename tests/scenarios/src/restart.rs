//! Either end crashes, the link breaks, or either end stops gracefully.
use std::cell::Cell;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::signal::Signal;
use postern_testbed::Testbed;
use postern_testbed::agent::{self, Agent};
use postern_testbed::client::{self, End, connect, echo, expect_unreachable, visit};
use postern_testbed::report::{figure, progress};
use postern_testbed::server::{self, Builder, Server};
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::wait::{wait_for, wait_until, while_running};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::common::{hold, server_and_agent, session_of, skip, target};

scenarios! {
    agent_killed_and_started_again(quick),
    connects_wait_for_an_agent_that_comes_back,
    link_cut_and_restored(edges = 2, waits, limit = 180),
    interface_down_and_up(waits, limit = 180),
    server_stops_and_finishes_what_is_in_flight,
    second_signal_ends_the_server_immediately,
    drain_has_a_limit,
    agent_stops_and_finishes_what_is_in_flight,
    server_stops_and_leaves_nothing,
}

/// A dead link must be noticed within 30 s; the rest is slack.
const NOTICED: Duration = Duration::from_secs(33);

/// Idle time after which the server regards a connection as having no open request at a drain's limit.
const QUIET: Duration = Duration::from_millis(500);

async fn expect_reset_of(held: &mut TcpStream) -> Result<()> {
    let end = client::end_of(held, client::PATIENCE).await?;
    ensure!(end == End::Reset, "the held connection was not reset");
    Ok(())
}

async fn wait_draining(server: &Server<'_>) -> Result<()> {
    wait_for("/readyz to report that the server stops", client::PATIENCE, async || {
        Ok(matches!(server.get("/readyz").await, Ok((503, _))).then_some(()))
    })
    .await
}

async fn agent_killed_and_started_again(testbed: &Testbed) -> Result<()> {
    let (server, mut agent) = server_and_agent(testbed).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let mut held = hold(on_edge.address, b"before").await?;
    agent.process.crash().await?;
    expect_reset_of(&mut held).await?;
    server.wait_connected("edge-1", false, client::PATIENCE).await?;
    expect_unreachable(on_edge.address).await?;
    server.wait_access("of the held connection", |line| line.text("outcome") == "tunnel_lost").await?;
    let start = Instant::now();
    agent.return_to(&server).await?;
    figure(&format!("a restarted agent is back after {:.1?}", start.elapsed()));
    visit(on_edge.address).await?;
    Ok(())
}

/// Time for which the server expects an agent back.
const RETURN: Duration = Duration::from_secs(2);

/// The agent's link is reset, or the agent is killed and restarted. A connect() in between is held until it has
/// attached again.
async fn connects_wait_for_an_agent_that_comes_back(testbed: &Testbed) -> Result<()> {
    let (server, mut agent) = server_and_agent(testbed).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    visit(on_edge.address).await?;
    // By the way in which the agent was away.
    let mut held = [0, 0];
    for round in 0..6 {
        let epoch = session_of(&server, 0).await?["epoch"].clone();
        let earlier = server.access_log()?.len();
        let comes_back = async {
            let start = Instant::now();
            if round % 2 == 0 {
                testbed.edge(1).ns.output("ss", "-K -t dport = :10262")?;
            } else {
                agent.process.crash().await?;
                agent.start_again()?;
            }
            let now = async || session_of(&server, 0).await;
            let new = |session: &serde_json::Value| session["epoch"] != epoch;
            wait_until("a new session", agent::START, now, new).await?;
            Ok(start.elapsed())
        };
        let connecting = async |done: &Cell<bool>| failed_connects(on_edge.address, done).await;
        let (away, failed) = while_running(comes_back, connecting).await?;
        let lines = server.settled_access_log().await?;
        figure(&format!("a connect is held for up to {away:.1?} in round {round}"));
        // On a machine that stood still the agent may have been away for longer.
        if away < RETURN {
            ensure!(failed.is_empty(), "round {round}: {} connects failed: {:?}", failed.len(), failed[0]);
            let refused = lines.iter().skip(earlier).find(|line| line.text("outcome") == "no_tunnel");
            ensure!(refused.is_none(), "round {round}: {refused:?}");
            held[round % 2] += 1;
        }
        visit(on_edge.address).await?;
    }
    let [cut, restarted] = held;
    ensure!(cut > 0, "the agent whose link was cut was always away for longer than connects are held");
    ensure!(
        restarted > 0,
        "the agent that was started again was always away for longer than connects are held"
    );
    Ok(())
}

/// Connects repeatedly until `done`; returns the errors of connects that failed for lack of a tunnel.
async fn failed_connects(address: SocketAddr, done: &Cell<bool>) -> Result<Vec<std::io::Error>> {
    let mut failed = Vec::new();
    while !done.get() {
        let connected = client::attempt(address, client::PATIENCE).await;
        failed.extend(connected.err().filter(client::is_unreachable));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(failed)
}

/// Expects no answer from the edge address: without a redirect the router drops the connection.
async fn expect_direct(address: SocketAddr) -> Result<()> {
    let error = client::connect_error(address, Duration::from_secs(2)).await?;
    ensure!(
        error.kind() == std::io::ErrorKind::TimedOut,
        "connect() to {address}: {error:?}, expected no answer at all"
    );
    Ok(())
}

async fn link_cut_and_restored(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let _other = Agent::enrol(&server, 2).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let on_other = target(testbed, 2, 10250, Behaviour::Echo)?;
    let mut held = hold(on_edge.address, b"before").await?;
    testbed.cut_link(1)?;
    let start = Instant::now();
    server.wait_connected("edge-1", false, NOTICED).await?;
    figure(&format!("a cut link is noticed after {:.1?}", start.elapsed()));
    expect_reset_of(&mut held).await?;
    expect_unreachable(on_edge.address).await?;
    visit(on_other.address).await.context("the other edge")?;
    testbed.restore_link(1)?;
    let start = Instant::now();
    server.wait_connected("edge-1", true, Duration::from_secs(60)).await?;
    figure(&format!("a restored link is used again after {:.1?}", start.elapsed()));
    visit(on_edge.address).await?;
    Ok(())
}

async fn interface_down_and_up(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    visit(on_edge.address).await?;
    let port = &testbed.edge(1).router_port;
    testbed.router.ip(&format!("link set {port} down"))?;
    server.wait_connected("edge-1", false, NOTICED).await?;
    testbed.router.ip(&format!("link set {port} up"))?;
    server.wait_connected("edge-1", true, Duration::from_secs(60)).await?;
    visit(on_edge.address).await?;
    Ok(())
}

/// Starts a download: reads the first bytes and leaves the rest.
async fn begin_download(source: &Target) -> Result<TcpStream> {
    let mut stream = connect(source.address).await?;
    skip(&mut stream, 1_000_000).await?;
    Ok(stream)
}

const LENGTH: u64 = 60_000_000;
/// A busy machine may need longer for a download of that length than a program waits by default.
const DRAIN: &str = "--drain-timeout=2m";

async fn finish_download(stream: &mut TcpStream) -> Result<()> {
    let (got, _) = client::digest(stream).await?;
    let left = (LENGTH - 1_000_000).checked_sub(got).context("more bytes than were sent")?;
    ensure!(left == 0, "a clean end {left} bytes early");
    // The connection ends only when the other direction has ended too.
    stream.shutdown().await.context("closing")
}

async fn server_stops_and_finishes_what_is_in_flight(testbed: &Testbed) -> Result<()> {
    let mut server = Builder::new(testbed).flag(DRAIN).start().await?;
    let _agent = Agent::enrol_with(&server, 1, &[DRAIN]).await?;
    let source = target(testbed, 1, 9100, Behaviour::Source(21, LENGTH))?;
    let mut in_flight = begin_download(&source).await?;
    server.process.signal(Signal::SIGTERM)?;
    wait_draining(&server).await?;
    // New connections are refused while the transfer goes on.
    expect_unreachable(source.address).await.context("a new connection to a stopping server")?;
    ensure!(server.process.ended()?.is_none(), "the server ended with a transfer in flight");
    finish_download(&mut in_flight).await?;
    let status = server.process.wait_exit(Duration::from_secs(20)).await?;
    ensure!(status.code() == Some(0), "the server ended with {status}");
    let line = server.wait_access("of the transfer", |line| line.text("outcome") == "ok").await?;
    ensure!(line.bytes_from_node()? == LENGTH, "access line {line:?}");
    Ok(())
}

async fn second_signal_ends_the_server_immediately(testbed: &Testbed) -> Result<()> {
    let (mut server, _agent) = server_and_agent(testbed).await?;
    let on_edge = target(testbed, 1, 9100, Behaviour::Echo)?;
    let mut held = hold(on_edge.address, b"held open").await?;
    server.process.signal(Signal::SIGTERM)?;
    wait_draining(&server).await?;
    echo(&mut held, b"still relayed while draining").await?;
    server.process.signal(Signal::SIGTERM)?;
    let start = Instant::now();
    server.process.wait_exit(Duration::from_secs(10)).await?;
    figure(&format!("ended {:.1?} after the second signal", start.elapsed()));
    expect_reset_of(&mut held).await?;
    Ok(())
}

async fn drain_has_a_limit(testbed: &Testbed) -> Result<()> {
    let mut server = Builder::new(testbed).flag("--drain-timeout=2s").start().await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let on_edge = target(testbed, 1, 9100, Behaviour::Echo)?;
    for _ in 0..3 {
        if drains_to_its_limit(&mut server, &on_edge).await? {
            return Ok(());
        }
        progress("this machine stood still at the drain's limit: once more");
        server.start_again().await?;
        server.wait_connected("edge-1", true, agent::START).await?;
    }
    bail!("this machine stood still at the limit of each of three drains")
}

/// Stops the server during requests. Returns false if this machine stood still for so long that the connection was quiet
/// at the drain's limit.
async fn drains_to_its_limit(server: &mut Server<'_>, on_edge: &Target) -> Result<bool> {
    let mut held = hold(on_edge.address, b"held open").await?;
    let mut asking = hold(on_edge.address, b"asks all the time").await?;
    let start = Instant::now();
    server.process.signal(Signal::SIGTERM)?;
    // A request at the limit is answered.
    let (mut before, mut quiet) = (start, false);
    while start.elapsed() < Duration::from_millis(2300) && !quiet {
        let asked = Instant::now();
        let answered = echo(&mut asking, b"again").await;
        quiet = answered.is_err() && before.elapsed() >= QUIET;
        if !quiet {
            answered.context("at the drain's limit")?;
        }
        before = asked;
    }
    expect_reset_of(&mut held).await?;
    let took = start.elapsed();
    ensure!(took >= Duration::from_millis(1900), "reset after {took:?}, before the drain's limit");
    let status = server.process.wait_exit(Duration::from_secs(20)).await?;
    ensure!(status.code() == Some(0), "the server ended with {status}");
    if !quiet {
        expect_reset_of(&mut asking).await?;
    }
    Ok(!quiet)
}

async fn agent_stops_and_finishes_what_is_in_flight(testbed: &Testbed) -> Result<()> {
    let server = Builder::new(testbed).flag(DRAIN).start().await?;
    let mut agent = Agent::enrol_with(&server, 1, &[DRAIN]).await?;
    let source = target(testbed, 1, 9100, Behaviour::Source(21, LENGTH))?;
    let mut in_flight = begin_download(&source).await?;
    agent.process.signal(Signal::SIGTERM)?;
    server.wait_connected("edge-1", false, client::PATIENCE).await?;
    expect_unreachable(source.address).await?;
    finish_download(&mut in_flight).await?;
    let status = agent.process.wait_exit(Duration::from_secs(20)).await?;
    ensure!(status.code() == Some(0), "the agent ended with {status}");
    agent.return_to(&server).await?;
    begin_download(&source).await?;
    Ok(())
}

fn range_routes(testbed: &Testbed) -> Result<String> {
    let v4 = testbed.cloud.output("ip", "-4 route show table all")?;
    let v6 = testbed.cloud.output("ip", "-6 route show table all")?;
    let lines = v4
        .lines()
        .chain(v6.lines())
        .filter(|line| line.contains("198.18.") || line.contains("local fd") && line.contains('/'));
    Ok(lines.collect::<Vec<_>>().join("\n"))
}

async fn server_stops_and_leaves_nothing(testbed: &Testbed) -> Result<()> {
    let before = range_routes(testbed)?;
    ensure!(before.is_empty(), "redirect routes before the server ever ran: {before}");
    let (mut server, mut agent) = server_and_agent(testbed).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    visit(on_edge.address).await?;
    ensure!(
        range_routes(testbed)?.contains("198.18.0.0/15"),
        "no redirect route while the server runs: {}",
        range_routes(testbed)?
    );
    let status = server.process.stop().await?;
    ensure!(status.code() == Some(0), "the server ended with {status}");
    let after = range_routes(testbed)?;
    ensure!(after.is_empty(), "left behind: {after}");
    expect_direct(on_edge.address).await?;

    // The agent comes back to the next server. A route may remain after SIGKILL; `cleanup` removes it.
    server.start_again().await?;
    server.wait_connected("edge-1", true, agent::START).await?;
    ensure!(agent.process.ended()?.is_none(), "the agent ended");
    server.process.crash().await?;
    let bpffs = format!("--bpffs={}", testbed.bpffs().display());
    let cleaned = server::run(testbed, &["cleanup", &bpffs])?;
    ensure!(cleaned.status.success(), "cleanup: {}", String::from_utf8_lossy(&cleaned.stderr));
    let after = range_routes(testbed)?;
    ensure!(after.is_empty(), "left behind by cleanup: {after}");
    let again = server::run(testbed, &["cleanup", &bpffs])?;
    ensure!(again.status.success(), "cleanup with nothing to do: {}", String::from_utf8_lossy(&again.stderr));
    Ok(())
}
