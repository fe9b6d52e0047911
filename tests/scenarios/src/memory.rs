//! Floods under the memory limit of a container: they cause resets and are counted, but never an OOM kill.
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::admin::Admin;
use postern_testbed::agent::{self, Agent};
use postern_testbed::cgroup::MemoryLimit;
use postern_testbed::client::{self, End, connect, connect_from, echo, end_of, visit};
use postern_testbed::netns::Namespace;
use postern_testbed::process::Process;
use postern_testbed::report::figure;
use postern_testbed::server::{self, Server};
use postern_testbed::target::Behaviour;
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, NEIGHBOUR, Testbed, load_target};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::common::{
    HEALTHY, alongside, resets_settled, server_and_agent, small_kernel_buffers, stalled_readers, take_all,
    target,
};
use crate::web::Web;

scenarios! {
    a_pods_limits_are_found(limit = 180),
    a_server_that_has_started_holds_little(quick),
    stalled_readers_of_two_nodes(edges = 2, limit = 300),
    targets_that_never_read_beside_two_thousand_connections(limit = 300),
    downloads_that_nobody_reads_from_a_small_agent(limit = 300),
    heads_that_clients_never_end(limit = 180),
    idle_connections_to_a_small_agent(edges = 2, limit = 300),
    idle_connections_to_an_agent_with_few_files(quick),
    idle_connections_of_several_sources(edges = 2, limit = 300),
}

const SERVER: u64 = 256 << 20;
const AGENT: u64 = 64 << 20;
/// Number of bytes of one unread connection: more than a window plus the kernel's buffers.
const LENGTH: usize = 3_000_000;

/// Expects a limit on unread data of a sixth of the memory limit; the metric shows the value that the program derived
/// from its cgroup.
async fn expect_budget(admin: &Admin<'_>, limit: &MemoryLimit) -> Result<()> {
    #[expect(clippy::cast_precision_loss, reason = "megabytes fit")]
    let sixth = (limit.bytes() / 6) as f64;
    admin.expect_metric("postern_stalled_limit_bytes", &[], sixth).await?;
    admin.expect_metric("postern_stalled_bytes", &[], 0.0).await
}

/// Returns the path at which a shipped DaemonSet mounts the host's cgroups.
fn mount_of_cgroups(manifest: &str) -> Result<&Path> {
    let lines = manifest.lines().skip_while(|line| line.trim() != "- name: cgroup");
    let path = lines.map(str::trim).find_map(|line| line.strip_prefix("mountPath: "));
    path.map(Path::new).context("the manifest has no mount of the volume cgroup")
}

/// Memory that only the start of the redirect needs is given back: aya parses the types of the kernel into 15 MB.
async fn a_server_that_has_started_holds_little(testbed: &Testbed) -> Result<()> {
    const MOST: u64 = 12 << 20;
    let (server, agent) = server_and_agent(testbed).await?;
    for (name, process) in [("server", &server.process), ("agent", &agent.process)] {
        let held = process.anonymous_bytes()?;
        figure(&format!("{name}: {} KiB of anonymous memory after its start", held >> 10));
        ensure!(held < MOST, "{name} holds {} KiB after its start", held >> 10);
    }
    Ok(())
}

/// Both programs find their limits in a cgroup namespace of their own: with the host's hierarchies beside the pod's
/// own, as in the manifests, and with the host's mounted over the pod's own.
async fn a_pods_limits_are_found(testbed: &Testbed) -> Result<()> {
    const SERVER_MANIFEST: &str = include_str!("../../../deploy/base/server-daemonset.yaml");
    const REDIRECTOR_MANIFEST: &str =
        include_str!("../../../deploy/components/everywhere/redirector-daemonset.yaml");
    let shipped = mount_of_cgroups(SERVER_MANIFEST)?;
    ensure!(shipped == mount_of_cgroups(REDIRECTOR_MANIFEST)?, "server and redirector differ");
    let covering = Path::new("/sys/fs/cgroup");
    // Nothing may be created outside of the run's folder.
    let beside = testbed.dir().join("pod").join(shipped.strip_prefix("/")?);
    let beside = if shipped.starts_with(covering) { shipped } else { &beside };
    for (name, hosts) in [("beside", beside), ("covered", covering)] {
        let limits = testbed.limits_on_cloud(name, SERVER, 150_000)?.in_pod(hosts);
        let builder = server::Builder::new(testbed).memory(&limits).flag("--redirect=off");
        let mut server = builder.start().await?;
        expect_limits(&server, &limits).await?;
        let line =
            server.settled_log().await?.lines().any(|line| {
                line.contains("process limits") && line.contains(&format!("\"memory\":{SERVER}"))
            });
        ensure!(line, "{name}: the log does not say the limits");
        let limit = testbed.limit_on_edge(&format!("agent-{name}"), AGENT)?.in_pod(hosts);
        let mut agent = agent::Builder::new(&server, 1).memory(&limit).enrol(&server).await?;
        expect_limits(&agent, &limit).await?;
        limit.expect_kept(agent.process.pid())?;
        agent.process.stop().await?;
        limits.expect_kept(server.process.pid())?;
        server.process.stop().await?;
    }
    Ok(())
}

