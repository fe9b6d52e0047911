//! One agent with two servers, or with one that it finds by name.
use std::cell::Cell;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use postern_testbed::agent::{self, Agent};
use postern_testbed::client::{self, connect_from, echo, end_of, visit};
use postern_testbed::netns::Namespace;
use postern_testbed::report::progress;
use postern_testbed::server::{Builder, Server};
use postern_testbed::target::Behaviour;
use postern_testbed::wait::{wait_for, wait_until};
use postern_testbed::{CLOUD, NEIGHBOUR, Testbed};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::common::{Mounted, alongside, hold, pause, server, target};
use crate::https::{KUBELET, client_hello, expect_back};

scenarios! {
    one_of_two_is_killed(limit = 180, quick),
    two_that_do_not_reach_each_other(limit = 180),
    one_that_does_not_hear_its_agent_forwards_connections(limit = 180),
    a_silent_one_is_passed_by(waits, limit = 180),
    one_whose_successor_died_is_linked_once(limit = 180),
    a_name_is_resolved_anew_and_all_its_addresses_are_tried,
}

/// Time limit for servers to notice that they cannot reach each other, or can again.
const APART: Duration = Duration::from_secs(45);
/// Time limit for an agent to drop a session that it no longer needs.
const SETTLED: Duration = Duration::from_secs(30);
/// Silence that a session survives for certain: it ends after 12 s.
const SURVIVED: Duration = Duration::from_secs(10);

/// Opens a connection through the https listener of the second server.
pub(crate) async fn through_second(neighbour: &Namespace) -> Result<TcpStream> {
    let listener = SocketAddr::new(NEIGHBOUR.into(), 10263);
    let mut stream =
        connect_from(neighbour, listener, client::PATIENCE).await.context("the second server's listener")?;
    let hello = client_hello("edge-1")?;
    stream.write_all(&hello).await?;
    expect_back(&mut stream, &hello).await?;
    Ok(stream)
}

async fn one_of_two_is_killed(testbed: &Testbed) -> Result<()> {
    let mut first = server(testbed).await?;
    let neighbour = testbed.add_neighbour()?;
    let second = Builder::on_neighbour(&first, &neighbour)?.start().await?;
    let both = format!("--server={}", second.agent_address());
    let agent = Agent::enrol_with(&first, 1, &[&both]).await?;
    second.wait_connected("edge-1", true, agent::START).await?;
    agent.expect_metric("postern_agent_sessions_started_total", &[], 2.0).await?;

    let on_edge = target(testbed, 1, KUBELET, Behaviour::Echo)?;
    let mut by_first = hold(on_edge.address, b"through the first").await?;
    let mut by_second = through_second(&neighbour).await?;
    for (server, listener) in [(&first, "redirect"), (&second, "https")] {
        server.expect_metric("postern_connections_active", &[("listener", listener)], 1.0).await?;
    }

    // Connections through the second server are not affected.
    let killed = Cell::new(false);
    let kill = async {
        first.process.crash().await?;
        let end = end_of(&mut by_first, client::PATIENCE).await?;
        ensure!(end == client::End::Reset, "the connection through the killed server ended with {end:?}");
        // Longer than the agent's retry interval.
        pause(5).await?;
        killed.set(true);
        anyhow::Ok(())
    };
    let go_on = async {
        while !killed.get() {
            echo(&mut by_second, b"through the second").await.context("on an open connection")?;
            through_second(&neighbour).await.context("on a new connection")?;
            ensure!(second.is_connected("edge-1").await?, "the second server has lost its agent");
        }
        Ok(())
    };
    tokio::try_join!(kill, go_on)?;
    agent.expect_metric("postern_agent_sessions_started_total", &[], 2.0).await?;
    second.expect_every_access(|line| line.text("outcome") == "ok").await?;

    first.start_again().await?;
    let back = first.wait_connected("edge-1", true, agent::START);
    back.await.context("the agent comes back to the first")?;
    alongside("two servers", on_edge.address, async {
        echo(&mut by_second, b"still through the second").await
    })
    .await
}

/// Starts two servers that are linked: one with a redirect here, one on the neighbour.
async fn linked<'a>(testbed: &'a Testbed, neighbour: &'a Namespace) -> Result<(Server<'a>, Server<'a>)> {
    let first = Builder::new(testbed).flag(format!("--peers={NEIGHBOUR}:10262")).start().await?;
    let second = Builder::on_neighbour(&first, neighbour)?;
    let second = second.flag(format!("--peers={CLOUD}:10262")).start().await?;
    Ok((first, second))
}

