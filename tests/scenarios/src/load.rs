//! Heavy load, and failures and stalls alongside healthy traffic.
use std::cell::Cell;
use std::collections::HashSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::Agent;
use postern_testbed::client::{self, End, Pattern, connect, digest, echo, end_after, pattern_digest, visit};
use postern_testbed::percentiles::Times;
use postern_testbed::report::figure;
use postern_testbed::target::Behaviour;
use postern_testbed::wait::{wait_for, wait_until, while_running};
use postern_testbed::{Testbed, load_target};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tunnel_link::link;

use crate::common::{
    HEALTHY, alongside, at_once, expect_reset, hold_many, pause, resets_settled, server_and_agent,
    small_kernel_buffers, stalled_readers, target,
};

scenarios! {
    bulk_both_ways(limit = 180),
    bulk_without_page_faults(limit = 180),
    healthy_traffic_with_a_stalled_reader,
    healthy_traffic_with_black_holed_dials,
    healthy_traffic_with_refused_dials,
    healthy_traffic_with_a_slow_target(quick),
    healthy_traffic_with_bulk_downloads,
    hundred_stalled_readers_of_one_node(edges = 2, limit = 180),
    five_hundred_stalled_readers_of_one_node(limit = 300),
    targets_that_never_read(limit = 180),
    two_thousand_concurrent_connections(limit = 180),
}

const BULK: u64 = 200_000_000;

fn rate(bytes: u64, start: Instant) -> String {
    // Numbers of bytes below 2^53 are exact in an f64.
    #[expect(clippy::cast_precision_loss, reason = "for printing")]
    let megabytes = bytes as f64 / 1e6;
    format!("{megabytes:.0} MB at {:.0} MB/s", megabytes / start.elapsed().as_secs_f64())
}

async fn download(address: SocketAddr, seed: u64, length: u64) -> Result<()> {
    let mut stream = connect(address).await?;
    let got = digest(&mut stream).await?;
    ensure!(
        got == (length, pattern_digest(seed, length)),
        "downloaded {} bytes, changed or incomplete",
        got.0
    );
    Ok(())
}

async fn bulk_both_ways(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let source = target(testbed, 1, 9100, Behaviour::Source(11, BULK))?;
    let start = Instant::now();
    download(source.address, 11, BULK).await?;
    figure(&format!("download, generators and checksums included: {}", rate(BULK, start)));

    let sink = target(testbed, 1, 9101, Behaviour::Sink)?;
    let start = Instant::now();
    let mut stream = connect(sink.address).await?;
    let mut pattern = Pattern::new(12, BULK);
    pattern.write_to(&mut stream).await?;
    stream.shutdown().await?;
    let answer = client::text(&mut stream, "no checksum arrived").await?;
    ensure!(answer == format!("{BULK} {}", pattern.digest()), "uploaded bytes arrived as {answer}");
    figure(&format!("upload, generators and checksums included: {}", rate(BULK, start)));

    let line = server
        .wait_access("of the download", |line| line.text("destination") == source.address.to_string())
        .await?;
    ensure!(line.bytes_from_node()? == BULK && line.text("outcome") == "ok", "access line {line:?}");
    let line = server
        .wait_access("of the upload", |line| line.text("destination") == sink.address.to_string())
        .await?;
    ensure!(line.bytes_to_node()? == BULK && line.text("outcome") == "ok", "access line {line:?}");
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    let bulk = BULK as f64;
    for direction in ["from_node", "to_node"] {
        let relayed = [("direction", direction)];
        server.wait_metric("postern_relayed_bytes_total", &relayed, |bytes| bytes >= bulk).await?;
    }
    Ok(())
}

/// The memory of buffers is used again. Where each segment's is fetched from the kernel, a gigabyte costs a page fault for
/// every 4 KiB or two, and a fifth of the throughput.
async fn bulk_without_page_faults(testbed: &Testbed) -> Result<()> {
    const WARM_UP: u64 = 200_000_000;
    const GIGABYTE: u64 = 1_000_000_000;
    // The goal is 1,000. On a busy machine more is in flight, now and then more than ever before.
    const MOST: u64 = 10_000;
    let (server, agent) = server_and_agent(testbed).await?;
    let programs = [("server", &server.process), ("agent", &agent.process)];
    let target = load_target::Target::start(testbed, 1).await?;
    let mut over = Vec::new();
    for way in [Way::Down, Way::Up] {
        transfer(&target, way, WARM_UP).await?;
        let faults =
            || programs.iter().map(|(_, process)| process.minor_faults()).collect::<Result<Vec<_>>>();
        let before = faults()?;
        transfer(&target, way, GIGABYTE).await?;
        for (((program, process), before), after) in programs.iter().zip(before).zip(faults()?) {
            let line = format!("{way:?}, {program}: {} page faults for a gigabyte", after - before);
            figure(&format!("{line}, {} MB resident", process.resident_bytes()? / 1_000_000));
            if after - before > MOST {
                over.push(line);
            }
        }
    }
    ensure!(over.is_empty(), "{} ({MOST} are expected at most)", over.join("; "));
    Ok(())
}