/// Expects the limits that the program has found, and the files that contain them.
async fn expect_limits(admin: &Admin<'_>, limit: &MemoryLimit) -> Result<()> {
    expect_budget(admin, limit).await?;
    #[expect(clippy::cast_precision_loss, reason = "megabytes fit")]
    let bytes = limit.bytes() as f64;
    admin.expect_metric("postern_memory_limit_bytes", &[], bytes).await?;
    let machine = [("from", "/proc/meminfo")];
    let of_machine = admin.metric_or_zero("postern_memory_limit_bytes", &machine).await?;
    ensure!(of_machine == 0.0, "it is the machine's memory");
    match limit.cpus() {
        Some(cpus) => admin.expect_metric("postern_cpu_limit", &[], cpus).await,
        None => Ok(()),
    }
}

/// Waits until the unread data is near its limit: not far below it and, after the grace period, not above it.
async fn expect_held(admin: &Admin<'_>) -> Result<()> {
    let ratio = async || {
        let metrics = admin.metrics().await?;
        Ok(metrics.sum("postern_stalled_bytes", &[])? / metrics.sum("postern_stalled_limit_bytes", &[])?)
    };
    let at_bound = |ratio: &f64| *ratio > 0.5 && *ratio <= 1.0;
    wait_until("what is held over its bound to be 0.5 to 1", client::PATIENCE, ratio, at_bound).await?;
    Ok(())
}

fn expect_alive(process: &mut Process, limit: &MemoryLimit) -> Result<()> {
    let ended = process.ended()?;
    ensure!(ended.is_none(), "{} ended: {ended:?}", process.name());
    limit.expect_kept(process.pid())?;
    let (resident, charged) = (process.peak_resident_bytes()?, limit.peak()?);
    let megabytes = |bytes: u64| bytes >> 20;
    figure(&format!(
        "{} had {} MiB resident at most, {} MiB were charged with the page cache, of {} MiB",
        process.name(),
        megabytes(resident),
        megabytes(charged),
        megabytes(limit.bytes())
    ));
    Ok(())
}

async fn stalled_at(server: &Server<'_>) -> Result<f64> {
    server.metric_or_zero("postern_connections_total", &[("outcome", "stalled")]).await
}

