//! Links over a wide-area path: delay, low bandwidth, loss, outages, a NAT that forgets.
mod silent;
mod stops;
mod uplinks;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::{self, Agent, START};
use postern_testbed::client::{self, Pattern, connect, digest, echo, pattern_digest};
use postern_testbed::percentiles::Times;
use postern_testbed::report::{figure, skipped};
use postern_testbed::server::{self, Builder, Server};
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::wait::wait_until;
use postern_testbed::wan::{Loss, Path};
use postern_testbed::{CLOUD, Testbed};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tunnel_link::link::Congestion;

use crate::common::{self, at_once, hold, server_and_agent, session_of, target};
use silent::{
    a_long_outage_ends_at_once, nat_forgets_the_link, outages_of_up_to_ten_seconds_are_survived,
    the_edge_gets_another_address, the_edge_was_asleep,
};
use stops::{
    an_agent_that_stops_ends_no_connection_with_a_request_on_its_way, an_agent_that_stops_sends_what_it_has,
};
use uplinks::one_of_two_uplinks_fails;

scenarios! {
    a_lossy_path_changes_no_byte(quick),
    keystrokes_beside_a_download_on_a_slow_line,
    connect_and_echo_take_one_round_trip,
    a_busy_node_has_more_links,
    a_silent_link_attracts_no_connections,
    two_links_are_enough_for_bbr,
    a_small_receive_window_is_named,
    links_through_a_load_balancer_lead_to_one_server,
    sixteen_at_once_after_each_start(limit = 240),
    an_agent_that_stops_sends_what_it_has,
    an_agent_that_stops_ends_no_connection_with_a_request_on_its_way,
    a_full_line_of_1_mbit_keeps_its_link(edges = 2),
    a_full_line_of_100_kbit_keeps_its_link(edges = 2, limit = 180),
    outages_of_up_to_ten_seconds_are_survived,
    a_long_outage_ends_at_once(waits, limit = 180),
    nat_forgets_the_link,
    the_edge_gets_another_address,
    the_edge_was_asleep,
    one_of_two_uplinks_fails(limit = 180),
}

/// Time limit for a step on a slow path; the scenario's own limit is far above.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn mbit(bytes: u64, took: Duration) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "for printing")]
    let bits = bytes as f64 * 8.0;
    bits / 1e6 / took.as_secs_f64()
}

pub(crate) async fn download(address: SocketAddr, seed: u64, length: u64) -> Result<Duration> {
    let start = Instant::now();
    let mut stream = connect(address).await?;
    let got = digest(&mut stream).await?;
    ensure!(got == (length, pattern_digest(seed, length)), "{} bytes came, changed or incomplete", got.0);
    Ok(start.elapsed())
}

pub(crate) async fn upload(address: SocketAddr, seed: u64, length: u64) -> Result<Duration> {
    let start = Instant::now();
    let mut stream = connect(address).await?;
    let mut pattern = Pattern::new(seed, length);
    pattern.write_to(&mut stream).await?;
    stream.shutdown().await?;
    let answer = client::text(&mut stream, "no checksum arrived").await?;
    ensure!(answer == format!("{length} {}", pattern.digest()), "uploaded bytes arrived as {answer}");
    Ok(start.elapsed())
}

async fn a_lossy_path_changes_no_byte(testbed: &Testbed) -> Result<()> {
    let mut path = Path::new(100, 100).lossy(Loss::Bursts { rate: 0.003, length: 3.0 });
    path.reordered = 0.002;
    path.mtu = 1400;
    let wan = testbed.wan(1, path)?;
    let (_server, _agent) = server_and_agent(testbed).await?;
    let source = target(testbed, 1, 9100, Behaviour::Source(3, 30_000_000))?;
    let sink = target(testbed, 1, 9101, Behaviour::Sink)?;
    let took = download(source.address, 3, 30_000_000).await?;
    figure(&format!("download at 100 ms and 100 Mbit/s: {:.0} Mbit/s", mbit(30_000_000, took)));
    let took = upload(sink.address, 4, 30_000_000).await?;
    figure(&format!("upload: {:.0} Mbit/s", mbit(30_000_000, took)));
    let (down, up) = wan.counts();
    ensure!(down.lost > 10 && up.lost > 10, "the path lost nothing: {down:?}, {up:?}");
    Ok(())
}

/// Sends a 64-byte message every 50 ms, like a user's typing.
async fn keystrokes(stream: &mut TcpStream, count: usize) -> Result<Times> {
    let mut times = Times::default();
    let mut clock = tokio::time::interval(Duration::from_millis(50));
    clock.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    for _ in 0..count {
        clock.tick().await;
        let start = Instant::now();
        tokio::time::timeout(PATIENCE, echo(stream, &[b'k'; 64])).await.context("a keystroke")??;
        times.add(start.elapsed());
    }
    Ok(times)
}