#[derive(Clone, Copy, Debug)]
enum Way {
    Down,
    Up,
}

/// Moves bytes from the target's source, or to its sink.
async fn transfer(target: &load_target::Target<'_>, way: Way, bytes: u64) -> Result<()> {
    let port = match way {
        Way::Down => load_target::SOURCE,
        Way::Up => load_target::SINK,
    };
    let mut stream = connect(target.at(port)).await?;
    stream.write_u64(bytes).await?;
    let mut chunk = vec![0; 256 << 10];
    let mut left = bytes;
    while left > 0 {
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(chunk.len());
        let moved = match way {
            Way::Down => stream.read(&mut chunk[..most]).await?,
            Way::Up => stream.write(&chunk[..most]).await?,
        };
        ensure!(moved > 0, "{left} of {bytes} bytes are missing");
        left -= moved as u64;
    }
    if let Way::Up = way {
        ensure!(stream.read_u64().await? == bytes, "the sink has not got all of it");
    }
    Ok(())
}

async fn healthy_traffic_with_a_stalled_reader(testbed: &Testbed) -> Result<()> {
    let (_server, _agent) = server_and_agent(testbed).await?;
    let length = 64_000_000;
    let source = target(testbed, 1, 9100, Behaviour::Source(5, length))?;
    let healthy = target(testbed, 1, HEALTHY, Behaviour::Echo)?;
    let mut stalled = connect(source.address).await?;
    alongside("a stalled reader", healthy.address, pause(3)).await?;
    // Once it reads again, all bytes arrive.
    let got = digest(&mut stalled).await?;
    ensure!(
        got == (length, pattern_digest(5, length)),
        "after the stall {} bytes came, changed or incomplete",
        got.0
    );
    Ok(())
}

async fn healthy_traffic_with_black_holed_dials(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    testbed.black_hole(1, 9105)?;
    let hole = SocketAddr::new(testbed.edge(1).ip(), 9105);
    let healthy = target(testbed, 1, HEALTHY, Behaviour::Echo)?;
    let start = Instant::now();
    alongside("ten black-holed dials", healthy.address, at_once(10, || expect_reset(hole))).await?;
    figure(&format!("black-holed dials were given up after {:.1?}", start.elapsed()));
    server
        .wait_access("timed out", |line| {
            line.text("outcome") == "timed_out" && line.text("destination") == hole.to_string()
        })
        .await?;
    Ok(())
}

async fn healthy_traffic_with_refused_dials(testbed: &Testbed) -> Result<()> {
    let (_server, _agent) = server_and_agent(testbed).await?;
    let closed = SocketAddr::new(testbed.edge(1).ip(), 9104);
    let healthy = target(testbed, 1, HEALTHY, Behaviour::Echo)?;
    alongside("500 refused dials", healthy.address, async {
        for _ in 0..50 {
            at_once(10, || expect_reset(closed)).await?;
        }
        Ok(())
    })
    .await
}

async fn healthy_traffic_with_a_slow_target(testbed: &Testbed) -> Result<()> {
    let (_server, _agent) = server_and_agent(testbed).await?;
    let slow = target(testbed, 1, 9100, Behaviour::Slow(Duration::from_secs(2)))?;
    let healthy = target(testbed, 1, HEALTHY, Behaviour::Echo)?;
    alongside("20 connections to a slow target", healthy.address, at_once(20, || visit(slow.address)))
        .await?;
    Ok(())
}

async fn healthy_traffic_with_bulk_downloads(testbed: &Testbed) -> Result<()> {
    let (_server, _agent) = server_and_agent(testbed).await?;
    let length = 50_000_000;
    let source = target(testbed, 1, 9100, Behaviour::Source(3, length))?;
    let healthy = target(testbed, 1, HEALTHY, Behaviour::Echo)?;
    alongside("four bulk downloads", healthy.address, at_once(4, || download(source.address, 3, length)))
        .await?;
    Ok(())
}