/// The flood is within the server's limit for one node, but not within its memory. The link with the most unread data
/// is reset, and the other node's readers keep theirs.
async fn stalled_readers_of_two_nodes(testbed: &Testbed) -> Result<()> {
    const GREEDY: usize = 400;
    const MODEST: usize = 10;
    small_kernel_buffers(testbed)?;
    let limit = testbed.limit_on_cloud("tunnel-server", SERVER)?;
    let mut server = server::Builder::new(testbed).memory(&limit).start().await?;
    let _agents = (Agent::enrol(&server, 1).await?, Agent::enrol(&server, 2).await?);
    expect_budget(&server, &limit).await?;
    let greedy = load_target::Target::start(testbed, 1).await?;
    let modest = load_target::Target::start(testbed, 2).await?;
    let kept = stalled_readers(&modest, MODEST, LENGTH).await?;
    let flood = alongside("a flood of another node", modest.at(load_target::ECHO), async {
        let flood = stalled_readers(&greedy, GREEDY, LENGTH).await?;
        resets_settled(async || {
            limit.expect_kept(server.process.pid())?;
            stalled_at(&server).await
        })
        .await?;
        Ok(flood)
    })
    .await?;
    alongside("its own node's flood", greedy.at(load_target::ECHO), async { expect_held(&server).await })
        .await?;
    expect_alive(&mut server.process, &limit)?;
    let lines: Vec<_> = server
        .settled_access_log()
        .await?
        .into_iter()
        .filter(|line| line.text("outcome") == "stalled")
        .collect();
    figure(&format!("{} of {GREEDY} were reset", lines.len()));
    for line in lines {
        ensure!(line.text("node") == "edge-1", "a connection of the modest node was reset: {line:?}");
        ensure!(
            line.text("error").contains("exceeded the memory limit"),
            "not at the process's bound: {line:?}"
        );
    }
    drop(flood);
    for mut stream in kept {
        // The target ends once no more bytes are requested.
        stream.shutdown().await.context("asking for the end")?;
        let end = end_of(&mut stream, client::PATIENCE).await?;
        ensure!(end == End::Eof(LENGTH), "one within the bound ended with {end:?}");
    }
    server.expect_metric("postern_stalled_bytes", &[], 0.0).await
}

/// Sends until the other end resets the connection, which is success.
async fn send_until_reset(mut stream: TcpStream) -> Result<()> {
    let chunk = vec![7; 64 * 1024];
    let mut left = LENGTH;
    while left > 0 {
        let part = left.min(chunk.len());
        if let Err(error) = stream.write_all(&chunk[..part]).await {
            let reset = matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe);
            ensure!(reset, "sending to a target that never reads: {error}");
            return Ok(());
        }
        left -= part;
    }
    let mut byte = [0];
    let end = tokio::io::AsyncReadExt::read(&mut stream, &mut byte).await;
    ensure!(end.is_err(), "a target that never reads has answered: {end:?}");
    Ok(())
}

/// More data is sent to targets that never read than the agent may hold, beside as many connections as a busy node has.
async fn targets_that_never_read_beside_two_thousand_connections(testbed: &Testbed) -> Result<()> {
    /// One source may have 814 of what the agent accepts, and less beside others.
    const SOURCES: u8 = 10;
    const OPEN_OF_EACH: usize = 200;
    const STUCK: usize = 200;
    let pod = testbed.add_pod()?;
    let limit = testbed.limit_on_edge("tunnel-agent", AGENT)?;
    let server = crate::common::server(testbed).await?;
    let mut agent = agent::Builder::new(&server, 1).memory(&limit).enrol(&server).await?;
    expect_budget(&agent, &limit).await?;
    let healthy = target(testbed, 1, HEALTHY, Behaviour::Echo)?;
    let never_reads = target(testbed, 1, 9100, Behaviour::NeverReads)?;
    let on_edge = target(testbed, 1, 9101, Behaviour::Echo)?;
    let mut open = Vec::new();
    for source in 0..SOURCES {
        another_source(&pod, 3 + source)?;
        open.extend(take_all(&pod, on_edge.address, OPEN_OF_EACH).await?);
    }
    ensure!(open.len() == usize::from(SOURCES) * OPEN_OF_EACH, "{} connections are open", open.len());
    another_source(&pod, 3 + SOURCES)?;

    let mut stuck = JoinSet::new();
    alongside("targets that never read", healthy.address, async {
        for _ in 0..STUCK / 2 {
            stuck.spawn(send_until_reset(connect(never_reads.address).await?));
            let of_pod = connect_from(&pod, never_reads.address, client::PATIENCE).await?;
            stuck.spawn(send_until_reset(of_pod));
        }
        resets_settled(async || {
            limit.expect_kept(agent.process.pid())?;
            agent.metric_or_zero("postern_agent_connections_total", &[("outcome", "stalled")]).await
        })
        .await
    })
    .await?;
    expect_held(&agent).await?;
    let resets = agent.metric("postern_agent_connections_total", &[("outcome", "stalled")]).await?;
    expect_alive(&mut agent.process, &limit)?;
    for stream in &mut open {
        echo(stream, b"still there").await.context("one of the connections beside them")?;
    }
    // Each reset reached its client, and the server logs the reason.
    figure(&format!("{resets} of {STUCK} were reset"));
    let logged = async || stalled_at(&server).await;
    wait_until("the server to log every reset", client::PATIENCE, logged, |logged| *logged == resets).await?;
    #[expect(clippy::cast_precision_loss, reason = "hundreds fit")]
    let left = STUCK as f64 - resets;
    let waiting = async || {
        while let Some(ended) = stuck.try_join_next() {
            ended.context("a client")??;
        }
        #[expect(clippy::cast_precision_loss, reason = "hundreds fit")]
        let waiting = stuck.len() as f64;
        Ok(waiting)
    };
    wait_until("the clients of these to be reset", client::PATIENCE, waiting, |waiting| *waiting == left)
        .await?;
    Ok(())
}