async fn keystrokes_beside_a_download_on_a_slow_line(testbed: &Testbed) -> Result<()> {
    let _wan = testbed.wan(1, Path::asymmetric(60, 10_000_000, 5_000_000))?;
    let (_server, _agent) = server_and_agent(testbed).await?;
    let source = target(testbed, 1, 9100, Behaviour::Source(3, 100_000_000))?;
    let shell = target(testbed, 1, 9102, Behaviour::Echo)?;
    let mut stream = hold(shell.address, b"login").await?;
    let mut alone = keystrokes(&mut stream, 20).await?;
    let idle = alone.percentile(0.5).context("no keystroke")?;
    figure(&format!("keystrokes alone: {}", alone.summary()));
    let mut bulk = connect(source.address).await?;
    let reading = tokio::spawn(async move { digest(&mut bulk).await });
    // Until the line is full.
    keystrokes(&mut stream, 20).await?;
    common::within("the median of keystrokes beside a download", 3 * idle, async || {
        let mut beside = keystrokes(&mut stream, 60).await?;
        ensure!(!reading.is_finished(), "the download ended too early");
        figure(&format!("keystrokes beside a download: {}", beside.summary()));
        beside.percentile(0.5).context("no keystroke")
    })
    .await?;
    reading.abort();
    Ok(())
}

/// A second round trip, for a handshake or an answer of the agent's, would show.
async fn connect_and_echo_take_one_round_trip(testbed: &Testbed) -> Result<()> {
    const RTT: u64 = 100;
    let _wan = testbed.wan(1, Path::new(RTT, 100))?;
    let (_server, _agent) = server_and_agent(testbed).await?;
    let shell = target(testbed, 1, 9102, Behaviour::Echo)?;
    client::visit(shell.address).await?;
    common::within("connect and echo", Duration::from_millis(RTT * 18 / 10), async || {
        let start = Instant::now();
        drop(hold(shell.address, b"one round trip").await?);
        Ok(start.elapsed())
    })
    .await
}

/// Returns the number of connections on each link of the only node.
async fn on_each_link(server: &Server<'_>) -> Result<Vec<u64>> {
    let session = session_of(server, 0).await?;
    let links = session["links"].as_array().with_context(|| format!("no links in {session}"))?;
    Ok(links.iter().filter_map(|link| link["connections"].as_u64()).collect())
}

async fn wait_links(server: &Server<'_>, expected: &[u64]) -> Result<()> {
    let what = format!("links with {expected:?} connections");
    wait_until(&what, PATIENCE, async || on_each_link(server).await, |links| links == expected).await?;
    Ok(())
}

/// The default; if one end uses another congestion control, each connection has a link of its own.
async fn two_links_are_enough_for_bbr(testbed: &Testbed) -> Result<()> {
    let _wan = testbed.wan(1, Path::new(40, 100))?;
    let server = common::server(testbed).await?;
    let shell = target(testbed, 1, 9102, Behaviour::Echo)?;
    let mut reno = Agent::enrol_with(&server, 1, &["--congestion-control=reno"]).await?;
    drop(hold_on_links_of_their_own(&server, shell.address, 4).await?);
    reno.process.stop().await?;
    server.wait_connected("edge-1", false, START).await?;
    if !Congestion::Auto.is_bbr() {
        skipped("two links with BBR: this kernel has none, or does not permit it");
        let _reno = agent::Builder::new(&server, 1).spawn()?;
        server.wait_connected("edge-1", true, START).await?;
        return hold_on_links_of_their_own(&server, shell.address, 4).await.map(drop);
    }
    let _bbr = agent::Builder::new(&server, 1).spawn()?;
    server.wait_connected("edge-1", true, START).await?;
    let mut held = hold_on_links_of_their_own(&server, shell.address, 1).await?;
    for _ in 0..3 {
        held.push(hold(shell.address, b"login").await?);
    }
    let links = on_each_link(&server).await?;
    ensure!(links.len() == 2 && links.iter().sum::<u64>() == 4, "{links:?}");
    Ok(())
}

/// Opens connections to a shell, each on its own link; after each one the node has a spare link.
pub(crate) async fn hold_on_links_of_their_own(
    server: &Server<'_>,
    shell: SocketAddr,
    most: usize,
) -> Result<Vec<TcpStream>> {
    let mut held = Vec::new();
    while held.len() < most {
        held.push(hold(shell, b"login").await?);
        let mut expected = vec![1; held.len()];
        expected.push(0);
        wait_links(server, &expected).await?;
    }
    Ok(held)
}

