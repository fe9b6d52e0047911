//! The egress listener, which kube-apiserver's EgressSelector calls.
pub(crate) mod client;
mod konnectivity;
mod leaks;
mod proxy_server;
mod tls;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::Agent;
use postern_testbed::client::{PATIENCE, Pattern, echo, pattern_digest};
use postern_testbed::server::{Builder, Server};
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, Testbed};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tunnel_link::konnectivity::{Packet, packet::Payload};

use crate::common::target;
use client::{CONNECTED, Caller, ask, channel, connect, random};
use konnectivity::{konnectivitys_own_agent_attaches, konnectivitys_own_client_gets_its_page};
use leaks::{nothing_is_left_of_ten_thousand_dials, the_agent_keeps_nothing_of_ten_thousand_dials_either};
use proxy_server::{
    konnectivitys_agents_reach_edges_by_a_gateway, the_agent_attaches_to_konnectivitys_servers,
};
use tls::{callers_need_a_certificate, certificates_follow_their_files, what_a_caller_reads_late_arrives};

scenarios! {
    both_protocols_reach_edges(edges = 2, quick),
    a_duplicated_address_is_reached_by_name(twin),
    failures_say_why(edges = 2),
    no_byte_overtakes_the_200,
    packets_are_answered_as_konnectivity_answers_them(quick),
    a_closed_connections_last_bytes_arrive,
    stalled_callers_and_targets_stall_nobody(waits, limit = 180),
    what_is_no_edges_is_dialled_where_allowed,
    the_socket_passes_to_a_successor,
    callers_need_a_certificate(quick),
    certificates_follow_their_files,
    what_a_caller_reads_late_arrives,
    nothing_is_left_of_ten_thousand_dials(edges = 2, limit = 400),
    konnectivitys_own_client_gets_its_page(konnectivity),
    konnectivitys_own_agent_attaches(konnectivity, edges = 2),
    the_agent_attaches_to_konnectivitys_servers(konnectivity, limit = 240),
    konnectivitys_agents_reach_edges_by_a_gateway(konnectivity),
    the_agent_keeps_nothing_of_ten_thousand_dials_either(konnectivity, limit = 400),
}

const ECHO: u16 = 9100;

fn socket(testbed: &Testbed) -> PathBuf {
    testbed.dir().join("egress.sock")
}

fn server(testbed: &Testbed) -> Builder<'_> {
    Builder::new(testbed)
        .flag(format!("--egress-socket={}", socket(testbed).display()))
        .flag("--redirect=off")
}

async fn server_and_agent(testbed: &Testbed) -> Result<(Server<'_>, Agent<'_>)> {
    let server = server(testbed).start().await?;
    let agent = Agent::enrol(&server, 1).await?;
    Ok((server, agent))
}

async fn both_protocols_reach_edges(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let first = target(testbed, 1, ECHO, Behaviour::Echo)?;
    let sink = target(testbed, 1, 9101, Behaviour::Sink)?;
    let source = target(testbed, 1, 9102, Behaviour::Source(7, 20_000_000))?;
    let socket = socket(testbed);
    let edge = testbed.edge(1);
    for (asked, name) in [
        (format!("{}:{ECHO}", edge.address), "the address"),
        (format!("edge-1:{ECHO}"), "the name"),
        (format!("EDGE-1.:{ECHO}"), "the name in capitals"),
    ] {
        let before = first.connections();
        let mut stream = connect(&socket, &asked).await?;
        echo(&mut stream, b"over CONNECT").await.with_context(|| name.to_owned())?;
        let mut caller = Caller::open(&socket).await?;
        let connect_id = caller.connected(&asked).await?;
        caller.echo(connect_id, b"over gRPC").await.with_context(|| name.to_owned())?;
        caller.close(connect_id).await?;
        ensure!(first.connections() == before + 2, "{name} led elsewhere");
    }
    let line = server.wait_access("of the egress listener", |line| line.text("listener") == "egress").await?;
    ensure!(line.text("node") == "edge-1" && line.text("caller").contains("uid=0"), "access line {line:?}");

    // Bulk data in both directions, and a half-close.
    let mut up = connect(&socket, &sink.address.to_string()).await?;
    let mut pattern = Pattern::new(3, 20_000_000);
    pattern.write_to(&mut up).await?;
    up.shutdown().await?;
    let answer = postern_testbed::client::text(&mut up, "no answer of the sink").await?;
    ensure!(answer == format!("20000000 {}", pattern.digest()), "the sink got {answer}");
    let mut down = connect(&socket, &source.address.to_string()).await?;
    let got = postern_testbed::client::digest(&mut down).await?;
    ensure!(got == (20_000_000, pattern_digest(7, 20_000_000)), "the source's bytes changed: {got:?}");
    let mut caller = Caller::open(&socket).await?;
    let connect_id = caller.connected(&source.address.to_string()).await?;
    let mut length = 0;
    let ended = loop {
        let packet = caller.next().await?;
        match packet.payload {
            Some(Payload::Data(data)) => length += data.data.len(),
            other => break other,
        }
    };
    ensure!(length == 20_000_000, "{length} bytes came over gRPC before {ended:?}");
    let Some(Payload::CloseResponse(close)) = ended else { anyhow::bail!("it ended with {ended:?}") };
    ensure!(close.connect_id == connect_id && close.error.is_empty(), "it ended with {close:?}");
    let refused = server.metric_or_zero("postern_callers_refused_total", &[("listener", "egress")]).await?;
    ensure!(refused == 0.0, "{refused} callers were refused");
    Ok(())
}

