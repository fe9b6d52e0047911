//! Agents and strangers that mean harm, beside healthy traffic.
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rand::RngCore as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;

use super::Scenario;
use super::common::{HEALTHY, beside, expect_reset, never, server, server_and_agent, target};
use crate::agent::{self, Agent, Builder};
use crate::client::{self, connect, connect_from, echo, expect_unreachable, visit};
use crate::evil::{self, Credentials, EvilAgent, Manner};
use crate::runner::figure;
use crate::server::Server;
use crate::target::Behaviour;
use crate::testbed::{CLOUD, Testbed};
use crate::wait::{wait_for, wait_until};

pub(super) const ALL: &[Scenario] = &[
    Scenario::new("hostile::newer_session_wins_and_older_is_told", 1, |t| Box::pin(newer_session_wins(t))),
    Scenario::new("hostile::two_real_agents_of_one_node_do_not_flap", 2, |t| Box::pin(two_real_agents(t)))
        .limit(180),
    Scenario::new("hostile::certificate_of_another_node", 2, |t| Box::pin(certificate_of_another_node(t)))
        .quick(),
    Scenario::new("hostile::no_certificate", 1, |t| Box::pin(no_certificate(t))),
    Scenario::new("hostile::flood_of_events", 2, |t| Box::pin(flood_of_events(t))),
    Scenario::new("hostile::flood_of_frames", 2, |t| Box::pin(flood_of_frames(t))),
    Scenario::new("hostile::flood_in_a_carried_connection", 2, |t| Box::pin(flood_in_carry(t))),
    Scenario::new("hostile::never_greets", 2, |t| Box::pin(never_greets(t))),
    Scenario::new("hostile::target_outside_the_policy", 1, |t| Box::pin(outside_the_policy(t))),
    Scenario::new("hostile::garbage_on_every_port", 1, |t| Box::pin(garbage(t))).limit(180),
];

/// A server's memory after an attack, compared with before it.
const MEMORY: u64 = 300_000_000;

/// Enrols an agent on edge `n` and stops it, so that its certificate can be misused.
async fn stolen(server: &Server<'_>, n: usize) -> Result<Credentials> {
    let mut agent = Agent::enrol(server, n).await?;
    agent.kill().await?;
    let name = server.testbed().edge(n).name.clone();
    server.wait_connected(&name, false, client::PATIENCE).await?;
    Credentials::of_agent(&agent.state_dir())
}

async fn serve(
    server: &Server<'_>,
    from: usize,
    own: &Credentials,
    node: &str,
    epoch: u64,
    manner: Manner,
) -> Result<EvilAgent> {
    let address: SocketAddr = server.agent_address().parse()?;
    let stream = own.dial(&server.testbed().edge(from).ns, address).await?;
    Ok(EvilAgent::serve(stream, node, epoch, manner))
}

async fn wait_told(what: &str, agent: &EvilAgent, accept: impl Fn(&evil::Told) -> bool) -> Result<()> {
    wait_for(what, client::PATIENCE, async || Ok(agent.told(&accept).then_some(())))
        .await
        .with_context(|| agent.told(|told| format!("{told:?}")))
}

async fn newer_session_wins(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    let own = stolen(&server, 1).await?;
    let epoch = u64::MAX - 1000;
    let first = serve(&server, 1, &own, "edge-1", epoch, Manner::Quiet).await?;
    server.wait_connected("edge-1", true, client::PATIENCE).await?;
    let second = serve(&server, 1, &own, "edge-1", epoch + 10, Manner::Quiet).await?;
    wait_told("the older session to be told", &first, |told| told.replaced == 1).await?;
    ensure!(server.is_connected("edge-1").await?, "the newer session is not in use");
    // A session with a number in between comes too late.
    let late = serve(&server, 1, &own, "edge-1", epoch + 5, Manner::Quiet).await?;
    wait_told("the late session to be refused", &late, |told| !told.refused.is_empty()).await?;
    // The end of the old ones does not end the new one.
    drop((first, late));
    never("the loss of the newer session", Duration::from_secs(3), async || {
        Ok(!server.is_connected("edge-1").await?)
    })
    .await?;
    let address = SocketAddr::new(testbed.edge(1).ip(), 9100);
    expect_reset(address).await?;
    wait_told("the newer session to be asked to carry", &second, |told| told.carried == 1).await?;
    drop(second);
    server.wait_connected("edge-1", false, client::PATIENCE).await?;
    expect_unreachable(address).await
}