/// A load balancer in front of two servers, which get connections in turn.
async fn links_through_a_load_balancer_lead_to_one_server(testbed: &Testbed) -> Result<()> {
    let _wan = testbed.wan(1, Path::new(40, 100))?;
    let first = common::server(testbed).await?;
    let neighbour = testbed.add_neighbour()?;
    let second = Builder::on_neighbour(&first, &neighbour)?.start().await?;
    let servers = vec![first.agent_address().parse()?, second.agent_address().parse()?];
    let (balancer, _balancing) = common::balance((CLOUD, 0).into(), servers).await?;
    let mut agent = Agent::enrol_with(&first, 1, &["--max-links=8"]).await?;
    agent.process.stop().await?;
    agent.start_again_at(balancer)?;
    first.wait_connected("edge-1", true, START).await?;
    // The kernel measures only the path to the load balancer.
    let far = |rtt: &Option<f64>| rtt.is_some_and(|rtt| rtt > 30.0);
    let rtt = async || Ok(session_of(&first, 0).await?["rtt_ms"].as_f64());
    wait_until("the round-trip time to the agent", PATIENCE, rtt, far).await?;
    let shell = target(testbed, 1, 9102, Behaviour::Echo)?;
    let mut held = hold_on_links_of_their_own(&first, shell.address, 4).await?;
    ensure!(!second.is_connected("edge-1").await?, "the second server has taken a link for a session");
    for stream in &mut held {
        echo(stream, b"still there").await?;
    }
    Ok(())
}

/// Links are requested while the first connections are in progress.
async fn sixteen_at_once_after_each_start(testbed: &Testbed) -> Result<()> {
    const STARTS: usize = 40;
    let _wan = testbed.wan(1, Path::new(50, 100))?;
    let (server, mut agent) = server_and_agent(testbed).await?;
    let shell = target(testbed, 1, 9102, Behaviour::Echo)?;
    let mut times = Times::default();
    for start in 1..=STARTS {
        client::visit(shell.address).await?;
        for _ in 0..3 {
            let visit = || async move {
                let limit = Duration::from_secs(10);
                tokio::time::timeout(limit, client::visit(shell.address)).await.context("an echo is late")?
            };
            let visits = at_once(16, visit).await.with_context(|| format!("after start {start}"))?;
            visits.into_iter().for_each(|visit| times.add(visit));
        }
        agent.crash(&server).await?;
        agent.return_to(&server).await?;
    }
    figure(&format!("16 at once: {}", times.summary()));
    Ok(())
}

async fn a_busy_node_has_more_links(testbed: &Testbed) -> Result<()> {
    let _wan = testbed.wan(1, Path::new(40, 100))?;
    let server = common::server(testbed).await?;
    let agent = Agent::enrol_with(&server, 1, &["--max-links=8"]).await?;
    let shell = target(testbed, 1, 9102, Behaviour::Echo)?;
    let source = target(testbed, 1, 9100, Behaviour::Source(3, 20_000_000))?;
    let mut held = hold_on_links_of_their_own(&server, shell.address, 7).await?;
    ensure!(
        agent.status().await?["servers"][0]["links"] == 8,
        "the agent counts others: {:?}",
        agent.status().await
    );
    // A transfer on its own link, followed by connections that share links.
    download(source.address, 3, 20_000_000).await?;
    // The server keeps the connection until the node's end of it has arrived too.
    wait_links(&server, &[1, 1, 1, 1, 1, 1, 1, 0]).await?;
    held.push(hold(shell.address, b"login").await?);
    held.push(hold(shell.address, b"login").await?);
    let links = on_each_link(&server).await?;
    let (on_links, most) = (links.iter().sum::<u64>(), links.iter().max());
    ensure!(links.len() == 8 && on_links == 9 && most == Some(&2), "{links:?}");
    server.expect_metric("postern_links", &[], 8.0).await?;
    let median = [("quantile", "0.5")];
    let plausible = |rtt| (0.04..1.0).contains(&rtt);
    server.wait_metric("postern_link_rtt_seconds", &median, plausible).await.context("of 40 ms")?;
    server.wait_metric("postern_link_delivery_rate_bytes", &median, |rate| rate > 0.0).await?;
    // One link fails: only its connections are reset.
    let session = session_of(&server, 0).await?;
    let (first, others) = ports_of_links(testbed, &session)?;
    ensure!(others.len() == 7, "{} links of the agent besides the first", others.len());
    let other = &others[0];
    testbed.edge(1).ns.output("ss", &format!("-K -t sport = :{other}"))?;
    wait_until(
        "the link to be gone",
        PATIENCE,
        async || on_each_link(&server).await,
        |links| links.len() == 7,
    )
    .await?;
    let mut lost = 0;
    for stream in &mut held {
        lost += usize::from(echo(stream, b"still there").await.is_err());
    }
    ensure!((1..=2).contains(&lost), "{lost} of {} connections ended with one link", held.len());
    ensure!(session_of(&server, 0).await?["epoch"] == session["epoch"], "the session is another one");
    // The end of the first link ends the session.
    testbed.edge(1).ns.output("ss", &format!("-K -t sport = :{first}"))?;
    wait_until(
        "another session",
        PATIENCE,
        async || session_of(&server, 0).await,
        |now| now["epoch"] != session["epoch"],
    )
    .await?;
    for stream in &mut held {
        ensure!(echo(stream, b"gone").await.is_err(), "a connection of the old session lives");
    }
    Ok(())
}

