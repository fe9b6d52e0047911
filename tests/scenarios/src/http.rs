//! The http listener: a request's Host names the node.
use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::Agent;
use postern_testbed::client::{self, connect};
use postern_testbed::inventory::{Inventory, node};
use postern_testbed::server::Builder;
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::{CLOUD, Testbed, server};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::common::server_and_agent;
use crate::front;
use crate::web::{Web, curl};

scenarios! {
    host_names_the_node(edges = 2, quick),
    failures_have_their_own_status(edges = 2),
    connections_are_kept(edges = 2),
    bodies_of_any_length_pass,
    a_callers_end_reaches_the_target,
    ambiguous_requests_reach_nobody_twice,
    an_answer_that_breaks_off_is_not_whole,
    a_request_that_comes_with_a_successor_is_answered,
    unusual_nodes_take_nothing_from_the_others(edges = 2),
}

const PORT: u16 = 9100;
const HOST: &str = "edge-1:9100";
/// A request after an ambiguous one.
const SMUGGLED: &str = "GET /smuggled HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n";
const LISTENER: &str = "http://127.0.0.1:10264";

fn listener() -> SocketAddr {
    ([127, 0, 0, 1], 10264).into()
}

/// Sends bytes to the listener, and reads to the end.
async fn ask(request: &[u8]) -> Result<String> {
    front::ask(connect(listener()).await?, request).await
}

async fn host_names_the_node(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let _other = Agent::enrol(&server, 2).await?;
    let (first, second) = (Web::start(testbed, 1, PORT)?, Web::start(testbed, 2, PORT)?);
    let edge = testbed.edge(1).address;
    let by_address = format!("Host: {edge}:9100");
    let by_dest = format!("X-Tunnel-Proxy-Dest: {}", first.address);
    for (headers, on, host) in [
        (&["Host: edge-1:9100"][..], &first, "edge-1:9100".to_owned()),
        (&[&by_address], &first, format!("{edge}:9100")),
        (&["Host: EDGE-2.:9100"], &second, "EDGE-2.:9100".to_owned()),
        (&["Host: x:9100", "X-Tunnel-Proxy-Host: edge-2"], &second, "edge-2:9100".to_owned()),
        (&["Host: edge-1", &by_dest], &first, first.address.to_string()),
    ] {
        let before = on.connections();
        let url = format!("{LISTENER}/metrics?x=1");
        let mut args = vec![url.as_str(), "-H", "Authorization: Bearer theirs"];
        args.extend(headers.iter().flat_map(|header| ["-H", *header]));
        let answer = curl(testbed, &args).await?;
        answer.expect(200, "GET /metrics?x=1 HTTP/1.1").with_context(|| format!("{headers:?}"))?;
        answer.expect(200, &format!("\nhost: {host}\n")).with_context(|| format!("{headers:?}"))?;
        // Nothing is added, and only this listener's own headers are removed.
        answer.expect(200, "authorization: Bearer theirs")?;
        ensure!(!answer.body.contains("x-tunnel-proxy"), "{answer:?}");
        ensure!(on.connections() == before + 1, "{headers:?} went elsewhere");
    }
    // As a client of a proxy sends it.
    let answer = curl(testbed, &["--proxy", LISTENER, "http://edge-2:9100/metrics"]).await?;
    answer.expect(200, "\nhost: edge-2:9100\n")?;
    let line = server.wait_access("of the http listener", |line| line.text("listener") == "http").await?;
    ensure!(line.text("outcome") == "ok", "access line {line:?}");
    // Names chosen by callers and nodes create no time series.
    let (status, metrics) = server.get("/metrics").await?;
    ensure!(status == 200 && metrics.contains("listener=\"http\""), "/metrics answered {status}: {metrics}");
    for name in ["metrics?x", "edge-1", "edge-2", &edge.to_string()] {
        ensure!(!metrics.contains(name), "{name} is in the metrics: {metrics}");
    }
    Ok(())
}