async fn hundred_stalled_readers_of_one_node(testbed: &Testbed) -> Result<()> {
    small_kernel_buffers(testbed)?;
    let (server, agent) = server_and_agent(testbed).await?;
    let _other = Agent::enrol(&server, 2).await?;
    let source = target(testbed, 1, 9100, Behaviour::Source(4, 20_000_000))?;
    let healthy = target(testbed, 1, HEALTHY, Behaviour::Echo)?;
    let other_node = target(testbed, 2, HEALTHY, Behaviour::Echo)?;
    let before = server.process.resident_bytes()?;
    let mut stalled = Vec::new();
    for _ in 0..100 {
        stalled.push(connect(source.address).await?);
    }
    let seen = async || Ok(source.connections());
    wait_until("100 connections at the target", client::PATIENCE, seen, |seen| *seen == 100).await?;
    alongside("100 stalled readers of the same node", healthy.address, pause(3)).await?;
    alongside("100 stalled readers of another node", other_node.address, async { Ok(()) }).await?;
    let megabytes = |bytes: u64| bytes / 1_000_000;
    let (server_now, agent_now) = (server.process.resident_bytes()?, agent.process.resident_bytes()?);
    figure(&format!(
        "100 stalled readers hold: server {} MB (before {} MB), agent {} MB",
        megabytes(server_now),
        megabytes(before),
        megabytes(agent_now)
    ));
    // Each holds a window, and what h2 has of it in its own buffers.
    let most = 2 * 100 * u64::from(link::STREAM_WINDOW);
    ensure!(
        server_now < before + most,
        "stalled readers took {} MB of the server, {} are expected at most",
        megabytes(server_now - before),
        megabytes(most)
    );
    // One of them reads again and gets all its bytes.
    let mut first = stalled.swap_remove(0);
    let got = digest(&mut first).await?;
    ensure!(got == (20_000_000, pattern_digest(4, 20_000_000)), "{} bytes after the stall", got.0);
    Ok(())
}

/// More stalled data than the limit allows: the connections blocked longest are reset and logged as such, and no other
/// connection is affected.
async fn five_hundred_stalled_readers_of_one_node(testbed: &Testbed) -> Result<()> {
    const COUNT: usize = 500;
    // More than a window plus the kernel's buffers.
    const LENGTH: usize = 3_000_000;
    // The server's limit for each node, in receivers that each hold a whole window, the maximum for one. A blocked one
    // holds at least half of it: h2 announces consumed data only once it is the other half.
    const LEFT: usize = link::SERVER_STALL_BYTES / link::STREAM_WINDOW as usize;
    small_kernel_buffers(testbed)?;
    let (server, _agent) = server_and_agent(testbed).await?;
    // In a process of its own: it fills 500 windows within the grace period.
    let target = load_target::Target::start(testbed, 1).await?;
    let at = |port| SocketAddr::new(testbed.edge(1).ip(), port);
    let echo_at = at(load_target::ECHO);
    let mut open = connect(echo_at).await?;
    alongside("nothing", echo_at, trips_alongside("nothing", &mut open, pause(2))).await?;
    let before = server.process.resident_bytes()?;
    let what = "500 readers of the same node that stop reading";
    let stalling = async {
        let stalled = stalled_readers(&target, COUNT, LENGTH).await?;
        resets_settled(async || {
            server.metric_or_zero("postern_connections_total", &[("outcome", "stalled")]).await
        })
        .await?;
        Ok(stalled)
    };
    let stalled = alongside(what, echo_at, trips_alongside(what, &mut open, stalling)).await?;
    let what = "those within the bound";
    alongside(what, echo_at, trips_alongside(what, &mut open, pause(2))).await?;

    let held = server.process.peak_resident_bytes()?.saturating_sub(before);
    figure(&format!("500 stalled readers held {} MB of the server at most", held / 1_000_000));
    // During the grace period the limit is doubled.
    let worst = 2 * link::SERVER_STALL_BYTES as u64;
    ensure!(held < worst, "stalled readers held {held} bytes of the server, {worst} at most are documented");

    let reset = || -> Result<HashSet<String>> {
        let lines = server.access_log()?.into_iter().filter(|line| line.text("outcome") == "stalled");
        Ok(lines.map(|line| line.text("client")).collect())
    };
    let early = reset()?;
    let kept = COUNT - early.len();
    ensure!((LEFT..2 * LEFT).contains(&kept), "{kept} of {COUNT} are kept, {LEFT} may hold a window each");
    let mut late = HashSet::new();
    for mut stream in stalled {
        let client = stream.local_addr()?.to_string();
        let was_reset = early.contains(&client);
        // The target closes when its client has: not before all bytes are here, because the kernel gives up what is left
        // of a closed socket sooner.
        let end = end_after(&mut stream, LENGTH, client::PATIENCE).await.with_context(|| client.clone())?;
        match end {
            End::Reset if was_reset => {}
            End::Eof(LENGTH) if !was_reset => {}
            // A receiver that reads again is still blocked now and then, and the sum is at the limit.
            End::Reset => drop(late.insert(client)),
            End::Eof(_) => anyhow::bail!("{client} ended with {end:?}, reset before: {was_reset}"),
        }
    }
    ensure!(late.len() < kept / 10, "{} of {kept} that read again were reset", late.len());
    wait_for("the access log to say why each was reset", client::PATIENCE, async || {
        Ok(late.is_subset(&reset()?).then_some(()))
    })
    .await
}

