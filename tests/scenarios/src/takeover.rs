//! A second server of the same host takes over from the first, and what a killed one leaves.
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use postern_testbed::Testbed;
use postern_testbed::agent::{self, Agent};
use postern_testbed::client::{self, connect_error, echo, end_of, visit};
use postern_testbed::process::Process;
use postern_testbed::report::figure;
use postern_testbed::server::{self, Builder, Server};
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::wait::wait_until;
use serde_json::Value;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::common::{alongside, hold, pause, server, session_of, skip, target};
use crate::mapped::{self, MAP, alongside_map, hold_mapped, visit_mapped};

scenarios! {
    nobody_notices(edges = 2, limit = 240),
    a_successor_that_dies_is_replaced(edges = 2, limit = 180),
    a_successor_dies_while_the_first_one_drains(limit = 180),
    a_server_that_dies_as_it_passes_on_leaves_nothing(edges = 2, limit = 180),
    a_server_that_is_told_to_stop_waits_for_its_successor(edges = 2, limit = 180),
    a_server_that_waits_no_longer_leaves_the_redirect(edges = 2, limit = 180),
    an_agent_is_replaced(limit = 180),
    an_agents_successor_dies(limit = 180),
    an_agents_successor_dies_while_the_first_one_drains(limit = 180),
    killed_and_back(limit = 180),
    killed_and_gone(limit = 180),
}

/// How long a server may take to end once it has nothing to carry.
const ENDS: Duration = Duration::from_secs(20);
/// How long what a server that died has pinned may stay: it is dead after three seconds without a sign of life.
const REMOVED: Duration = Duration::from_secs(10);

async fn agents<'a>(server: &Server<'a>, count: usize) -> Result<Vec<Agent<'a>>> {
    let mut agents = Vec::new();
    for n in 1..=count {
        agents.push(Agent::enrol(server, n).await?);
    }
    Ok(agents)
}

async fn server_id(server: &Server<'_>) -> Result<String> {
    let status = server.status().await?;
    Ok(status["server_id"].as_str().with_context(|| format!("no server_id in {status}"))?.to_owned())
}

async fn nobody_notices(testbed: &Testbed) -> Result<()> {
    let mut first = Builder::new(testbed).flag("--drain-timeout=1m").start().await?;
    let agents = agents(&first, 2).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let on_other = target(testbed, 2, 10250, Behaviour::Echo)?;
    let length = 30_000_000;
    let source = target(testbed, 2, 9100, Behaviour::Source(21, length))?;
    visit(on_other.address).await?;
    for turn in 1..=3 {
        let before = server_id(&first).await?;
        let mut held = hold(on_edge.address, b"before").await?;
        let mut download = client::connect(source.address).await?;
        skip(&mut download, 1_000_000).await?;
        let started = Instant::now();
        let replaced = alongside("a takeover, at one edge", on_edge.address, async {
            alongside("a takeover, at the other", on_other.address, async {
                let second = first.take_over().await?;
                figure(&format!("turn {turn}: took over after {:.1?}", started.elapsed()));
                // What the first one carries goes on.
                echo(&mut held, b"after").await.context("on the connection held")?;
                let (got, _) = client::digest(&mut download).await?;
                ensure!(got + 1_000_000 == length, "a download of {got} bytes");
                download.shutdown().await.context("closing the download")?;
                ensure!(first.process.ended()?.is_none(), "the first server ended with a connection open");
                echo(&mut held, b"still").await.context("on the connection held")?;
                held.shutdown().await.context("closing")?;
                ensure!(end_of(&mut held, client::PATIENCE).await? == client::End::Eof(0), "no clean end");
                let status = first.process.wait_exit(ENDS).await?;
                ensure!(status.code() == Some(0), "the first server ended with {status}");
                pause(1).await?;
                anyhow::Ok(second)
            })
            .await
        })
        .await?;
        for line in first.access_log()? {
            ensure!(line.text("outcome") == "ok", "at the first server: {line:?}");
        }
        ensure!(server_id(&replaced).await? != before, "the first server still answers");
        first = replaced;
    }
    for edge in testbed.edges() {
        ensure!(first.is_connected(&edge.name).await?, "{} is not attached to the last server", edge.name);
    }
    for agent in &agents {
        let ended = agent.metrics().await?.sum("postern_agent_sessions_started_total", &[]);
        ensure!(ended == 4.0, "{ended} sessions for one server and three successors");
    }
    let status = first.process.stop().await?;
    ensure!(status.code() == Some(0), "the last server ended with {status}");
    nothing_is_left(testbed)
}

