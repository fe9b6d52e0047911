//! The https listener: TLS passthrough by server name.
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::Agent;
use postern_testbed::client::{self, connect, echo};
use postern_testbed::server::{self, Builder};
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::{CLOUD, Testbed, tls};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::common::{server_and_agent, target};

scenarios! {
    tls_ends_at_the_edge(edges = 2, quick),
    hello_in_single_bytes,
    node_address_as_name,
    unknown_names_get_an_alert,
    plaintext_is_refused,
    node_without_a_tunnel(edges = 2),
    further_ports_lead_to_other_ports_of_nodes,
}

pub(crate) const KUBELET: u16 = 10250;
/// Alerts of RFC 8446 section 6.
const UNEXPECTED_MESSAGE: u8 = 10;
const RECORD_OVERFLOW: u8 = 22;
const DECODE_ERROR: u8 = 50;
const UNRECOGNIZED_NAME: u8 = 112;

fn listener_address() -> SocketAddr {
    (CLOUD, 10263).into()
}

/// Returns a ClientHello for `name`. rustls sends no IP address as a server name, so `name` overwrites one of the same
/// length.
pub(crate) fn client_hello(name: &str) -> Result<Vec<u8>> {
    let stand_in = "x".repeat(name.len());
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    let mut client =
        rustls::ClientConnection::new(Arc::new(config), ServerName::try_from(stand_in.clone())?)?;
    let mut bytes = Vec::new();
    client.write_tls(&mut bytes)?;
    let at = bytes
        .windows(name.len())
        .position(|part| part == stand_in.as_bytes())
        .context("no name in the hello")?;
    bytes[at..at + name.len()].copy_from_slice(name.as_bytes());
    Ok(bytes)
}

/// Returns the listener's whole answer to bytes that it refuses.
async fn answer(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut stream = connect(listener_address()).await?;
    stream.write_all(bytes).await?;
    let mut answer = Vec::new();
    let read = tokio::time::timeout(client::PATIENCE, stream.read_to_end(&mut answer)).await;
    // A reset may follow the alert, because the server may have unread bytes.
    read.context("the listener neither answered nor closed")?.ok();
    Ok(answer)
}

fn ensure_alert(answer: &[u8], description: u8) -> Result<()> {
    let fatal_alert = matches!(answer, [21, 3, _, 0, 2, 2, said] if *said == description);
    ensure!(fatal_alert, "expected the fatal TLS alert {description}, got {answer:?}");
    Ok(())
}

async fn tls_ends_at_the_edge(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let _other = Agent::enrol(&server, 2).await?;
    for edge in testbed.edges() {
        // A kubelet's serving certificate that only this client trusts.
        let (certificate, acceptor) = tls::self_signed(&edge.name, None)?;
        let address = SocketAddr::new(edge.ip(), KUBELET);
        let listener = edge.ns.run(|| Ok(std::net::TcpListener::bind(address)?))?;
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let kubelet = tokio::spawn(async move {
            let (stream, _) = listener.accept().await?;
            let mut stream = acceptor.accept(stream).await.context("TLS at the edge")?;
            let mut request = [0; 4];
            stream.read_exact(&mut request).await?;
            stream.write_all(&request).await?;
            stream.shutdown().await?;
            anyhow::Ok(stream.get_ref().1.server_name().map(str::to_owned))
        });

        let mut roots = rustls::RootCertStore::empty();
        roots.add(certificate)?;
        let stream = connect(listener_address()).await?;
        let mut stream = tls::handshake(stream, &edge.name, roots, None, None)
            .await
            .context("TLS through the listener")?;
        echo(&mut stream, b"logs").await?;
        ensure!(kubelet.await??.as_deref() == Some(edge.name.as_str()), "the edge saw another name");
        drop(stream);
        let line = server.wait_access("of the https listener", |line| line.text("node") == edge.name).await?;
        ensure!(
            line.text("listener") == "https" && line.text("destination") == address.to_string(),
            "access line {line:?}"
        );
    }
    server.expect_metric("postern_connections_total", &[("listener", "https")], 2.0).await
}

async fn hello_in_single_bytes(testbed: &Testbed) -> Result<()> {
    let (_server, _agent) = server_and_agent(testbed).await?;
    // The echo shows that every byte arrives unchanged.
    let on_edge = target(testbed, 1, KUBELET, Behaviour::Echo)?;
    let hello = client_hello("edge-1")?;
    let mut stream = connect(listener_address()).await?;
    stream.set_nodelay(true)?;
    for byte in &hello {
        stream.write_all(std::slice::from_ref(byte)).await?;
        tokio::task::yield_now().await;
    }
    expect_back(&mut stream, &hello).await?;
    ensure!(on_edge.connections() == 1, "{} connections", on_edge.connections());
    Ok(())
}

pub(crate) async fn expect_back(stream: &mut TcpStream, bytes: &[u8]) -> Result<()> {
    let mut back = vec![0; bytes.len()];
    tokio::time::timeout(client::PATIENCE, stream.read_exact(&mut back))
        .await
        .context("nothing came back")??;
    ensure!(back == bytes, "the bytes arrived changed");
    Ok(())
}

