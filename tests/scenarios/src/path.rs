//! The path of a connection: from a cloud client, by the edge's own address, to a target on the edge.
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::access_log::AccessLine;
use postern_testbed::agent::{self, Agent};
use postern_testbed::client::{self, connect, connect_from, echo, expect_unreachable, pattern_digest, visit};
use postern_testbed::inventory::{Inventory, node};
use postern_testbed::server::{Builder, Server};
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, NEIGHBOUR, POD, Testbed};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::common::{expect_reset, server, server_and_agent, session_of, target};

scenarios! {
    by_edge_address(edges = 2, quick),
    by_edge_address_ipv6,
    without_ipv4,
    no_tunnel_fails_at_connect(edges = 2, quick),
    cloud_addresses_stay_direct,
    half_close_both_ways(quick),
    every_end_arrives,
    pod_is_redirected_and_neighbour_is_refused,
}

fn of_connection<'a>(node: &'a str, target: &'a str, outcome: &'a str) -> impl Fn(&AccessLine) -> bool + 'a {
    move |line| {
        line.text("node") == node && line.text("destination") == target && line.text("outcome") == outcome
    }
}

async fn by_edge_address(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    let agents = [Agent::enrol(&server, 1).await?, Agent::enrol(&server, 2).await?];
    for (at, agent) in agents.iter().enumerate() {
        let edge = testbed.edge(at + 1);
        let on_edge = target(testbed, at + 1, 10250, Behaviour::Echo)?;
        let mut stream = connect(on_edge.address).await?;
        ensure!(
            stream.peer_addr()? == on_edge.address,
            "getpeername shows {}, not the edge",
            stream.peer_addr()?
        );
        echo(&mut stream, format!("hello {}", edge.name).as_bytes()).await?;
        ensure!(on_edge.connections() == 1, "the target saw {} connections", on_edge.connections());
        let client = stream.local_addr()?;
        stream.shutdown().await?;
        ensure!(
            client::end_of(&mut stream, client::PATIENCE).await? == client::End::Eof(0),
            "not a clean end"
        );

        let target = on_edge.address.to_string();
        let line = server.wait_access("of this connection", of_connection(&edge.name, &target, "ok")).await?;
        ensure!(line.text("listener") == "redirect", "listener of {line:?}");
        ensure!(line.text("client") == client.to_string(), "client of {line:?}, expected {client}");
        let length = format!("hello {}", edge.name).len() as u64;
        ensure!(line.bytes_to_node()? == length && line.bytes_from_node()? == length, "bytes of {line:?}");
        agent.expect_metric("postern_agent_connections_total", &[("outcome", "ok")], 1.0).await?;
        agent.expect_metric("postern_agent_connections_active", &[], 0.0).await?;
    }
    let ok = [("listener", "redirect"), ("outcome", "ok")];
    server.expect_metric("postern_connections_total", &ok, 2.0).await?;
    server.expect_metric("postern_tunnels", &[], 2.0).await
}

async fn by_edge_address_ipv6(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let edge = testbed.edge(1);
    let on_edge = Target::start(&edge.ns, edge.address_v6, 10250, Behaviour::Echo)?;
    let mut stream = connect(on_edge.address).await?;
    ensure!(stream.peer_addr()? == on_edge.address, "getpeername shows {}", stream.peer_addr()?);
    echo(&mut stream, b"by IPv6").await?;
    drop(stream);
    // An IPv4 address through an IPv6 socket.
    let v4 = target(testbed, 1, 10255, Behaviour::Echo)?;
    let mapped = SocketAddr::new(edge.address.to_ipv6_mapped().into(), 10255);
    let mut stream = connect(mapped).await?;
    echo(&mut stream, b"by a v4-mapped address").await?;
    ensure!(v4.connections() == 1, "the v4 target saw {}", v4.connections());
    drop(stream);
    server
        .wait_access("of the v6 target", |line| line.text("destination") == on_edge.address.to_string())
        .await?;
    Ok(())
}

