//! Steps that several scenarios share.
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use postern_testbed::agent::{self, Agent};
pub(crate) use postern_testbed::client::hold;
use postern_testbed::client::{self, echo, visit};
use postern_testbed::netns::Namespace;
use postern_testbed::percentiles::Times;
use postern_testbed::process::Process;
use postern_testbed::report::figure;
use postern_testbed::server::{Builder, Server};
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::wait::{wait_for, wait_until};
use postern_testbed::{Testbed, load_target};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tunnel_link::link;

/// Port of the healthy echo while something else goes wrong.
pub(crate) const HEALTHY: u16 = 10255;
/// The third server's address, in the LAN of the cloud.
pub(crate) const THIRD: Ipv4Addr = Ipv4Addr::new(10, 70, 0, 3);

pub(crate) async fn server(testbed: &Testbed) -> Result<Server<'_>> {
    Builder::new(testbed).start().await
}

pub(crate) async fn server_and_agent(testbed: &Testbed) -> Result<(Server<'_>, Agent<'_>)> {
    let server = server(testbed).await?;
    let agent = Agent::enrol(&server, 1).await?;
    Ok((server, agent))
}

/// A file mounted over one of the machine's, visible only to processes in the mount namespace.
pub(crate) struct Mounted {
    /// Process that keeps the mount namespace.
    pub(crate) keeper: Process,
    file: PathBuf,
}

impl Mounted {
    /// Mounts a file with this text over the file `over`, on edge 1.
    pub(crate) async fn over(testbed: &Testbed, over: &Path, text: &str) -> Result<Self> {
        let name = over.file_name().context("not a file")?;
        let file = testbed.dir().join(name);
        let mounted = file.with_extension("mounted");
        let mut command = testbed.on_edge(1).command("unshare".as_ref());
        command.args(["--mount", "--propagation=private", "sh", "-c"]);
        command.arg(r#"mount --bind "$0" "$1" && touch "$2" && exec sleep infinity"#);
        command.arg(&file).arg(over).arg(&mounted);
        std::fs::write(&file, text).with_context(|| format!("writing {}", file.display()))?;
        let keeper = Process::spawn(testbed.dir(), &name.to_string_lossy(), command)?;
        let exists = async || Ok(mounted.exists().then_some(()));
        wait_for("the file to be mounted", agent::START, exists).await?;
        Ok(Self { keeper, file })
    }

    /// Written in place: this inode is the one that is mounted.
    pub(crate) fn write(&self, text: &str) -> Result<()> {
        std::fs::write(&self.file, text).with_context(|| format!("writing {}", self.file.display()))
    }
}

pub(crate) fn target(testbed: &Testbed, n: usize, port: u16, behaviour: Behaviour) -> Result<Target> {
    let edge = testbed.edge(n);
    Target::start(&edge.ns, edge.address, port, behaviour)
}

/// Maximum duration of a visit, which normally takes milliseconds. One that waits for a fault takes as long as the
/// fault lasts: the agent's dial of a host that does not answer ends after 5 s, a session whose agent is silent after
/// 12.
const STALL: Duration = Duration::from_secs(4);
/// Pause between visits. Each uses one of the agent's ports for a minute, of the 28,000 available per target.
const PACE: Duration = Duration::from_millis(3);

/// Visits `address` repeatedly while `work` runs. Every visit must succeed and none may stall, including the one in
/// flight when the work ends; unless the work is short, at least one must begin and end during it. Reports their
/// latencies.
pub(crate) async fn alongside<T>(
    what: &str,
    address: SocketAddr,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    longest_alongside(what, address, work).await.map(|(result, _)| result)
}

/// As [`alongside`], and returns the longest visit.
pub(crate) async fn longest_alongside<T>(
    what: &str,
    address: SocketAddr,
    work: impl Future<Output = Result<T>>,
) -> Result<(T, Duration)> {
    let mut work = std::pin::pin!(work);
    let mut latencies = Times::default();
    let begin = Instant::now();
    let steady = async || {
        tokio::time::sleep(PACE).await;
        let latency = visit(address).await.with_context(|| format!("healthy traffic alongside {what}"))?;
        ensure!(latency < STALL, "healthy traffic stood still for {latency:.1?} alongside {what}");
        Ok(latency)
    };
    let mut visiting = Box::pin(steady());
    let result = loop {
        tokio::select! {
            biased;
            result = &mut work => break result?,
            latency = &mut visiting => {
                latencies.add(latency?);
                visiting = Box::pin(steady());
            }
        }
    };
    let took = begin.elapsed();
    ensure!(
        latencies.count() > 0 || took < Duration::from_secs(1),
        "no visit ended while {what} lasted ({took:.1?})"
    );
    latencies.add(visiting.await?);
    // At least a few visits, however short the work.
    while latencies.count() < 20 {
        latencies.add(steady().await?);
    }
    figure(&format!(
        "healthy traffic alongside {what}: {} visits, {}",
        latencies.count(),
        latencies.summary()
    ));
    Ok((result, latencies.percentile(1.0).unwrap_or_default()))
}

/// Measures up to three times until the time is within `bound`: beside other work one or two may be slower. The path's
/// delay or a timer of Postern's has to dominate what is measured.
pub(crate) async fn within(
    what: &str,
    bound: Duration,
    mut measure: impl AsyncFnMut() -> Result<Duration>,
) -> Result<()> {
    let mut all = Vec::new();
    while all.len() < 3 {
        let took = measure().await.with_context(|| what.to_owned())?;
        all.push(took);
        if took <= bound {
            figure(&format!("{what}: {all:.0?}, of {bound:.0?}"));
            return Ok(());
        }
    }
    bail!("{what}: {all:?}, each longer than {bound:?}")
}

/// Connects and expects a reset without data. The reset may arrive before connect() returns.
pub(crate) async fn expect_reset(address: SocketAddr) -> Result<()> {
    let mut stream = match client::connect(address).await {
        Ok(stream) => stream,
        Err(error) if is_reset(&error) => return Ok(()),
        Err(error) => return Err(error),
    };
    // A socket reports its reset once: if the write gets it, the read then sees an end of file.
    if stream
        .write_all(b"GET / HTTP/1.0\r\n\r\n")
        .await
        .is_err_and(|error| error.kind() == ErrorKind::ConnectionReset)
    {
        return Ok(());
    }
    let end = client::end_of(&mut stream, client::PATIENCE).await?;
    ensure!(end == client::End::Reset, "{address} ended with {end:?}, expected a reset");
    Ok(())
}

fn is_reset(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == ErrorKind::ConnectionReset)
}

