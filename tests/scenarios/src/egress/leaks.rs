//! Ten thousand dials and more, of every outcome, and the resources left afterwards.
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::Agent;
use postern_testbed::client::echo;
use postern_testbed::metrics::Metrics;
use postern_testbed::process::Process;
use postern_testbed::report::figure;
use postern_testbed::server::Server;
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, Testbed};
use tokio::io::AsyncWriteExt as _;
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use tunnel_link::konnectivity::Packet;

use super::client::{Caller, ask, connect, random};
use super::proxy_server::{agent_at_both, proxy_servers};
use super::{ECHO, server, socket};
use crate::common::target;
use crate::held::ALLOCATOR;

const AT_ONCE: usize = 20;
/// Number of kinds of dials.
const KINDS: usize = 11;
/// Number of dials that take seconds: the first of each round, so that the others run beside them.
const FEW: usize = 6;
/// Number of initial dials, which exclude one-time allocations from the measurement.
const WARM_UP: usize = 2_000;
/// Number of dials in each later round. Bounded structures are full after five rounds; leaks grow in every one.
const ROUND: usize = 4_000;
const ROUNDS: usize = 8;
/// Number of rounds without growth: what leaks grows in each, and one may be level because the allocator found room.
const LEVEL: u32 = 2;
/// Maximum growth of memory per round: 64 bytes per dial.
const GROWTH: u64 = 256 << 10;

/// Makes one dial of a kind.
async fn dial(socket: &Path, kind: usize) -> Result<()> {
    match kind % KINDS {
        0 => echo(&mut connect(socket, "edge-1:9100").await?, b"one").await,
        1 => {
            let mut caller = Caller::open(socket).await?;
            let connect_id = caller.connected("edge-1:9100").await?;
            caller.echo(connect_id, b"one").await?;
            caller.close(connect_id).await
        }
        // Connection left open.
        2 => {
            let mut caller = Caller::open(socket).await?;
            let connect_id = caller.connected("edge-1:9100").await?;
            caller.echo(connect_id, b"one").await
        }
        3 => refused(socket, "edge-1:9104", "connection refused").await,
        4 => refused(socket, "edge-2:9100", "no tunnel").await,
        5 => refused(socket, "nobody:9100", "no such host").await,
        // Given up while the agent dials.
        6 => {
            let mut caller = Caller::open(socket).await?;
            let number = random();
            caller.send(Packet::dial_request("edge-1:9103".to_owned(), number)).await?;
            caller.send(Packet::close_dial(number)).await?;
            // Packets are processed in order, so the dial is over when this one is answered.
            let connect_id = caller.connected("edge-1:9100").await?;
            caller.close(connect_id).await
        }
        7 => {
            let mut stream = UnixStream::connect(socket).await?;
            stream.write_all(b"CONNECT edge-1:9103 HTTP/1.1\r\n\r\n").await?;
            Ok(())
        }
        8 => {
            let mut caller = Caller::open(socket).await?;
            let connect_id = caller.connected("edge-1:9101").await?;
            caller.data(connect_id, b"x").await?;
            caller.closed().await.map(drop)
        }
        9 => {
            let mut stream = connect(socket, "edge-1:9102").await?;
            postern_testbed::client::digest(&mut stream).await.map(drop)
        }
        // Refused by the agent's policy, and by the egress listener's.
        _ => {
            refused(socket, "edge-1:9105", "may not be dialled here").await?;
            refused(socket, &format!("{CLOUD}:10262"), "--egress-direct does not allow").await
        }
    }
}

async fn refused(socket: &Path, asked: &str, reason: &str) -> Result<()> {
    let (_, answer) = ask(UnixStream::connect(socket).await?, asked).await?;
    ensure!(answer.contains(reason), "{asked} was answered {answer:?}");
    let error = Caller::open(socket).await?.dial(asked).await?.err().unwrap_or_default();
    ensure!(error.contains(reason), "the dial of {asked} was answered {error:?}");
    Ok(())
}