/// The agent enrols, attaches and is reached by IPv6; its router drops IPv4.
async fn without_ipv4(testbed: &Testbed) -> Result<()> {
    let edge = testbed.edge(1);
    testbed.router.iptables(&format!("-I FORWARD -i {} -j DROP", edge.router_port))?;
    let server = Builder::new(testbed).flag("--bind-address=::").start().await?;
    let agent = agent::Builder::alone(testbed, 1).flag("--server=[fd70::1]:10262");
    let _agent = agent.enrol(&server).await?;
    let peer = session_of(&server, 0).await?["peer"].clone();
    let from_edge = |peer: &str| peer.starts_with(&format!("[{}]:", edge.address_v6));
    ensure!(peer.as_str().is_some_and(from_edge), "the agent comes from {peer}");
    let on_edge = Target::start(&edge.ns, edge.address_v6, 10250, Behaviour::Echo)?;
    visit(on_edge.address).await?;
    let target = on_edge.address.to_string();
    let line = server.wait_access("by IPv6", of_connection(&edge.name, &target, "ok")).await?;
    ensure!(line.text("listener") == "redirect", "listener of {line:?}");
    Ok(())
}

async fn no_tunnel_fails_at_connect(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    for edge in testbed.edges() {
        expect_unreachable((edge.address, 10250)).await?;
        expect_unreachable((edge.address_v6, 10250)).await?;
    }
    let _agent = Agent::enrol(&server, 1).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    visit(on_edge.address).await?;
    expect_unreachable((testbed.edge(2).address, 10250)).await
}

async fn cloud_addresses_stay_direct(testbed: &Testbed) -> Result<()> {
    let neighbour = testbed.add_neighbour()?;
    let mut inventory = Inventory::of(testbed)?;
    inventory.nodes.push(node("cloud-2", false, &[NEIGHBOUR.into()], &[]));
    inventory.write()?;
    let (server, _agent) = server_and_agent(testbed).await?;
    let on_neighbour = Target::start(&neighbour, NEIGHBOUR, 10250, Behaviour::Echo)?;
    let on_this_host = Target::start(&testbed.cloud, CLOUD, 9100, Behaviour::Echo)?;
    let on_loopback = Target::start(&testbed.cloud, IpAddr::from([127, 0, 0, 1]), 9101, Behaviour::Echo)?;
    for direct in [&on_neighbour, &on_this_host, &on_loopback] {
        visit(direct.address).await.with_context(|| format!("direct to {}", direct.address))?;
        ensure!(direct.connections() == 1, "{} saw {} connections", direct.address, direct.connections());
    }
    // A port that is not tunnelled is dialled directly, so the router drops the packets.
    let error = client::connect_error((testbed.edge(1).address, 9999), Duration::from_secs(1)).await?;
    ensure!(error.kind() == std::io::ErrorKind::TimedOut, "port 9999 is not tunnelled, yet: {error}");
    let lines = server.settled_access_log().await?;
    ensure!(lines.is_empty(), "direct connections went through the server: {lines:?}");
    Ok(())
}

async fn half_close_both_ways(testbed: &Testbed) -> Result<()> {
    let (_server, _agent) = server_and_agent(testbed).await?;
    half_closes(testbed).await
}

pub(crate) async fn half_closes(testbed: &Testbed) -> Result<()> {
    let length = 2_000_000;
    // The client half-closes first; the answer follows.
    let sink = target(testbed, 1, 9100, Behaviour::Sink)?;
    let mut stream = connect(sink.address).await?;
    client::Pattern::new(1, length).write_to(&mut stream).await?;
    stream.shutdown().await?;
    let answer = client::text(&mut stream, "no answer after half-close").await?;
    ensure!(
        answer == format!("{length} {}", pattern_digest(1, length)),
        "the sink got something else: {answer}"
    );
    // The target half-closes first; the client goes on sending.
    let ends_first = target(testbed, 1, 9101, Behaviour::EndsFirst("goodbye"))?;
    let mut stream = connect(ends_first.address).await?;
    let greeting = client::text(&mut stream, "the target did not end").await?;
    ensure!(greeting == "goodbye", "greeting {greeting:?}");
    client::Pattern::new(2, length).write_to(&mut stream).await?;
    stream.shutdown().await?;
    let want = (length, pattern_digest(2, length));
    let read = async || Ok(ends_first.digest());
    wait_until("the target to have read it all", client::PATIENCE, read, |seen| seen.as_ref() == Some(&want))
        .await?;
    Ok(())
}

/// A target that speaks first, refuses or resets; a client that resets, or writes a few bytes at a time.
async fn every_end_arrives(testbed: &Testbed) -> Result<()> {
    let (server, agent) = server_and_agent(testbed).await?;
    target_speaks_first(testbed).await.context("a target that speaks first")?;
    refused(testbed, &server, &agent).await.context("refused")?;
    resets(testbed, &server).await.context("resets")?;
    small_writes(testbed).await.context("small writes")
}

