//! The http door: the request's Host names the node.
use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::agent::Agent;
use postern_testbed::client::{self, connect};
use postern_testbed::target::Behaviour;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::common::{server_and_agent, target};

scenarios! {
    host_names_the_node(edges = 2, quick),
    failures_have_their_own_status(edges = 2),
}

const PORT: u16 = 9100;
const ANSWER: &str = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi";

/// Sends a request to the door, and reads to the end.
async fn ask(request: &str) -> Result<String> {
    let door: SocketAddr = ([127, 0, 0, 1], 10264).into();
    let mut stream = connect(door).await?;
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    let read = tokio::time::timeout(client::PATIENCE, stream.read_to_end(&mut answer)).await;
    read.context("the door neither answered nor closed")??;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

async fn host_names_the_node(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let _other = Agent::enrol(&server, 2).await?;
    // The greeting is the HTTP answer.
    let first = target(testbed, 1, PORT, Behaviour::EndsFirst(ANSWER))?;
    let second = target(testbed, 2, PORT, Behaviour::EndsFirst(ANSWER))?;
    let edge = testbed.edge(1).address;
    for (asked, on) in [
        ("GET /metrics HTTP/1.1\r\nHost: edge-1:9100\r\n\r\n".to_owned(), &first),
        (format!("GET /metrics HTTP/1.1\r\nHost: {edge}:9100\r\n\r\n"), &first),
        ("GET http://EDGE-2:9100/metrics HTTP/1.1\r\n\r\n".to_owned(), &second),
        ("GET / HTTP/1.1\r\nHost: x:9100\r\nX-Tunnel-Proxy-Host: edge-2\r\n\r\n".to_owned(), &second),
        (format!("GET / HTTP/1.1\r\nHost: edge-1\r\nX-Tunnel-Proxy-Dest: {}\r\n\r\n", first.address), &first),
    ] {
        let before = on.connections();
        let answer = ask(&asked).await.with_context(|| asked.clone())?;
        ensure!(answer == ANSWER, "{asked:?} was answered {answer:?}");
        ensure!(on.connections() == before + 1, "{asked:?} went elsewhere");
    }
    let line = server.wait_access("of the http door", |line| line.text("door") == "http").await?;
    ensure!(line.text("outcome") == "ok", "access line {line:?}");
    Ok(())
}

async fn failures_have_their_own_status(testbed: &Testbed) -> Result<()> {
    let (_server, _agent) = server_and_agent(testbed).await?;
    testbed.black_hole(1, 9103)?;
    for (host, status, reason) in [
        ("edge-1:9101", 502, "refused"),
        ("edge-2:9100", 503, "no tunnel to node edge-2"),
        ("edge-1:9103", 504, "timed out"),
        ("edge-9:9100", 400, "\"edge-9\" is not the name of an edge node"),
        ("10.70.0.1:9100", 400, "is not the address of an edge node"),
        ("edge-1", 400, "has no port"),
        ("edge-1:22", 400, "port 22 is not tunnelled"),
        ("edge-1:9100\r\nX-Tunnel-Proxy-Dest: 192.168.50.2:22", 400, "port 22 is not tunnelled"),
        ("edge-1:9100\r\nX-Tunnel-Proxy-Dest: 192.168.99.9:9100", 403, "--allow-target would allow it"),
        ("edge-1:9100\r\nX-Tunnel-Proxy-Dest: router:80", 400, "is not an IP address and a port"),
    ] {
        let answer = ask(&format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n")).await.context(host)?;
        ensure!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")) && answer.contains(reason),
            "{host:?} was answered {answer:?}"
        );
    }
    for (request, reason) in [
        (
            "Host: edge-1:9100\r\nContent-Length: 3\r\nTransfer-Encoding: chunked",
            "both Transfer-Encoding and Content-Length",
        ),
        ("Host: edge-1:9100\r\nContent-Length: 3\r\nContent-Length: 30", "more than one Content-Length"),
        ("Host: edge-1:+9100", "is not a host and a port"),
    ] {
        let answer = ask(&format!("POST / HTTP/1.1\r\n{request}\r\n\r\n")).await.context(request)?;
        ensure!(
            answer.starts_with("HTTP/1.1 400 ") && answer.contains(reason),
            "{request:?} was answered {answer:?}"
        );
    }
    let large = format!("GET / HTTP/1.1\r\nHost: edge-1:9100\r\nX: {}\r\n\r\n", "x".repeat(100_000));
    let answer = ask(&large).await?;
    ensure!(answer.contains("larger than 65536 bytes"), "a head of 100 kB was answered {answer:?}");
    let answer = ask("\x16\x03\x01\x02\x00").await?;
    ensure!(answer.starts_with("HTTP/1.1 400 "), "garbage was answered {answer:?}");
    Ok(())
}
