//! Clients: each opens a connection to a target of a node, writes in pieces, and expects everything back.

use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Result, anyhow, bail, ensure};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy, split};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tunnel_runtime::accept::Gate;
use tunnel_server::agent_port::Accept as _;
use tunnel_server::listener::{OpenRequest, Piped};

use crate::agent;
use crate::fleet::Fleet;
use crate::network::{Listener, Net};

/// Targets have the ports from here on, each client one of its own.
const PORTS: u16 = 20_000;
/// Maximum bytes in a piece.
const PIECE: usize = 16 << 10;
/// The same of one that does not read all the time: eight of these are more than all windows and buffers hold.
const LARGE_PIECE: usize = 512 << 10;
/// Maximum time in which a client writes.
const WRITES: Duration = Duration::from_secs(8);
/// The same of one that ends complete: with the time on its way this is less than [`crate::server::DRAIN`].
const DRAINS: Duration = Duration::from_secs(3);
/// Maximum time for which a client does not read that ends complete.
const PAUSES: Duration = Duration::from_millis(1500);
/// One that ends complete has done so within this time.
const COMPLETES: Duration = Duration::from_secs(8);
/// A connection has ended after so long: it is opened within about 12 s, and ends with its session on a silent path.
const ENDS: Duration = Duration::from_secs(60);
/// The same at an agent of konnectivity's, which notices a silent path after 80 s.
const ENDS_LATER: Duration = Duration::from_secs(100);

/// How a client deals with its socket.
#[derive(Clone, Copy, Debug, Default)]
enum Socket {
    #[default]
    Reads,
    /// After so many bytes it does not read for a time.
    Pauses { after: usize, lasts: Duration },
    /// It never reads, and goes after this time.
    Deaf { lasts: Duration },
    /// It goes after so many bytes, and does not wait for the others.
    Resets { after: usize },
}

impl Socket {
    fn of(random: &mut StdRng, completes: bool) -> Self {
        let after = random.random_range(0..PIECE);
        let most = if completes { PAUSES } else { WRITES * 2 };
        let lasts = most.mul_f64(random.random());
        match random.random_range(0..8) {
            0 | 1 => Self::Pauses { after, lasts },
            2 => Self::Deaf { lasts: lasts + WRITES * 2 },
            3 => Self::Resets { after },
            _ => Self::Reads,
        }
    }

    /// Time for which it does not read.
    fn lasts(self) -> Duration {
        match self {
            Self::Pauses { lasts, .. } | Self::Deaf { lasts } => lasts,
            Self::Reads | Self::Resets { .. } => Duration::ZERO,
        }
    }
}

/// A client of the plan.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    number: u16,
    /// Index of the server to which it connects.
    pub(crate) server: usize,
    /// Index of the node that has its target.
    pub(crate) node: usize,
    /// Its node has an agent of konnectivity's.
    pub(crate) of_konnectivity: bool,
    /// Its bytes follow from this.
    seed: u64,
    pieces: u32,
    /// Time between two pieces.
    pause: Duration,
    /// Nothing fails meanwhile: it gets everything back.
    completes: bool,
    socket: Socket,
}

impl Client {
    pub(crate) fn of(
        random: &mut StdRng,
        number: u16,
        (servers, agents): (usize, usize),
        completes: bool,
    ) -> Self {
        let pieces = random.random_range(1..=8);
        let most = if completes { DRAINS } else { WRITES };
        Self {
            number,
            server: random.random_range(0..servers),
            node: random.random_range(0..agents),
            of_konnectivity: false,
            seed: random.random(),
            pieces,
            pause: most.mul_f64(random.random()) / pieces,
            completes,
            socket: Socket::Reads,
        }
    }

    /// The client may read late, or never, or go in the middle.
    pub(crate) fn with_socket(mut self, random: &mut StdRng) -> Self {
        self.socket = Socket::of(random, self.completes);
        match self.socket {
            // Also the time in which all of its bytes arrive.
            Socket::Pauses { .. } => self.pause /= 4,
            // It fills all windows at once.
            Socket::Deaf { .. } => (self.pieces, self.pause) = (8, Duration::ZERO),
            Socket::Reads | Socket::Resets { .. } => {}
        }
        self
    }

    /// Another one on the same session, if this one does not read, though nothing fails: that must not stall the other.
    pub(crate) fn beside(&self, number: u16) -> Option<Self> {
        let deaf = matches!(self.socket, Socket::Deaf { .. }) && self.completes;
        deaf.then(|| Self { number, seed: !self.seed, socket: Socket::Reads, ..self.clone() })
    }