/// Reads and discards `count` bytes.
pub(crate) async fn skip(stream: &mut TcpStream, count: usize) -> Result<()> {
    let mut left = count;
    let mut buffer = vec![0; 64 * 1024];
    while left > 0 {
        let part = left.min(buffer.len());
        let n = tokio::time::timeout(client::PATIENCE, stream.read(&mut buffer[..part]))
            .await
            .context("no bytes arrived")??;
        ensure!(n > 0, "ended {left} bytes early");
        left -= n;
    }
    Ok(())
}

/// Opens idle connections until `most` of them work or a number of them were refused. Returns the working ones.
pub(crate) async fn take_all(ns: &Namespace, address: SocketAddr, most: usize) -> Result<Vec<TcpStream>> {
    let (mut held, mut refused) = (Vec::new(), 0);
    while refused < 20 && held.len() < most {
        let relayed = async {
            let mut stream = client::connect_from(ns, address, client::PATIENCE).await?;
            echo(&mut stream, b"mine").await?;
            anyhow::Ok(stream)
        };
        match relayed.await {
            Ok(stream) => held.push(stream),
            Err(_) => refused += 1,
        }
    }
    Ok(held)
}

/// Limits what the kernels of the cloud host and of the edges queue for sockets that nobody reads. All hosts of all
/// scenarios share the machine's limit on it (tcp_mem), a gigabyte or so; beyond it the kernel drops segments, which
/// retransmission timers repair after tens of seconds, or gives up.
pub(crate) fn small_kernel_buffers(testbed: &Testbed) -> Result<()> {
    for host in testbed.edges().iter().map(|edge| &edge.ns).chain([&testbed.cloud]) {
        for buffer in ["tcp_rmem", "tcp_wmem"] {
            host.write(&format!("/proc/sys/net/ipv4/{buffer}"), "4096 16384 131072")?;
        }
    }
    Ok(())
}