/// The folders of pins.
fn pinned(testbed: &Testbed) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(testbed.bpffs().join("postern")).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

/// Until only one server has pins.
async fn wait_pinned_by_one(testbed: &Testbed) -> Result<()> {
    let what = "the pins of a server that died to be removed";
    wait_until(what, REMOVED, async || Ok(pinned(testbed)), |pinned| pinned.len() == 1).await.map(drop)
}

/// Neither pins nor routes.
fn nothing_is_left(testbed: &Testbed) -> Result<()> {
    let left = pinned(testbed);
    ensure!(left.is_empty(), "pins are left: {left:?}");
    let routes = testbed.cloud.output("ip", "-4 route show table local 198.18.0.0/15")?;
    ensure!(routes.is_empty(), "routes are left: {routes}");
    Ok(())
}

async fn a_successor_that_dies_is_replaced(testbed: &Testbed) -> Result<()> {
    let first = server(testbed).await?;
    let mut agents = agents(&first, 2).await?;
    let before = server_id(&first).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let mut held = hold(on_edge.address, b"before").await?;
    // It does not come to the second server, which waits for it.
    agents[1].process.signal(Signal::SIGSTOP)?;
    let mut second = first.successor()?;
    first.wait_log("another server takes over").await?;
    wait_sessions(&agents[0], 2.0).await.context("the first agent is told")?;
    second.process.crash().await?;
    first.wait_log("this server goes on").await?;
    agents[1].process.signal(Signal::SIGCONT)?;
    for edge in testbed.edges() {
        first.wait_connected(&edge.name, true, agent::START).await?;
    }
    ensure!(server_id(&first).await? == before, "another server answers");
    wait_sessions(&agents[0], 3.0).await.context("the first agent comes back")?;
    echo(&mut held, b"after").await.context("on the connection held")?;
    visit(on_edge.address).await?;
    wait_pinned_by_one(testbed).await?;
    // The next one is taken.
    let second = alongside("a takeover", on_edge.address, first.take_over()).await?;
    ensure!(server_id(&second).await? != before, "the first server still answers");
    echo(&mut held, b"still").await.context("on the connection held")
}

/// It had taken over: a third one starts at once, whatever the first one still carries.
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

/// Its successor goes on, and removes what it had pinned.
async fn a_server_that_dies_as_it_passes_on_leaves_nothing(testbed: &Testbed) -> Result<()> {
    let mut first = server(testbed).await?;
    let mut agents = agents(&first, 2).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    visit(on_edge.address).await?;
    // It does not come to the second server, which waits for it.
    agents[1].process.signal(Signal::SIGSTOP)?;
    let mut second = first.successor()?;
    first.wait_log("another server takes over").await?;
    wait_sessions(&agents[0], 2.0).await.context("the first agent is told")?;
    ensure!(pinned(testbed).len() == 2, "the pins of two servers: {:?}", pinned(testbed));
    first.process.crash().await?;
    second.wait_log("the server before ended meanwhile").await?;
    agents[1].process.signal(Signal::SIGCONT)?;
    second.wait_connected("edge-2", true, agent::START).await?;
    visit(on_edge.address).await?;
    wait_pinned_by_one(testbed).await?;
    alongside("the programs of one server only", on_edge.address, pause(1)).await?;
    let status = second.process.stop().await?;
    ensure!(status.code() == Some(0), "the second server ended with {status}");
    nothing_is_left(testbed)
}

/// The first one has carried what it had, and ends with it; the third one goes on.
async fn finishes(first: &mut Process, mut held: TcpStream, on_edge: SocketAddr) -> Result<()> {
    ensure!(first.ended()?.is_none(), "the first one ended with a connection open");
    echo(&mut held, b"after").await.context("on the connection held")?;
    drop(held);
    let status = first.wait_exit(ENDS).await?;
    ensure!(status.code() == Some(0), "the first one ended with {status}");
    visit(on_edge).await.context("after the first one's end").map(drop)
}

async fn a_server_that_is_told_to_stop_waits_for_its_successor(testbed: &Testbed) -> Result<()> {
    let mut first = server(testbed).await?;
    let mut agents = agents(&first, 2).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    visit(on_edge.address).await?;
    agents[1].process.signal(Signal::SIGSTOP)?;
    let second = alongside("a stop in the middle of a takeover", on_edge.address, async {
        let second = first.successor()?;
        first.wait_log("another server takes over").await?;
        first.process.signal(Signal::SIGTERM)?;
        let status = first.process.wait_exit(ENDS).await?;
        ensure!(status.code() == Some(0), "the first server ended with {status}");
        anyhow::Ok(second)
    })
    .await?;
    agents[1].process.signal(Signal::SIGCONT)?;
    second.wait_connected("edge-2", true, agent::START).await
}

