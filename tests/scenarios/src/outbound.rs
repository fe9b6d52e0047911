//! Workloads on edge nodes reach the cloud and each other through the server, as far as its policy permits.
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::access_log::AccessLine;
use postern_testbed::agent::{self, Agent};
use postern_testbed::client::{self, Pattern};
use postern_testbed::netns::Namespace;
use postern_testbed::server::{Builder, Server};
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, Testbed};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::common::{hold, target};
use crate::takeover::tokens;

scenarios! {
    workloads_reach_what_their_node_may(edges = 2, quick),
    a_range_opens_no_edge_node_however_wide_it_is,
    workloads_find_the_next_server,
    who_waits_for_a_server_is_told_with_all_others,
    who_has_given_up_is_not_relayed_later,
    a_link_that_a_nat_has_forgotten_is_used_once,
    a_link_whose_address_has_gone_is_not_used,
}

const SOON: Duration = Duration::from_secs(30);
const PROXY: u16 = 10281;
const MAP: u16 = 9090;

const POLICY: &str = r#"
rules:
- name: the first edge
  from: [{node: edge-1}]
  to:
  - addresses: [10.70.0.1]
    ports: [9300, 9302]
  - node: edge-2
    ports: [9101]
  - service: grafana.monitoring
    ports: [9300]
"#;

const ANYWHERE: &str = r#"
rules:
- name: anywhere
  from: [{node: edge-1}]
  to:
  - addresses: [0.0.0.0/0, "::/0"]
    ports: ["*"]
"#;

/// Asks the connect listener on an edge's loopback for a connection, like a workload there.
async fn connect(ns: &Namespace, to: &str) -> Result<(TcpStream, String)> {
    let mut stream = client::connect_from(ns, (([127, 0, 0, 1]), PROXY).into(), SOON).await?;
    stream.write_all(format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n\r\n").as_bytes()).await?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let byte = tokio::time::timeout(SOON, stream.read_u8()).await.context("no whole answer")?;
        head.push(byte.with_context(|| format!("after {:?}", String::from_utf8_lossy(&head)))?);
    }
    Ok((stream, String::from_utf8_lossy(&head).into_owned()))
}

fn server<'a>(testbed: &'a Testbed, rules: &str) -> Result<Builder<'a>> {
    let policy = testbed.dir().join("policy.yaml");
    fs::write(&policy, rules).with_context(|| format!("writing {}", policy.display()))?;
    Ok(Builder::new(testbed).flag(format!("--policy={}", policy.display())))
}

async fn edge<'a>(server: &Server<'a>, n: usize) -> Result<Agent<'a>> {
    let name = format!("edge-{n}");
    let agent = agent::Builder::new(server, n)
        .token(server.token(&name)?)
        .flag(format!("--connect-address=127.0.0.1:{PROXY}"))
        .flag(format!("--forward=127.0.0.1:{MAP}={CLOUD}:9300"))
        .spawn()?;
    server.wait_connected(&name, true, agent::START).await?;
    Ok(agent)
}

/// Returns the open connections between two ports of the loopback interface, without those to the admin port.
fn on_loopback(ns: &Namespace) -> Result<Vec<String>> {
    const LOOPBACK: &str = "0100007F:";
    const ESTABLISHED: &str = "01";
    let admin = format!(":{:04X}", 10265);
    let table = ns.output("cat", "/proc/net/tcp")?;
    let rows = table.lines().skip(1).filter(|row| {
        let fields: Vec<_> = row.split_whitespace().collect();
        let [_, local, remote, state, ..] = fields[..] else { return false };
        state == ESTABLISHED
            && [local, remote].iter().all(|end| end.starts_with(LOOPBACK) && !end.ends_with(&admin))
    });
    Ok(rows.map(ToOwned::to_owned).collect())
}

