//! An agent stops while connections go through it.
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use postern_testbed::Testbed;
use postern_testbed::agent::Agent;
use postern_testbed::client::{connect, digest, echo, pattern_digest};
use postern_testbed::target::Behaviour;
use postern_testbed::wait::wait_until;
use postern_testbed::wan::Path;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;

use super::{PATIENCE, on_each_link, wait_links};
use crate::common::{hold, server, target};

pub(super) async fn an_agent_that_stops_sends_what_it_has(testbed: &Testbed) -> Result<()> {
    let _wan = testbed.wan(1, Path::asymmetric(60, 10_000_000, 5_000_000))?;
    let server = server(testbed).await?;
    // A busy machine may need longer for the download than an agent waits by default.
    let mut agent = Agent::enrol_with(&server, 1, &["--drain-timeout=2m"]).await?;
    let shell = target(testbed, 1, 9102, Behaviour::Echo)?;
    let source = target(testbed, 1, 9100, Behaviour::Source(3, 3_000_000))?;
    let held = hold(shell.address, b"login").await?;
    wait_links(&server, &[1, 0]).await?;
    // On an additional link, to which the agent still has data to send after reading everything.
    let address = source.address;
    let downloading = tokio::spawn(async move {
        let mut stream = connect(address).await?;
        // The client half-closes, so the agent's work is done once it has read everything.
        stream.shutdown().await?;
        digest(&mut stream).await
    });
    wait_until("the download", PATIENCE, async || on_each_link(&server).await, |on| on.get(1) == Some(&1))
        .await?;
    // The server counts it before the agent has it; one that the agent gets while it stops is refused.
    let dialled = async || Ok(source.connections());
    wait_until("the agent to dial the source", PATIENCE, dialled, |connections| *connections == 1).await?;
    drop(held);
    agent.process.signal(Signal::SIGTERM)?;
    let got = downloading.await.context("the download")??;
    ensure!(got == (3_000_000, pattern_digest(3, 3_000_000)), "{} bytes came, changed or incomplete", got.0);
    let status = agent.process.wait_exit(PATIENCE).await?;
    ensure!(status.success(), "the agent ended with {status}");
    Ok(())
}

/// As kube-apiserver's connection with a kubelet: the next request is sent 650 ms after the last one. Where the server judges, the
/// connection ends 500 ms behind a request, in the pause; the agent would see the request, and end it, 100 ms later, and its
/// reset would arrive 100 ms after that.
pub(super) async fn an_agent_that_stops_ends_no_connection_with_a_request_on_its_way(
    testbed: &Testbed,
) -> Result<()> {
    let _wan = testbed.wan(1, Path::new(200, 100))?;
    let server = server(testbed).await?;
    let mut agent = Agent::enrol_with(&server, 1, &["--drain-timeout=1s"]).await?;
    let kubelet = target(testbed, 1, 10250, Behaviour::Echo)?;
    let mut client = hold(kubelet.address, b"first").await?;
    agent.process.signal(Signal::SIGTERM)?;
    let mut answered = 0;
    loop {
        echo(&mut client, b"request").await.with_context(|| format!("behind {answered} answers"))?;
        answered += 1;
        // Not before the next request, unless the connection ends.
        if let Ok(read) = timeout(Duration::from_millis(450), client.read(&mut [0])).await {
            ensure!(!matches!(read, Ok(1..)), "received data without a request");
            break;
        }
        ensure!(answered < 20, "the connection outlasts its agent");
    }
    ensure!(answered >= 2, "it ended before the drain's time was over");
    let status = agent.process.wait_exit(PATIENCE).await?;
    ensure!(status.success(), "the agent ended with {status}");
    server.expect_every_access(|line| line.text("outcome") == "shutdown").await
}