/// Returns the agent's ports of the session's first link and of the others.
fn ports_of_links(testbed: &Testbed, session: &serde_json::Value) -> Result<(String, Vec<String>)> {
    let peers = testbed.edge(1).ns.output("ss", "-H -t -n -o state established dport = :10262")?;
    let first = session["peer"].as_str().and_then(|peer| peer.rsplit(':').next()).context("no peer")?;
    let ports = peers.lines().filter_map(local_port).map(str::to_owned);
    Ok((first.to_owned(), ports.filter(|port| port != first).collect()))
}

/// A NAT forgets an additional link without connections, which would be the least loaded link for each new connection.
async fn a_silent_link_attracts_no_connections(testbed: &Testbed) -> Result<()> {
    let _wan = testbed.wan(1, Path::new(40, 100))?;
    let server = common::server(testbed).await?;
    let _agent = Agent::enrol_with(&server, 1, &["--max-links=8"]).await?;
    let shell = target(testbed, 1, 9102, Behaviour::Echo)?;
    let mut held = hold_on_links_of_their_own(&server, shell.address, 1).await?;
    let session = session_of(&server, 0).await?;
    let (_, others) = ports_of_links(testbed, &session)?;
    let [other] = &others[..] else { anyhow::bail!("the agent's links besides the first: {others:?}") };
    for rule in [format!("OUTPUT -p tcp --sport {other}"), format!("INPUT -p tcp --dport {other}")] {
        testbed.edge(1).ns.iptables(&format!("-I {rule} -j DROP"))?;
    }
    // One connection has to fail before the server notices.
    ensure!(client::visit(shell.address).await.is_err(), "a silent link has relayed a connection");
    server
        .wait_access("by the silent link", |line| line.text("error").contains("has been silent for"))
        .await?;
    for _ in 0..10 {
        client::visit(shell.address).await.context("beside a silent link")?;
    }
    echo(&mut held[0], b"still there").await?;
    ensure!(session_of(&server, 0).await?["epoch"] == session["epoch"], "the session is another one");
    Ok(())
}

async fn a_small_receive_window_is_named(testbed: &Testbed) -> Result<()> {
    let _wan = testbed.wan(1, Path::new(100, 100))?;
    // A tenth of the path's bandwidth-delay product.
    testbed.edge(1).ns.write("/proc/sys/net/ipv4/tcp_rmem", "4096 131072 131072")?;
    // BBR would pace itself to what the window allows.
    let server = Builder::new(testbed).flag("--congestion-control=reno").start().await?;
    let agent = Agent::enrol(&server, 1).await?;
    let sink = target(testbed, 1, 9101, Behaviour::Sink)?;
    upload(sink.address, 4, 4_000_000).await?;
    let session = session_of(&server, 0).await?;
    let links = session["links"].as_array().with_context(|| format!("no links in {session}"))?;
    let most = |field: &str| links.iter().filter_map(|link| link[field].as_f64()).fold(0.0, f64::max);
    let (window, buffer) = (most("window_limited"), most("buffer_limited"));
    figure(&format!("limited by the window for {window:.2} of the time, by the buffer for {buffer:.2}"));
    ensure!(window > 0.5 && buffer < 0.5, "{session}");
    let worst = [("quantile", "0.99")];
    server.wait_metric("postern_link_window_limited_ratio", &worst, |ratio| ratio > 0.5).await?;
    let text = server::run(testbed, &["status", "-o", "wide"])?.stdout;
    let text = String::from_utf8_lossy(&text);
    ensure!(text.contains(" window "), "the table does not name the window: {text}");
    // The other direction is not limited.
    let other = agent.status().await?["servers"][0]["window_limited"].as_f64().unwrap_or_default();
    ensure!(other < 0.5, "the agent was limited by the server's window for {other} of the time");
    Ok(())
}

