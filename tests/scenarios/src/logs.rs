//! Standard error that is not read, is closed, or fails: no tunnel waits for it.
use std::fs::OpenOptions;
use std::io::{self, BufRead as _, BufReader};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::fcntl::{FcntlArg, fcntl};
use postern_testbed::Testbed;
use postern_testbed::admin::Admin;
use postern_testbed::agent::{self, Agent};
use postern_testbed::client::visit;
use postern_testbed::server::{Builder, Server};
use postern_testbed::target::Behaviour;

use crate::common::{at_once, target};

scenarios! {
    nobody_reads_standard_error(limit = 240),
    standard_error_fails(quick),
}

/// One page, the minimum capacity of a pipe.
const PIPE: i32 = 4096;
/// A visit takes milliseconds; one that waits for a log line never ends.
const LIMIT: Duration = Duration::from_secs(120);

fn small_pipe() -> Result<(io::PipeReader, io::PipeWriter)> {
    let (reader, writer) = io::pipe()?;
    fcntl(&writer, FcntlArg::F_SETPIPE_SZ(PIPE)).context("shrinking a pipe")?;
    Ok((reader, writer))
}

async fn with_output<'a>(
    testbed: &'a Testbed,
    server: io::PipeWriter,
    agent: io::PipeWriter,
) -> Result<(Server<'a>, Agent<'a>)> {
    let server = Builder::new(testbed).flag("--log-level=debug").stderr(server).start().await?;
    let token = server.token("edge-1")?;
    let agent =
        agent::Builder::new(&server, 1).token(token).flag("--log-level=trace").stderr(agent).spawn()?;
    server.wait_connected("edge-1", true, agent::START).await?;
    Ok((server, agent))
}

async fn lost(admin: &Admin<'_>, reason: &str) -> Result<f64> {
    admin.metric("postern_log_lines_lost_total", &[("reason", reason)]).await
}

async fn nobody_reads_standard_error(testbed: &Testbed) -> Result<()> {
    let ((of_server, server), (of_agent, agent)) = (small_pipe()?, small_pipe()?);
    let (mut server, mut agent) = with_output(testbed, server, agent).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let begin = Instant::now();
    loop {
        at_once(100, || async move { visit(on_edge.address).await }).await?;
        ensure!(server.get("/healthz").await?.0 == 200, "/healthz");
        let (of_server, of_agent) = (lost(&server, "queue_full").await?, lost(&agent, "queue_full").await?);
        if of_server > 0.0 && of_agent > 0.0 {
            break;
        }
        ensure!(begin.elapsed() < LIMIT, "dropped lines: {of_server} of the server, {of_agent} of the agent");
    }
    ensure!(server.is_connected("edge-1").await?, "the tunnel was lost");
    // Standard error is read again, and has a line about the lost ones.
    let line = tokio::task::spawn_blocking(move || {
        let mut lines = BufReader::new(of_server).lines();
        lines.find(|line| line.as_ref().is_ok_and(|line| line.contains("dropped log lines"))).is_some()
    });
    ensure!(tokio::time::timeout(LIMIT, line).await.context("no line about lost lines")??, "the log ended");
    visit(on_edge.address).await?;
    // The agent's pipe is full until the end; the server's has no reader any more.
    let status = agent.process.stop().await?;
    ensure!(status.success(), "the agent ended with {status}");
    let status = server.process.stop().await?;
    ensure!(status.success(), "the server ended with {status}");
    drop(of_agent);
    Ok(())
}

async fn standard_error_fails(testbed: &Testbed) -> Result<()> {
    let (reader, closed) = small_pipe()?;
    drop(reader);
    let full = || OpenOptions::new().write(true).open("/dev/full").context("/dev/full");
    let mut server = Builder::new(testbed).stderr(full()?).start().await?;
    let token = server.token("edge-1")?;
    let mut agent = agent::Builder::new(&server, 1).token(token).stderr(closed).spawn()?;
    server.wait_connected("edge-1", true, agent::START).await?;
    visit(target(testbed, 1, 10250, Behaviour::Echo)?.address).await?;
    for admin in [&*server, &*agent] {
        let failed = [("reason", "write_failed")];
        admin.wait_metric("postern_log_lines_lost_total", &failed, |lost| lost > 0.0).await?;
    }
    for process in [&mut agent.process, &mut server.process] {
        let status = process.stop().await?;
        ensure!(status.success(), "{} ended with {status}", process.name());
    }
    Ok(())
}
