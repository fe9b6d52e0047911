//! Failures on a node or between it and the cloud during `kubectl logs -f`.
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::agent::Agent;
use postern_testbed::client::{connect, connect_error};
use postern_testbed::cluster::pods::{self, TALK, shell};
use postern_testbed::cluster::{Cluster, EDGE_NODE, postern, tls};
use postern_testbed::server::Server;
use postern_testbed::wait::{wait_for, wait_until};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::time::timeout;

use super::checks::Checks;
use super::following::Following;

const PATIENCE: Duration = Duration::from_secs(30);
/// Time limit for recovery: a dead link is noticed by PING, a lost address by the agent's next attempt.
const LINK: Duration = Duration::from_secs(60);

pub(super) async fn failures(testbed: &Testbed) -> Result<()> {
    let mut cluster = Cluster::start(testbed).await?;
    pods::run(&cluster.api, &[shell("talker", EDGE_NODE, TALK)]).await?;
    let manifests = postern::install(&cluster, "base").await?;
    let mut server = postern::server(&cluster, &manifests).await?.start().await?;
    let mut agent = postern::agent(&cluster, &server, &manifests, 1).await?;
    let mut checks = Checks::new();
    checks.run("logs -f goes on after the link was away for 3 s", link_away(&cluster)).await;
    checks
        .run(
            "logs -f and exec three times while the agent crashes",
            agent_crashes(&cluster, &server, &mut agent),
        )
        .await;
    checks.run("logs -f while the server crashes", server_crashes(&cluster, &mut server)).await;
    checks.run("the kubelet restarts", kubelet_restarts(&mut cluster)).await;
    checks.run("the kubelet's certificate is rotated", certificate_rotates(&cluster)).await;
    let moved = node_moves(&mut cluster, &server);
    checks.run_within(Duration::from_secs(180), "the node comes back with another address", moved).await;
    checks.finish()
}

async fn link_away(cluster: &Cluster<'_>) -> Result<()> {
    let mut following = Following::start(&cluster.kubectl).await?;
    cluster.testbed.cut_link(1)?;
    // Duration of the outage itself.
    tokio::time::sleep(Duration::from_secs(3)).await;
    cluster.testbed.restore_link(1)?;
    following.next(60).await
}

async fn agent_crashes(cluster: &Cluster<'_>, server: &Server<'_>, agent: &mut Agent<'_>) -> Result<()> {
    for _ in 0..3 {
        let following = Following::start(&cluster.kubectl).await?;
        let mut command =
            cluster.kubectl.start(&["exec", "-i", "talker", "--", "sh", "-c", "echo here; cat"])?;
        let mut lines = BufReader::new(command.stdout.take().context("no output")?).lines();
        let line = timeout(PATIENCE, lines.next_line()).await.context("exec printed nothing")??;
        ensure!(line.as_deref() == Some("here"), "exec printed {line:?}");
        agent.process.crash().await?;
        following.expect_end().await?;
        timeout(PATIENCE, command.wait()).await.context("exec goes on")??;
        server.wait_connected(EDGE_NODE, false, PATIENCE).await?;
        // The kernel's routes follow the session's end a moment later; until then the connection is reset.
        let failed = async || cluster.kubectl.fails(&["logs", "talker", "--tail=1"]).await;
        let at_once = |error: &String| error.contains("no route to host");
        wait_until("logs to fail without an agent", PATIENCE, failed, at_once).await?;
        agent.start_again()?;
        server.wait_connected(EDGE_NODE, true, PATIENCE).await?;
        Following::start(&cluster.kubectl).await?;
    }
    Ok(())
}

async fn server_crashes(cluster: &Cluster<'_>, server: &mut Server<'_>) -> Result<()> {
    let following = Following::start(&cluster.kubectl).await?;
    server.process.crash().await?;
    following.expect_end().await?;
    server.start_again().await?;
    server.wait_connected(EDGE_NODE, true, LINK).await?;
    Following::start(&cluster.kubectl).await?;
    Ok(())
}

async fn kubelet_restarts(cluster: &mut Cluster<'_>) -> Result<()> {
    let following = Following::start(&cluster.kubectl).await?;
    cluster.host_mut(EDGE_NODE)?.kill_kubelet()?;
    following.expect_end().await?;
    cluster.start_kubelet(EDGE_NODE)?;
    logs_of(cluster, "talker").await?;
    Following::start(&cluster.kubectl).await?;
    Ok(())
}

async fn certificate_rotates(cluster: &Cluster<'_>) -> Result<()> {
    let address = cluster.testbed.edge(1).address;
    let presented = async || {
        let stream = connect((address, 10250)).await?;
        // With the node's name: without a server name in the handshake this kubelet keeps presenting the certificate
        // that it started with.
        tls::certificate(&tls::handshake(stream, EDGE_NODE, &cluster.pki, None).await?)
    };
    let old = presented().await?;
    let mut following = Following::start(&cluster.kubectl).await?;
    cluster.host(EDGE_NODE)?.rotate_certificate(&cluster.pki)?;
    let is_new = async || Ok(presented().await? != old);
    wait_until("the kubelet to present its new certificate", LINK, is_new, |new| *new).await?;
    following.next(1).await?;
    Following::start(&cluster.kubectl).await?;
    Ok(())
}

/// Gives the machine another address: its links end, and its kubelet registers again.
async fn node_moves(cluster: &mut Cluster<'_>, server: &Server<'_>) -> Result<()> {
    let ns = cluster.testbed.edge(1).ns.clone();
    let old = cluster.testbed.edge(1).address;
    let new = std::net::Ipv4Addr::from(u32::from(old) + 1);
    cluster.host_mut(EDGE_NODE)?.kill_kubelet()?;
    cluster.api.delete(&format!("/api/v1/nodes/{EDGE_NODE}")).await?;
    ns.ip(&format!("addr del {old}/24 dev eth0"))?;
    ns.ip(&format!("addr add {new}/24 dev eth0"))?;
    ns.ip(&format!("route add default via {}", std::net::Ipv4Addr::from(u32::from(old) - 1)))?;
    cluster.move_host(EDGE_NODE, new)?;
    cluster.start_kubelet(EDGE_NODE)?;
    cluster.label_node(EDGE_NODE).await?;
    cluster.wait_ready(EDGE_NODE).await?;
    pods::run(&cluster.api, &[shell("after-the-move", EDGE_NODE, TALK)]).await?;
    // Until the old session is found dead, connections to its tunnel fail.
    logs_of(cluster, "after-the-move").await?;
    server.wait_connected(EDGE_NODE, true, PATIENCE).await?;
    // The old address is unused now and does not answer.
    let error = connect_error((old, 10250), Duration::from_secs(2)).await?;
    ensure!(error.kind() == std::io::ErrorKind::TimedOut, "the old address: {error}");
    // The Node object is younger than the agent's certificate. A few seconds after its creation the server refuses the
    // session for that reason, and the agent enrols again.
    wait_for("the new address to lead to the node", PATIENCE, async || {
        let Ok(stream) = connect((new, 10250)).await else { return Ok(None) };
        Ok(tls::handshake(stream, &new.to_string(), &cluster.pki, None).await.ok().map(drop))
    })
    .await
}

/// Waits until a plain `kubectl logs` works.
async fn logs_of(cluster: &Cluster<'_>, pod: &str) -> Result<()> {
    let kubectl = cluster.kubectl.within(Duration::from_secs(10));
    let logs = async || kubectl.run(&["logs", pod, "--tail=1"]).await;
    wait_until(&format!("kubectl logs {pod} to work"), LINK, logs, |logs| logs.starts_with("line ")).await?;
    Ok(())
}