/// Each download may have a window in flight, which adds up to far more than the agent's memory: the data queued for
/// its link is limited for all of them together.
async fn downloads_that_nobody_reads_from_a_small_agent(testbed: &Testbed) -> Result<()> {
    const UNREAD: u32 = 240;
    small_kernel_buffers(testbed)?;
    let limit = testbed.limit_on_edge("tunnel-agent", AGENT)?;
    let server = crate::common::server(testbed).await?;
    let mut agent = agent::Builder::new(&server, 1).memory(&limit).enrol(&server).await?;
    let source = load_target::Target::start(testbed, 1).await?;
    let unread = alongside("downloads that nobody reads", source.at(load_target::ECHO), async {
        let unread = stalled_readers(&source, UNREAD as usize, LENGTH).await?;
        let held = async || {
            limit.expect_kept(agent.process.pid())?;
            server.metric("postern_stalled_bytes", &[]).await
        };
        let windows = f64::from(UNREAD) * f64::from(1 << 19);
        wait_until("the server to hold what they do not read", client::PATIENCE, held, |held| {
            *held > windows
        })
        .await?;
        Ok(unread)
    })
    .await?;
    expect_alive(&mut agent.process, &limit)?;
    for mut stream in unread {
        stream.shutdown().await.context("asking for the end")?;
        let end = end_of(&mut stream, client::PATIENCE).await?;
        ensure!(end == End::Eof(LENGTH), "a download ended with {end:?}");
    }
    expect_alive(&mut agent.process, &limit)
}

/// Incomplete request heads of unauthenticated clients at the plain and the https listener: they use a limited part of
/// the memory, and those of one source do not block other sources.
async fn heads_that_clients_never_end(testbed: &Testbed) -> Result<()> {
    const CLIENTS: usize = 5_000;
    const PLAIN: u16 = 10268;
    const HTTPS: u16 = 10263;
    let limit = testbed.limit_on_cloud("tunnel-server", SERVER)?;
    let neighbour = testbed.add_neighbour()?;
    let builder = server::Builder::new(testbed).memory(&limit).flag(format!("--plain-port={PLAIN}"));
    let mut server = builder.flag(format!("--plain-clients={NEIGHBOUR}/32")).start().await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let healthy = target(testbed, 1, HEALTHY, Behaviour::Echo)?;
    let _web = Web::start(testbed, 1, 9100)?;
    let filler = vec![b'x'; 60_000];
    let head = [&b"GET / HTTP/1.1\r\nHost: edge-1:9100\r\nX: "[..], &filler[..]].concat();
    // A TLS record with the beginning of a ClientHello.
    let hello = [&[22, 3, 1, 0x3f, 0xff, 1, 0, 0x3f, 0xf0][..], &filler[..15_000]].concat();
    let listeners = [(PLAIN, head), (HTTPS, hello)];
    let held = alongside("heads that never end", healthy.address, async {
        let mut held = Vec::new();
        for (port, head) in listeners.iter().cycle().take(CLIENTS) {
            // A client over the limit is reset, possibly before its connect() has returned.
            let Ok(mut stream) = connect((CLOUD, *port)).await else { continue };
            if stream.write_all(head).await.is_ok() {
                held.push(stream);
            }
        }
        for listener in ["plain", "https"] {
            let of_listener = [("listener", listener), ("reason", "unauthenticated")];
            // Some of them are accepted by the kernel only.
            let over = "postern_connections_over_limit_total";
            let refused = server.wait_metric(over, &of_listener, |refused| refused > 0.0).await?;
            figure(&format!(
                "the {listener} listener reset {refused} of {} unauthenticated clients",
                CLIENTS / 2
            ));
        }
        let mut other = connect_from(&neighbour, (CLOUD, PLAIN).into(), client::PATIENCE).await?;
        other.write_all(b"GET / HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: close\r\n\r\n").await?;
        let answer = client::text(&mut other, "the plain listener does not answer").await?;
        ensure!(answer.starts_with("HTTP/1.1 200 "), "another source was answered {answer:?}");
        Ok(held)
    })
    .await?;
    expect_alive(&mut server.process, &limit)?;
    drop(held);
    Ok(())
}

