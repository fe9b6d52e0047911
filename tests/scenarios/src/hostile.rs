//! Hostile agents and clients alongside healthy traffic.
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::{self, Agent, Builder};
use postern_testbed::client::{self, connect, connect_from, echo, expect_unreachable, visit};
use postern_testbed::report::figure;
use postern_testbed::server::Server;
use postern_testbed::target::Behaviour;
use postern_testbed::tls;
use postern_testbed::wait::{wait_for, wait_until};
use postern_testbed::{CLOUD, Testbed};
use rand::RngCore as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;

use crate::common::{
    HEALTHY, alongside, expect_reset, hold, never, pause, refusals_counted, server, server_and_agent,
    session_of, target,
};
use crate::hostile_frames::{self, Flood, Role};
use crate::hostile_peer::{self, Behaviour as Hostility, Credentials, HostileAgent, Observed};

scenarios! {
    newer_session_wins_and_older_is_notified,
    two_real_agents_of_one_node_do_not_flap(edges = 2, waits, limit = 180),
    additional_links_that_nobody_asked_for,
    certificate_of_another_node(edges = 2, quick),
    no_certificate,
    agents_do_not_pose_as_servers,
    flood_of_events(edges = 2),
    flood_of_frames(edges = 2, limit = 240),
    flood_in_a_relayed_connection(edges = 2),
    agent_without_hello(edges = 2),
    target_outside_the_policy,
    garbage_on_every_port(limit = 180),
}

const AGENTS: u16 = 10262;
const HTTPS: u16 = 10263;
const HTTP: u16 = 10264;
const ADMIN: u16 = 10265;

const HERE: &str = "from this host";
const OUTSIDE: &str = "from another host";

/// Maximum growth of a server's memory during an attack, in bytes.
const MEMORY: u64 = 300_000_000;
/// Maximum growth of its peak memory during one flood of frames, in bytes.
const FLOOD_MEMORY: u64 = 20_000_000;

/// Enrols an agent on edge `n` and stops it, so that its certificate can be misused.
async fn stolen(server: &Server<'_>, n: usize) -> Result<Credentials> {
    let mut agent = Agent::enrol(server, n).await?;
    agent.crash(server).await?;
    Credentials::of_agent(&agent.state_dir())
}

async fn serve(
    server: &Server<'_>,
    from: usize,
    own: &Credentials,
    node: &str,
    epoch: u64,
    hostility: Hostility,
) -> Result<HostileAgent> {
    serve_link(server, from, own, node, (epoch, 0), hostility).await
}

/// As [`serve`], as an additional link of a session.
async fn serve_link(
    server: &Server<'_>,
    from: usize,
    own: &Credentials,
    node: &str,
    (epoch, link): (u64, u32),
    hostility: Hostility,
) -> Result<HostileAgent> {
    let address: SocketAddr = server.agent_address().parse()?;
    let stream = own.dial(&server.testbed().edge(from).ns, address).await?;
    Ok(HostileAgent::serve(stream, node, (epoch, link), hostility))
}

async fn wait_observed(what: &str, agent: &HostileAgent, accept: impl Fn(&Observed) -> bool) -> Result<()> {
    wait_for(what, client::PATIENCE, async || Ok(agent.observed(&accept).then_some(())))
        .await
        .with_context(|| agent.observed(|seen| format!("{seen:?}")))
}

async fn newer_session_wins_and_older_is_notified(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    let own = stolen(&server, 1).await?;
    let epoch = u64::MAX - 1000;
    let first = serve(&server, 1, &own, "edge-1", epoch, Hostility::Quiet).await?;
    server.wait_connected("edge-1", true, client::PATIENCE).await?;
    let second = serve(&server, 1, &own, "edge-1", epoch + 10, Hostility::Quiet).await?;
    wait_observed("the older session to be notified", &first, |seen| seen.replaced == 1).await?;
    ensure!(server.is_connected("edge-1").await?, "the newer session is not in use");
    // A session with an epoch between the two is too late.
    let late = serve(&server, 1, &own, "edge-1", epoch + 5, Hostility::Quiet).await?;
    wait_observed("the late session to be refused", &late, |seen| !seen.refused.is_empty()).await?;
    // The end of the old sessions does not end the new one.
    drop((first, late));
    never("a loss of the newer session", Duration::from_secs(3), async || {
        Ok(!server.is_connected("edge-1").await?)
    })
    .await?;
    let address = SocketAddr::new(testbed.edge(1).ip(), 9100);
    expect_reset(address).await?;
    wait_observed("the newer session to be asked to relay", &second, |seen| seen.relayed == 1).await?;
    drop(second);
    server.wait_connected("edge-1", false, client::PATIENCE).await?;
    expect_unreachable(address).await
}