async fn workloads_reach_what_their_node_may(testbed: &Testbed) -> Result<()> {
    const BYTES: u64 = 8 << 20;
    let server = server(testbed, POLICY)?.start().await?;
    let (_first, _second) = (edge(&server, 1).await?, edge(&server, 2).await?);
    let (one, two) = (&testbed.edge(1).ns, &testbed.edge(2).ns);
    let _echo = Target::start(&testbed.cloud, CLOUD, 9300, Behaviour::Echo)?;
    let _source = Target::start(&testbed.cloud, CLOUD, 9302, Behaviour::Source(7, BYTES))?;
    let _on_edge = target(testbed, 2, 9101, Behaviour::Echo)?;

    // An address in the cloud, a whole transfer with its end, another edge node, and a static map.
    let cloud = format!("{CLOUD}:9300");
    let (mut stream, head) = connect(one, &cloud).await?;
    ensure!(head.starts_with("HTTP/1.1 200 "), "CONNECT {cloud}: {head:?}");
    client::echo(&mut stream, b"from the edge").await?;
    stream.shutdown().await?;
    let end = client::end_of(&mut stream, SOON).await?;
    ensure!(end == client::End::Eof(0), "after a half-close: {end:?}");
    let (mut stream, _) = connect(one, &format!("{CLOUD}:9302")).await?;
    let mut whole = Vec::new();
    tokio::time::timeout(SOON, stream.read_to_end(&mut whole))
        .await
        .context("the transfer stands still")??;
    let mut expected = Vec::new();
    Pattern::new(7, BYTES).write_to(&mut expected).await?;
    ensure!(whole == expected, "{} bytes came, or changed ones", whole.len());
    let (mut stream, head) = connect(one, "edge-2:9101").await?;
    ensure!(head.starts_with("HTTP/1.1 200 "), "CONNECT edge-2:9101: {head:?}");
    client::echo(&mut stream, b"from edge to edge").await?;
    let local = SocketAddr::from(([127, 0, 0, 1], MAP));
    let mut mapped = client::connect_from(one, local, SOON).await?;
    client::echo(&mut mapped, b"through a map").await?;

    // None of their bytes cross the loopback interface, where others of that host could capture them.
    let crossing = on_loopback(&testbed.cloud)?;
    ensure!(crossing.is_empty(), "with two connections open there are on loopback: {crossing:?}");

    // Targets that no rule permits, and targets that do not exist.
    for (ns, to, status) in [
        (one, "edge-2:22", "403"),
        (one, "10.70.0.1:22", "403"),
        (one, "10.70.0.2:9300", "403"),
        (one, "edge-1:9101", "403"),
        (two, cloud.as_str(), "403"),
        (two, "edge-1:9101", "403"),
        (one, "grafana.monitoring:9300", "502"),
        (one, "nonsense", "400"),
    ] {
        let (_, head) = connect(ns, to).await.context(to.to_owned())?;
        ensure!(head.starts_with(&format!("HTTP/1.1 {status} ")), "CONNECT {to}: {head:?}");
    }
    let end =
        client::end_at_once(client::connect_from(two, local, SOON).await).await.context("a denied map")?;
    ensure!(end == client::End::Reset, "a map that the policy does not permit ended with {end:?}");

    // curl, as a workload would use it.
    let _http = Target::start(&testbed.cloud, CLOUD, 9301, Behaviour::Echo)?;
    let mut curl = testbed.on_edge(1).command(Path::new("curl"));
    curl.args([
        "-sS",
        "-m",
        "15",
        "-p",
        "-x",
        &format!("http://127.0.0.1:{PROXY}"),
        &format!("http://{CLOUD}:9301/"),
    ]);
    let output = tokio::task::spawn_blocking(move || curl.output()).await??;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(said.contains("403"), "curl said {said:?}");

    let line = |node: &'static str, outcome: &'static str| {
        move |line: &AccessLine| {
            line.text("listener") == "edge"
                && line.text("caller") == "node edge-1 by the first edge"
                && line.text("node") == node
                && line.text("outcome") == outcome
        }
    };
    server.wait_access("into the cloud", line("", "ok")).await?;
    drop(stream);
    server.wait_access("to another edge", line("edge-2", "ok")).await?;

    // A revoked node's workloads reach nothing any more, and what they have open ends.
    server.run(&["agent", "revoke", "edge-1"])?;
    let end = client::end_of(&mut mapped, SOON).await.context("a revoked node's connection")?;
    ensure!(end == client::End::Reset, "a revoked node's connection ended with {end:?}");
    server
        .wait_access("of a revoked node", |line| {
            line.text("outcome") == "denied" && line.text("error").starts_with("node edge-1 was revoked")
        })
        .await?;
    let revoked = async || {
        let mut stream = client::connect_from(one, local, SOON).await?;
        Ok(client::echo(&mut stream, b"still there?").await.is_err())
    };
    wait_until("a revoked node to reach nothing", SOON, revoked, |refused| *refused).await?;
    Ok(())
}

