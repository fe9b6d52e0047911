//! Connections to a node whose agent is attached only to another server.
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use postern_testbed::access_log::AccessLine;
use postern_testbed::agent::{self, Agent};
use postern_testbed::client::{self, expect_unreachable, visit};
use postern_testbed::load_target::{SOURCE, Target as LoadTarget};
use postern_testbed::netns::Namespace;
use postern_testbed::report::figure;
use postern_testbed::server::{self, Builder, Server};
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, NEIGHBOUR, Testbed};
use tokio::io::AsyncWriteExt as _;

use crate::common::{HEALTHY, THIRD, alongside, expect_reset, hold, pause, skip, stalled_readers, target};
use crate::path;

scenarios! {
    every_end_is_forwarded(quick),
    a_dial_times_out_behind_another_server,
    bytes_are_forwarded_beside_stalled_readers(limit = 180),
    a_server_that_goes_takes_its_nodes_along(limit = 180),
    a_node_is_lost_and_comes_back,
    a_server_goes_silent(limit = 180),
    a_holder_that_does_not_answer_is_passed_by(limit = 180),
    a_holder_that_does_not_hear_the_agent_is_passed_by(limit = 180),
    a_server_is_replaced(limit = 180),
    a_successor_waits_for_what_the_other_servers_have(limit = 180),
}

/// Time limit for a change at one server to take effect at the other.
const TOLD: Duration = Duration::from_secs(10);

/// Time limit for noticing a peer that hears nothing any more, and its return: PING's time plus pauses between
/// attempts.
const SILENT: Duration = Duration::from_secs(45);

/// Time limit for giving up a link with a server to which nothing gets through, whether or not that one is heard: 2.5 s of
/// silence, looked for every 0.5 s after the kernel's first question or retransmission. A PING would take 22 s.
const GIVEN_UP: Duration = Duration::from_secs(10);

/// Minimum time for which a server waits for a peer's answer before it asks another one.
const UNANSWERED: Duration = Duration::from_secs(1);

/// Time limit for a server to end once another one has taken over.
const ENDS: Duration = Duration::from_secs(20);

/// Two servers: the first one redirects and has no agent; the second one has the agent.
struct Pair<'a> {
    first: Server<'a>,
    second: Server<'a>,
    agent: Agent<'a>,
}

impl<'a> Pair<'a> {
    async fn start(testbed: &'a Testbed, neighbour: &'a Namespace) -> Result<Self> {
        Self::join(Self::first(testbed).await?, neighbour).await
    }