pub(crate) async fn target_speaks_first(testbed: &Testbed) -> Result<()> {
    let on_edge = target(testbed, 1, 9102, Behaviour::HelloFirst("220 welcome\r\n"))?;
    let mut stream = connect(on_edge.address).await?;
    let mut greeting = [0; 13];
    tokio::time::timeout(client::PATIENCE, stream.read_exact(&mut greeting))
        .await
        .context("no greeting arrived")??;
    ensure!(&greeting == b"220 welcome\r\n", "greeting {greeting:?}");
    echo(&mut stream, b"EHLO").await
}

pub(crate) async fn refused(testbed: &Testbed, server: &Server<'_>, agent: &Agent<'_>) -> Result<()> {
    let address = SocketAddr::new(testbed.edge(1).ip(), 9105);
    expect_reset(address).await?;
    expect_reset(address).await?;
    server.wait_access("refused", of_connection("edge-1", &address.to_string(), "refused")).await?;
    agent.expect_metric("postern_agent_dials_total", &[("outcome", "refused")], 2.0).await
}

pub(crate) async fn resets(testbed: &Testbed, server: &Server<'_>) -> Result<()> {
    // A reset from the target to the client.
    let resets = target(testbed, 1, 9103, Behaviour::Resets)?;
    let mut stream = connect(resets.address).await?;
    stream.write_all(b"x").await?;
    let end = client::end_of(&mut stream, client::PATIENCE).await?;
    ensure!(end == client::End::Reset, "the target's reset arrived as {end:?}");
    server
        .wait_access("target's reset", of_connection("edge-1", &resets.address.to_string(), "target_reset"))
        .await?;
    // A reset from the client to the target.
    let on_edge = target(testbed, 1, 9104, Behaviour::Echo)?;
    let mut stream = connect(on_edge.address).await?;
    echo(&mut stream, b"up to here").await?;
    socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
    drop(stream);
    let resets = async || Ok(on_edge.resets());
    wait_until("the target to see a reset", client::PATIENCE, resets, |seen| *seen == 1).await?;
    server
        .wait_access("client's reset", of_connection("edge-1", &on_edge.address.to_string(), "client_reset"))
        .await?;
    Ok(())
}

async fn pod_is_redirected_and_neighbour_is_refused(testbed: &Testbed) -> Result<()> {
    let pod = testbed.add_pod()?;
    let neighbour = testbed.add_neighbour()?;
    // By route: `redirect::pods_are_taken_by_route`.
    let server = Builder::new(testbed).flag("--redirect-pods=connect").start().await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let mut from_pod = connect_from(&pod, on_edge.address, client::PATIENCE).await.context("from the pod")?;
    ensure!(
        from_pod.peer_addr()? == on_edge.address,
        "the pod's getpeername shows {}",
        from_pod.peer_addr()?
    );
    echo(&mut from_pod, b"from a pod").await?;

    // The pod's connection arrives at the host with the node's virtual address as its destination.
    let sockets = testbed.cloud.output("ss", "-Htn state established")?;
    let is_virtual = |address: &SocketAddr| matches!(address.ip(), IpAddr::V4(v4) if v4.octets()[0] == 198);
    let token = sockets.split_whitespace().filter_map(|word| word.parse().ok()).find(is_virtual);
    let token = token.with_context(|| format!("no virtual address in the cloud's sockets:\n{sockets}"))?;
    neighbour.ip("route add 198.18.0.0/15 via 10.70.0.1")?;
    let refused = connect_from(&neighbour, token, Duration::from_secs(3)).await;
    ensure!(refused.is_err(), "a neighbour reached {token} and with it every edge");
    let before = on_edge.connections();
    visit(on_edge.address).await?;
    ensure!(on_edge.connections() == before + 1, "the target saw more connections than were made");
    drop(from_pod);
    let client = POD.to_string();
    server.wait_access("from the pod", |line| line.text("client").starts_with(&client)).await?;
    Ok(())
}

pub(crate) async fn small_writes(testbed: &Testbed) -> Result<()> {
    let sink = target(testbed, 1, 10255, Behaviour::Sink)?;
    let mut stream = connect(sink.address).await?;
    stream.set_nodelay(true)?;
    let mut sent = client::Pattern::new(9, 50_000);
    let mut byte = [0; 5];
    while let Some(chunk) = sent.chunk(&mut byte) {
        stream.write_all(chunk).await?;
    }
    stream.shutdown().await?;
    let answer = client::text(&mut stream, "no answer").await?;
    ensure!(answer == format!("50000 {}", sent.digest()), "the sink got {answer}");
    Ok(())
}