/// On the server's host, its loopback and the redirect's virtual addresses lead to edge nodes.
async fn a_range_opens_no_edge_node_however_wide_it_is(testbed: &Testbed) -> Result<()> {
    let server = server(testbed, ANYWHERE)?.start().await?;
    let _agent = edge(&server, 1).await?;
    let one = &testbed.edge(1).ns;
    let _echo = Target::start(&testbed.cloud, CLOUD, 9300, Behaviour::Echo)?;
    let kubelet = target(testbed, 1, 10250, Behaviour::Echo)?;
    let _redirected = hold(kubelet.address, b"of the cloud host").await?;
    let token = tokens(testbed, &kubelet)?;
    let (mut stream, head) = connect(one, &format!("{CLOUD}:9300")).await?;
    ensure!(head.starts_with("HTTP/1.1 200 "), "what the rule is for: {head:?}");
    client::echo(&mut stream, b"into the cloud").await?;
    // Its own listeners at its own address, and a cloud's metadata service.
    let own = [10262, 10263].map(|port| format!("{CLOUD}:{port}"));
    for to in [
        token.as_str(),
        "127.0.0.1:10264",
        "0.0.0.0:10264",
        "[::1]:10264",
        "[::ffff:127.0.0.1]:10265",
        &own[0],
        &own[1],
        "169.254.169.254:80",
    ] {
        let (_, head) = connect(one, to).await.context(to.to_owned())?;
        ensure!(head.starts_with("HTTP/1.1 403 "), "CONNECT {to}: {head:?}");
    }
    Ok(())
}

async fn workloads_find_the_next_server(testbed: &Testbed) -> Result<()> {
    let first = server(testbed, POLICY)?.start().await?;
    let _agent = edge(&first, 1).await?;
    let one = &testbed.edge(1).ns;
    let _echo = Target::start(&testbed.cloud, CLOUD, 9300, Behaviour::Echo)?;
    let local = SocketAddr::from(([127, 0, 0, 1], MAP));
    let mut held = client::connect_from(one, local, SOON).await?;
    client::echo(&mut held, b"before").await?;
    // A successor on the same host takes over during a connection.
    let _second = first.take_over().await?;
    let reached = async || {
        let mut stream = client::connect_from(one, local, SOON).await?;
        Ok(client::echo(&mut stream, b"after").await.is_ok())
    };
    wait_until("a workload to reach the cloud through the new server", SOON, reached, |reached| *reached)
        .await?;
    Ok(())
}

/// Keeps new connections of edge 1 from the servers.
const NO_SYN: &str = "OUTPUT -p tcp --dport 10262 --syn -j DROP";

/// Opens clients of the map that send something and close at once.
async fn impatient(ns: &Namespace, count: usize) -> Result<()> {
    for _ in 0..count {
        let mut client = client::connect_from(ns, ([127, 0, 0, 1], MAP).into(), SOON).await?;
        client.write_all(b"is anybody there?").await?;
    }
    Ok(())
}

async fn wait_outbound(agent: &Agent<'_>, outcome: &str, count: f64) -> Result<()> {
    agent.expect_metric("postern_agent_outbound_connections_total", &[("outcome", outcome)], count).await
}