/// Makes round trips on an open connection while `work` runs; every one must be answered. Reports their times.
async fn trips_alongside<T>(
    what: &str,
    stream: &mut TcpStream,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    let trips = async |done: &Cell<bool>| {
        let mut latencies = Times::default();
        while !done.get() {
            let start = Instant::now();
            echo(stream, b"0123456789abcdef")
                .await
                .with_context(|| format!("a round trip alongside {what}"))?;
            latencies.add(start.elapsed());
        }
        Ok(latencies)
    };
    let (result, mut latencies) = while_running(work, trips).await?;
    figure(&format!(
        "round trips on an open connection alongside {what}: {} trips, {}",
        latencies.count(),
        latencies.summary()
    ));
    Ok(result)
}

async fn targets_that_never_read(testbed: &Testbed) -> Result<()> {
    small_kernel_buffers(testbed)?;
    let (server, agent) = server_and_agent(testbed).await?;
    let resident = || anyhow::Ok([server.process.resident_bytes()?, agent.process.resident_bytes()?]);
    let before = resident()?;
    let never_reads = target(testbed, 1, 9100, Behaviour::NeverReads)?;
    let healthy = target(testbed, 1, HEALTHY, Behaviour::Echo)?;
    let chunk = vec![7; 256 * 1024];
    let mut stuck = Vec::new();
    for _ in 0..30 {
        let mut stream = connect(never_reads.address).await?;
        // Until no more is accepted for half a second, 64 MB at most.
        for _ in 0..256 {
            let write = tokio::time::timeout(Duration::from_millis(500), stream.write_all(&chunk)).await;
            if write.is_err() {
                break;
            }
        }
        stuck.push(stream);
    }
    alongside("30 targets that never read", healthy.address, pause(2)).await?;
    // Each holds a window, and what h2 has of it in its own buffers.
    let most = 2 * 30 * u64::from(link::STREAM_WINDOW);
    for ((program, before), now) in ["server", "agent"].iter().zip(before).zip(resident()?) {
        let held = now.saturating_sub(before);
        figure(&format!("30 targets that never read hold {} MB of the {program}", held / 1_000_000));
        ensure!(held < most, "{held} bytes of the {program}, {most} are expected at most");
    }
    Ok(())
}

async fn two_thousand_concurrent_connections(testbed: &Testbed) -> Result<()> {
    const COUNT: usize = 2_000;
    let (server, agent) = server_and_agent(testbed).await?;
    let on_edge = target(testbed, 1, 9100, Behaviour::Echo)?;
    let (server_before, agent_before) = (server.process.resident_bytes()?, agent.process.resident_bytes()?);
    let start = Instant::now();
    let mut open = hold_many(on_edge.address, COUNT).await?;
    figure(&format!("{COUNT} connections opened and used in {:.1?}", start.elapsed()));
    #[expect(clippy::cast_precision_loss, reason = "2000 fits")]
    let count = COUNT as f64;
    agent.expect_metric("postern_agent_connections_active", &[], count).await?;
    server.expect_metric("postern_connections_active", &[], count).await?;
    let kib = |now: u64, before: u64| now.saturating_sub(before) / 1024 / COUNT as u64;
    figure(&format!(
        "each open connection holds {} KiB in the server and {} KiB in the agent",
        kib(server.process.resident_bytes()?, server_before),
        kib(agent.process.resident_bytes()?, agent_before)
    ));
    for stream in &mut open {
        echo(stream, b"still there").await?;
    }
    drop(open);
    let open = async || Ok(on_edge.open());
    wait_until("all connections to be closed", client::PATIENCE, open, |open| *open == 0).await?;
    server.expect_metric("postern_connections_active", &[], 0.0).await
}