async fn additional_links_that_nobody_asked_for(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    let mut agent = Agent::enrol(&server, 1).await?;
    let echo_target = target(testbed, 1, 9100, Behaviour::Echo)?;
    let own = Credentials::of_agent(&agent.state_dir())?;
    let mut held = hold(echo_target.address, b"before").await?;
    let epoch = session_of(&server, 0).await?["epoch"].as_u64().context("no epoch")?;
    for (claimed, link, reason) in [
        (epoch, 1, "link 1 of this session was not asked for, or is up already"),
        (epoch, u32::MAX, "link 4294967295 of this session was not asked for, or is up already"),
        (epoch + 1, 1, &*format!("no session with number {} is attached to this server", epoch + 1)),
    ] {
        let hostile = serve_link(&server, 1, &own, "edge-1", (claimed, link), Hostility::FloodsRelay).await?;
        wait_observed("the link to be refused", &hostile, |seen| seen.refused == [reason]).await?;
        hostile.wait_ended("the link to be closed", client::PATIENCE).await?;
        ensure!(hostile.observed(|seen| seen.relayed) == 0, "it was asked to relay");
    }
    echo(&mut held, b"after").await?;
    // The end of the session does not let them in either.
    agent.crash(&server).await?;
    let hostile = serve_link(&server, 1, &own, "edge-1", (epoch, 1), Hostility::Quiet).await?;
    wait_observed("the link to be refused", &hostile, |seen| !seen.refused.is_empty()).await?;
    ensure!(!server.is_connected("edge-1").await?, "an additional link made a session");
    Ok(())
}

async fn two_real_agents_of_one_node_do_not_flap(testbed: &Testbed) -> Result<()> {
    const EACH_ONCE: usize = 2;
    let (server, mut first) = server_and_agent(testbed).await?;
    let token = server.token("edge-1")?;
    let second = Builder::new(&server, 2).node("edge-1").named("second-agent").token(token).spawn()?;
    server.wait_log("session replaced by a newer one").await?;
    let attached = |server: &Server<'_>| -> Result<usize> {
        Ok(server.process.output()?.matches("session attached").count())
    };
    let sessions = async || attached(&server);
    wait_until("each agent to have been attached", client::PATIENCE, sessions, |seen| *seen == EACH_ONCE)
        .await?;
    never("alternating sessions", Duration::from_secs(12), async || {
        Ok(attached(&server)? > EACH_ONCE || !server.is_connected("edge-1").await?)
    })
    .await?;
    // It retries after one to two minutes and is refused as long as the newer session lives.
    let (name, older, limit) =
        ("postern_agent_sessions_refused_total", [("result", "older")], Duration::from_secs(140));
    server.wait_metric_for(limit, name, &older, |count| count >= 1.0).await?;
    ensure!(attached(&server)? == EACH_ONCE, "the sessions alternated");
    ensure!(
        server.is_connected("edge-1").await?,
        "the newer session did not survive the older agent's return"
    );
    ensure!(first.process.ended()?.is_none(), "the older agent ended instead of waiting");
    let log = first.settled_log().await?.to_lowercase();
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
    // While the real agent is attached, and while it is not.
    let impostor = serve(&server, 2, &own, "edge-1", u64::MAX, Hostility::Quiet).await?;
    wait_observed("the impostor to be refused", &impostor, |seen| {
        seen.refused.iter().any(|reason| reason.contains("edge-2"))
    })
    .await?;
    impostor.wait_ended("the impostor's connection to end", client::PATIENCE).await?;
    visit(on_edge.address).await?;
    agent.crash(&server).await?;
    let impostor = serve(&server, 2, &own, "edge-1", u64::MAX, Hostility::Quiet).await?;
    wait_observed("the impostor to be refused", &impostor, |seen| !seen.refused.is_empty()).await?;
    ensure!(
        !server.is_connected("edge-1").await? && !server.is_connected("edge-2").await?,
        "the impostor is attached"
    );
    expect_unreachable(on_edge.address).await?;
    refusals_counted(&server, "impostor", 2.0).await
}