async fn who_waits_for_a_server_is_told_with_all_others(testbed: &Testbed) -> Result<()> {
    // One attempt takes ten seconds.
    const AN_ATTEMPT: Duration = Duration::from_secs(25);
    let server = server(testbed, POLICY)?.start().await?;
    let agent = edge(&server, 1).await?;
    let one = &testbed.edge(1).ns;
    let echo = Target::start(&testbed.cloud, CLOUD, 9300, Behaviour::Echo)?;
    one.iptables(&format!("-I {NO_SYN}"))?;
    impatient(one, 5).await?;
    let local = SocketAddr::from(([127, 0, 0, 1], MAP));
    let mut patient = client::connect_from(one, local, SOON).await?;
    let end = client::end_of(&mut patient, AN_ATTEMPT).await.context("one of six clients")?;
    ensure!(end == client::End::Reset, "without a server: {end:?}");
    wait_outbound(&agent, "no_tunnel", 6.0).await?;
    one.iptables(&format!("-D {NO_SYN}"))?;
    let mut next = client::connect_from(one, local, SOON).await?;
    client::echo(&mut next, b"and now?").await.context("after the outage")?;
    ensure!(echo.connections() == 1, "{} connections came for one client", echo.connections());
    Ok(())
}

async fn who_has_given_up_is_not_relayed_later(testbed: &Testbed) -> Result<()> {
    let server = server(testbed, POLICY)?.start().await?;
    let agent = edge(&server, 1).await?;
    let one = &testbed.edge(1).ns;
    let echo = Target::start(&testbed.cloud, CLOUD, 9300, Behaviour::Echo)?;
    one.iptables(&format!("-I {NO_SYN}"))?;
    impatient(one, 5).await?;
    let mut patient = client::connect_from(one, ([127, 0, 0, 1], MAP).into(), SOON).await?;
    // Longer than a closed client may wait, shorter than an attempt.
    tokio::time::sleep(Duration::from_secs(4)).await;
    one.iptables(&format!("-D {NO_SYN}"))?;
    client::echo(&mut patient, b"still here").await.context("after a short outage")?;
    wait_outbound(&agent, "client_reset", 5.0).await?;
    ensure!(echo.connections() == 1, "{} connections came for one client", echo.connections());
    Ok(())
}

async fn a_link_that_a_nat_has_forgotten_is_used_once(testbed: &Testbed) -> Result<()> {
    let server = server(testbed, POLICY)?.start().await?;
    let _agent = edge(&server, 1).await?;
    let one = &testbed.edge(1).ns;
    let _echo = Target::start(&testbed.cloud, CLOUD, 9300, Behaviour::Echo)?;
    let local = SocketAddr::from(([127, 0, 0, 1], MAP));
    let mut before = client::connect_from(one, local, SOON).await?;
    client::echo(&mut before, b"before").await?;
    testbed.forget_mappings()?;
    let mut lost = client::connect_from(one, local, SOON).await?;
    lost.write_all(b"lost").await?;
    let end = client::end_of(&mut lost, SOON).await.context("on the link that was forgotten")?;
    ensure!(end == client::End::Reset, "on the link that was forgotten: {end:?}");
    // Sooner than PING would give that link up.
    let mut next = client::connect_from(one, local, SOON).await?;
    client::echo(&mut next, b"after").await.context("on the next link")
}

async fn a_link_whose_address_has_gone_is_not_used(testbed: &Testbed) -> Result<()> {
    const NEXT: Ipv4Addr = Ipv4Addr::new(192, 168, 50, 3);
    // A link that is silent is noticed after ten seconds.
    const AT_ONCE: Duration = Duration::from_secs(6);
    let server = server(testbed, POLICY)?.start().await?;
    let agent = edge(&server, 1).await?;
    let (edge, local) = (testbed.edge(1), SocketAddr::from(([127, 0, 0, 1], MAP)));
    let _echo = Target::start(&testbed.cloud, CLOUD, 9300, Behaviour::Echo)?;
    let mut first = client::connect_from(&edge.ns, local, SOON).await?;
    client::echo(&mut first, b"over the first address").await?;
    // Otherwise the second address is deleted with the first.
    edge.ns.write("/proc/sys/net/ipv4/conf/eth0/promote_secondaries", "1")?;
    edge.ns.ip(&format!("addr add {NEXT}/24 dev eth0"))?;
    edge.ns.ip(&format!("addr del {}/24 dev eth0", edge.address))?;
    edge.ns.ip("route replace default via 192.168.50.1")?;
    agent.wait_log("link lost its address, replacing it").await?;
    let mut next = client::connect_from(&edge.ns, local, SOON).await?;
    let echoed = tokio::time::timeout(AT_ONCE, client::echo(&mut next, b"over the second")).await;
    echoed.context("no answer over the second address")??;
    Ok(())
}