/// Reports the memory that each of these connections has used.
fn cost(limit: &MemoryLimit, before: u64, connections: usize) -> Result<()> {
    let taken = limit.charged()?.saturating_sub(before);
    let each = taken / connections.max(1) as u64;
    figure(&format!(
        "{connections} idle connections: {} MiB more are charged, {each} bytes for each",
        taken >> 20
    ));
    Ok(())
}

/// One source gets a third of the connections that an agent has memory for, and the agent refuses those beyond its
/// memory, which takes several servers; its other connections, and other nodes, are not affected.
async fn idle_connections_to_a_small_agent(testbed: &Testbed) -> Result<()> {
    const MOST: usize = 6_000;
    // Memory for 1,820 connections: a server with 20,000 open files lets one source have more.
    let limit = testbed.limit_on_edge("tunnel-agent", 48 << 20)?;
    let pod = testbed.add_pod()?;
    let server = server::Builder::new(testbed).flag("--drain-timeout=3m").start().await?;
    let mut agent = agent::Builder::new(&server, 1).memory(&limit).enrol(&server).await?;
    let _other = Agent::enrol(&server, 2).await?;
    let on_first = target(testbed, 1, 9100, Behaviour::Echo)?;
    let on_second = target(testbed, 2, 9100, Behaviour::Echo)?;
    let before = limit.charged()?;
    let mut held = take_all(&testbed.cloud, on_first.address, MOST).await?;
    ensure!((600..=625).contains(&held.len()), "this host was given {} connections", held.len());
    server
        .wait_access("of the refused client", |line| {
            line.text("outcome") == "busy" && line.text("error").contains("whose agent has room for")
        })
        .await?;
    // For its source's part of the agent.
    let (over, reason) = ("postern_connections_over_limit_total", [("reason", "agent")]);
    server.wait_metric(over, &reason, |refused| refused >= 1.0).await?;
    let mut other = connect_from(&pod, on_first.address, client::PATIENCE).await?;
    echo(&mut other, b"another client").await.context("another client of the same node")?;
    drop(other);

    let more = fill_by_successors(&server, &testbed.cloud, on_first.address, MOST).await?;
    held.extend(more.held);
    cost(&limit, before, held.len())?;
    expect_alive(&mut agent.process, &limit)?;
    ensure!((1_800..=1_820).contains(&held.len()), "the agent has taken {} connections", held.len());
    expect_busy_agent(&more.servers[1], &agent).await?;
    visit(on_second.address).await.context("another node")?;
    for stream in &mut held {
        echo(stream, b"still mine").await.context("one of those that it has taken")?;
    }
    expect_alive(&mut agent.process, &limit)?;
    drop(held);
    // Waits until both ends have seen their ends.
    let visited = async || visit(on_first.address).await;
    wait_until("a place among those given back", client::PATIENCE, visited, |_| true).await?;
    Ok(())
}

/// Servers that took over one after the other, and the connections that clients hold through them.
struct Filled<'a> {
    servers: [Server<'a>; 2],
    held: Vec<TcpStream>,
}

/// A server does not know a node's connections through other servers: two successors bring the agent to its own limit.
async fn fill_by_successors<'a>(
    first: &Server<'a>,
    from: &Namespace,
    address: SocketAddr,
    most: usize,
) -> Result<Filled<'a>> {
    let second = first.take_over().await?;
    let mut held = take_all(from, address, most).await?;
    let third = second.take_over().await?;
    held.extend(take_all(from, address, most).await?);
    Ok(Filled { servers: [second, third], held })
}

