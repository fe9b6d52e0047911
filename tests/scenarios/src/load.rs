//! Heavy load, and failures and stalls alongside healthy traffic.
use std::cell::Cell;
use std::collections::HashSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use postern_testbed::client::{self, End, connect, digest, echo, end_after, pattern_digest, visit};
use postern_testbed::percentiles::Times;
use postern_testbed::process::Process;
use postern_testbed::report::figure;
use postern_testbed::target::Behaviour;
use postern_testbed::wait::{wait_for, while_running};
use postern_testbed::{Testbed, load_target};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tunnel_link::link;

use crate::common::{
    HEALTHY, alongside, at_once, expect_reset, pause, resets_settled, server_and_agent, small_kernel_buffers,
    stalled_readers, target,
};
use crate::wan::{download, mbit, upload};

scenarios! {
    bulk_both_ways(limit = 180),
    bulk_without_page_faults(limit = 180),
    healthy_traffic_with_a_stalled_reader,
    healthy_traffic_with_black_holed_dials,
    healthy_traffic_with_refused_slow_and_bulk_connections(quick),
    five_hundred_stalled_readers_of_one_node(limit = 300),
    targets_that_never_read(limit = 180),
}

const BULK: u64 = 200_000_000;

async fn bulk_both_ways(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let source = target(testbed, 1, 9100, Behaviour::Source(11, BULK))?;
    let took = download(source.address, 11, BULK).await?;
    figure(&format!("download, generators and checksums included: {:.0} Mbit/s", mbit(BULK, took)));

    let sink = target(testbed, 1, 9101, Behaviour::Sink)?;
    let took = upload(sink.address, 12, BULK).await?;
    figure(&format!("upload, generators and checksums included: {:.0} Mbit/s", mbit(BULK, took)));

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
    let (server, agent) = server_and_agent(testbed).await?;
    let programs = [("server", &server.process), ("agent", &agent.process)];
    let target = load_target::Target::start(testbed, 1).await?;
    let mut over = Vec::new();
    for way in [Way::Down, Way::Up] {
        transfer(&target, way, WARM_UP).await?;
        let mut of_gigabyte = many_page_faults(&target, way, &programs).await?;
        if !of_gigabyte.is_empty() {
            // The second run reuses the memory that the first one allocated for a new peak of data in flight.
            of_gigabyte = many_page_faults(&target, way, &programs).await?;
        }
        over.extend(of_gigabyte);
    }
    ensure!(over.is_empty(), "{} ({MOST_FAULTS} are expected at most)", over.join("; "));
    Ok(())
}

/// The goal is 1,000 for a gigabyte. On a busy machine more is in flight, now and then more than ever before.
const MOST_FAULTS: u64 = 10_000;

/// Transfers a gigabyte, and reports the page faults of each program. Returns the lines of those with too many.
async fn many_page_faults(
    target: &load_target::Target<'_>,
    way: Way,
    programs: &[(&str, &Process)],
) -> Result<Vec<String>> {
    const GIGABYTE: u64 = 1_000_000_000;
    let faults = || programs.iter().map(|(_, process)| process.minor_faults()).collect::<Result<Vec<_>>>();
    let before = faults()?;
    transfer(target, way, GIGABYTE).await?;
    let mut over = Vec::new();
    for (((program, process), before), after) in programs.iter().zip(before).zip(faults()?) {
        let line = format!("{way:?}, {program}: {} page faults for a gigabyte", after - before);
        figure(&format!("{line}, {} MB resident", process.resident_bytes()? / 1_000_000));
        if after - before > MOST_FAULTS {
            over.push(line);
        }
    }
    Ok(over)
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

async fn healthy_traffic_with_refused_slow_and_bulk_connections(testbed: &Testbed) -> Result<()> {
    let (_server, _agent) = server_and_agent(testbed).await?;
    let closed = SocketAddr::new(testbed.edge(1).ip(), 9104);
    let healthy = target(testbed, 1, HEALTHY, Behaviour::Echo)?;
    alongside("500 refused dials", healthy.address, async {
        for _ in 0..50 {
            at_once(10, || expect_reset(closed)).await?;
        }
        Ok(())
    })
    .await?;
    let slow = target(testbed, 1, 9100, Behaviour::Slow(Duration::from_secs(2)))?;
    alongside("20 connections to a slow target", healthy.address, at_once(20, || visit(slow.address)))
        .await?;
    let length = 50_000_000;
    let source = target(testbed, 1, 9101, Behaviour::Source(3, length))?;
    alongside("four bulk downloads", healthy.address, at_once(4, || download(source.address, 3, length)))
        .await?;
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
    let echo_at = target.at(load_target::ECHO);
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
