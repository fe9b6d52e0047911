//! A second agent of the same node takes over from the first.
use std::net::SocketAddr;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::agent::{self, Agent};
use postern_testbed::client::{self, echo, end_of, visit};
use postern_testbed::report::figure;
use postern_testbed::server::Server;
use postern_testbed::target::Behaviour;
use postern_testbed::wait::{wait_for, wait_until};
use serde_json::Value;
use tokio::io::AsyncWriteExt as _;

use super::ends::{ENDS, LENGTH, Open, finishes, is_refused};
use crate::common::{alongside, hold, server, session_of, target};
use crate::mapped::{self, MAP, alongside_map, hold_mapped, visit_mapped};

pub(super) async fn an_agent_is_replaced(testbed: &Testbed) -> Result<()> {
    let (server, _in_cloud) = mapped::server(testbed).await?;
    let flags = ["--drain-timeout=1m", "--connect-address=127.0.0.1:10281", MAP];
    let mut agent = Agent::enrol_with(&server, 1, &flags).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let source = target(testbed, 1, 9100, Behaviour::Source(22, LENGTH))?;
    visit(on_edge.address).await?;
    let down = async || server.metric("postern_redirect_verdicts_total", &[("outcome", "down")]).await;
    let before = down().await?;
    for turn in 1..=3 {
        let epoch = session_of(&server, 0).await?["epoch"].clone();
        let open = Open::new(hold(on_edge.address, b"before").await?, &source).await?;
        let mut mapped = hold_mapped(testbed).await?;
        let started = Instant::now();
        let replacing = async {
            let second = agent.take_over().await?;
            figure(&format!("turn {turn}: took over after {:.1?}", started.elapsed()));
            // Connections of the first agent go on.
            echo(&mut mapped, b"still").await.context("on the connection from the edge")?;
            mapped.shutdown().await.context("closing")?;
            ensure!(end_of(&mut mapped, client::PATIENCE).await? == client::End::Eof(0), "no clean end");
            open.finish(&mut agent.process).await?;
            anyhow::Ok(second)
        };
        let replacing = alongside_map(testbed, replacing);
        agent = alongside("an agent's replacement", on_edge.address, replacing).await?;
        ensure!(session_of(&server, 0).await?["epoch"] != epoch, "the first agent's session is the live one");
        agent.expect_metric("postern_agent_sessions_started_total", &[], 1.0).await?;
        let ready = agent.get("/readyz").await?;
        ensure!(ready.0 == 200, "/readyz of the second agent: {ready:?}");
    }
    server.expect_every_access(|line| line.text("outcome") == "ok").await?;
    let failed = down().await? - before;
    ensure!(failed == 0.0, "{failed} connects found no tunnel");
    let status = agent.process.stop().await?;
    ensure!(status.code() == Some(0), "the last agent ended with {status}");
    ensure!(!agent.state_dir().join("takeover").exists(), "its socket is left");
    Ok(())
}

/// Returns the number of connections of each session of edge 1 whose agent is leaving, the oldest first.
async fn leaving(server: &Server<'_>) -> Result<Vec<u64>> {
    let status = server.status().await?;
    let sessions = status["nodes"][0]["leaving"].as_array();
    let sessions = sessions.with_context(|| format!("no list `leaving` in {status}"))?;
    let connections = sessions.iter().map(|session| session["connections"].as_u64());
    connections.collect::<Option<_>>().with_context(|| format!("no number of connections in {sessions:?}"))
}

async fn wait_leaving(server: &Server<'_>, connections: &[u64]) -> Result<()> {
    let what = format!("the sessions that leave to relay {connections:?}");
    wait_until(&what, ENDS, async || leaving(server).await, |seen| *seen == connections).await?;
    server.expect_metric("postern_agent_sessions_leaving", &[], connections.len() as f64).await
}

/// As during a long `kubectl logs -f`: each agent finishes its connections, however often the next one is replaced.
pub(super) async fn agents_are_replaced_while_earlier_ones_drain(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    let mut agents = vec![Agent::enrol_with(&server, 1, &["--drain-timeout=2m"]).await?];
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(hold(on_edge.address, b"before").await?);
        let last = agents.last().context("an agent")?;
        let next = alongside("an agent's replacement", on_edge.address, last.take_over()).await?;
        agents.push(next);
        wait_leaving(&server, &vec![1; held.len()]).await?;
        for stream in &mut held {
            echo(stream, b"after").await.context("on a connection held")?;
        }
    }
    server.expect_metric("postern_tunnels", &[], 1.0).await?;

    let mut second = agents.remove(1);
    drop(held.remove(1));
    let status = second.process.wait_exit(ENDS).await?;
    ensure!(status.code() == Some(0), "the second agent ended with {status}");
    wait_leaving(&server, &[1, 1]).await?;

    // The next agent takes over from the last one, and not from the first, whose successor has ended.
    let mut fourth = agents.pop().context("the fourth agent")?;
    let mut fifth = alongside("one more replacement", on_edge.address, fourth.take_over()).await?;
    let status = fourth.process.wait_exit(ENDS).await?;
    ensure!(status.code() == Some(0), "the fourth agent ended with {status}");
    let ready = fifth.get("/readyz").await?;
    ensure!(ready.0 == 200, "/readyz of the fifth agent: {ready:?}");
    fifth.expect_metric("postern_agent_sessions_started_total", &[], 1.0).await?;
    wait_leaving(&server, &[1, 1]).await?;
    for (agent, stream) in agents.iter_mut().zip(held) {
        finishes(&mut agent.process, stream, on_edge.address).await?;
    }
    wait_leaving(&server, &[]).await?;
    server.expect_every_access(|line| line.text("outcome") == "ok").await?;
    let status = fifth.process.stop().await?;
    ensure!(status.code() == Some(0), "the last agent ended with {status}");
    ensure!(!fifth.state_dir().join("takeover").exists(), "its socket is left");
    Ok(())
}

