//! The arm64 builds, run by qemu on machines of another architecture.
use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::agent::{self, Agent};
use postern_testbed::client::{self, Pattern, connect, digest, echo, pattern_digest};
use postern_testbed::process::arm64_program;
use postern_testbed::report::figure;
use postern_testbed::server::{self, START};
use postern_testbed::target::Behaviour;
use tokio::io::AsyncWriteExt as _;

use crate::common::{self, expect_reset, target};

scenarios! {
    agent_relays_checked_bytes(arm64),
    server_relays_checked_bytes(arm64),
}

const LENGTH: u64 = 20_000_000;
const SEED: u64 = 21;
/// `e_machine` of an ELF file for arm64.
const EM_AARCH64: u16 = 183;

async fn agent_relays_checked_bytes(testbed: &Testbed) -> Result<()> {
    is_arm64("tunnel-agent")?;
    let server = common::server(testbed).await?;
    let mut agent = agent::Builder::new(&server, 1).arm64()?.enrol(&server).await?;
    let target_of = |port, behaviour| target(testbed, 1, port, behaviour);
    let echoes = target_of(10250, Behaviour::Echo)?;
    echo(&mut connect(echoes.address).await?, b"hello arm64").await?;

    let source = target_of(9100, Behaviour::Source(SEED, LENGTH))?;
    let sink = target_of(9101, Behaviour::Sink)?;
    relays(source.address, sink.address, "the agent").await?;

    // No target listens there: the agent's dial error reaches the client.
    expect_reset((testbed.edge(1).address, 9102).into()).await?;

    // The agent has its certificate, and handles a crash of its process itself.
    agent.crash(&server).await?;
    agent.return_to(&server).await?;
    echo(&mut connect(echoes.address).await?, b"hello again").await?;
    agent
        .wait_metric("postern_agent_connections_total", &[("outcome", "ok")], |count| count >= 1.0)
        .await
        .map(drop)
}

/// The server's listeners and its link: every function that needs no BPF.
async fn server_relays_checked_bytes(testbed: &Testbed) -> Result<()> {
    is_arm64("tunnel-server")?;
    let map = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
    let mut server = server::Builder::arm64(testbed)?
        .flag(format!("--map={}=edge-1/9100", map(3000)))
        .flag(format!("--map={}=edge-1/9101", map(3001)))
        .start()
        .await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let _source = target(testbed, 1, 9100, Behaviour::Source(SEED, LENGTH))?;
    let _sink = target(testbed, 1, 9101, Behaviour::Sink)?;
    relays(map(3000), map(3001), "the server").await?;

    // The CA and the server's record of the node are on disk.
    server.process.crash().await?;
    server.start_again().await?;
    server.wait_connected("edge-1", true, START).await?;
    relays(map(3000), map(3001), "the server").await
}

/// Downloads from `source` and uploads to `sink`; both ends must agree on the bytes.
async fn relays(source: SocketAddr, sink: SocketAddr, emulated: &str) -> Result<()> {
    let begin = std::time::Instant::now();
    let got = digest(&mut connect(source).await?).await?;
    ensure!(got == (LENGTH, pattern_digest(SEED, LENGTH)), "{} bytes came, changed or incomplete", got.0);
    let mut stream = connect(sink).await?;
    Pattern::new(SEED, LENGTH).write_to(&mut stream).await?;
    stream.shutdown().await?;
    let answer = client::text(&mut stream, "the sink's answer").await?;
    ensure!(answer == format!("{LENGTH} {}", pattern_digest(SEED, LENGTH)), "the sink saw {answer}");
    let seconds = begin.elapsed().as_secs_f64();
    figure(&format!("{LENGTH} bytes down and up in {seconds:.1} s, {emulated} emulated"));
    Ok(())
}

fn is_arm64(name: &str) -> Result<()> {
    let program: PathBuf = arm64_program(name)?.pop().context("an empty command line")?;
    let header = std::fs::read(&program).with_context(|| format!("reading {}", program.display()))?;
    let machine = header.get(18..20).context("an ELF header")?;
    ensure!(machine == EM_AARCH64.to_le_bytes(), "{} is not for arm64", program.display());
    Ok(())
}
