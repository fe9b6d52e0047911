//! An edge with two uplinks, and MPTCP on its links.
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::agent;
use postern_testbed::client::{Pattern, connect, echo};
use postern_testbed::report::figure;
use postern_testbed::server::Builder;
use postern_testbed::target::Behaviour;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::{PATIENCE, session};
use crate::common::{hold, target};

/// Interface of the second uplink on the router.
const SECOND: &str = "edge1-second";
/// Within this time the kernel has retransmitted on the other path; only PING, after 20 s, would find the link dead.
const SOON: Duration = Duration::from_secs(5);

pub(super) async fn one_of_two_uplinks_fails(testbed: &Testbed) -> Result<()> {
    let (edge, router) = (testbed.edge(1), &testbed.router);
    edge.ns.ip(&format!("link add eth1 type veth peer name {SECOND} netns {}", router.name()))?;
    for change in [
        "addr add 192.168.150.2/24 dev eth1",
        "link set eth1 up",
        "rule add from 192.168.150.2 table 150",
        "route add default via 192.168.150.1 table 150",
        // As in docs/tasks/edge-sites.md.
        "mptcp endpoint add 192.168.150.2 dev eth1 subflow",
    ] {
        edge.ns.ip(change).context("needed: MPTCP in the kernel, and net.mptcp.enabled=1")?;
    }
    router.ip(&format!("addr add 192.168.150.1/24 dev {SECOND}"))?;
    router.ip(&format!("link set {SECOND} up"))?;

    let server = Builder::new(testbed).start().await?;
    let _agent = agent::Builder::new(&server, 1).flag("--mptcp=on").enrol(&server).await?;
    let shell = target(testbed, 1, 9102, Behaviour::Echo)?;
    let sink = target(testbed, 1, 9101, Behaviour::Sink)?;
    let mut typing = hold(shell.address, b"before").await?;
    let before = session(&server).await?;
    for (failed, port) in [("first", edge.router_port.as_str()), ("second", SECOND)] {
        testbed.drop_at_router("-I", port)?;
        let pause = type_on(&mut typing).await?;
        let took = upload_patiently(sink.address).await?;
        figure(&format!("the {failed} uplink fails: a keystroke waits {pause:.2?}, 5 MB {took:.2?}"));
        ensure!(pause <= SOON, "a keystroke took {pause:.1?} after the {failed} uplink had failed");
        testbed.drop_at_router("-D", port)?;
        // The kernel goes back to a path once that has acknowledged what was lost on it.
        type_on(&mut typing).await?;
    }
    ensure!(session(&server).await? == before, "the agent attached again");

    // No path is left: PINGs find that, and the agent dials again once there is one.
    testbed.cut_link(1)?;
    testbed.drop_at_router("-I", SECOND)?;
    server.wait_connected("edge-1", false, PATIENCE).await?;
    testbed.restore_link(1)?;
    testbed.drop_at_router("-D", SECOND)?;
    server.wait_connected("edge-1", true, PATIENCE).await?;
    drop(hold(shell.address, b"after").await?);
    Ok(())
}

/// Uploads 5 MB. If the kernel does not take a path for failed (it asks that the other one acknowledged something lately), it sends
/// what it had queued there 64 KiB at a time on the other one, with longer and longer pauses: 900 KiB took half a minute.
async fn upload_patiently(address: SocketAddr) -> Result<Duration> {
    let start = Instant::now();
    let mut stream = connect(address).await?;
    let mut pattern = Pattern::new(5, 5_000_000);
    let mut buffer = vec![0; 128 * 1024];
    let mut answer = String::new();
    tokio::time::timeout(PATIENCE, async {
        while let Some(chunk) = pattern.chunk(&mut buffer) {
            stream.write_all(chunk).await?;
        }
        stream.shutdown().await?;
        stream.read_to_string(&mut answer).await
    })
    .await
    .context("the upload was not answered")??;
    ensure!(answer == format!("5000000 {}", pattern.digest()), "uploaded bytes arrived as {answer}");
    Ok(start.elapsed())
}

/// The longest wait for an echo, while keys are pressed for a second.
async fn type_on(stream: &mut TcpStream) -> Result<Duration> {
    let start = Instant::now();
    let mut longest = Duration::ZERO;
    while start.elapsed() < Duration::from_secs(1) {
        let pressed = Instant::now();
        tokio::time::timeout(PATIENCE, echo(stream, b"during")).await??;
        longest = longest.max(pressed.elapsed());
    }
    Ok(longest)
}