async fn failures_have_their_own_status(testbed: &Testbed) -> Result<()> {
    let (server, mut agent) = server_and_agent(testbed).await?;
    testbed.black_hole(1, 9103)?;
    for (host, more, status, reason) in [
        ("edge-1:9101", "", 502, "refused"),
        ("edge-2:9100", "", 503, "no tunnel to node edge-2 (not seen"),
        ("edge-1:9103", "", 504, "timed out"),
        ("edge-9:9100", "", 400, "\"edge-9\" is not the name of an edge node"),
        ("10.70.0.1:9100", "", 400, "is not the address of an edge node"),
        ("edge-1", "", 400, "has no port"),
        ("edge-1:+9100", "", 400, "is not a host and a port"),
        ("edge-1:22", "", 400, "port 22 is not tunnelled"),
        ("edge-1:9100", "X-Tunnel-Proxy-Dest: 192.168.50.2:22", 400, "port 22 is not tunnelled"),
        ("edge-1:9100", "X-Tunnel-Proxy-Dest: 192.168.99.9:9100", 403, "--allow-target would allow it"),
        ("edge-1:9100", "X-Tunnel-Proxy-Dest: router:80", 400, "is not an IP address and a port"),
    ] {
        let host = format!("Host: {host}");
        let mut args = vec![LISTENER, "-H", &host];
        if !more.is_empty() {
            args.extend(["-H", more]);
        }
        let answer = curl(testbed, &args).await?;
        answer.expect(status, reason).with_context(|| format!("{host} {more}"))?;
        ensure!(answer.body.starts_with("tunnel-server: "), "a line for a person: {answer:?}");
        // The same for a Kubernetes client.
        args.extend(["-H", "Accept: application/json"]);
        let answer = curl(testbed, &args).await?;
        let object: serde_json::Value = serde_json::from_str(&answer.body)?;
        ensure!(object["kind"] == "Status" && object["code"] == status, "{host} {more}: {object}");
        let message = object["message"].as_str().unwrap_or_default();
        ensure!(answer.status == status && message.contains(reason), "{host} {more}: {object}");
    }
    let large = format!("GET / HTTP/1.1\r\nHost: edge-1:9100\r\nX: {}\r\n\r\n", "x".repeat(100_000));
    let answer = ask(large.as_bytes()).await?;
    ensure!(answer.starts_with("HTTP/1.1 431 "), "a head of 100 kB was answered {answer:?}");
    let answer = ask(b"\x16\x03\x01\x02\x00\x01\x00\x01").await?;
    ensure!(answer.is_empty() || answer.starts_with("HTTP/1.1 400 "), "garbage was answered {answer:?}");
    agent.process.stop().await?;
    server.wait_connected("edge-1", false, client::PATIENCE).await?;
    let answer = curl(testbed, &[LISTENER, "-H", "Host: edge-1:9100"]).await?;
    answer.expect(503, "no tunnel to node edge-1 (last seen ")?;
    ensure!(answer.body.contains(" s ago)"), "{answer:?}");
    Ok(())
}

async fn connections_are_kept(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let _other = Agent::enrol(&server, 2).await?;
    let (first, second) = (Web::start(testbed, 1, PORT)?, Web::start(testbed, 2, PORT)?);
    // Each request on one connection goes to the node in its own Host.
    let mut stream = connect(listener()).await?;
    for host in ["edge-1", "edge-2", "edge-1", "edge-9"] {
        stream.write_all(format!("GET / HTTP/1.1\r\nHost: {host}:9100\r\n\r\n").as_bytes()).await?;
        let answer = read_answer(&mut stream).await?;
        let known = host != "edge-9";
        ensure!(
            answer.starts_with(if known { "HTTP/1.1 200 " } else { "HTTP/1.1 400 " }),
            "{host}: {answer}"
        );
        ensure!(!known || answer.contains(&format!("host: {host}:9100")), "{host}: {answer}");
    }
    ensure!(first.connections() == 2 && second.connections() == 1, "requests went elsewhere");
    Ok(())
}