async fn no_certificate(testbed: &Testbed) -> Result<()> {
    let (server, agent) = server_and_agent(testbed).await?;
    let address: SocketAddr = server.agent_address().parse()?;
    let ns = &testbed.edge(1).ns;
    let roots = || tls::roots(&agent.state_dir().join("ca.crt"));
    // In TLS 1.3 a client learns of its refusal only from its first read.
    let mut handshakes = 0;
    for alpn in [b"postern/1".as_slice(), b"http/1.1", b"postern/2"] {
        let Ok(mut stream) = hostile_peer::dial(ns, address, roots()?, None, alpn).await else { continue };
        handshakes += 1;
        let mut bytes = Vec::new();
        let read = tokio::time::timeout(client::PATIENCE, stream.read_to_end(&mut bytes)).await;
        let read =
            read.with_context(|| format!("not closed, with ALPN {}", String::from_utf8_lossy(alpn)))?;
        ensure!(read.is_err() || bytes.is_empty(), "the server sent data without a certificate: {bytes:?}");
    }
    ensure!(handshakes > 0, "no handshake came about");
    server.expect_metric("postern_tunnels", &[], 1.0).await?;
    Ok(())
}

async fn agents_do_not_pose_as_servers(testbed: &Testbed) -> Result<()> {
    let (server, agent) = server_and_agent(testbed).await?;
    let own = Credentials::of_agent(&agent.state_dir())?;
    let address = server.agent_address().parse()?;
    let mut stream = own.dial_for(&testbed.edge(1).ns, address, b"postern-peer/1").await?;
    let mut bytes = Vec::new();
    let read = tokio::time::timeout(client::PATIENCE, stream.read_to_end(&mut bytes)).await;
    let read = read.context("not closed")?;
    ensure!(read.is_err() || bytes.is_empty(), "the server talked to an agent as to a server: {bytes:?}");
    server.wait_log("it needs the certificate of a server").await
}

async fn flood_of_events(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let own = stolen(&server, 2).await?;
    let healthy = target(testbed, 1, HEALTHY, Behaviour::Echo)?;
    let before = server.process.resident_bytes()?;
    alongside("an agent that floods events", healthy.address, async {
        let flooder = serve(&server, 2, &own, "edge-2", u64::MAX - 1, Hostility::FloodsEvents).await?;
        flooder.wait_ended("the flooder to be disconnected", client::PATIENCE).await
    })
    .await?;
    refusals_counted(&server, "flood", 1.0).await?;
    memory(&server, before)
}

fn memory(server: &Server<'_>, before: u64) -> Result<()> {
    let now = server.process.resident_bytes()?;
    figure(&format!("server's memory: {} MB before, {} MB after", before / 1_000_000, now / 1_000_000));
    ensure!(now < before + MEMORY, "the server's memory grew from {before} to {now} bytes");
    Ok(())
}

/// Reports whether the server ends the connection. It ignores other floods, or answers at its own pace.
fn is_ended(kind: Flood) -> bool {
    match kind {
        Flood::Resets | Flood::Continuations | Flood::EmptyData | Flood::LargeHeaders | Flood::Promises => {
            true
        }
        Flood::Settings | Flood::Pings | Flood::WindowUpdates | Flood::Priorities | Flood::Unknown => false,
    }
}