async fn two_real_agents(testbed: &Testbed) -> Result<()> {
    let (server, mut first) = server_and_agent(testbed).await?;
    let token = server.token("edge-1")?;
    let second = Builder::new(&server, 2).node("edge-1").named("second-agent").token(token).spawn()?;
    server.wait_log("a newer session replaces the live one").await?;
    let attached = |server: &Server<'_>| -> Result<usize> {
        Ok(server.process.output()?.matches("session attached").count())
    };
    let before = attached(&server)?;
    never("a change of sessions to and fro", Duration::from_secs(12), async || {
        Ok(attached(&server)? > before + 1 || !server.is_connected("edge-1").await?)
    })
    .await?;
    // When it tries again, after one to two minutes, it is refused for as long as the newer session lives.
    let refused = async || {
        Ok(server.metrics().await?.sum("postern_agent_sessions_refused_total", &[("result", "older")]))
    };
    wait_until("the older agent to be refused", Duration::from_secs(140), refused, |count| *count >= 1.0)
        .await?;
    ensure!(attached(&server)? == before, "the sessions took turns");
    ensure!(
        server.is_connected("edge-1").await?,
        "the newer session did not survive the older agent's return"
    );
    ensure!(first.process.ended()?.is_none(), "the older agent ended instead of waiting");
    let log = first.process.output()?.to_lowercase();
    ensure!(
        log.contains("replace") || log.contains("newer"),
        "the older agent's log does not say what happened"
    );
    drop(second);
    Ok(())
}

async fn certificate_of_another_node(testbed: &Testbed) -> Result<()> {
    let (server, mut agent) = server_and_agent(testbed).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let own = stolen(&server, 2).await?;
    // Beside the real agent, and in its absence.
    let liar = serve(&server, 2, &own, "edge-1", u64::MAX, Manner::Quiet).await?;
    wait_told("the liar to be refused", &liar, |told| {
        told.refused.iter().any(|reason| reason.contains("edge-2"))
    })
    .await?;
    wait_for("the liar's connection to end", client::PATIENCE, async || Ok(liar.ended().then_some(())))
        .await?;
    visit(on_edge.address).await?;
    agent.kill().await?;
    server.wait_connected("edge-1", false, client::PATIENCE).await?;
    let liar = serve(&server, 2, &own, "edge-1", u64::MAX, Manner::Quiet).await?;
    wait_told("the liar to be refused", &liar, |told| !told.refused.is_empty()).await?;
    ensure!(
        !server.is_connected("edge-1").await? && !server.is_connected("edge-2").await?,
        "the liar is attached"
    );
    expect_unreachable(on_edge.address).await?;
    let metrics = server.metrics().await?;
    metrics.expect("postern_agent_sessions_refused_total", &[("result", "impostor")], 2.0)?;
    Ok(())
}

async fn no_certificate(testbed: &Testbed) -> Result<()> {
    let (server, agent) = server_and_agent(testbed).await?;
    let address: SocketAddr = server.agent_address().parse()?;
    let ns = &testbed.edge(1).ns;
    let roots = || evil::roots(&agent.state_dir());
    // TLS 1.3 tells a client only with its first read that it is refused.
    for alpn in [b"postern/1".as_slice(), b"http/1.1", b"postern/2"] {
        let Ok(mut stream) = evil::dial(ns, address, roots()?, None, alpn).await else { continue };
        let mut bytes = Vec::new();
        let read = tokio::time::timeout(client::PATIENCE, stream.read_to_end(&mut bytes)).await;
        let read = read.with_context(|| format!("not ended, by ALPN {}", String::from_utf8_lossy(alpn)))?;
        ensure!(read.is_err() || bytes.is_empty(), "the server spoke to a stranger: {bytes:?}");
    }
    server.metrics().await?.expect("postern_tunnels", &[], 1.0)?;
    Ok(())
}

async fn flood_of_events(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let own = stolen(&server, 2).await?;
    let healthy = target(testbed, 1, HEALTHY, Behaviour::Echo)?;
    let before = server.process.resident_bytes()?;
    beside("an agent that floods events", healthy.address, async {
        let flooder = serve(&server, 2, &own, "edge-2", u64::MAX - 1, Manner::FloodsEvents).await?;
        wait_for("the flooder to be thrown out", client::PATIENCE, async || Ok(flooder.ended().then_some(())))
            .await
    })
    .await?;
    server.metrics().await?.expect("postern_agent_sessions_refused_total", &[("result", "flood")], 1.0)?;
    memory(&server, before)
}

fn memory(server: &Server<'_>, before: u64) -> Result<()> {
    let now = server.process.resident_bytes()?;
    figure(&format!("server's memory: {} MB before, {} MB after", before / 1_000_000, now / 1_000_000));
    ensure!(now < before + MEMORY, "the server's memory grew from {before} to {now} bytes");
    Ok(())
}

async fn flood_of_frames(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let own = stolen(&server, 2).await?;
    let healthy = target(testbed, 1, HEALTHY, Behaviour::Echo)?;
    let before = server.process.resident_bytes()?;
    let address: SocketAddr = server.agent_address().parse()?;
    beside("an agent that floods HTTP/2 frames", healthy.address, async {
        let stream = own.dial(&testbed.edge(2).ns, address).await?;
        let written = evil::flood_frames(stream, Duration::from_secs(5)).await?;
        figure(&format!("the flooder could write {} KB", written / 1000));
        Ok(())
    })
    .await?;
    memory(&server, before)
}