async fn node_address_as_name(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let edge = testbed.edge(1);
    let on_edge = target(testbed, 1, KUBELET, Behaviour::Echo)?;
    for name in [edge.address.to_string(), "EDGE-1".to_owned()] {
        let hello = client_hello(&name)?;
        let mut stream = connect(listener_address()).await?;
        stream.write_all(&hello).await?;
        expect_back(&mut stream, &hello).await.with_context(|| format!("by the name {name}"))?;
    }
    let on_v6 = Target::start(&edge.ns, edge.address_v6, KUBELET, Behaviour::Echo)?;
    let hello = client_hello(&edge.address_v6.to_string())?;
    let mut stream = connect(listener_address()).await?;
    stream.write_all(&hello).await?;
    expect_back(&mut stream, &hello).await.context("by the IPv6 address")?;
    ensure!(on_edge.connections() == 2 && on_v6.connections() == 1, "connections at the edge");
    drop(stream);
    server.wait_access("by IPv6", |line| line.text("destination") == on_v6.address.to_string()).await?;
    Ok(())
}

async fn unknown_names_get_an_alert(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    for name in ["edge-9", "10.70.0.1", "cloud-1", "example.org"] {
        let answer = answer(&client_hello(name)?).await?;
        ensure_alert(&answer, UNRECOGNIZED_NAME).with_context(|| format!("for the name {name}"))?;
        server.wait_log(name).await?;
    }
    turned_away(&server, 4.0).await
}

/// Waits until the listener has counted a client, which it does after answering.
async fn turned_away(server: &server::Server<'_>, clients: f64) -> Result<()> {
    server.expect_metric("postern_callers_refused_total", &[("listener", "https")], clients).await
}

async fn plaintext_is_refused(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let garbage: [(&[u8], u8); 5] = [
        (b"GET / HTTP/1.1\r\nHost: edge-1\r\n\r\n", UNEXPECTED_MESSAGE),
        (b"\x16\x03\x01\xff\xff", DECODE_ERROR),
        (b"\x16\x03\x01\x00\x04\x01\xff\xff\xff", RECORD_OVERFLOW),
        (b"\x80\x2e\x01\x00\x02", UNEXPECTED_MESSAGE),
        (&[0; 4096], UNEXPECTED_MESSAGE),
    ];
    for (bytes, alert) in garbage {
        ensure_alert(&answer(bytes).await?, alert).with_context(|| format!("for {bytes:?}"))?;
    }
    server.wait_log("not TLS").await?;
    turned_away(&server, 5.0).await?;
    // A silent client is closed after a timeout, and delays no other client meanwhile.
    let mut silent = connect(listener_address()).await?;
    let on_edge = target(testbed, 1, KUBELET, Behaviour::Echo)?;
    let hello = client_hello("edge-1")?;
    let mut stream = connect(listener_address()).await?;
    stream.write_all(&hello).await?;
    expect_back(&mut stream, &hello).await?;
    ensure!(on_edge.connections() == 1, "{} connections", on_edge.connections());
    let end = client::end_of(&mut silent, Duration::from_secs(30)).await.context("a silent client")?;
    ensure!(end == client::End::Reset, "a silent client's connection ended with {end:?}");
    Ok(())
}

async fn node_without_a_tunnel(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let mut stream = connect(listener_address()).await?;
    stream.write_all(&client_hello("edge-2")?).await?;
    let end = client::end_of(&mut stream, server::START).await?;
    ensure!(end == client::End::Reset, "without a tunnel the connection ended with {end:?}");
    let line = server.wait_access("without a tunnel", |line| line.text("node") == "edge-2").await?;
    ensure!(line.text("outcome") == "no_tunnel", "access line {line:?}");
    Ok(())
}

async fn further_ports_lead_to_other_ports_of_nodes(testbed: &Testbed) -> Result<()> {
    const LED_TO: u16 = 9443;
    let server = Builder::new(testbed).flag(format!("--secure-ports=10270={LED_TO}")).start().await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let (on_edge, kubelet) =
        (target(testbed, 1, LED_TO, Behaviour::Echo)?, target(testbed, 1, KUBELET, Behaviour::Echo)?);
    let hello = client_hello("edge-1")?;
    let through = async |listener: SocketAddr| {
        let mut stream = connect(listener).await?;
        stream.write_all(&hello).await?;
        expect_back(&mut stream, &hello).await
    };
    let further = SocketAddr::from((CLOUD, 10270));
    through(further).await?;
    through(listener_address()).await?;
    ensure!((on_edge.connections(), kubelet.connections()) == (1, 1), "both went to one port");
    let destination = on_edge.address.to_string();
    server.wait_access("of the further port", |line| line.text("destination") == destination).await?;
    // A successor has the listener too.
    let _second = server.take_over().await?;
    through(further).await?;
    ensure!(on_edge.connections() == 2, "{} connections", on_edge.connections());
    Ok(())
}