/// Expects that clients were refused for the agent's limit, and not for an error.
async fn expect_busy_agent(server: &Server<'_>, agent: &Agent<'_>) -> Result<()> {
    server
        .wait_access("of a refused client", |line| {
            line.text("outcome") == "busy" && line.text("error").contains("has open files and memory for")
        })
        .await?;
    agent.wait_metric("postern_agent_dials_total", &[("outcome", "busy")], |busy| busy >= 1.0).await?;
    for output in [server.settled_log().await?, agent.settled_log().await?] {
        // The error has the same name if other programs have all inotify instances of the user.
        let used_up =
            |line: &str| line.contains("Too many open files") && !line.contains("max_user_instances");
        ensure!(!output.lines().any(used_up), "files were used up: {output}");
    }
    Ok(())
}

async fn idle_connections_to_an_agent_with_few_files(testbed: &Testbed) -> Result<()> {
    const FILES: u32 = 256;
    let server = server::Builder::new(testbed).flag("--drain-timeout=3m").start().await?;
    let agent = agent::Builder::new(&server, 1).open_files(FILES)?.enrol(&server).await?;
    let on_edge = target(testbed, 1, 9100, Behaviour::Echo)?;
    let mut held = take_all(&testbed.cloud, on_edge.address, FILES as usize).await?;
    let more = fill_by_successors(&server, &testbed.cloud, on_edge.address, FILES as usize).await?;
    held.extend(more.held);
    ensure!(held.len() == FILES as usize * 3 / 4, "the agent has taken {} connections", held.len());
    expect_busy_agent(&more.servers[1], &agent).await?;
    // The agent has files left for its other work.
    ensure!(agent.get("/readyz").await?.0 == 200, "the agent is not ready");
    Ok(())
}

/// More idle connections than the server has memory for, from three pod addresses and from this host, where there are
/// open files for more: the newest are refused, and another client reaches another node.
async fn idle_connections_of_several_sources(testbed: &Testbed) -> Result<()> {
    const SERVER: u64 = 128 << 20;
    const MOST: usize = 6_000;
    let pod = testbed.add_pod()?;
    let limit = testbed.limit_on_cloud("tunnel-server", SERVER)?;
    let mut server = server::Builder::new(testbed).memory(&limit).start().await?;
    let _agents = (Agent::enrol(&server, 1).await?, Agent::enrol(&server, 2).await?);
    let on_first = target(testbed, 1, 9100, Behaviour::Echo)?;
    let on_second = target(testbed, 2, 9100, Behaviour::Echo)?;
    let before = limit.charged()?;
    let mut held = Vec::new();
    for source in 3..6 {
        another_source(&pod, source)?;
        for target in [&on_first, &on_second] {
            held.extend(take_all(&pod, target.address, MOST - held.len()).await?);
        }
    }
    held.extend(take_all(&testbed.cloud, on_first.address, MOST - held.len()).await?);
    cost(&limit, before, held.len())?;
    expect_alive(&mut server.process, &limit)?;
    ensure!((1_400..2_497).contains(&held.len()), "the server has taken {} connections", held.len());
    server
        .wait_access("of a refused client", |line| {
            line.text("outcome") == "busy" && line.text("error").contains("connections open")
        })
        .await?;
    for reason in ["source", "node"] {
        let over = "postern_connections_over_limit_total";
        server.wait_metric(over, &[("reason", reason)], |refused| refused >= 1.0).await?;
    }
    another_source(&pod, 6)?;
    let mut other = connect_from(&pod, on_second.address, client::PATIENCE).await?;
    echo(&mut other, b"another client").await.context("another client")?;
    for stream in &mut held {
        echo(stream, b"still mine").await.context("one of those that it has taken")?;
    }
    ensure!(!server.settled_log().await?.contains("failed to accept"), "the open files were used up");
    expect_alive(&mut server.process, &limit)
}

/// Makes a pod's connections come from another address.
fn another_source(pod: &Namespace, number: u8) -> Result<()> {
    pod.ip(&format!("addr add 10.71.0.{number}/24 dev eth0"))?;
    pod.ip(&format!("route replace default via 10.71.0.1 src 10.71.0.{number}"))
}
