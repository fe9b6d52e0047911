//! Ten thousand dials of every outcome, and what is left of them.
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::client::echo;
use postern_testbed::report::figure;
use postern_testbed::server::Server;
use postern_testbed::target::Behaviour;
use postern_testbed::wait::wait_until;
use tokio::io::AsyncWriteExt as _;
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use tunnel_core::konnectivity::Packet;

use super::client::{Caller, ask, connect, random};
use super::{ECHO, server_and_agent, socket};
use crate::common::target;

const AT_ONCE: usize = 20;
/// Kinds of dials.
const KINDS: usize = 10;

/// One dial of a kind.
async fn dial(socket: &Path, kind: usize) -> Result<()> {
    match kind % KINDS {
        0 => echo(&mut connect(socket, "edge-1:9100").await?, b"one").await,
        1 => {
            let mut caller = Caller::open(socket).await?;
            let connect_id = caller.connected("edge-1:9100").await?;
            caller.echo(connect_id, b"one").await?;
            caller.close(connect_id).await
        }
        // Left open.
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
            // It is taken in order, so the dial is over when this is answered.
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
        _ => {
            let mut stream = connect(socket, "edge-1:9102").await?;
            postern_testbed::client::digest(&mut stream).await.map(drop)
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

async fn dials(socket: &Path, count: usize) -> Result<()> {
    let mut under_way = JoinSet::new();
    for number in 0..count {
        let socket = socket.to_owned();
        under_way.spawn(async move { dial(&socket, number).await.with_context(|| format!("dial {number}")) });
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

/// Tasks, open files and connections of the server.
async fn left(server: &Server<'_>) -> Result<(u64, u64, u64)> {
    let metrics = server.metrics().await?;
    let open = metrics.sum("postern_connections_active", &[("door", "egress")]);
    let tasks = metrics.sum("postern_tasks", &[]);
    let files = std::fs::read_dir(format!("/proc/{}/fd", server.process.pid()))?.count();
    Ok((open as u64, tasks as u64, files as u64))
}

pub(super) async fn nothing_is_left_of_ten_thousand_dials(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let _echo = target(testbed, 1, ECHO, Behaviour::Echo)?;
    let _resets = target(testbed, 1, 9101, Behaviour::Resets)?;
    let _ends = target(testbed, 1, 9102, Behaviour::EndsFirst("bye"))?;
    testbed.black_hole(1, 9103)?;
    let socket = socket(testbed);
    let (_, tasks, files) = left(&server).await?;
    // What is allocated once is not what is looked for.
    dials(&socket, 3_000).await?;
    let settled = |(open, now_tasks, now_files): &(u64, u64, u64)| {
        *open == 0 && *now_tasks <= tasks + 2 && *now_files <= files + 2
    };
    let limit = Duration::from_secs(90);
    wait_until("nothing to be left of 3,000 dials", limit, async || left(&server).await, settled).await?;
    let before = server.process.resident_bytes()?;
    dials(&socket, 10_000).await?;
    wait_until("nothing to be left of 10,000 dials", limit, async || left(&server).await, settled).await?;
    let after = server.process.resident_bytes()?;
    figure(&format!("memory before 10,000 dials {} KiB, after {} KiB", before >> 10, after >> 10));
    ensure!(after <= before + before / 20, "memory grew from {before} to {after} bytes");
    Ok(())
}