async fn a_duplicated_address_is_reached_by_name(testbed: &Testbed) -> Result<()> {
    const KUBELET: u16 = 10250;
    let server = server(testbed).start().await?;
    let (first, second) = (testbed.edge(1), testbed.edge(2));
    ensure!(first.address == second.address, "the twin has {}", second.address);
    let _agents = [Agent::enrol(&server, 1).await?, Agent::enrol(&server, 2).await?];
    let kubelets = [
        target(testbed, 1, KUBELET, Behaviour::HelloFirst("first"))?,
        target(testbed, 2, KUBELET, Behaviour::HelloFirst("second"))?,
    ];
    let socket = socket(testbed);
    for (node, kubelet, greeting) in
        [(&first.name, &kubelets[0], "first"), (&second.name, &kubelets[1], "second")]
    {
        let asked = format!("{node}:{KUBELET}");
        let mut stream = connect(&socket, &asked).await?;
        let mut said = vec![0; greeting.len()];
        timeout(PATIENCE, stream.read_exact(&mut said)).await.context("no greeting over CONNECT")??;
        ensure!(said == greeting.as_bytes(), "CONNECT {asked} reached {said:?}");
        echo(&mut stream, b"over CONNECT").await?;
        let mut caller = Caller::open(&socket).await?;
        let connect_id = caller.connected(&asked).await?;
        let said = caller.expect_data(connect_id).await?;
        ensure!(said == greeting.as_bytes(), "the dial of {asked} reached {said:?}");
        caller.echo(connect_id, b"over gRPC").await?;
        caller.close(connect_id).await?;
        ensure!(kubelet.connections() == 2, "{asked}: {} connections", kubelet.connections());
        server.wait_access("of the node", |line| line.text("node") == *node).await?;
    }
    let asked = format!("{}:{KUBELET}", first.address);
    let (_, answer) = ask(UnixStream::connect(&socket).await?, &asked).await?;
    ensure!(answer.starts_with("HTTP/1.1 403 ") && answer.contains("name the node instead"), "{answer:?}");
    let error = Caller::open(&socket).await?.dial(&asked).await?.err().unwrap_or_default();
    ensure!(error.contains("name the node instead"), "the dial of {asked} was answered {error:?}");
    Ok(())
}