async fn flood_of_frames(testbed: &Testbed) -> Result<()> {
    let (server, agent) = server_and_agent(testbed).await?;
    let own = stolen(&server, 2).await?;
    let healthy = target(testbed, 1, HEALTHY, Behaviour::Echo)?;
    let address: SocketAddr = server.agent_address().parse()?;
    let ns = &testbed.edge(2).ns;
    let mut wrong = Vec::new();
    for role in [Role::Answering, Role::Asking] {
        for kind in Flood::ALL {
            let before = server.process.peak_resident_bytes()?;
            let what = format!("a flood of frames, {role:?} {kind:?}");
            let flooded = alongside(&what, healthy.address, async {
                let stream = match role {
                    Role::Answering => own.dial(ns, address).await?,
                    Role::Asking => {
                        let roots = tls::roots(&agent.state_dir().join("ca.crt"))?;
                        hostile_peer::dial(ns, address, roots, None, b"h2").await?
                    }
                };
                hostile_frames::flood(stream, role, kind, Duration::from_secs(3)).await
            })
            .await?;
            let grown = server.process.peak_resident_bytes()?.saturating_sub(before);
            let (ended, written) = (flooded.ended, flooded.written / 1000);
            figure(&format!("{what}: {written} KB written, ended: {ended}, {} KiB more memory", grown >> 10));
            if ended != is_ended(kind) {
                wrong.push(format!("{what}: the server ended it: {ended}"));
            }
            if grown >= FLOOD_MEMORY {
                wrong.push(format!("{what}: the server took {grown} bytes more"));
            }
        }
    }
    ensure!(wrong.is_empty(), "{wrong:#?}");
    Ok(())
}

async fn flood_in_a_relayed_connection(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let own = stolen(&server, 2).await?;
    let healthy = target(testbed, 1, HEALTHY, Behaviour::Echo)?;
    let flooder = serve(&server, 2, &own, "edge-2", u64::MAX - 1, Hostility::FloodsRelay).await?;
    server.wait_connected("edge-2", true, client::PATIENCE).await?;
    let before = server.process.resident_bytes()?;
    let mut readers = Vec::new();
    for _ in 0..20 {
        // These clients read nothing: flow control must stop the flooder.
        readers.push(connect((testbed.edge(2).ip(), 9100)).await?);
    }
    wait_observed("20 Relay calls", &flooder, |seen| seen.relayed == 20).await?;
    alongside("an agent that floods 20 relayed connections", healthy.address, pause(3)).await?;
    memory(&server, before)
}

async fn agent_without_hello(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let own = stolen(&server, 2).await?;
    let silent = serve(&server, 2, &own, "edge-2", 1, Hostility::NoHello).await?;
    let start = Instant::now();
    silent.wait_ended("the silent agent to be disconnected", Duration::from_secs(30)).await?;
    figure(&format!("an agent without a Hello is disconnected after {:.1?}", start.elapsed()));
    ensure!(!server.is_connected("edge-2").await?, "it is attached");
    Ok(())
}

async fn target_outside_the_policy(testbed: &Testbed) -> Result<()> {
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
    agent.expect_metric("postern_agent_dials_total", &[("outcome", "denied")], 1.0).await?;
    Ok(())
}

/// Outcome of a connection that sent garbage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Heard {
    /// No connection.
    Refused,
    Answer,
    /// Closed or reset without an answer.
    End,
    /// Neither of them within the time limit.
    Nothing,
}

/// Sends one kind of garbage and reads the answer.
async fn send_garbage(mut stream: tokio::net::TcpStream, port: u16, kind: usize) -> Heard {
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
    let mut answer = Vec::new();
    let talk = async {
        stream.write_all(beginning).await?;
        stream.write_all(&bytes).await?;
        stream.read_to_end(&mut answer).await
    };
    // These ports wait for the rest of a handshake; on the others no connection may stay open.
    let limit = if matches!(port, AGENTS | HTTPS) { Duration::from_secs(2) } else { client::PATIENCE };
    let ended = tokio::time::timeout(limit, talk).await.is_ok();
    match ended {
        _ if !answer.is_empty() => Heard::Answer,
        true => Heard::End,
        false => Heard::Nothing,
    }
}