async fn flood_in_carry(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let own = stolen(&server, 2).await?;
    let healthy = target(testbed, 1, HEALTHY, Behaviour::Echo)?;
    let flooder = serve(&server, 2, &own, "edge-2", u64::MAX - 1, Manner::FloodsCarry).await?;
    server.wait_connected("edge-2", true, client::PATIENCE).await?;
    let before = server.process.resident_bytes()?;
    let mut readers = Vec::new();
    for _ in 0..20 {
        // These read nothing: what the flooder sends must stop at the windows.
        readers.push(connect((testbed.edge(2).ip(), 9100)).await?);
    }
    wait_told("20 Carry calls", &flooder, |told| told.carried == 20).await?;
    beside("an agent that floods 20 carried connections", healthy.address, async {
        tokio::time::sleep(Duration::from_secs(3)).await;
        Ok(())
    })
    .await?;
    memory(&server, before)
}

async fn never_greets(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let own = stolen(&server, 2).await?;
    let silent = serve(&server, 2, &own, "edge-2", 1, Manner::NeverGreets).await?;
    let start = Instant::now();
    wait_for("the silent agent to be thrown out", Duration::from_secs(30), async || {
        Ok(silent.ended().then_some(()))
    })
    .await?;
    figure(&format!("an agent that never greets is thrown out after {:.1?}", start.elapsed()));
    ensure!(!server.is_connected("edge-2").await?, "it is attached");
    Ok(())
}

async fn outside_the_policy(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    let allowed = format!("--allow-target={}/32:9100", testbed.edge(1).address);
    let agent = Agent::enrol_with(&server, 1, &[&allowed]).await?;
    let yes = target(testbed, 1, 9100, Behaviour::Echo)?;
    let no = target(testbed, 1, 9101, Behaviour::Echo)?;
    visit(yes.address).await?;
    expect_reset(no.address).await?;
    ensure!(no.connections() == 0, "the agent dialled a target outside its policy");
    server
        .wait_access("denied", |line| {
            line.text("outcome") == "denied" && line.text("destination") == no.address.to_string()
        })
        .await?;
    agent.metrics().await?.expect("postern_agent_dials_total", &[("outcome", "denied")], 1.0)?;
    Ok(())
}

/// Connects, sends garbage of one kind, reads what comes, until the peer ends it or two seconds are over.
async fn annoy(mut stream: tokio::net::TcpStream, kind: usize) {
    let mut bytes = vec![0; 8192];
    rand::rng().fill_bytes(&mut bytes);
    let beginning: &[u8] = match kind % 6 {
        0 => b"GET / HTTP/1.1\r\n\r\n",
        1 => b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03",
        2 => b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        3 => b"\x16\x03\x01\x00\x01",
        4 => b"",
        _ => b"\x15\x03\x03\x00\x02\x02\x28",
    };
    let talk = async {
        stream.write_all(beginning).await?;
        stream.write_all(&bytes).await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await
    };
    // However it ends is fine: what counts is the others.
    tokio::time::timeout(Duration::from_secs(2), talk).await.ok();
}

async fn garbage(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let healthy = target(testbed, 1, HEALTHY, Behaviour::Echo)?;
    let neighbour = testbed.add_neighbour()?;
    let mut held = connect(healthy.address).await?;
    echo(&mut held, b"before").await?;
    let before = server.process.resident_bytes()?;
    let sockets = testbed.cloud.output("ss", "-Hltn")?;
    let ports: Vec<u16> = sockets
        .lines()
        .filter_map(|line| line.split_whitespace().nth(3)?.rsplit_once(':')?.1.parse().ok())
        .collect();
    ensure!(ports.contains(&10262) && ports.contains(&10263), "the server listens on {ports:?}");
    beside(&format!("garbage on the ports {ports:?}"), healthy.address, async {
        let start = Instant::now();
        let mut count = 0;
        let mut strangers = JoinSet::new();
        while start.elapsed() < Duration::from_secs(8) && count < 4_000 {
            for port in &ports {
                count += 1;
                // From this host, which the admin port and the interceptor listen to as well, and from outside.
                let stream = if count % 2 == 0 {
                    let local: SocketAddr = ([127, 0, 0, 1], *port).into();
                    tokio::net::TcpStream::connect(local).await
                } else {
                    connect_from(&neighbour, (CLOUD, *port).into(), Duration::from_millis(200))
                };
                if let Ok(stream) = stream {
                    strangers.spawn(annoy(stream, count));
                }
            }
            while strangers.len() > 300 {
                strangers.join_next().await;
            }
        }
        figure(&format!("{count} strangers sent garbage"));
        strangers.join_all().await;
        Ok(())
    })
    .await?;
    echo(&mut held, b"after").await?;
    ensure!(server.get("/healthz").await?.0 == 200, "/healthz");
    server.wait_connected("edge-1", true, agent::START).await?;
    memory(&server, before)
}