async fn wait_peers(servers: [&Server<'_>; 2], count: usize) -> Result<()> {
    for server in servers {
        let what = format!("{} to have {count} peers", server.process.name());
        wait_until(&what, APART, async || server.peers().await, |peers| peers.len() == count).await?;
    }
    Ok(())
}

/// The agent reaches both: no connection is lost.
async fn two_that_do_not_reach_each_other(testbed: &Testbed) -> Result<()> {
    let neighbour = testbed.add_neighbour()?;
    let (first, second) = linked(testbed, &neighbour).await?;
    let agent = Agent::enrol_with(&first, 1, &[&format!("--server={}", second.agent_address())]).await?;
    second.wait_connected("edge-1", true, agent::START).await?;
    wait_peers([&first, &second], 1).await?;

    let on_edge = target(testbed, 1, KUBELET, Behaviour::Echo)?;
    let mut by_first = hold(on_edge.address, b"through the first").await?;
    let mut by_second = through_second(&neighbour).await?;
    let deaf = [(&testbed.cloud, NEIGHBOUR), (&neighbour, CLOUD)];
    for (host, other) in deaf {
        host.iptables(&format!("-I INPUT -s {other} -j DROP"))?;
    }
    alongside("two servers that are apart", on_edge.address, async {
        wait_peers([&first, &second], 0).await?;
        through_second(&neighbour).await.map(drop)
    })
    .await?;
    for (host, other) in deaf {
        host.iptables(&format!("-D INPUT -s {other} -j DROP"))?;
    }
    wait_peers([&first, &second], 1).await?;
    echo(&mut by_first, b"still through the first").await?;
    echo(&mut by_second, b"still through the second").await?;
    for server in [&first, &second] {
        server
            .expect_every_access(|line| line.text("outcome") == "ok" && line.text("via").is_empty())
            .await?;
    }
    agent.expect_metric("postern_agent_sessions_started_total", &[], 2.0).await
}

/// An agent limited to one session opens another while its server is silent, and returns to the first without a new
/// session.
async fn a_silent_one_is_passed_by(testbed: &Testbed) -> Result<()> {
    let neighbour = testbed.add_neighbour()?;
    let (first, second) = linked(testbed, &neighbour).await?;
    // By the hash of the node's name and the addresses, edge-1 prefers the second server.
    let both = format!("--server={}", first.agent_address());
    let agent = Agent::enrol_with(&second, 1, &[&both, "--max-servers=1"]).await?;
    ensure!(!first.is_connected("edge-1").await?, "the agent has a second session");
    let on_edge = target(testbed, 1, 9100, Behaviour::Echo)?;
    alongside("a session with the other server", on_edge.address, pause(1)).await?;

    let rules = ["INPUT -p tcp --dport 10262 -j DROP", "OUTPUT -p tcp --sport 10262 -j DROP"];
    let silent = Instant::now();
    rules.iter().try_for_each(|rule| neighbour.iptables(&format!("-I {rule}")))?;
    first.wait_connected("edge-1", true, client::PATIENCE).await.context("another takes its place")?;
    visit(on_edge.address).await?;
    rules.iter().try_for_each(|rule| neighbour.iptables(&format!("-D {rule}")))?;
    let silent = silent.elapsed();
    first.wait_connected("edge-1", false, agent::START + SETTLED).await.context("its substitute is left")?;
    ensure!(second.is_connected("edge-1").await?, "the second server has lost its agent");
    if silent < SURVIVED {
        agent.expect_metric("postern_agent_sessions_started_total", &[], 2.0).await?;
    } else {
        progress(&format!("silent for {silent:.1?}: the agent may have begun a third session"));
    }
    alongside("the session that was silent", on_edge.address, pause(1)).await
}

/// The agent is attached to both. The line between it and the first server is down for a while, and no kernel reports
/// it.
async fn one_that_does_not_hear_its_agent_forwards_connections(testbed: &Testbed) -> Result<()> {
    let neighbour = testbed.add_neighbour()?;
    let (first, second) = linked(testbed, &neighbour).await?;
    let _agent = Agent::enrol_with(&first, 1, &[&format!("--server={}", second.agent_address())]).await?;
    second.wait_connected("edge-1", true, agent::START).await?;
    let known = async || first.holders().await;
    wait_until("the first server to know that the second has the node", APART, known, |via| via.len() == 1)
        .await?;
    let on_edge = target(testbed, 1, KUBELET, Behaviour::Echo)?;
    visit(on_edge.address).await?;

    let rules =
        [format!("FORWARD -i edge+ -d {CLOUD} -j DROP"), format!("FORWARD -o edge+ -s {CLOUD} -j DROP")];
    rules.iter().try_for_each(|rule| testbed.router.iptables(&format!("-I {rule}")))?;
    // One connection has to fail before the server notices.
    ensure!(visit(on_edge.address).await.is_err(), "a line that is out has relayed a connection");
    first
        .wait_access("by the silent link", |line| line.text("error").contains("has been silent for"))
        .await?;
    for _ in 0..10 {
        visit(on_edge.address).await.context("while the second server has the node")?;
    }
    let forwarded = async || {
        let lines = first.access_log()?;
        Ok(lines.iter().filter(|line| line.text("outcome") == "ok" && !line.text("via").is_empty()).count())
    };
    wait_until("a line of each connection that was forwarded", APART, forwarded, |lines| *lines == 10)
        .await?;

    rules.iter().try_for_each(|rule| testbed.router.iptables(&format!("-D {rule}")))?;
    wait_for("the first server to use its own session again", APART, async || {
        visit(on_edge.address).await.context("once the line is back")?;
        let lines = first.access_log()?;
        Ok(lines.last().is_some_and(|line| line.text("via").is_empty()).then_some(()))
    })
    .await
}

/// The peer was told that the server stops, and has dialled its address again.
async fn one_whose_successor_died_is_linked_once(testbed: &Testbed) -> Result<()> {
    let neighbour = testbed.add_neighbour()?;
    let (first, second) = linked(testbed, &neighbour).await?;
    let mut agent = Agent::enrol(&first, 1).await?;
    wait_peers([&first, &second], 1).await?;
    // The successor waits for the agent.
    agent.process.freeze().await?;
    let mut successor = first.successor()?;
    first.wait_log("successor connected").await?;
    let told = async || Ok(second.peers().await?.iter().any(|peer| peer["draining"] == true));
    wait_until("the second server to be told", APART, told, |told| *told).await?;
    successor.process.crash().await?;
    first.wait_log("resuming service").await?;
    agent.process.signal(Signal::SIGCONT)?;
    wait_peers([&first, &second], 1).await?;
    wait_until("none that stops", APART, told, |told| !told).await.map(drop)
}

const NAME: &str = "tunnel.postern.test";

/// Returns the content of a hosts file.
fn hosts(addresses: &[Ipv4Addr]) -> String {
    addresses.iter().map(|address| format!("{address} {NAME}\n")).collect()
}

async fn a_name_is_resolved_anew_and_all_its_addresses_are_tried(testbed: &Testbed) -> Result<()> {
    let (silent, later) = (Ipv4Addr::new(10, 70, 0, 7), Ipv4Addr::new(10, 70, 0, 8));
    testbed.router.iptables(&format!("-I FORWARD -d {silent} -j DROP"))?;
    let mounted = Mounted::over(testbed, Path::new("/etc/hosts"), &hosts(&[silent, CLOUD])).await?;
    let mut server = server(testbed).await?;
    let _agent = agent::Builder::alone(testbed, 1)
        .flag(format!("--server={NAME}:10262"))
        .mounts_of(mounted.keeper.pid())
        .enrol(&server)
        .await?;
    let on_edge = target(testbed, 1, 9100, Behaviour::Echo)?;
    visit(on_edge.address).await?;

    // The server comes back at another address. The name has it before the agent dials again: a SYN to the old one would wait.
    testbed.cloud.ip(&format!("addr add {later}/24 dev eth0"))?;
    mounted.write(&hosts(&[silent, later]))?;
    testbed.router.iptables(&format!("-I FORWARD -i edge+ -d {CLOUD} -p tcp -j DROP"))?;
    server.process.crash().await?;
    server.start_again().await?;
    let moved = server.wait_connected("edge-1", true, agent::START + SETTLED);
    moved.await.context("the agent finds the other address")?;
    visit(on_edge.address).await.map(drop)
}