/// The next agent has another `--forward`, and the first one still has a connection.
pub(super) async fn an_agent_leaves_no_listener_behind(testbed: &Testbed) -> Result<()> {
    let (server, _in_cloud) = mapped::server(testbed).await?;
    let former = "--forward=127.0.0.1:9091=10.70.0.1:9300";
    let mut first = Agent::enrol_with(&server, 1, &["--drain-timeout=2m", former]).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let held = hold(on_edge.address, b"before").await?;
    let _second = alongside("a takeover", on_edge.address, first.take_over_with(MAP)).await?;
    let (edge, former) = (&testbed.edge(1).ns, SocketAddr::from(([127, 0, 0, 1], 9091)));
    wait_for("connects to the former address to be refused", ENDS, async || {
        let connected = client::connect_from(edge, former, client::PATIENCE).await;
        Ok(is_refused(connected).await?.then_some(()))
    })
    .await?;
    visit_mapped(testbed).await?;
    finishes(&mut first.process, held, on_edge.address).await
}

/// The successor had taken over: a third agent starts at once, whatever connections the first one still has.
pub(super) async fn an_agents_successor_dies_while_the_first_one_drains(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    let mut first = Agent::enrol_with(&server, 1, &["--drain-timeout=2m"]).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let held = hold(on_edge.address, b"before").await?;
    let mut second = alongside("a takeover", on_edge.address, first.take_over()).await?;
    second.crash(&server).await?;
    second.return_to(&server).await?;
    visit(on_edge.address).await?;
    finishes(&mut first.process, held, on_edge.address).await
}

pub(super) async fn an_agents_successor_dies(testbed: &Testbed) -> Result<()> {
    let (server, _in_cloud) = mapped::server(testbed).await?;
    // As in a pod, which is stopped by its kubelet.
    let mut agent = Agent::enrol_with(&server, 1, &["--when-replaced=wait", MAP]).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let mut held = hold(on_edge.address, b"before").await?;
    visit_mapped(testbed).await?;
    let epoch = session_of(&server, 0).await?["epoch"].clone();

    // Half-way: the successor reaches no server.
    let edge = &testbed.edge(1).ns;
    let syn = "OUTPUT -p tcp --dport 10262 --syn -j DROP";
    edge.iptables(&format!("-I {syn}"))?;
    alongside("a successor that dies half-way", on_edge.address, async {
        let mut second = agent.successor()?;
        agent.wait_log("another agent takes over").await?;
        second.wait_log("taking over from the running process").await?;
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

    // The second agent has taken over, and the first one waits to be stopped.
    let mut second = alongside("a takeover", on_edge.address, agent.take_over()).await?;
    echo(&mut held, b"after").await.context("on the connection held")?;
    ensure!(agent.process.ended()?.is_none(), "the first agent ended by itself");
    visit_mapped(testbed).await.context("after the takeover")?;
    let epoch = session_of(&server, 0).await?["epoch"].clone();
    second.process.crash().await?;
    let now = async || Ok(session_of(&server, 0).await?["epoch"].clone());
    let back = |now: &Value| *now != epoch;
    wait_until("the first agent to be back", agent::START, now, back).await?;
    server.wait_connected("edge-1", true, agent::START).await?;
    echo(&mut held, b"still").await.context("on the connection held")?;
    visit(on_edge.address).await?;
    visit_mapped(testbed).await.context("after the second agent's death")?;

    // The next successor is accepted.
    let third = alongside("another takeover", on_edge.address, agent.take_over()).await?;
    drop(held);
    alongside("the first agent's end", on_edge.address, async {
        let status = agent.process.stop().await?;
        ensure!(status.code() == Some(0), "the first agent ended with {status}");
        Ok(())
    })
    .await?;
    third.expect_metric("postern_agent_sessions_started_total", &[], 1.0).await
}
