//! Mixed load with faults, round after round: both programs hold no more at the end than after a minute. `cargo xtask
//! soak` runs it for hours.
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use postern_testbed::Testbed;
use postern_testbed::agent::{self, Agent};
use postern_testbed::client::{self, Pattern, connect, digest, pattern_digest, visit};
use postern_testbed::inventory::{Inventory, node};
use postern_testbed::report::{figure, progress};
use postern_testbed::server::{self, Server};
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::wait::wait_until;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::common::target;
use crate::held::{ALLOCATOR, Held, growth, of_process};

scenarios! {
    what_is_held_does_not_grow(edges = 2, limit = 300, quick),
}

/// Duration in seconds; `cargo xtask soak` sets it. The runner adds it to the scenario's limit.
pub(crate) const SECONDS: &str = "POSTERN_SOAK_SECONDS";
const DEFAULT: Duration = Duration::from_secs(60);
/// Time of the first measurement, with which the end is compared; half of the duration if that is shorter.
const WARM: Duration = Duration::from_secs(60);
const ROUND: Duration = Duration::from_secs(6);
/// Slack for fluctuating resources: the allocator's pages, threads for blocking calls, a connection of the admin port
/// and its task, and up to seven additional links of each agent with their tasks: on a busy machine a path seems long.
const SLACK: [(&str, f64); 4] = [("memory", 2e6), ("sockets", 16.0), ("tasks", 48.0), ("threads", 4.0)];
const LENGTH: u64 = 4_000_000;

/// Returns the requested duration of the soak.
pub(crate) fn asked() -> Option<Duration> {
    std::env::var(SECONDS).ok()?.parse().ok().map(Duration::from_secs)
}

async fn what_is_held_does_not_grow(testbed: &Testbed) -> Result<()> {
    let length = asked().unwrap_or(DEFAULT);
    let server = server::Builder::new(testbed).envs(ALLOCATOR).start().await?;
    let agent = agent::Builder::new(&server, 1).envs(ALLOCATOR).enrol(&server).await?;
    let mut other = Agent::enrol(&server, 2).await?;
    let targets = Targets::start(testbed)?;
    let begin = Instant::now();
    let (mut warm, mut rounds, mut served) = (None, 0usize, 0usize);
    loop {
        served += round(testbed, &server, &mut other, &targets, rounds).await?;
        rounds += 1;
        let held = held(&server, &agent).await?;
        let took = begin.elapsed();
        if took >= length {
            let Some(warm) = warm else { bail!("{length:?} is too short for two rounds") };
            figure(&format!(
                "{rounds} rounds, {served} connections in {took:.0?}; {}",
                growth(&warm, &held, &SLACK)?
            ));
            return Ok(());
        }
        if rounds % 10 == 0 {
            progress(&format!("{rounds} rounds, {served} connections, {held:.0?}"));
        }
        if warm.is_none() && took >= WARM.min(length / 2) {
            warm = Some(held);
        }
    }
}

async fn held(server: &Server<'_>, agent: &Agent<'_>) -> Result<Held> {
    let idle = async || {
        let metrics = server.metrics().await?;
        Ok((metrics.sum("postern_connections_active", &[])?, metrics.sum("postern_tunnels", &[])?))
    };
    wait_until("every connection to end", Duration::from_secs(60), idle, |now| *now == (0.0, 2.0)).await?;
    let status = server.status().await?;
    let mut held = Held::new();
    for count in ["routes", "routes_down", "excluded"] {
        let value = status["redirect"][count].as_f64().with_context(|| format!("no {count} in {status}"))?;
        held.insert(format!("server's {count}"), value);
    }
    for (program, metrics) in [("server", server.metrics().await?), ("agent", agent.metrics().await?)] {
        held.extend(of_process(program, &metrics)?);
    }
    Ok(held)
}

/// The targets, all on the steady edge except the last.
struct Targets {
    echo: Target,
    source: Target,
    sink: Target,
    resets: Target,
    shaken: Target,
}

impl Targets {
    fn start(testbed: &Testbed) -> Result<Self> {
        Ok(Self {
            echo: target(testbed, 1, 10250, Behaviour::Echo)?,
            source: target(testbed, 1, 9100, Behaviour::Source(5, LENGTH))?,
            sink: target(testbed, 1, 9101, Behaviour::Sink)?,
            resets: target(testbed, 1, 9102, Behaviour::Resets)?,
            shaken: target(testbed, 2, 10250, Behaviour::Echo)?,
        })
    }
}

