//! The agent's arm64 build, which most edge nodes run: below qemu's emulation where the machine is another one.
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::agent::Builder;
use postern_testbed::client::{self, Pattern, connect, digest, echo, pattern_digest};
use postern_testbed::process::arm64_program;
use postern_testbed::report::figure;
use postern_testbed::target::Behaviour;
use postern_testbed::wait::wait_until;
use tokio::io::AsyncWriteExt as _;

use crate::common::{expect_reset, server, target};

scenarios! {
    agent_carries_checked_bytes(arm64),
}

const LENGTH: u64 = 20_000_000;
/// `e_machine` of an ELF file for arm64.
const EM_AARCH64: u16 = 183;

async fn agent_carries_checked_bytes(testbed: &Testbed) -> Result<()> {
    let command = arm64_program("tunnel-agent")?;
    let program = command.last().context("an empty command line")?;
    let header = std::fs::read(program).with_context(|| format!("reading {}", program.display()))?;
    let machine = header.get(18..20).context("an ELF header")?;
    ensure!(machine == EM_AARCH64.to_le_bytes(), "{} is not for arm64", program.display());

    let server = server(testbed).await?;
    let mut agent = Builder::new(&server, 1).arm64()?.enrol(&server).await?;
    let target_of = |port, behaviour| target(testbed, 1, port, behaviour);
    let echoes = target_of(10250, Behaviour::Echo)?;
    echo(&mut connect(echoes.address).await?, b"hello arm64").await?;

    let begin = std::time::Instant::now();
    let source = target_of(9100, Behaviour::Source(21, LENGTH))?;
    let got = digest(&mut connect(source.address).await?).await?;
    ensure!(got == (LENGTH, pattern_digest(21, LENGTH)), "{} bytes came, changed or incomplete", got.0);
    let sink = target_of(9101, Behaviour::Sink)?;
    let mut stream = connect(sink.address).await?;
    Pattern::new(22, LENGTH).write_to(&mut stream).await?;
    stream.shutdown().await?;
    let answer = client::text(&mut stream, "the sink's answer").await?;
    ensure!(answer == format!("{LENGTH} {}", pattern_digest(22, LENGTH)), "the sink saw {answer}");
    let seconds = begin.elapsed().as_secs_f64();
    figure(&format!("{LENGTH} bytes down and up in {seconds:.1} s, the agent emulated"));

    // Nothing listens there: what the agent's dial fails with reaches the client.
    expect_reset((testbed.edge(1).address, 9102).into()).await?;

    // With its certificate, and its own handling of a crash of its process.
    agent.crash(&server).await?;
    agent.return_to(&server).await?;
    echo(&mut connect(echoes.address).await?, b"hello again").await?;
    let metrics = async || agent.metrics().await;
    wait_until("the agent's metrics", Duration::from_secs(10), metrics, |metrics| {
        metrics.sum("postern_agent_connections_total", &[("outcome", "ok")]) >= 1.0
    })
    .await?;
    Ok(())
}