    /// Starts the first server, whose dials of the second one fail until that exists.
    async fn first(testbed: &'a Testbed) -> Result<Server<'a>> {
        Builder::new(testbed).flag(format!("--peers={NEIGHBOUR}:10262")).start().await
    }

    async fn join(first: Server<'a>, neighbour: &'a Namespace) -> Result<Self> {
        let second = Builder::on_neighbour(&first, neighbour)?;
        // The list may include its own address.
        let second = second.flag(format!("--peers={CLOUD}:10262,{NEIGHBOUR}:10262")).start().await?;
        let agent = Agent::enrol(&second, 1).await?;
        let pair = Self { first, second, agent };
        pair.wait_told(true).await?;
        Ok(pair)
    }

    fn servers(&self) -> [&Server<'a>; 2] {
        [&self.first, &self.second]
    }

    /// Waits until the first server knows that the second has the node, or no longer has it.
    async fn wait_told(&self, has: bool) -> Result<()> {
        self.wait_told_within(TOLD, has).await
    }

    async fn wait_told_within(&self, limit: Duration, has: bool) -> Result<()> {
        let what =
            format!("the first server to know that the other {} the node", if has { "has" } else { "lost" });
        let via = async || self.first.holders().await;
        wait_until(&what, limit, via, |servers| servers.len() == usize::from(has)).await?;
        if has { self.first.session_began("edge-1").await } else { Ok(()) }
    }
}

async fn every_end_is_forwarded(testbed: &Testbed) -> Result<()> {
    let neighbour = testbed.add_neighbour()?;
    let pair = Pair::start(testbed, &neighbour).await?;
    path::half_closes(testbed).await.context("half-closes")?;
    path::target_speaks_first(testbed).await.context("a target that speaks first")?;
    path::refused(testbed, &pair.first, &pair.agent).await.context("refused")?;
    path::resets(testbed, &pair.first).await.context("resets")?;
    path::small_writes(testbed).await.context("small writes")?;

    ensure!(!pair.first.is_connected("edge-1").await?, "the agent is attached to the first server as well");
    let clients = pair.first.settled_access_log().await?;
    ensure!(!clients.is_empty(), "no connection at the first server");
    for line in &clients {
        ensure!(!line.text("via").is_empty(), "not by the other server: {line:?}");
        let same = |other: &AccessLine| {
            // A client's port may come again with another destination.
            ["client", "destination"].iter().all(|of| other.text(of) == line.text(of))
                && other.text("listener") == "peer"
        };
        // Each server writes its own line, in either order.
        let what = format!("the second server's of {line:?}");
        let other = pair.second.wait_access(&what, same).await?;
        ensure!(other.text("outcome") == line.text("outcome"), "{line:?}, and at the other server {other:?}");
    }
    let status = server::run(testbed, &["status"])?;
    let status = String::from_utf8_lossy(&status.stdout);
    ensure!(
        status.contains("1 nodes") && status.contains("1 of 1 connected: 0 here, 1 elsewhere"),
        "the first server's status:\n{status}"
    );
    Ok(())
}

/// The agent gives up within the time that the first server allowed, and both log it.
async fn a_dial_times_out_behind_another_server(testbed: &Testbed) -> Result<()> {
    let neighbour = testbed.add_neighbour()?;
    let pair = Pair::start(testbed, &neighbour).await?;
    testbed.black_hole(1, 9105)?;
    let hole = SocketAddr::new(testbed.edge(1).ip(), 9105);
    let on_edge = target(testbed, 1, 9100, Behaviour::Echo)?;
    alongside("a black-holed dial", on_edge.address, expect_reset(hole)).await?;
    let timed_out = |line: &AccessLine| {
        line.text("outcome") == "timed_out" && line.text("destination") == hole.to_string()
    };
    let line = pair.first.wait_access("timed out", timed_out).await?;
    ensure!(
        line.text("listener") == "redirect" && !line.text("via").is_empty(),
        "at the first server: {line:?}"
    );
    let line = pair.second.wait_access("timed out", timed_out).await?;
    ensure!(line.text("listener") == "peer", "at the second server: {line:?}");
    // The agent gave up itself: no server lost patience with it.
    pair.agent.expect_metric("postern_agent_dials_total", &[("outcome", "timed_out")], 1.0).await
}

async fn bytes_are_forwarded_beside_stalled_readers(testbed: &Testbed) -> Result<()> {
    const BYTES: usize = 4 << 20;
    const WHOLE: usize = 64 << 20;
    let neighbour = testbed.add_neighbour()?;
    let pair = Pair::start(testbed, &neighbour).await?;
    let load = LoadTarget::start(testbed, 1).await?;
    let healthy = target(testbed, 1, HEALTHY, Behaviour::Echo)?;
    let before = pair.servers().map(|server| server.process.resident_bytes());
    let [Ok(first), Ok(second)] = before else { anyhow::bail!("resident memory: {before:?}") };
    let before = [first, second];
    let stalled = stalled_readers(&load, 40, BYTES).await?;
    alongside("40 stalled readers of another server's node", healthy.address, async {
        let mut stream = client::connect(load.at(SOURCE)).await?;
        stream.write_u64(WHOLE as u64).await.context("asking for bytes")?;
        skip(&mut stream, WHOLE).await
    })
    .await?;
    for (server, before) in pair.servers().into_iter().zip(before) {
        let after = server.process.resident_bytes()?;
        figure(&format!("{}: {before} bytes resident, then {after}", server.process.name()));
        // Each server may hold one window per reader.
        ensure!(after < before + (200 << 20), "{} holds {after} bytes", server.process.name());
    }
    // A reader that resumes gets every byte.
    for mut stream in stalled {
        skip(&mut stream, BYTES).await.context("a reader that had stalled")?;
    }
    Ok(())
}

async fn a_server_that_goes_takes_its_nodes_along(testbed: &Testbed) -> Result<()> {
    let neighbour = testbed.add_neighbour()?;
    let mut pair = Pair::start(testbed, &neighbour).await?;
    let on_edge = target(testbed, 1, 9100, Behaviour::Echo)?;
    let mut held = hold(on_edge.address, b"through both").await?;
    pair.second.process.crash().await?;
    let end = client::end_of(&mut held, client::PATIENCE).await?;
    ensure!(end == client::End::Reset, "the connection ended with {end:?}");
    pair.wait_told(false).await?;
    expect_unreachable((testbed.edge(1).address, 9100)).await?;
    pair.second.start_again().await?;
    pair.second.wait_connected("edge-1", true, agent::START).await?;
    pair.wait_told(true).await?;
    visit(SocketAddr::new(testbed.edge(1).ip(), 9100)).await.map(drop)
}

async fn a_node_is_lost_and_comes_back(testbed: &Testbed) -> Result<()> {
    let neighbour = testbed.add_neighbour()?;
    let mut pair = Pair::start(testbed, &neighbour).await?;
    let on_edge = target(testbed, 1, 9100, Behaviour::Echo)?;
    visit(on_edge.address).await?;
    pair.agent.crash(&pair.second).await?;
    pair.wait_told(false).await?;
    expect_unreachable((testbed.edge(1).address, 9100)).await?;
    pair.agent.return_to(&pair.second).await?;
    pair.wait_told(true).await?;
    visit(on_edge.address).await.map(drop)
}

/// Half-open: the second server sends, but hears nothing of the first. Neither gets an error from its kernel.
async fn a_server_goes_silent(testbed: &Testbed) -> Result<()> {
    let neighbour = testbed.add_neighbour()?;
    let pair = Pair::start(testbed, &neighbour).await?;
    let on_edge = target(testbed, 1, 9100, Behaviour::Echo)?;
    let mut held = hold(on_edge.address, b"through both").await?;
    let deaf = format!("INPUT -s {CLOUD} -j DROP");
    neighbour.iptables(&format!("-I {deaf}"))?;
    let start = Instant::now();
    pair.wait_told_within(GIVEN_UP, false).await?;
    figure(&format!("a silent server is given up after {:.1?}", start.elapsed()));
    let end = client::end_of(&mut held, SILENT).await?;
    ensure!(end == client::End::Reset, "the connection ended with {end:?}");
    expect_unreachable((testbed.edge(1).address, 9100)).await?;
    // The second server keeps its agent all the while.
    ensure!(pair.second.is_connected("edge-1").await?, "the second server has lost its agent");
    neighbour.iptables(&format!("-D {deaf}"))?;
    pair.wait_told_within(SILENT, true).await?;
    visit(on_edge.address).await.map(drop)
}

/// The first server has no agent; the agent is attached to the two others, and a connection was forwarded to one of
/// them.
struct Holders<'a> {
    first: Server<'a>,
    /// The server that forwarded that connection and will be asked first again.
    asked: Server<'a>,
    asked_at: Ipv4Addr,
    /// Server ID of the other one.
    other: String,
    _other: Server<'a>,
    _agent: Agent<'a>,
    on_edge: Target,
}