/// Returns the local port in a line of `ss -t -n`.
fn local_port(line: &str) -> Option<&str> {
    line.split_whitespace().nth(2)?.rsplit(':').next()
}

/// Returns the number of sessions that agents have begun, as the server counts them.
async fn session(server: &Server<'_>) -> Result<f64> {
    server.metric("postern_agent_handshakes_total", &[("result", "attached")]).await
}

async fn a_full_line_of_1_mbit_keeps_its_link(testbed: &Testbed) -> Result<()> {
    a_full_line_keeps_its_link(testbed, 1_000_000, 0).await
}

async fn a_full_line_of_100_kbit_keeps_its_link(testbed: &Testbed) -> Result<()> {
    a_full_line_keeps_its_link(testbed, 100_000, 3).await
}

/// `late`: maximum number of connections whose dials are not answered within eight seconds; if all were late, the line
/// would not be shared.
async fn a_full_line_keeps_its_link(testbed: &Testbed, up: u64, late: usize) -> Result<()> {
    let path = Path::asymmetric(60, 1_000_000, up);
    let wan = testbed.wan(1, path)?;
    let (server, _agent) = server_and_agent(testbed).await?;
    // Longer than the 22 s after which a dead link is noticed.
    let end = Instant::now() + Duration::from_secs(35);
    let (relayed, plain) = tokio::join!(
        connections_beside_a_download(testbed, &server, end, late),
        plain_connections_beside_an_upload(testbed, path, end),
    );
    let ((mut relayed, failed), mut plain) = (relayed?, plain?);
    figure(&format!(
        "connect and echo beside it: {}, {failed} failed; without a tunnel: {}; {:?}",
        relayed.summary(),
        plain.summary(),
        wan.counts().1
    ));
    Ok(())
}

/// Returns the times until new connections to edge 1 got their echo, and the number that got none.
async fn connections_beside_a_download(
    testbed: &Testbed,
    server: &Server<'_>,
    end: Instant,
    late: usize,
) -> Result<(Times, usize)> {
    let source = target(testbed, 1, 9100, Behaviour::Source(3, 100_000_000))?;
    let shell = target(testbed, 1, 9102, Behaviour::Echo)?;
    let before = session(server).await?;
    let mut bulk = connect(source.address).await?;
    let reading = tokio::spawn(async move { digest(&mut bulk).await });
    let (mut times, mut failed) = (Times::default(), 0);
    while Instant::now() < end {
        let start = Instant::now();
        let mut stream = connect(shell.address).await?;
        let answered = tokio::time::timeout(PATIENCE, echo(&mut stream, b"hello")).await;
        match answered.context("a new connection")? {
            Ok(_) => times.add(start.elapsed()),
            Err(_) if failed < late => failed += 1,
            Err(error) => return Err(error.context(format!("a new connection, after {failed} that failed"))),
        }
    }
    ensure!(times.count() > 0, "no new connection was answered");
    ensure!(!reading.is_finished(), "the download has ended");
    ensure!(session(server).await? == before, "the agent had to attach again");
    reading.abort();
    Ok((times, failed))
}

/// The same without a tunnel, on a separate line of edge 2, which dials the cloud host: a handshake and an echo cross
/// the full direction equally often.
async fn plain_connections_beside_an_upload(testbed: &Testbed, path: Path, end: Instant) -> Result<Times> {
    let _wan = testbed.wan(2, path)?;
    let edge = &testbed.edge(2).ns;
    let sink = Target::start(&testbed.cloud, CLOUD, 0, Behaviour::Sink)?;
    let shell = Target::start(&testbed.cloud, CLOUD, 0, Behaviour::Echo)?;
    let mut bulk = client::connect_from(edge, sink.address, PATIENCE).await?;
    let sending = tokio::spawn(async move { Pattern::new(3, 100_000_000).write_to(&mut bulk).await });
    let mut times = Times::default();
    while Instant::now() < end {
        let start = Instant::now();
        let mut stream = client::connect_from(edge, shell.address, PATIENCE).await?;
        tokio::time::timeout(PATIENCE, echo(&mut stream, b"hello")).await.context("a plain connection")??;
        times.add(start.elapsed());
    }
    ensure!(!sending.is_finished(), "the upload has ended");
    sending.abort();
    Ok(times)
}