    /// Lasts until the connection has ended, also that of the agent with the target. Returns what to note.
    ///
    /// # Errors
    /// If the client gets what it must not get, or something does not end.
    pub(crate) async fn run(self, net: Net, listener: Piped, killed: CancellationToken) -> Result<String> {
        let (number, gone) = (self.number, CancellationToken::new());
        let within = self.socket.lasts() + if self.of_konnectivity { ENDS_LATER } else { ENDS };
        let target = SocketAddr::new(agent::host(self.node), PORTS + number);
        let echo = tokio::spawn(echo(net.listen(target, Gate::new(true)), gone.clone()));
        let (sent, mut back, begin) = (self.bytes(), Vec::new(), Instant::now());
        let relaying = killed.run_until_cancelled(self.relay(&listener, target, &sent, &mut back));
        let ended = match timeout(within, relaying).await {
            Ok(ended) => ended.unwrap_or_else(|| Err(anyhow!("its server was killed"))),
            Err(_) => bail!("the connection of client {number} does not end within {within:?}"),
        };
        gone.cancel();
        let lasted = begin.elapsed();
        ensure!(
            !self.completes || self.goes() || lasted < COMPLETES,
            "client {number} takes {lasted:?}, while nothing fails"
        );
        ensure!(sent.starts_with(&back), "client {number} gets other bytes back than it has sent");
        let (all, got) = (sent.len(), back.len());
        tracing::debug!(number, all, got, ?ended, "connection of a client");
        match &ended {
            Ok(()) if self.goes() => {}
            Ok(()) => ensure!(got == all, "client {number} gets an end of file after {got} of {all} bytes"),
            Err(error) => {
                ensure!(
                    !self.completes || self.goes(),
                    "client {number} is cut after {got} of {all} bytes: {error:#}"
                );
            }
        }
        match timeout(within, echo).await {
            Ok(ended) => ended?,
            Err(_) => bail!("the agent keeps a connection with the target of client {number}"),
        }
        Ok(format!("client {number} {}", if ended.is_ok() { "is done" } else { "is cut" }))
    }

    /// True if it does not wait for all of its bytes.
    fn goes(&self) -> bool {
        matches!(self.socket, Socket::Deaf { .. } | Socket::Resets { .. })
    }

    fn bytes(&self) -> Vec<u8> {
        let mut random = StdRng::seed_from_u64(self.seed);
        let most = match self.socket {
            Socket::Reads | Socket::Resets { .. } => PIECE,
            Socket::Pauses { .. } | Socket::Deaf { .. } => LARGE_PIECE,
        };
        let least = if matches!(self.socket, Socket::Deaf { .. }) { most } else { 1 };
        let mut bytes = vec![0_u8; self.pieces as usize * random.random_range(least..=most)];
        random.fill(&mut bytes[..]);
        bytes
    }

    /// Reads up to the end of file.
    async fn relay(
        &self,
        listener: &Piped,
        target: SocketAddr,
        sent: &[u8],
        back: &mut Vec<u8>,
    ) -> Result<()> {
        let own = SocketAddr::from(([10, 6, 0, 1], PORTS + self.number));
        let request = OpenRequest::new(agent::node(self.node)?, target);
        let (stream, record) = listener.open(request, own).await.map_err(anyhow::Error::msg)?;
        let (mut read, mut write) = split(stream);
        let reading = async {
            if let Socket::Deaf { lasts } = self.socket {
                sleep(lasts).await;
                return Ok(());
            }
            let mut paused = false;
            loop {
                match self.socket {
                    Socket::Resets { after } if back.len() >= after => break,
                    Socket::Pauses { after, lasts } if back.len() >= after && !paused => {
                        paused = true;
                        sleep(lasts).await;
                    }
                    _ => {}
                }
                if read.read_buf(back).await? == 0 {
                    break;
                }
                // The protocol has no half-close, so the client closes once it has read everything.
                if self.of_konnectivity && back.len() == sent.len() {
                    break;
                }
            }
            Ok::<_, io::Error>(())
        };
        let writing = async {
            for piece in sent.chunks(sent.len() / self.pieces as usize) {
                if write.write_all(piece).await.is_err() {
                    break;
                }
                sleep(self.pause).await;
            }
            if !self.of_konnectivity {
                // Of a failure the reader gets the reason.
                let _ = write.shutdown().await;
            }
            pending::<io::Result<()>>().await
        };
        let ended = tokio::select! {
            ended = reading => ended,
            never = writing => never,
        };
        if !self.goes() {
            record.end();
        }
        Ok(ended?)
    }
}

/// The target: sends everything back, on each connection. Ends with the last one once the client is gone.
async fn echo(mut listener: Listener, gone: CancellationToken) {
    let mut connections = JoinSet::new();
    while let Some((line, _)) = gone.run_until_cancelled(listener.accept("target")).await {
        connections.spawn(async move {
            let (mut read, mut write) = split(line);
            // The agent may cut it.
            if copy(&mut read, &mut write).await.is_ok() {
                let _ = write.shutdown().await;
            }
        });
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Checks that no connection of a client has left anything behind.
pub(crate) fn nothing_is_left(fleet: &Fleet) -> Result<()> {
    let clients = fleet.clients.len();
    ensure!(clients == 0, "{clients} clients have not ended");
    for agent in fleet.agents.iter().flatten() {
        let taken = agent.runtime.places.taken();
        ensure!(taken == 0, "an agent has {taken} places of connections in use");
    }
    for server in fleet.servers.iter().flatten() {
        let (sessions, peers) = (server.runtime.sessions.all(), server.runtime.peers.all());
        let links = sessions.iter().map(|session| &session.links).chain(peers.iter().map(|peer| &peer.links));
        let taken: u32 = links.map(|links| links.connections()).sum();
        ensure!(taken == 0, "{} has {taken} connections on its links", server.id);
    }
    Ok(())
}