/// Returns the answer to a dial that fails late, by gRPC or by CONNECT.
async fn failure([grpc, http]: [&Path; 2], asked: &str, number: usize) -> Result<String> {
    if number.is_multiple_of(2) {
        return Ok(Caller::open(grpc).await?.dial(asked).await?.err().unwrap_or_default());
    }
    let (_, answer) = ask(UnixStream::connect(http).await?, asked).await?;
    Ok(answer)
}

async fn timed_out(sockets: [&Path; 2], number: usize) -> Result<()> {
    let answer = failure(sockets, "edge-1:9103", number).await?;
    ensure!(is_timeout(&answer), "a dial that timed out was answered {answer:?}");
    Ok(())
}

fn is_timeout(answer: &str) -> bool {
    answer.starts_with("HTTP/1.1 504 ") || answer.contains("i/o timeout")
}

/// Loses the tunnel of edge 2 while dials are in flight.
async fn lost(server: &Server<'_>, agent: &mut Agent<'_>, socket: &Path) -> Result<()> {
    agent.return_to(server).await?;
    let mut under_way = JoinSet::new();
    for number in 0..FEW {
        let socket = socket.to_owned();
        under_way.spawn(async move { failure([socket.as_path(); 2], "edge-2:9103", number).await });
    }
    server.expect_metric("postern_connections_active", &[], FEW as f64).await?;
    agent.crash(server).await?;
    let mut lost = 0;
    while let Some(done) = under_way.join_next().await {
        let answer = done??;
        let is_lost = answer.contains("lost");
        // On a busy machine the agent may have given up the first ones before it was killed.
        ensure!(is_lost || is_timeout(&answer), "a dial whose tunnel was lost was answered {answer:?}");
        lost += usize::from(is_lost);
    }
    ensure!(lost > 0, "every dial had timed out before its tunnel was lost");
    Ok(())
}

/// Makes one dial of a kind through konnectivity's servers; the first serves gRPC, the second CONNECT. Cases that their
/// own races break are left out: by CONNECT no target speaks first.
async fn dial_at_konnectivity(sockets: &[PathBuf; 2], kind: usize) -> Result<()> {
    let [grpc, http] = sockets;
    match kind % KINDS {
        kind @ (1 | 2 | 6 | 8) => dial(grpc, kind).await,
        3 => refused_by_either(sockets, "edge-1:9104", "connection refused").await,
        4 | 10 => refused_by_either(sockets, "10.0.0.1:9100", "may not be dialled here").await,
        5 => refused_by_either(sockets, "no-such-host.invalid:9100", "no such host").await,
        9 => {
            let mut caller = Caller::open(grpc).await?;
            let connect_id = caller.connected("edge-1:9102").await?;
            let bye = caller.expect_data(connect_id).await?;
            ensure!(bye == b"bye", "the target said {bye:?}");
            caller.closed().await.map(drop)
        }
        kind => dial(http, kind).await,
    }
}

async fn refused_by_either([grpc, http]: &[PathBuf; 2], asked: &str, reason: &str) -> Result<()> {
    let (_, answer) = ask(UnixStream::connect(http).await?, asked).await?;
    ensure!(answer.starts_with("HTTP/1.1 502 "), "{asked} was answered {answer:?}");
    let error = Caller::open(grpc).await?.dial(asked).await?.err().unwrap_or_default();
    ensure!(error.contains(reason), "the dial of {asked} was answered {error:?}");
    Ok(())
}

async fn dials<D: Future<Output = Result<()>> + Send + 'static>(
    dial: impl Fn(usize) -> D,
    count: usize,
) -> Result<()> {
    let mut under_way = JoinSet::new();
    for number in 0..count {
        let dialled = dial(number);
        under_way.spawn(async move { dialled.await.with_context(|| format!("dial {number}")) });
        if under_way.len() >= AT_ONCE
            && let Some(done) = under_way.join_next().await
        {
            done??;
        }
    }
    while let Some(done) = under_way.join_next().await {
        done??;
    }
    Ok(())
}