/// Its drain is shorter than its successor's wait for an agent; and it does not know the other's programs by their names.
async fn a_server_that_waits_no_longer_leaves_the_redirect(testbed: &Testbed) -> Result<()> {
    let first = Builder::new(testbed).flag("--drain-timeout=2s").without_sys_admin();
    let mut first = first.start().await?;
    let mut agents = agents(&first, 2).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    visit(on_edge.address).await?;
    agents[1].process.signal(Signal::SIGSTOP)?;
    let second = alongside("a stop before the end of a takeover", on_edge.address, async {
        let second = first.successor()?;
        first.wait_log("another server takes over").await?;
        wait_sessions(&agents[0], 2.0).await.context("the first agent is told")?;
        first.process.signal(Signal::SIGTERM)?;
        let status = first.process.wait_exit(ENDS).await?;
        ensure!(status.code() == Some(0), "the first server ended with {status}");
        second.wait_log("the server before ended meanwhile").await?;
        anyhow::Ok(second)
    })
    .await?;
    agents[1].process.signal(Signal::SIGCONT)?;
    second.wait_connected("edge-2", true, agent::START).await
}

/// Until the agent has begun so many sessions.
async fn wait_sessions(agent: &Agent<'_>, count: f64) -> Result<()> {
    let begun = async || Ok(agent.metrics().await?.sum("postern_agent_sessions_started_total", &[]));
    let what = format!("{} to begin {count} sessions", agent.process.name());
    wait_until(&what, agent::START, begun, |begun| *begun >= count).await.map(drop)
}

async fn an_agent_is_replaced(testbed: &Testbed) -> Result<()> {
    let (server, _in_cloud) = mapped::server(testbed).await?;
    let flags = ["--drain-timeout=1m", "--connect-address=127.0.0.1:10281", MAP];
    let mut agent = Agent::enrol_with(&server, 1, &flags).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let length = 30_000_000;
    let source = target(testbed, 1, 9100, Behaviour::Source(22, length))?;
    visit(on_edge.address).await?;
    let down = async || {
        let metrics = server.metrics().await?;
        anyhow::Ok(metrics.sum("postern_redirect_verdicts_total", &[("outcome", "down")]))
    };
    let before = down().await?;
    for turn in 1..=3 {
        let epoch = session_of(&server, 0).await?["epoch"].clone();
        let mut held = hold(on_edge.address, b"before").await?;
        let mut mapped = hold_mapped(testbed).await?;
        let mut download = client::connect(source.address).await?;
        skip(&mut download, 1_000_000).await?;
        let started = Instant::now();
        let replacing = async {
            let second = agent.take_over().await?;
            figure(&format!("turn {turn}: took over after {:.1?}", started.elapsed()));
            // What the first one carries goes on.
            echo(&mut held, b"after").await.context("on the connection held")?;
            let (got, _) = client::digest(&mut download).await?;
            ensure!(got + 1_000_000 == length, "a download of {got} bytes");
            download.shutdown().await.context("closing the download")?;
            ensure!(agent.process.ended()?.is_none(), "the first agent ended with a connection open");
            for stream in [&mut held, &mut mapped] {
                echo(stream, b"still").await.context("on a connection held")?;
                stream.shutdown().await.context("closing")?;
                ensure!(end_of(stream, client::PATIENCE).await? == client::End::Eof(0), "no clean end");
            }
            let status = agent.process.wait_exit(ENDS).await?;
            ensure!(status.code() == Some(0), "the first agent ended with {status}");
            anyhow::Ok(second)
        };
        let replacing = alongside_map(testbed, replacing);
        agent = alongside("an agent's replacement", on_edge.address, replacing).await?;
        ensure!(session_of(&server, 0).await?["epoch"] != epoch, "the first agent's session is the live one");
        agent.metrics().await?.expect("postern_agent_sessions_started_total", &[], 1.0)?;
        let ready = agent.get("/readyz").await?;
        ensure!(ready.0 == 200, "/readyz of the second agent: {ready:?}");
    }
    for line in server.access_log()? {
        ensure!(line.text("outcome") == "ok", "{line:?}");
    }
    let failed = down().await? - before;
    ensure!(failed == 0.0, "{failed} connects found no tunnel");
    let status = agent.process.stop().await?;
    ensure!(status.code() == Some(0), "the last agent ended with {status}");
    ensure!(!agent.state_dir().join("takeover").exists(), "its socket is left");
    Ok(())
}

