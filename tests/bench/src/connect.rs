//! Cost of a redirect for a client: connect() alone, by the number of nodes. The connection always ends at a listener
//! of the same host, as with every redirect, and is not accepted meanwhile.
use std::fmt::Write as _;
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use postern_testbed::client::is_unreachable;
use postern_testbed::inventory::{self, Inventory};
use postern_testbed::load_target::ECHO;
use postern_testbed::netns::Namespace;
use postern_testbed::percentiles::Times;
use postern_testbed::server::Server;
use postern_testbed::wait::{wait_for, wait_until};
use postern_testbed::{CLOUD, NEIGHBOUR, Testbed};
use socket2::{Domain, Socket, Type};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::catalogue::NODES;
use crate::dial::Dialer;
use crate::fleet;
use crate::line::Peer;
use crate::load::{self, Effort, micros};
use crate::peers::{BEHIND_NAT, Running};
use crate::record::Record;

/// The port of the listener for connections that are not redirected.
const LOCAL_PORT: u16 = 9190;
/// Connections of one batch: fewer than any listener's backlog.
const BATCH: usize = 64;
/// The kernel's upper bound of a backlog.
const BACKLOG: i32 = 4096;
/// Maximum wait until connect() knows new nodes.
const IN_EFFECT: Duration = Duration::from_secs(60);

/// A listener that accepts only between batches.
struct Local {
    listener: TcpListener,
    address: SocketAddr,
}

impl Local {
    fn open(address: Ipv4Addr) -> Result<Self> {
        let address = SocketAddr::from((address, LOCAL_PORT));
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).context("socket")?;
        socket.set_reuse_address(true).context("SO_REUSEADDR")?;
        socket.bind(&address.into()).with_context(|| format!("binding {address}"))?;
        socket.listen(BACKLOG).with_context(|| format!("listening on {address}"))?;
        socket.set_nonblocking(true).context("O_NONBLOCK")?;
        Ok(Self { listener: socket.into(), address })
    }

    /// Connects in batches to `address`, which a rule may translate to this listener's.
    fn batches(&self, address: SocketAddr, effort: &Effort) -> Result<Times> {
        let mut times = Times::default();
        for _ in 0..effort.batches {
            times.0.extend(batch(address)?.0);
            while self.listener.accept().is_ok() {}
        }
        Ok(times)
    }
}

/// Connects one after the other, and closes all at the end.
fn batch(address: SocketAddr) -> Result<Times> {
    let mut times = Times::default();
    let mut open = Vec::with_capacity(BATCH);
    for _ in 0..BATCH {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).context("socket")?;
        // With a reset nothing stays behind in TIME_WAIT.
        socket.set_linger(Some(Duration::ZERO)).context("SO_LINGER")?;
        let start = Instant::now();
        socket.connect(&address.into()).with_context(|| format!("connect() to {address}"))?;
        times.add(start.elapsed());
        open.push(socket);
    }
    Ok(times)
}

/// Measures the empty host, which is the same for any number of nodes.
pub(crate) async fn direct(running: &Running<'_>, effort: &Effort, record: &mut Record) -> Result<()> {
    let local = Local::open(CLOUD)?;
    let p50 = micros(&mut local.batches(local.address, effort)?, 0.5)?;
    let rate = load::visits(&running.dialer, 16, effort).await?.rate();
    for nodes in NODES {
        record.value(&format!("connect-{nodes}"), Peer::Direct, p50);
        record.value(&format!("connect-other-{nodes}"), Peer::Direct, p50);
        record.value(&format!("connect-rate-{nodes}"), Peer::Direct, rate);
    }
    Ok(())
}

/// Measures rules in the nat table of a separate host, because connection tracking stays in a namespace once enabled.
pub(crate) fn iptables(
    host: &Namespace,
    testbed: &Testbed,
    open_edge: Ipv4Addr,
    effort: &Effort,
    record: &mut Record,
) -> Result<()> {
    let redirected = testbed.edge(BEHIND_NAT).address;
    for nodes in NODES {
        rules(host, nodes, redirected, &SocketAddr::from((NEIGHBOUR, LOCAL_PORT)))?;
        let (mut own, mut other) = host.run(|| {
            let local = Local::open(NEIGHBOUR)?;
            let own = local.batches((redirected, ECHO).into(), effort)?;
            Ok((own, local.batches(local.address, effort)?))
        })?;
        record.value(&format!("connect-{nodes}"), Peer::Iptables, micros(&mut own, 0.5)?);
        record.value(&format!("connect-other-{nodes}"), Peer::Iptables, micros(&mut other, 0.5)?);
        rules(host, nodes, redirected, &SocketAddr::from((open_edge, ECHO)))?;
        let visits = host.run(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(load::visits(&Dialer::Tcp(redirected.into()), 16, effort))
        })?;
        record.value(&format!("connect-rate-{nodes}"), Peer::Iptables, visits.rate());
    }
    host.iptables("-t nat -F OUTPUT")
}