/// Starts `count` clients of the target's source that each request `length` bytes and read none.
pub(crate) async fn stalled_readers(
    target: &load_target::Target<'_>,
    count: usize,
    length: usize,
) -> Result<Vec<TcpStream>> {
    let mut stalled = Vec::new();
    while stalled.len() < count {
        for _ in 0..50.min(count - stalled.len()) {
            stalled.push(client::connect(target.at(load_target::SOURCE)).await?);
        }
        // The agent's limit on pending dials is not under test here.
        let all = stalled.len() as u64;
        let seen = async || target.open().await;
        wait_until("the connections at the target", client::PATIENCE, seen, |n| *n >= all).await?;
    }
    for stream in &mut stalled {
        stream.write_u64(length as u64).await.context("asking for bytes")?;
    }
    Ok(stalled)
}

/// Waits until connections are reset at a limit on stalled receivers, and then until no more are. The grace period
/// begins with the last byte that a receiver's kernel took; each PING triggers a search for connections that have
/// exceeded it.
pub(crate) async fn resets_settled(resets: impl AsyncFn() -> Result<f64>) -> Result<()> {
    let (span, mut last) = (2 * link::PING_INTERVAL, (Instant::now(), 0.0));
    wait_for("connections beyond the bound, and no more, to be reset", 8 * span, async || {
        let now = resets().await?;
        if now != last.1 {
            last = (Instant::now(), now);
        }
        Ok((now > 0.0 && last.0.elapsed() > span).then_some(()))
    })
    .await
}

/// Acts as a load balancer at an address until it is dropped: connections go to each of the servers in turn. Returns the
/// address, of which the port may have been 0.
pub(crate) async fn balance(at: SocketAddr, servers: Vec<SocketAddr>) -> Result<(SocketAddr, JoinSet<()>)> {
    let listener = TcpListener::bind(at).await.context("the load balancer's port")?;
    let address = listener.local_addr()?;
    let mut balance = JoinSet::new();
    balance.spawn(async move {
        for server in servers.into_iter().cycle() {
            let Ok((mut agent, _)) = listener.accept().await else { return };
            tokio::spawn(async move {
                if let Ok(mut server) = TcpStream::connect(server).await {
                    // Ends when either side ends.
                    let _ = tokio::io::copy_bidirectional(&mut agent, &mut server).await;
                }
            });
        }
    });
    Ok((address, balance))
}

/// Starts `count` tasks and waits for all of them.
pub(crate) async fn at_once<T, F>(count: usize, mut start: impl FnMut() -> F) -> Result<Vec<T>>
where
    T: Send + 'static,
    F: Future<Output = Result<T>> + Send + 'static,
{
    let mut tasks = JoinSet::new();
    for _ in 0..count {
        tasks.spawn(start());
    }
    tasks.join_all().await.into_iter().collect()
}

/// Work that only takes time, to run other traffic alongside.
pub(crate) async fn pause(seconds: u64) -> Result<()> {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    Ok(())
}

/// Fails if the condition becomes true within `span`.
pub(crate) async fn never(
    what: &str,
    span: Duration,
    mut happened: impl AsyncFnMut() -> Result<bool>,
) -> Result<()> {
    let deadline = std::time::Instant::now() + span;
    while std::time::Instant::now() < deadline {
        ensure!(!happened().await?, "{what} happened");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

/// Waits for a session of the node with this index, and returns its entry in the server's status.
pub(crate) async fn session_of(server: &Server<'_>, index: usize) -> Result<serde_json::Value> {
    let session = async || Ok(server.status().await?["nodes"][index]["session"].clone());
    wait_until("a session of the node", client::PATIENCE, session, serde_json::Value::is_object).await
}

/// Waits until exactly this number of sessions was refused for this reason: a server counts one once its agent has been
/// told and its link is closed.
pub(crate) async fn refusals_counted(server: &Server<'_>, reason: &str, count: f64) -> Result<()> {
    server.expect_metric("postern_agent_sessions_refused_total", &[("result", reason)], count).await
}