/// Reads an answer with a length from a connection that stays open.
async fn read_answer(stream: &mut TcpStream) -> Result<String> {
    let mut answer = Vec::new();
    let reading = async {
        loop {
            let text = String::from_utf8_lossy(&answer).into_owned();
            if let Some((head, body)) = text.split_once("\r\n\r\n") {
                let length = head.lines().find_map(|line| {
                    let (name, value) = line.split_once(':')?;
                    name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
                });
                if body.len() >= length.context("an answer without a length")? {
                    return Ok(text);
                }
            }
            ensure!(stream.read_buf(&mut answer).await? > 0, "closed after {text:?}");
        }
    };
    tokio::time::timeout(client::PATIENCE, reading).await.context("no whole answer")?
}

async fn bodies_of_any_length_pass(testbed: &Testbed) -> Result<()> {
    let (_server, _agent) = server_and_agent(testbed).await?;
    let web = Web::start(testbed, 1, PORT)?;
    let upload = testbed.dir().join("upload");
    std::fs::write(&upload, vec![b'u'; 20 << 20])?;
    let (file, host) = (format!("@{}", upload.display()), "Host: edge-1:9100");
    let length = "body=20971520";
    let chunked = "Transfer-Encoding: chunked";
    let expects = ["-H", "Expect: 100-continue"];
    for more in [&[][..], &["-H", chunked], &["-X", "GET", "-H", chunked], &expects] {
        let args = [&[LISTENER, "-H", host, "--data-binary", &file][..], more].concat();
        curl(testbed, &args).await?.expect(200, length).with_context(|| format!("{more:?}"))?;
    }
    // A target that refuses before the body gets none of it.
    let before = web.read();
    front::an_expectation_is_answered(async || connect(listener()).await, HOST).await?;
    ensure!(web.read() == before, "{} bytes of an unwanted body arrived", web.read() - before);
    front::an_unwanted_upload_is_answered(async || connect(listener()).await).await?;
    let url = format!("{LISTENER}/large");
    let answer = curl(testbed, &[&url, "-H", host]).await?;
    ensure!(answer.status == 200 && answer.body.len() == 32 << 20, "{} bytes of 32 MiB", answer.body.len());
    // Trailers, requested by TE and announced.
    let asked =
        "GET /trailers HTTP/1.1\r\nHost: edge-1:9100\r\nTE: trailers\r\nConnection: close, TE\r\n\r\n";
    let answer = ask(asked.as_bytes()).await?;
    ensure!(answer.ends_with("0\r\nx-sum: 42\r\n\r\n"), "without its trailers: {answer:?}");
    let asked = "POST / HTTP/1.1\r\nHost: edge-1:9100\r\nTrailer: x-sum\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n3\r\nabc\r\n0\r\nx-sum: 9\r\n\r\n";
    let answer = ask(asked.as_bytes()).await?;
    ensure!(answer.contains("x-sum\": \"9\"") && answer.contains("body=3"), "{answer:?}");
    Ok(())
}

async fn a_callers_end_reaches_the_target(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let web = Web::start(testbed, 1, PORT)?;
    front::a_reset_reaches_the_target(async || connect(listener()).await, |stream| stream, HOST, &web)
        .await?;
    front::departures_are_logged(&server, "http", 2).await
}

