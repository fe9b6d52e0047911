//! A static map on edge 1 from its workloads to an echo in the cloud.
use std::fs;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::client::{self, echo, end_of};
use postern_testbed::server::{Builder, Server};
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::{CLOUD, Testbed};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

/// The agent's flag.
pub(crate) const MAP: &str = "--forward=127.0.0.1:9090=10.70.0.1:9300";
const POLICY: &str = "
rules:
- name: the map
  from: [{node: edge-1}]
  to:
  - addresses: [10.70.0.1]
    ports: [9300]
";

/// Starts a server that lets workloads on the edge reach the echo, and the echo.
pub(crate) async fn server(testbed: &Testbed) -> Result<(Server<'_>, Target)> {
    server_of(testbed, Builder::new(testbed)).await
}

/// As [`server`], with this builder of the server.
pub(crate) async fn server_of<'a>(testbed: &'a Testbed, server: Builder<'a>) -> Result<(Server<'a>, Target)> {
    let policy = testbed.dir().join("policy.yaml");
    fs::write(&policy, POLICY).with_context(|| format!("writing {}", policy.display()))?;
    let server = server.flag(format!("--policy={}", policy.display())).start().await?;
    Ok((server, Target::start(&testbed.cloud, CLOUD, 9300, Behaviour::Echo)?))
}

/// Connects through the map like a workload on the edge, echoes, and returns the open connection.
pub(crate) async fn hold_mapped(testbed: &Testbed) -> Result<TcpStream> {
    let map = SocketAddr::from(([127, 0, 0, 1], 9090));
    let mut stream = client::connect_from(&testbed.edge(1).ns, map, client::PATIENCE)
        .await
        .context("connecting to the map on the edge")?;
    echo(&mut stream, b"from the edge").await.context("through the map")?;
    Ok(stream)
}

/// As [`hold_mapped`], and closes the connection.
pub(crate) async fn visit_mapped(testbed: &Testbed) -> Result<()> {
    let mut stream = hold_mapped(testbed).await?;
    stream.shutdown().await.context("closing")?;
    let end = end_of(&mut stream, client::PATIENCE).await?;
    ensure!(end == client::End::Eof(0), "through the map: {end:?} instead of a clean end");
    Ok(())
}

/// Uses the map repeatedly, like workloads on the edge, while `work` runs; no use may fail.
pub(crate) async fn alongside_map<T>(testbed: &Testbed, work: impl Future<Output = Result<T>>) -> Result<T> {
    let mut work = std::pin::pin!(work);
    let mut visits = 0;
    loop {
        let mut visit = std::pin::pin!(visit_mapped(testbed));
        tokio::select! {
            biased;
            result = &mut work => {
                visit.await?;
                ensure!(visits > 0, "nobody has used the map");
                return result;
            }
            visited = &mut visit => visited.with_context(|| format!("after {visits} visits"))?,
        }
        visits += 1;
        // Each one uses one of the server's ports for a minute.
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
}