async fn failures_say_why(testbed: &Testbed) -> Result<()> {
    let (_server, _agent) = server_and_agent(testbed).await?;
    let socket = socket(testbed);
    testbed.black_hole(1, 9103)?;
    let nowhere = format!("{CLOUD}:10262");
    for (asked, status, reason) in [
        ("edge-1:9101", 502, "connection refused"),
        ("edge-2:9100", 503, "no tunnel to node edge-2"),
        ("edge-1:9103", 504, "i/o timeout"),
        ("edge-9:9100", 403, "no such host"),
        (nowhere.as_str(), 403, "--egress-direct does not allow"),
        ("edge-1", 403, "is not a host and a port"),
    ] {
        let stream = UnixStream::connect(&socket).await?;
        let (_, answer) = ask(stream, asked).await?;
        let (line, _) = answer.split_once("\r\n").context("no status line")?;
        ensure!(
            line.starts_with(&format!("HTTP/1.1 {status} ")) && line.contains(reason),
            "{asked:?} was answered {answer:?}"
        );
        let error = Caller::open(&socket).await?.dial(asked).await?.err().unwrap_or_default();
        ensure!(error.contains(reason), "the dial of {asked:?} was answered {error:?}");
    }
    for (request, status) in [
        ("GET / HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        ("\x16\x03\x01\x02\x00\r\n\r\n", 400),
        ("CONNECT edge-1:9100 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    ] {
        let mut stream = UnixStream::connect(&socket).await?;
        stream.write_all(request.as_bytes()).await?;
        let answer = postern_testbed::client::text(&mut stream, "no answer").await?;
        ensure!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request:?} was answered {answer:?}");
    }
    Ok(())
}

/// kube-apiserver drops a connection if one read returns more than the head.
async fn no_byte_overtakes_the_200(testbed: &Testbed) -> Result<()> {
    const GREETING: &str = "220 a server that speaks first\r\n";
    let (_server, _agent) = server_and_agent(testbed).await?;
    let greeter = target(testbed, 1, ECHO, Behaviour::HelloFirst(GREETING))?;
    let (socket, address) = (socket(testbed), greeter.address.to_string());
    for round in 0..500 {
        let mut stream = UnixStream::connect(&socket).await?;
        let request = format!("CONNECT {address} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        if round % 5 == 0 {
            // Late enough for the greeting to have arrived as well.
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let mut read = vec![0; 4096];
        let length = timeout(Duration::from_secs(10), stream.read(&mut read)).await??;
        ensure!(
            &read[..length] == CONNECTED.as_bytes(),
            "round {round}: one read returned {:?}",
            String::from_utf8_lossy(&read[..length])
        );
        let mut greeting = vec![0; GREETING.len()];
        timeout(Duration::from_secs(10), stream.read_exact(&mut greeting)).await??;
        ensure!(greeting == GREETING.as_bytes(), "round {round}: {greeting:?}");
    }
    for round in 0..200 {
        let mut caller = Caller::open(&socket).await?;
        // Fails unless the first packet is the answer.
        let connect_id = caller.connected(&address).await.with_context(|| format!("round {round}"))?;
        let greeting = caller.expect_data(connect_id).await?;
        ensure!(greeting == GREETING.as_bytes(), "round {round}: {greeting:?}");
    }
    Ok(())
}

async fn packets_are_answered_as_konnectivity_answers_them(testbed: &Testbed) -> Result<()> {
    let (_server, _agent) = server_and_agent(testbed).await?;
    let echo = target(testbed, 1, ECHO, Behaviour::Echo)?;
    let resets = target(testbed, 1, 9101, Behaviour::Resets)?;
    testbed.black_hole(1, 9103)?;
    let mut caller = Caller::open(&socket(testbed)).await?;
    caller.data(5, b"early").await?;
    ensure!(caller.closed().await? == (5, "backend not initialized".to_owned()), "data before a dial");
    let address = echo.address.to_string();
    let one = caller.connected(&address).await?;
    let two = caller.connected(&address).await?;
    ensure!((one, two) == (1, 2), "connections were numbered {one} and {two}");
    caller.data(99, b"unknown").await?;
    ensure!(
        caller.closed().await? == (99, "unrecognized connectID".to_owned()),
        "data of an unknown connection"
    );
    caller.send(Packet::close_request(99)).await?;
    ensure!(caller.closed().await? == (99, "Unknown connectID".to_owned()), "closing an unknown connection");
    // Ignored, as by konnectivity's server.
    caller.data(0, b"nobody's").await?;
    caller.send(Packet::close_response(one, String::new())).await?;
    caller.send(Packet::default()).await?;
    caller.echo(one, b"both").await?;
    caller.echo(two, b"work").await?;
    // A closed dial is not answered, and the others go on.
    let given_up = random();
    caller.send(Packet::dial_request("edge-1:9103".to_owned(), given_up)).await?;
    caller.send(Packet::close_dial(given_up)).await?;
    caller.send(Packet::close_dial(given_up)).await?;
    caller.echo(two, b"still").await?;
    // A dial closed after it was answered ends its connection.
    let late = random();
    caller.send(Packet::dial_request(address.clone(), late)).await?;
    let Some(Payload::DialResponse(answer)) = caller.next().await?.payload else {
        anyhow::bail!("no answer to the dial")
    };
    caller.send(Packet::close_dial(late)).await?;
    let (closed, error) = caller.closed().await?;
    ensure!(closed == answer.connect_id && error.contains("gone"), "{closed} ended with {error:?}");
    let udp = Packet {
        payload: Some(Payload::DialRequest(tunnel_link::konnectivity::DialRequest {
            protocol: "udp".to_owned(),
            address: address.clone(),
            random: 7,
        })),
        ..Packet::default()
    };
    caller.send(udp).await?;
    let Some(Payload::DialResponse(answer)) = caller.next().await?.payload else {
        anyhow::bail!("no answer to the dial of udp")
    };
    ensure!(answer.error.contains("only tcp"), "udp was answered {answer:?}");
    let reset = caller.connected(&resets.address.to_string()).await?;
    caller.data(reset, b"x").await?;
    let (closed, error) = caller.closed().await?;
    ensure!(closed == reset && error.contains("reset"), "a reset was told as {error:?}");
    caller.close(one).await?;
    caller.echo(two, b"alone").await?;
    // A caller's remaining connections end with it.
    drop(caller);
    wait_until(
        "the last connection to end",
        Duration::from_secs(10),
        async || Ok(echo.open()),
        |open| *open == 0,
    )
    .await
    .map(drop)
}

/// CLOSE_REQ and the end of the call arrive right after the data.
async fn a_closed_connections_last_bytes_arrive(testbed: &Testbed) -> Result<()> {
    const LENGTH: u64 = 100_000;
    let (_server, _agent) = server_and_agent(testbed).await?;
    let sink = target(testbed, 1, 9101, Behaviour::Sink)?;
    let socket = socket(testbed);
    for round in 0..20 {
        let mut caller = Caller::open(&socket).await?;
        let connect_id = caller.connected(&sink.address.to_string()).await?;
        let mut data = Vec::new();
        Pattern::new(round, LENGTH).write_to(&mut data).await?;
        caller.data(connect_id, &data).await?;
        caller.close(connect_id).await?;
        drop(caller);
        let sent = Some((LENGTH, pattern_digest(round, LENGTH)));
        let arrived = async || Ok(sink.digest());
        wait_until("the last bytes to arrive", Duration::from_secs(10), arrived, |got| *got == sent)
            .await
            .with_context(|| format!("round {round}"))?;
    }
    Ok(())
}

async fn visit(socket: &std::path::Path, address: &str) -> Result<()> {
    let started = std::time::Instant::now();
    echo(&mut connect(socket, address).await?, b"over CONNECT").await?;
    let mut caller = Caller::open(socket).await?;
    let connect_id = caller.connected(address).await?;
    caller.echo(connect_id, b"over gRPC").await?;
    ensure!(started.elapsed() < Duration::from_secs(10), "two visits took {:?}", started.elapsed());
    Ok(())
}

async fn stalled_callers_and_targets_stall_nobody(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let echo = target(testbed, 1, ECHO, Behaviour::Echo)?;
    let source = target(testbed, 1, 9101, Behaviour::Source(1, 1 << 30))?;
    let deaf = target(testbed, 1, 9102, Behaviour::NeverReads)?;
    let socket = socket(testbed);
    let address = echo.address.to_string();
    // Callers that do not read, each on its own connection.
    let mut stalled = Vec::new();
    for _ in 0..10 {
        stalled.push(connect(&socket, &source.address.to_string()).await?);
    }
    let mut callers = Vec::new();
    for _ in 0..10 {
        let mut caller = Caller::open(&socket).await?;
        caller.connected(&source.address.to_string()).await?;
        callers.push(caller);
    }
    // Callers whose targets do not read.
    let mut writers = JoinSet::new();
    for _ in 0..5 {
        let (socket, deaf) = (socket.clone(), deaf.address.to_string());
        writers.spawn(async move {
            let mut stream = connect(&socket, &deaf).await?;
            stream.write_all(&vec![1; 64 << 20]).await?;
            anyhow::Ok(())
        });
    }
    let (mut waiting, killed) = Caller::to_be_killed(&socket).await?;
    let deaf_id = waiting.connected(&deaf.address.to_string()).await?;
    let piece = vec![1; 64 << 10];
    let fill = async {
        for _ in 0..1024 {
            waiting.data(deaf_id, &piece).await?;
        }
        anyhow::Ok(())
    };
    ensure!(
        timeout(Duration::from_secs(5), fill).await.is_err(),
        "64 MiB were taken for a target that reads nothing"
    );
    for _ in 0..50 {
        visit(&socket, &address).await.context("beside callers and targets that do not read")?;
    }
    // With several connections on one stream, and several streams on one connection, only the stalled one is ended.
    let shared = channel(&socket).await?;
    let mut stuck = Caller::on(shared.clone());
    stuck.connected(&source.address.to_string()).await?;
    let mut several = Caller::on(shared);
    let bad = several.connected(&deaf.address.to_string()).await?;
    let good = several.connected(&address).await?;
    let mut ended = None;
    for _ in 0..1024 {
        several.data(bad, &piece).await?;
        several.data(good, b"x").await?;
        match several.next().await?.payload {
            Some(Payload::Data(data)) if data.connect_id == good => {}
            other => {
                ended = other;
                break;
            }
        }
    }
    let Some(Payload::CloseResponse(close)) = ended else { anyhow::bail!("it was not closed: {ended:?}") };
    ensure!(close.connect_id == bad && close.error.contains("1 MiB"), "closed with {close:?}");
    let memory = server.process.resident_bytes()?;
    ensure!(memory < 256 << 20, "the server holds {} MiB", memory >> 20);
    // As if the program died: without this, its client would wait until its last packets are sent.
    killed.shutdown(std::net::Shutdown::Both)?;
    drop((stalled, callers, waiting, stuck, several));
    writers.abort_all();
    // Connections whose targets have not taken everything linger.
    let (name, egress) = ("postern_connections_active", [("listener", "egress")]);
    server.wait_metric_for(Duration::from_secs(100), name, &egress, |active| active == 0.0).await.map(drop)
}

async fn what_is_no_edges_is_dialled_where_allowed(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).flag(format!("--egress-direct={CLOUD}/32")).start().await?;
    let cloud = Target::start(&testbed.cloud, CLOUD, ECHO, Behaviour::Echo)?;
    let socket = socket(testbed);
    visit(&socket, &cloud.address.to_string()).await?;
    let line = server.wait_access("of a direct connection", |line| line.text("listener") == "egress").await?;
    ensure!(
        line.text("node").is_empty() && line.text("destination") == cloud.address.to_string(),
        "{line:?}"
    );
    for asked in ["127.0.0.1:10265", "10.70.0.254:80"] {
        let (_, answer) = ask(UnixStream::connect(&socket).await?, asked).await?;
        ensure!(answer.starts_with("HTTP/1.1 403 "), "{asked} was answered {answer:?}");
    }
    let (_, answer) = ask(UnixStream::connect(&socket).await?, &format!("{CLOUD}:9199")).await?;
    ensure!(answer.starts_with("HTTP/1.1 502 ") && answer.contains("connection refused"), "{answer:?}");
    Ok(())
}

async fn the_socket_passes_to_a_successor(testbed: &Testbed) -> Result<()> {
    let (mut first, _agent) = server_and_agent(testbed).await?;
    let echoes = target(testbed, 1, ECHO, Behaviour::Echo)?;
    let (socket, address) = (socket(testbed), echoes.address.to_string());
    let mut held = connect(&socket, &address).await?;
    echo(&mut held, b"before").await?;
    let taking = first.take_over();
    let visiting = async {
        for _ in 0..200 {
            visit(&socket, &address).await.context("during the takeover")?;
        }
        anyhow::Ok(())
    };
    let (second, visited) = tokio::join!(taking, visiting);
    let second = second?;
    visited?;
    echo(&mut held, b"after").await?;
    drop(held);
    first.process.wait_exit(Duration::from_secs(40)).await?;
    visit(&socket, &address).await.context("of the second server alone")?;
    let mut second = second;
    second.process.stop().await?;
    ensure!(!socket.exists(), "the socket's file is left");
    Ok(())
}