/// Request smuggling: however a proxy in front of the listener reads a request, the target gets one request and sees
/// its end at the same place as the listener.
async fn ambiguous_requests_reach_nobody_twice(testbed: &Testbed) -> Result<()> {
    let (_server, _agent) = server_and_agent(testbed).await?;
    let web = Web::start(testbed, 1, PORT)?;
    for refused in [
        "Content-Length: 3\r\nContent-Length: 30\r\n\r\nabc",
        "Content-Length: 3, 30\r\n\r\nabc",
        "Content-Length: +3\r\n\r\nabc",
        "Content-Length: -1\r\n\r\nabc",
        "Content-Length: 3x\r\n\r\nabc",
        "Content-Length : 3\r\n\r\nabc",
        "Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        "X: a\r\n Content-Length: 3\r\n\r\nabc",
        "X: a\r\n\tTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "X\0: a\r\n\r\n",
        "Host: edge-2:9100\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nabc\r\n0\r\n\r\n",
    ] {
        let request = format!("POST / HTTP/1.1\r\nHost: edge-1:9100\r\n{refused}{SMUGGLED}");
        let answer = ask(request.as_bytes()).await?;
        ensure!(!answer.contains("200 OK"), "{refused:?} was answered {answer:?}");
    }
    for request in [
        format!(
            "POST / HTTP/1.0\r\nHost: edge-1:9100\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{SMUGGLED}"
        ),
        format!("POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n{SMUGGLED}"),
    ] {
        let answer = ask(request.as_bytes()).await?;
        ensure!(
            answer.starts_with("HTTP/1.1 400 ") || answer.starts_with("HTTP/1.0 400 "),
            "{request:?}: {answer:?}"
        );
    }
    // Both a coding and a length: the coding counts, the length is not forwarded, and the connection ends (RFC 9112
    // section 6.3), so that the bytes after it are not taken for a request.
    for both in [
        "Content-Length: 6\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 6",
        "Content-Length: 6\r\nTransfer-Encoding: chunked\r\nContent-Length: 60",
    ] {
        let request =
            format!("POST / HTTP/1.1\r\nHost: edge-1:9100\r\n{both}\r\n\r\n3\r\nabc\r\n0\r\n\r\n{SMUGGLED}");
        let answer = ask(request.as_bytes()).await?;
        ensure!(answer.matches("HTTP/1.1 200").count() == 1, "{both:?}: {answer:?}");
        let told = answer.to_lowercase();
        ensure!(
            told.contains("body=3") && told.contains("transfer-encoding: chunked"),
            "{both:?}: {answer:?}"
        );
        ensure!(!told.contains("content-length: 6"), "{both:?}: {answer:?}");
        ensure!(told.contains("connection: close"), "{both:?} left the connection open: {answer:?}");
        ensure!(!told.contains("/smuggled"), "{both:?}: {answer:?}");
    }
    // A sender cannot remove the headers that delimit the message by listing them in Connection.
    let request = "POST / HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: content-length, host, close\r\nContent-Length: 3\r\n\r\nabc";
    let answer = ask(request.as_bytes()).await?;
    ensure!(answer.contains("body=3") && answer.contains("host: edge-1:9100"), "{answer:?}");
    ensure!(web.read() == 4 * 3, "{} bytes of bodies", web.read());
    Ok(())
}

async fn an_answer_that_breaks_off_is_not_whole(testbed: &Testbed) -> Result<()> {
    let (server, agent) = server_and_agent(testbed).await?;
    let _web = Web::start(testbed, 1, PORT)?;
    let mut stream = connect(listener()).await?;
    stream.write_all(b"GET /half HTTP/1.0\r\nHost: edge-1:9100\r\n\r\n").await?;
    let mut answer = Vec::new();
    while !answer.ends_with(b"half") {
        ensure!(stream.read_buf(&mut answer).await? > 0, "closed after {answer:?}");
    }
    // The tunnel is lost in the middle of the answer.
    drop(agent);
    let end = client::end_of(&mut stream, server::START).await?;
    ensure!(end == client::End::Reset, "half an answer ended with {end:?}");
    let line = server.wait_access("of a lost tunnel", |line| line.text("listener") == "http").await?;
    ensure!(line.text("outcome") == "tunnel_lost", "access line {line:?}");
    Ok(())
}

