//! port-forward: many concurrent connections, large answers, and a server that half-closes first.
use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::client::{self, PATIENCE, pattern_digest};
use postern_testbed::cluster::Cluster;
use postern_testbed::cluster::kubectl::{Kubectl, Transport};
use postern_testbed::cluster::pods::{IDLE, on_host_network, shell};
use postern_testbed::target::{Behaviour, Target};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::Child;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::checks::Checks;

const CONNECTIONS: usize = 50;
const POD: &str = "forwarder";
const LOOPBACK: [u8; 4] = [127, 0, 0, 1];
/// Number of bytes from the server that ends first.
const LENGTH: u64 = 8 << 20;

/// Returns a pod with the node's network: servers on the node's loopback answer for it.
pub(super) fn pods(node: &str) -> Vec<serde_json::Value> {
    vec![on_host_network(shell(POD, node, IDLE))]
}

/// Runs all checks.
pub(super) async fn run(checks: &mut Checks, cluster: &Cluster<'_>) {
    for transport in [Transport::WebSocket, Transport::Spdy] {
        let kubectl = cluster.kubectl.over(transport);
        let name = format!("port-forward with {CONNECTIONS} concurrent connections ({transport:?})");
        checks.run(&name, many(cluster, &kubectl)).await;
        let name = format!("port-forward to a server that ends its sending first ({transport:?})");
        checks.run(&name, ends_first(cluster, &kubectl)).await;
    }
}

async fn many(cluster: &Cluster<'_>, kubectl: &Kubectl) -> Result<()> {
    let target = Target::start(&cluster.testbed.edge(1).ns, LOOPBACK, 0, Behaviour::Echo)?;
    let (_kubectl, address) = forward(kubectl, target.address.port()).await?;
    // All are open before the first one ends.
    let mut streams = Vec::new();
    for n in 0..CONNECTIONS {
        let mut stream = TcpStream::connect(address).await.context("connecting to kubectl")?;
        client::echo(&mut stream, format!("hello {n}").as_bytes())
            .await
            .with_context(|| format!("connection {n}"))?;
        streams.push(stream);
    }
    ensure!(target.open() == CONNECTIONS as u64, "{} connections are open on the node", target.open());
    let mut echoes = JoinSet::new();
    for (n, mut stream) in streams.into_iter().enumerate() {
        echoes.spawn(async move {
            let text = vec![u8::try_from(n % 256).unwrap_or_default(); 100_000];
            client::echo(&mut stream, &text).await.with_context(|| format!("connection {n}"))
        });
    }
    while let Some(echo) = echoes.join_next().await {
        echo.context("a connection's task")??;
    }
    Ok(())
}

async fn ends_first(cluster: &Cluster<'_>, kubectl: &Kubectl) -> Result<()> {
    let source = Behaviour::Source(9, LENGTH);
    let target = Target::start(&cluster.testbed.edge(1).ns, LOOPBACK, 0, source)?;
    let (_kubectl, address) = forward(kubectl, target.address.port()).await?;
    // Concurrently: containerd waits a second for the client's end before it ends each connection.
    let mut answers = JoinSet::new();
    for _ in 0..3 {
        answers.spawn(async move {
            let mut stream = TcpStream::connect(address).await.context("connecting to kubectl")?;
            client::digest(&mut stream).await
        });
    }
    while let Some(answer) = answers.join_next().await {
        let (count, digest) = answer.context("a connection's task")??;
        ensure!(
            (count, &digest) == (LENGTH, &pattern_digest(9, LENGTH)),
            "got {count} bytes with the checksum {digest}"
        );
    }
    Ok(())
}

/// Starts `kubectl port-forward` and returns the address that it listens on.
async fn forward(kubectl: &Kubectl, port: u16) -> Result<(Child, SocketAddr)> {
    let mut child = kubectl.start(&["port-forward", POD, &format!(":{port}"), "--address=127.0.0.1"])?;
    let mut lines = BufReader::new(child.stdout.take().context("no output")?).lines();
    let line = timeout(PATIENCE, lines.next_line()).await.context("port-forward printed nothing")??;
    let line = line.context("port-forward ended")?;
    // Example: Forwarding from 127.0.0.1:40123 -> 8080
    let address = line.split_whitespace().nth(2).with_context(|| format!("it printed {line:?}"))?;
    let address = address.parse().with_context(|| format!("it printed {line:?}"))?;
    // It prints a line for every connection, and a full pipe would block it.
    tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
    Ok((child, address))
}
