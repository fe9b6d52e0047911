//! A target for heavy load in a process of its own: echo, source and sink. It sends nothing before its client has,
//! because konnectivity loses the first bytes of a target that sends first.
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use crate::client;
use crate::process::Process;
use crate::topology::Testbed;
use crate::wait::{wait_for, wait_until};

/// Sends back what it reads.
pub const ECHO: u16 = 9100;
/// Reads a count of eight bytes, then sends that many bytes.
pub const SOURCE: u16 = 9101;
/// Reads a count of eight bytes and that many bytes, then sends the count back.
pub const SINK: u16 = 9102;
/// A black hole: the edge's firewall drops every packet.
pub const HOLE: u16 = 9105;
/// Sends the number of open connections; not tunnelled.
const CONTROL: u16 = 9109;
/// Ports that load goes to.
pub const RELAYED: [u16; 4] = [ECHO, SOURCE, SINK, HOLE];

const CHUNK: usize = 256 * 1024;
/// The kernel's own limit; a smaller one would limit the benchmark's 2,000 held connections.
const BACKLOG: u32 = 4096;

/// Number of open load connections.
static OPEN: AtomicU64 = AtomicU64::new(0);
/// Number of bytes received by the sink.
static RECEIVED: AtomicU64 = AtomicU64::new(0);

/// Argument with which a program becomes the target.
pub const ARGUMENT: &str = "--target";

/// Runs the target: serves until killed.
pub fn run() -> Result<()> {
    // All addresses of the edge, including those of a whole fleet.
    let address = IpAddr::from(Ipv4Addr::UNSPECIFIED);
    tunnel_runtime::lifecycle::raise_open_files();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("runtime")?;
    runtime.block_on(async {
        let serving = async |port| accept_all(listen(address, port)?, port).await;
        tokio::try_join!(serving(ECHO), serving(SOURCE), serving(SINK), serving(CONTROL)).map(drop)
    })
}

fn listen(address: IpAddr, port: u16) -> Result<TcpListener> {
    let address = SocketAddr::new(address, port);
    let socket = TcpSocket::new_v4().context("socket")?;
    socket.set_reuseaddr(true).context("SO_REUSEADDR")?;
    socket.bind(address).with_context(|| format!("binding {address}"))?;
    socket.listen(BACKLOG).with_context(|| format!("listening on {address}"))
}

async fn accept_all(listener: TcpListener, port: u16) -> Result<()> {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // Out of descriptors: wait until some are closed.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        tokio::spawn(async move {
            // A client may reset or leave early.
            serve(stream, port).await.ok();
        });
    }
}

struct Open;

impl Open {
    fn new() -> Self {
        OPEN.fetch_add(1, Ordering::Relaxed);
        Self
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        OPEN.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn serve(mut stream: TcpStream, port: u16) -> Result<()> {
    stream.set_nodelay(true)?;
    if port == CONTROL {
        stream.write_u64(OPEN.load(Ordering::Relaxed)).await?;
        stream.write_u64(RECEIVED.load(Ordering::Relaxed)).await?;
        return Ok(());
    }
    let _open = Open::new();
    match port {
        SOURCE => {
            let mut left = stream.read_u64().await?;
            let chunk = vec![0x5a; CHUNK];
            while left > 0 {
                let n = usize::try_from(left).unwrap_or(CHUNK).min(CHUNK);
                stream.write_all(&chunk[..n]).await?;
                left -= n as u64;
            }
            wait_for_end(&mut stream).await?;
        }
        SINK => {
            let count = stream.read_u64().await?;
            let mut left = count;
            let mut chunk = vec![0; CHUNK];
            while left > 0 {
                let n = stream.read(&mut chunk).await?;
                if n == 0 {
                    return Ok(());
                }
                RECEIVED.fetch_add(n as u64, Ordering::Relaxed);
                left = left.saturating_sub(n as u64);
            }
            stream.write_u64(count).await?;
            wait_for_end(&mut stream).await?;
        }
        _ => echo(stream).await?,
    }
    Ok(())
}

/// Reads to the end of the client's stream.
async fn wait_for_end(stream: &mut TcpStream) -> Result<()> {
    while stream.read(&mut [0; 16]).await? > 0 {}
    Ok(())
}

async fn echo(mut stream: TcpStream) -> Result<()> {
    // A small buffer: thousands of idle connections are held.
    let mut small = [0; 256];
    let mut large = Vec::new();
    loop {
        let buffer: &mut [u8] = if large.is_empty() { &mut small } else { &mut large };
        let n = stream.read(buffer).await?;
        if n == 0 {
            return Ok(());
        }
        stream.write_all(&buffer[..n]).await?;
        if n == small.len() {
            large.resize(16 * 1024, 0);
        }
    }
}

/// The target's process, running on an edge.
#[derive(Debug)]
pub struct Target<'a> {
    testbed: &'a Testbed,
    edge: usize,
    process: Process,
}

impl<'a> Target<'a> {
    /// Starts this program on edge `n` as the target and waits until it accepts; drops packets for [`HOLE`].
    pub async fn start(testbed: &'a Testbed, n: usize) -> Result<Self> {
        testbed.black_hole(n, HOLE)?;
        let program = std::env::current_exe().context("where this program is")?;
        let mut command = testbed.on_edge(n).command(&program);
        command.arg(ARGUMENT);
        let process = Process::spawn(testbed.dir(), &format!("target-{n}"), command)?;
        let target = Self { testbed, edge: n, process };
        wait_for("the target to accept", client::PATIENCE, async || Ok(target.open().await.ok())).await?;
        Ok(target)
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Returns the address at which clients reach one of its ports.
    pub fn at(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.testbed.edge(self.edge).ip(), port)
    }

    /// Returns the number of load connections open at the target.
    pub async fn open(&self) -> Result<u64> {
        Ok(self.counts().await?.0)
    }

    /// Returns the number of bytes received by its sink so far.
    pub async fn received(&self) -> Result<u64> {
        Ok(self.counts().await?.1)
    }

    async fn counts(&self) -> Result<(u64, u64)> {
        let edge = self.testbed.edge(self.edge);
        let mut stream = client::connect_from(&edge.ns, self.at(CONTROL), client::PATIENCE).await?;
        let open = stream.read_u64().await.context("asking the target")?;
        Ok((open, stream.read_u64().await.context("asking the target")?))
    }

    pub async fn settle(&self, limit: Duration) -> Result<()> {
        let what = "the target's connections to be closed";
        wait_until(what, limit, async || self.open().await, |open| *open == 0).await?;
        Ok(())
    }
}