/// Installs one rule for each node, that of `node` the last.
fn rules(host: &Namespace, nodes: usize, node: Ipv4Addr, to: &SocketAddr) -> Result<()> {
    let mut text = "*nat\n:OUTPUT ACCEPT [0:0]\n".to_owned();
    let others = (0..nodes - 1).map(fleet::address);
    for address in others.chain([node]) {
        writeln!(
            text,
            "-A OUTPUT -d {address}/32 -p tcp -m tcp --dport {ECHO} -j DNAT --to-destination {to}"
        )?;
    }
    text.push_str("COMMIT\n");
    // Unlike `iptables -F` this replaces the table as a whole.
    let mut command = host.command("iptables-restore");
    command.args(["-w"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().context("starting iptables-restore")?;
    child.stdin.take().context("its input")?.write_all(text.as_bytes()).context("writing rules")?;
    let output = child.wait_with_output().context("waiting for iptables-restore")?;
    ensure!(output.status.success(), "iptables-restore: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Measures Postern with that many edge nodes in its inventory, of which one has an agent.
pub(crate) async fn postern(
    running: &Running<'_>,
    testbed: &Testbed,
    effort: &Effort,
    record: &mut Record,
) -> Result<()> {
    let server = running.server().context("Postern without a server")?;
    for nodes in NODES {
        with_nodes(testbed, server, nodes, IN_EFFECT).await?;
        let (mut own, mut other) = postern_connects(running, testbed, server, effort).await?;
        record.value(&format!("connect-{nodes}"), Peer::Postern, micros(&mut own, 0.5)?);
        record.value(&format!("connect-other-{nodes}"), Peer::Postern, micros(&mut other, 0.5)?);
        let rate = load::visits(&running.dialer, 16, effort).await?.rate();
        record.value(&format!("connect-rate-{nodes}"), Peer::Postern, rate);
    }
    Inventory::of(testbed)?;
    Ok(())
}

/// Times of connects to the node with an agent, and of others, while the redirect is on.
pub(crate) async fn postern_connects(
    running: &Running<'_>,
    testbed: &Testbed,
    server: &Server<'_>,
    effort: &Effort,
) -> Result<(Times, Times)> {
    let pid = Pid::from_raw(i32::try_from(server.process.pid())?);
    let node = SocketAddr::from((testbed.edge(BEHIND_NAT).address, ECHO));
    let (mut own, mut other) = (Times::default(), Times::default());
    let local = Local::open(CLOUD)?;
    for _ in 0..effort.batches {
        // A stopped server cannot accept and dial meanwhile: only the kernel's part is timed.
        kill(pid, Signal::SIGSTOP).context("stopping the server")?;
        let connects = batch(node).and_then(|own| {
            let other = batch(local.address)?;
            Ok((own, other))
        });
        kill(pid, Signal::SIGCONT).context("continuing the server")?;
        let (some, others) = connects?;
        own.0.extend(some.0);
        other.0.extend(others.0);
        while local.listener.accept().is_ok() {}
        // Connections are accepted in order: once this one is through, the batch is handled.
        load::visit(&running.dialer).await?;
    }
    Ok((own, other))
}

/// The cloud host, the edge with the agent, and others up to that many edge nodes.
pub(crate) fn inventory_with(testbed: &Testbed, nodes: usize) -> Result<Inventory> {
    let mut inventory = Inventory::of(testbed)?;
    inventory.nodes.truncate(1 + BEHIND_NAT);
    let others = (0..nodes - 1).map(|n| {
        let address = fleet::address(n).into();
        inventory::node(&format!("filler-{n}"), true, &[address], &[])
    });
    inventory.nodes.extend(others);
    Ok(inventory)
}

/// Writes an inventory with that many edge nodes and waits until it is in the kernel.
pub(crate) async fn with_nodes(
    testbed: &Testbed,
    server: &Server<'_>,
    nodes: usize,
    limit: Duration,
) -> Result<()> {
    inventory_with(testbed, nodes)?.write()?;
    // The inventory counts nodes before they are in the kernel's maps, so connect() is tried too.
    for n in [nodes.checked_sub(2), nodes.checked_sub(2).map(|last| last / 2)].into_iter().flatten() {
        wait_known(fleet::address(n), limit).await?;
    }
    let what = format!("{nodes} edge nodes in effect");
    let expected = load::as_f64(nodes as u64);
    let seen = async || {
        let metrics = server.metrics().await?;
        let edges = metrics.sum_or_zero("postern_inventory_nodes", &[("role", "edge")])?;
        Ok((edges, metrics.sum("postern_redirect_current", &[])?))
    };
    wait_until(&what, limit, seen, |seen| *seen == (expected, 1.0)).await?;
    Ok(())
}

/// Waits until connect() knows the node of an address: then it fails immediately, as there is no tunnel. An unknown
/// address is not answered.
pub(crate) async fn wait_known(address: Ipv4Addr, limit: Duration) -> Result<()> {
    wait_for(&format!("connect() to know {address}"), limit, async || {
        let answer = timeout(Duration::from_millis(50), TcpStream::connect((address, ECHO))).await;
        Ok(answer.is_ok_and(|answer| answer.is_err_and(|error| is_unreachable(&error))).then_some(()))
    })
    .await
}