async fn a_request_that_comes_with_a_successor_is_answered(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let _web = Web::start(testbed, 1, PORT)?;
    let request = b"GET / HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n";
    let mut silent = connect(listener()).await?;
    // Connections are accepted in order.
    let mut other = connect(listener()).await?;
    other.write_all(request).await?;
    read_answer(&mut other).await?;
    let _second = server.successor()?;
    server.wait_log("handed over to the successor").await?;
    silent.write_all(request).await?;
    let answer = read_answer(&mut silent).await?;
    ensure!(answer.starts_with("HTTP/1.1 200 "), "the first request was answered {answer:?}");
    // A connection that has had a request is closed.
    let end = client::end_of(&mut other, client::PATIENCE).await?;
    ensure!(end == client::End::Eof(0), "an idle connection ended with {end:?}");
    Ok(())
}

/// Nodes with the most unusual values that Kubernetes permits.
async fn unusual_nodes_take_nothing_from_the_others(testbed: &Testbed) -> Result<()> {
    let mut inventory = Inventory::of(testbed)?;
    let (edge, other) = (testbed.edge(1).address, testbed.edge(2).address);
    // Its usual address is the last one, written as an IPv4-mapped IPv6 address.
    let addresses = ["169.254.9.9", "fe80::9", &format!("::FFFF:{edge}")]
        .map(|address| json!({ "type": "InternalIP", "address": address }));
    inventory.nodes[1]["status"]["addresses"] = json!(addresses);
    let odd = ["127.0.0.1", "0.0.0.0", "255.255.255.255", "224.0.0.1", "::1", "::", "198.18.0.1"];
    let mut odd: Vec<_> = odd.iter().map(|address| address.parse()).collect::<Result<_, _>>()?;
    odd.push(CLOUD.into());
    let mut everything = node(&"x".repeat(253), true, &odd, &["0.0.0.0/0", "::/0", "10.70.0.9/32"]);
    everything["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"] = json!(65535);
    inventory.nodes.push(everything);
    // Named like another node's address, and with an address that is another node's name.
    inventory.nodes.push(node(&other.to_string(), true, &[[192, 168, 77, 7].into()], &[]));
    inventory.write()?;
    let server = Builder::new(testbed).start().await?;
    let _agents = [Agent::enrol(&server, 1).await?, Agent::enrol(&server, 2).await?];
    let (first, second) = (Web::start(testbed, 1, PORT)?, Web::start(testbed, 2, PORT)?);
    for (host, web) in [
        ("edge-1".to_owned(), &first),
        (edge.to_string(), &first),
        ("edge-2".to_owned(), &second),
        (other.to_string(), &second),
        (format!("{other}."), &second),
    ] {
        let before = web.connections();
        let header = format!("Host: {host}:{PORT}");
        curl(testbed, &[LISTENER, "-H", &header])
            .await?
            .expect(200, "host: ")
            .with_context(|| header.clone())?;
        ensure!(web.connections() == before + 1, "{host} led elsewhere");
    }
    for (address, web) in [(edge, &first), (other, &second)] {
        let before = web.connections();
        curl(testbed, &[&format!("http://{address}:{PORT}/")]).await?.expect(200, "")?;
        ensure!(web.connections() == before + 1, "{address} led elsewhere");
    }
    // Addresses of this host stay local.
    for address in ["127.0.0.1".parse()?, CLOUD] {
        let here = Target::start(&testbed.cloud, address, 9104, Behaviour::Echo)?;
        client::echo(&mut connect(here.address).await?, b"here").await?;
        ensure!(here.connections() == 1, "{address} led elsewhere");
    }
    for (kind, count) in [("unroutable", 9.0), ("cloud_and_edge", 0.0), ("foreign", 1.0)] {
        server.expect_metric("postern_inventory_conflicts", &[("kind", kind)], count).await?;
    }
    Ok(())
}