impl<'a> Holders<'a> {
    async fn start(testbed: &'a Testbed, [neighbour, host]: &'a [Namespace; 2]) -> Result<Self> {
        let all = format!("--peers={CLOUD}:10262,{NEIGHBOUR}:10262,{THIRD}:10262");
        let first = Builder::new(testbed).flag(all.as_str()).start().await?;
        let second = Builder::on_neighbour(&first, neighbour)?.flag(all.as_str()).start().await?;
        let third = Builder::on_host(&first, host, THIRD, "third")?.flag(all.as_str()).start().await?;
        let to_third = format!("--server={}", third.agent_address());
        let agent = Agent::enrol_with(&second, 1, &[to_third.as_str()]).await?;
        third.wait_connected("edge-1", true, agent::START).await?;
        let known = async || first.holders().await;
        let ids = wait_until("the first server to know both", TOLD, known, |ids| ids.len() == 2).await?;
        first.session_began("edge-1").await?;

        let on_edge = target(testbed, 1, 9100, Behaviour::Echo)?;
        visit(on_edge.address).await?;
        let line = first.wait_access("of the first visit", |line| line.text("outcome") == "ok").await?;
        let asked = line.text("via");
        let other = ids.into_iter().find(|id| *id != asked).context("two servers with one name")?;
        // With equal load, the same server is asked first again.
        let relayed = async || {
            let peers = first.peers().await?;
            Ok(peers.iter().filter_map(|peer| peer["connections"].as_u64()).sum::<u64>())
        };
        wait_until("the first visit to be over", TOLD, relayed, |connections| *connections == 0).await?;
        let third_asked = third.id().await? == asked;
        let (asked, _other, asked_at) =
            if third_asked { (third, second, THIRD) } else { (second, third, NEIGHBOUR) };
        Ok(Self { first, asked, asked_at, other, _other, _agent: agent, on_edge })
    }

    /// Waits until the first server has `count` lines. The other server must have forwarded all connections after the
    /// first `before`.
    async fn relayed_by_other(&self, count: usize, before: usize) -> Result<()> {
        let lines = async || self.first.access_log();
        let lines = wait_until("a line of each visit", TOLD, lines, |lines| lines.len() == count).await?;
        for line in &lines[before..] {
            let other = line.text("outcome") == "ok" && line.text("via") == self.other;
            ensure!(other, "not by {}: {line:?}", self.other);
        }
        Ok(())
    }
}