/// Number of connections by port, source (this host or another one) and outcome.
type Tally = BTreeMap<(u16, &'static str, Heard), usize>;

async fn garbage_on_every_port(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let healthy = target(testbed, 1, HEALTHY, Behaviour::Echo)?;
    let neighbour = testbed.add_neighbour()?;
    let mut held = hold(healthy.address, b"before").await?;
    let before = server.process.resident_bytes()?;
    let sockets = testbed.cloud.output("ss", "-Hltn")?;
    let ports: BTreeSet<u16> = sockets
        .lines()
        .filter_map(|line| line.split_whitespace().nth(3)?.rsplit_once(':')?.1.parse().ok())
        .collect();
    let tally = alongside(&format!("garbage on the ports {ports:?}"), healthy.address, async {
        let mut tally = Tally::new();
        let start = Instant::now();
        let mut count = 0;
        let mut senders = JoinSet::new();
        let mut note = |(port, from, heard): (u16, &'static str, Heard)| {
            *tally.entry((port, from, heard)).or_default() += 1;
        };
        for kind in 0.. {
            if start.elapsed() > Duration::from_secs(8) || count > 4_000 {
                break;
            }
            for port in ports.iter().copied() {
                // From this host, where the admin port and the redirect listen too, and from outside.
                for from in [HERE, OUTSIDE] {
                    count += 1;
                    let stream = if from == HERE {
                        let local: SocketAddr = ([127, 0, 0, 1], port).into();
                        tokio::net::TcpStream::connect(local).await
                    } else {
                        connect_from(&neighbour, (CLOUD, port).into(), Duration::from_millis(200)).await
                    };
                    match stream {
                        Ok(stream) => {
                            let sent = send_garbage(stream, port, kind);
                            drop(senders.spawn(async move { (port, from, sent.await) }));
                        }
                        // The reset of a listener that has accepted it may arrive before connect() returns.
                        Err(error) if error.kind() == ErrorKind::ConnectionReset => {
                            note((port, from, Heard::End));
                        }
                        Err(_) => note((port, from, Heard::Refused)),
                    }
                }
            }
            while senders.len() > 300 {
                if let Some(ended) = senders.join_next().await {
                    note(ended?);
                }
            }
        }
        while let Some(ended) = senders.join_next().await {
            note(ended?);
        }
        Ok(tally)
    })
    .await?;
    for ((port, from, heard), count) in &tally {
        figure(&format!("port {port}, {from}: {count} times {heard:?}"));
    }
    let seen = |port: u16, from: &'static str, heard: Heard| {
        tally.get(&(port, from, heard)).copied().unwrap_or_default()
    };
    let taken = |port: u16, from: &'static str| {
        [Heard::Answer, Heard::End, Heard::Nothing].map(|heard| seen(port, from, heard)).iter().sum::<usize>()
    };
    for port in [AGENTS, HTTPS, HTTP, ADMIN] {
        ensure!(
            taken(port, HERE) > 0 && seen(port, HERE, Heard::Refused) == 0,
            "port {port} is not served: {tally:?}"
        );
    }
    for port in [HTTP, ADMIN] {
        ensure!(taken(port, OUTSIDE) == 0, "port {port} is served to other hosts: {tally:?}");
        ensure!(seen(port, HERE, Heard::Nothing) == 0, "left open on port {port}: {tally:?}");
        ensure!(seen(port, HERE, Heard::Answer) > 0, "nothing was answered on port {port}: {tally:?}");
    }
    for port in [AGENTS, HTTPS] {
        ensure!(
            seen(port, OUTSIDE, Heard::Answer) > 0,
            "port {port} is not served to other hosts: {tally:?}"
        );
    }
    // Answered connections count as refused callers; at the http listener, bytes after a refused request count too.
    let (http, https) =
        (taken(HTTP, HERE), seen(HTTPS, HERE, Heard::Answer) + seen(HTTPS, OUTSIDE, Heard::Answer));
    for (listener, turned_away) in [("http", http), ("https", https)] {
        #[expect(clippy::cast_precision_loss, reason = "thousands fit")]
        let all = |counted| counted >= turned_away as f64;
        server.wait_metric("postern_callers_refused_total", &[("listener", listener)], all).await?;
    }
    echo(&mut held, b"after").await?;
    ensure!(server.get("/healthz").await?.0 == 200, "/healthz");
    server.wait_connected("edge-1", true, agent::START).await?;
    memory(&server, before)
}