/// It had taken over: a third one starts at once, whatever the first one still carries.
async fn an_agents_successor_dies_while_the_first_one_drains(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    let mut first = Agent::enrol_with(&server, 1, &["--drain-timeout=2m"]).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let held = hold(on_edge.address, b"before").await?;
    let mut second = alongside("a takeover", on_edge.address, first.take_over()).await?;
    second.process.crash().await?;
    second.start_again()?;
    second.wait_log("attached").await?;
    server.wait_connected("edge-1", true, agent::START).await?;
    visit(on_edge.address).await?;
    finishes(&mut first.process, held, on_edge.address).await
}

async fn an_agents_successor_dies(testbed: &Testbed) -> Result<()> {
    let (server, _in_cloud) = mapped::server(testbed).await?;
    // As in a pod, which is stopped by its kubelet.
    let mut agent = Agent::enrol_with(&server, 1, &["--when-replaced=wait", MAP]).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let mut held = hold(on_edge.address, b"before").await?;
    visit_mapped(testbed).await?;
    let epoch = session_of(&server, 0).await?["epoch"].clone();

    // Half-way: it reaches no server.
    let edge = &testbed.edge(1).ns;
    let syn = "OUTPUT -p tcp --dport 10262 --syn -j DROP";
    edge.iptables(&format!("-I {syn}"))?;
    alongside("a successor that dies half-way", on_edge.address, async {
        let mut second = agent.successor()?;
        agent.wait_log("another agent takes over").await?;
        second.wait_log("taking over from the one that runs here").await?;
        for _ in 0..20 {
            visit_mapped(testbed).await?;
        }
        second.process.crash().await?;
        agent.wait_log("this agent goes on").await
    })
    .await?;
    edge.iptables(&format!("-D {syn}"))?;
    ensure!(session_of(&server, 0).await?["epoch"] == epoch, "the session is another one");
    ensure!(agent.get("/readyz").await?.0 == 200, "the first agent has lost its admin port");

    // It has taken over, and the first one waits to be stopped.
    let mut second = alongside("a takeover", on_edge.address, agent.take_over()).await?;
    echo(&mut held, b"after").await.context("on the connection held")?;
    ensure!(agent.process.ended()?.is_none(), "the first agent ended by itself");
    visit_mapped(testbed).await.context("after the takeover")?;
    let epoch = session_of(&server, 0).await?["epoch"].clone();
    second.process.crash().await?;
    let now = async || Ok(session_of(&server, 0).await?["epoch"].clone());
    let back = |now: &Value| now.is_number() && *now != epoch;
    wait_until("the first agent to be back", agent::START, now, back).await?;
    server.wait_connected("edge-1", true, agent::START).await?;
    echo(&mut held, b"still").await.context("on the connection held")?;
    visit(on_edge.address).await?;
    visit_mapped(testbed).await.context("after the second agent's death")?;

    // The next one is taken.
    let third = alongside("another takeover", on_edge.address, agent.take_over()).await?;
    drop(held);
    alongside("the first agent's end", on_edge.address, async {
        let status = agent.process.stop().await?;
        ensure!(status.code() == Some(0), "the first agent ended with {status}");
        Ok(())
    })
    .await?;
    third.metrics().await?.expect("postern_agent_sessions_started_total", &[], 1.0)
}

/// Expects that connects are refused at once, and never go to the edge's own network.
async fn expect_refused(address: SocketAddr) -> Result<Duration> {
    let start = Instant::now();
    let error = connect_error(address, Duration::from_secs(2)).await?;
    ensure!(error.kind() == ErrorKind::ConnectionRefused, "connect() to {address}: {error:?}");
    Ok(start.elapsed())
}

/// The token, with the port, of a connection to the target that is redirected now.
pub(crate) fn tokens(testbed: &Testbed, target: &Target) -> Result<String> {
    // The local address of the server's end of a redirected connection is its token.
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
    let held = hold(on_edge.address, b"before").await?;
    let token = tokens(testbed, &on_edge)?;
    drop(held);
    server.process.crash().await?;
    let took = expect_refused(on_edge.address).await?;
    figure(&format!("refused after {took:.1?} while the server is dead"));
    server.start_again().await?;
    server.wait_connected("edge-1", true, agent::START).await?;
    visit(on_edge.address).await?;
    let held = hold(on_edge.address, b"after").await?;
    ensure!(tokens(testbed, &on_edge)? == token, "the node has another token than before");
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
    // Without a server the address is direct again, which is nowhere.
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

fn bpffs(testbed: &Testbed) -> String {
    format!("--bpffs={}", testbed.bpffs().display())
}