/// Returns the numbers of connections, tasks and open files of a program.
fn left(process: &Process, metrics: &Metrics, open: &str) -> Result<(u64, u64, u64)> {
    let open = metrics.sum(open, &[])?;
    let tasks = metrics.sum("postern_tasks", &[])?;
    let files = std::fs::read_dir(format!("/proc/{}/fd", process.pid()))?.count();
    Ok((open as u64, tasks as u64, files as u64))
}

/// Dials, then compares the program's resources with those before. `first` runs before the dials of each round.
async fn nothing_is_left<D: Future<Output = Result<()>> + Send + 'static>(
    process: &Process,
    left: impl AsyncFn() -> Result<(u64, u64, u64)>,
    mut first: impl AsyncFnMut() -> Result<()>,
    dial: impl Fn(usize) -> D,
) -> Result<()> {
    let (_, tasks, files) = left().await?;
    let settled = |(open, now_tasks, now_files): &(u64, u64, u64)| {
        *open == 0 && *now_tasks <= tasks + 2 && *now_files <= files + 2
    };
    let (mut memory, mut level) = (Vec::new(), 0);
    for count in std::iter::once(WARM_UP).chain([ROUND; ROUNDS]) {
        first().await?;
        dials(&dial, count).await?;
        let what = format!("nothing to be left of {count} dials");
        wait_until(&what, Duration::from_secs(90), &left, settled).await?;
        let now = process.anonymous_bytes()?;
        level += u32::from(memory.last().is_some_and(|before| now.saturating_sub(*before) <= GROWTH));
        memory.push(now);
        if level == LEVEL {
            break;
        }
    }
    let kib: Vec<_> = memory.iter().map(|bytes| bytes >> 10).collect();
    figure(&format!("memory after {WARM_UP} dials, and after each {ROUND} more: {kib:?} KiB"));
    ensure!(level == LEVEL, "memory grew in all rounds but {level}: {kib:?} KiB");
    Ok(())
}

/// Starts targets for every outcome of a dial; one port never answers.
fn targets(testbed: &Testbed) -> Result<[Target; 3]> {
    testbed.black_hole(1, 9103)?;
    Ok([
        target(testbed, 1, ECHO, Behaviour::Echo)?,
        target(testbed, 1, 9101, Behaviour::Resets)?,
        target(testbed, 1, 9102, Behaviour::EndsFirst("bye"))?,
    ])
}

pub(super) async fn nothing_is_left_of_ten_thousand_dials(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).envs(ALLOCATOR).start().await?;
    let _agent = Agent::enrol_with(&server, 1, &["--allow-target=node:9100-9104"]).await?;
    let _targets = targets(testbed)?;
    testbed.black_hole(2, 9103)?;
    let mut second = Agent::enrol(&server, 2).await?;
    second.crash(&server).await?;
    let socket = socket(testbed);
    let left = async || left(&server.process, &server.metrics().await?, "postern_connections_active");
    let first = async || lost(&server, &mut second, &socket).await;
    let dial = |number| {
        let socket = socket.clone();
        async move {
            if number < FEW {
                timed_out([socket.as_path(); 2], number).await
            } else {
                dial(&socket, number).await
            }
        }
    };
    nothing_is_left(&server.process, left, first, dial).await
}

pub(super) async fn the_agent_keeps_nothing_of_ten_thousand_dials_either(testbed: &Testbed) -> Result<()> {
    let servers = proxy_servers(testbed).await?;
    let agent = agent_at_both(testbed, &servers).await?;
    let _targets = targets(testbed)?;
    let left = async || left(&agent.process, &agent.metrics().await?, "postern_agent_connections_active");
    let dial = |number| {
        let sockets = servers.sockets.clone();
        async move {
            if number < FEW {
                return timed_out([sockets[0].as_path(), sockets[1].as_path()], number).await;
            }
            dial_at_konnectivity(&sockets, number).await
        }
    };
    nothing_is_left(&agent.process, left, async || Ok(()), dial).await
}