/// Runs load while a fault occurs. Returns the number of connections that were served correctly.
async fn round(
    testbed: &Testbed,
    server: &Server<'_>,
    other: &mut Agent<'_>,
    targets: &Targets,
    number: usize,
) -> Result<usize> {
    let stop = Arc::new(AtomicBool::new(false));
    let mut load = JoinSet::new();
    let mut repeat = |client: Client, address: SocketAddr, strict: bool| {
        let stop = stop.clone();
        load.spawn(async move {
            let mut served = 0;
            while !stop.load(Ordering::Relaxed) {
                match client.run(address).await {
                    Ok(()) => served += 1,
                    Err(error) if strict => {
                        return Err(error.context(format!("{client:?} of the steady edge")));
                    }
                    // Its agent or its link is away.
                    Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            }
            Ok(served)
        });
    };
    let refused = SocketAddr::new(targets.echo.address.ip(), 9105);
    for (client, address) in [
        (Client::Visit, targets.echo.address),
        (Client::Visit, targets.echo.address),
        (Client::Download, targets.source.address),
        (Client::Upload, targets.sink.address),
        (Client::Reset, targets.resets.address),
        (Client::Reset, refused),
        (Client::Leave, targets.source.address),
    ] {
        repeat(client, address, true);
    }
    repeat(Client::Visit, targets.shaken.address, false);
    // One client reads nothing for the whole round.
    let stalled = connect(targets.source.address).await?;
    let begin = Instant::now();
    shake(testbed, server, other, number).await?;
    tokio::time::sleep(ROUND.saturating_sub(begin.elapsed())).await;
    drop(stalled);
    stop.store(true, Ordering::Relaxed);
    let mut served = 0;
    while let Some(client) = load.join_next().await {
        served += client.context("a client panicked")??;
    }
    Ok(served)
}

#[derive(Clone, Copy, Debug)]
enum Client {
    Visit,
    Download,
    Upload,
    /// The target resets or refuses.
    Reset,
    /// The client leaves in the middle.
    Leave,
}

impl Client {
    async fn run(self, address: SocketAddr) -> Result<()> {
        match self {
            Self::Visit => visit(address).await.map(drop),
            Self::Download => {
                let got = digest(&mut connect(address).await?).await?;
                ensure!(got == (LENGTH, pattern_digest(5, LENGTH)), "{} bytes, changed or incomplete", got.0);
                Ok(())
            }
            Self::Upload => {
                let mut stream = connect(address).await?;
                let mut pattern = Pattern::new(6, LENGTH);
                pattern.write_to(&mut stream).await?;
                stream.shutdown().await?;
                let answer = client::text(&mut stream, "the sink did not answer").await?;
                ensure!(answer == format!("{LENGTH} {}", pattern.digest()), "the sink has {answer}");
                Ok(())
            }
            Self::Reset => crate::common::expect_reset(address).await,
            Self::Leave => {
                let mut stream = connect(address).await?;
                crate::common::skip(&mut stream, 100_000).await?;
                // Unread bytes turn the close into a reset.
                Ok(())
            }
        }
    }
}

/// Causes one fault, a different one each time, and ends it.
async fn shake(testbed: &Testbed, server: &Server<'_>, other: &mut Agent<'_>, number: usize) -> Result<()> {
    match number % 5 {
        0 => {
            other.crash(server).await?;
            other.return_to(server).await
        }
        1 => {
            testbed.cut_link(2)?;
            tokio::time::sleep(Duration::from_secs(2)).await;
            testbed.restore_link(2)?;
            server.wait_connected("edge-2", true, Duration::from_secs(60)).await
        }
        2 => {
            let mut inventory = Inventory::of(testbed)?;
            inventory.nodes.extend(
                (0..200u8).map(|n| node(&format!("passing-{n}"), true, &[[10, 99, 0, n].into()], &[])),
            );
            inventory.write()?;
            let edges = async |count| {
                server.expect_metric("postern_inventory_nodes", &[("role", "edge")], count).await
            };
            edges(202.0).await?;
            inventory.nodes.truncate(3);
            inventory.write()?;
            edges(2.0).await
        }
        3 => {
            for port in [10262, 10263] {
                for bytes in [&b"\x16\x03\x01\x00\x00"[..], b"GET / HTTP/1.1\r\n\r\n", &[0xff; 2000]] {
                    let address = (postern_testbed::CLOUD, port);
                    let mut stream = TcpStream::connect(address).await.context("a listener")?;
                    stream.write_all(bytes).await.ok();
                }
            }
            Ok(())
        }
        _ => {
            let token = server.token("edge-2")?;
            let (id, _) = token.token.split_once('.').context("ID.SECRET")?;
            server.run(&["token", "revoke", id]).map(drop)
        }
    }
}