/// The server that is asked first is frozen: its kernel still answers, so the first server keeps its link. It is asked
/// once, and then the other one.
async fn a_holder_that_does_not_answer_is_passed_by(testbed: &Testbed) -> Result<()> {
    let hosts = [testbed.add_neighbour()?, testbed.add_to_cloud_lan("third", THIRD)?];
    let mut servers = Holders::start(testbed, &hosts).await?;
    let address = servers.on_edge.address;
    servers.asked.process.freeze().await?;
    // The frozen one does not answer, so the first server waits for the whole time.
    let took = visit(address).await.context("while one of two does not answer")?;
    ensure!(took >= UNANSWERED, "after {took:?}: the frozen server was not asked");
    let mut later = Vec::new();
    for _ in 0..5 {
        later.push(visit(address).await.context("while one of two has not answered")?);
    }
    figure(&format!("visits while the server that is asked first is frozen: {took:.1?}, then {later:.1?}"));
    // A visit that asks the frozen server takes longer; a single one may have waited for a processor.
    later.sort();
    ensure!(later[2] < UNANSWERED, "the frozen server was asked again: {later:?}");
    servers.relayed_by_other(7, 1).await?;
    servers.asked.process.signal(Signal::SIGCONT)?;
    visit(address).await.context("once it answers again").map(drop)
}

/// The line between the agent and the server that is asked first is down, and no kernel reports it.
async fn a_holder_that_does_not_hear_the_agent_is_passed_by(testbed: &Testbed) -> Result<()> {
    let hosts = [testbed.add_neighbour()?, testbed.add_to_cloud_lan("third", THIRD)?];
    let servers = Holders::start(testbed, &hosts).await?;
    let (address, at) = (servers.on_edge.address, servers.asked_at);
    for rule in [format!("FORWARD -i edge+ -d {at} -j DROP"), format!("FORWARD -o edge+ -s {at} -j DROP")] {
        testbed.router.iptables(&format!("-I {rule}"))?;
    }
    // One connection has to fail before the server notices.
    ensure!(visit(address).await.is_err(), "a line that is out has relayed a connection");
    let silent = |line: &AccessLine| line.text("error").contains("has been silent for");
    servers.asked.wait_access("by the silent link", silent).await?;
    for _ in 0..5 {
        visit(address).await.context("while the other one has the node")?;
    }
    servers.relayed_by_other(7, 2).await
}

/// The server with the agent is replaced, after the other server's dials to it had failed for a while before its start.
async fn a_server_is_replaced(testbed: &Testbed) -> Result<()> {
    let neighbour = testbed.add_neighbour()?;
    let first = Pair::first(testbed).await?;
    // Until the pauses between its attempts have reached their maximum.
    pause(8).await?;
    let mut pair = Pair::join(first, &neighbour).await?;
    let on_edge = target(testbed, 1, 9100, Behaviour::Echo)?;
    visit(on_edge.address).await?;
    let third = alongside("a takeover elsewhere", on_edge.address, async {
        let third = pair.second.take_over().await?;
        let status = pair.second.process.wait_exit(ENDS).await?;
        ensure!(status.code() == Some(0), "the second server ended with {status}");
        pause(1).await?;
        anyhow::Ok(third)
    })
    .await?;
    ensure!(third.is_connected("edge-1").await?, "the agent is not attached to the third server");
    pair.wait_told(true).await?;
    pair.first.expect_every_access(|line| line.text("outcome") == "ok" && !line.text("via").is_empty()).await
}

/// The successor has no agent to wait for, and reaches the server that has one only after a while.
async fn a_successor_waits_for_what_the_other_servers_have(testbed: &Testbed) -> Result<()> {
    let neighbour = testbed.add_neighbour()?;
    let pair = Pair::start(testbed, &neighbour).await?;
    let on_edge = target(testbed, 1, 9100, Behaviour::Echo)?;
    visit(on_edge.address).await?;
    let syn = "INPUT -p tcp --dport 10262 --syn -j DROP";
    neighbour.iptables(&format!("-I {syn}"))?;
    let third = alongside("a takeover without the other server", on_edge.address, async {
        let reached_again = async {
            pause(3).await?;
            neighbour.iptables(&format!("-D {syn}"))
        };
        let (third, ()) = tokio::try_join!(pair.first.take_over(), reached_again)?;
        pause(1).await?;
        anyhow::Ok(third)
    })
    .await?;
    for server in [&pair.first, &third] {
        server
            .expect_every_access(|line| line.text("outcome") == "ok" && !line.text("via").is_empty())
            .await?;
    }
    let log = third.settled_log().await?;
    ensure!(!log.contains("nodes of other servers not found"), "the third server did not wait");
    Ok(())
}
