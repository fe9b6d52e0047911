//! The side of the second server: finds the first one, and takes over from it step by step.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tunnel_core::identity::NodeName;
use tunnel_core::lifecycle::{Readiness, ReadyGuard};

use super::message::{Answer, Ask, Hello, receive, receive_sockets, send};
use super::{Gates, socket_path};
use crate::redirect::{Orphans, Redirect};
use crate::route::Router;
use crate::session::Sessions;

/// How long the first server may take to answer.
const ANSWER: Duration = Duration::from_secs(5);
/// How long no agent may have come before those that are missing are not waited for: one that was refused tries again within
/// four seconds.
const QUIET: Duration = Duration::from_secs(10);
/// How long agents are waited for altogether.
const LONGEST: Duration = Duration::from_secs(120);
/// How often to look.
const CHECK: Duration = Duration::from_millis(20);
/// The same for each node that is looked for.
const EACH: Duration = Duration::from_micros(5);

/// The server that runs on this host with the same state directory.
pub(crate) struct Predecessor {
    stream: UnixStream,
    hello: Hello,
    sockets: Vec<Option<OwnedFd>>,
}

impl Predecessor {
    /// None: there is none, or none that answers. In that case it has the ports, and binding them fails.
    pub(crate) async fn find(state_dir: &Path) -> Option<Self> {
        let path = socket_path(state_dir);
        let stream = UnixStream::connect(&path).await.ok()?;
        match timeout(ANSWER, Self::greet(stream)).await {
            Ok(Ok(found)) => {
                let Hello { version, server_id, pid, .. } = &found.hello;
                tracing::info!(server_id, version, pid, "taking over from the server that runs here");
                Some(found)
            }
            Ok(Err(error)) => {
                tracing::warn!(path = %path.display(), %error, "the server that runs here cannot be taken over from");
                None
            }
            Err(_) => {
                tracing::warn!(path = %path.display(), "the server that runs here does not answer within 5 s");
                None
            }
        }
    }

    async fn greet(mut stream: UnixStream) -> io::Result<Self> {
        let sockets = receive_sockets(&stream).await?;
        let hello: Hello = receive(&mut stream).await?.ok_or(io::ErrorKind::UnexpectedEof)?;
        if hello.listeners.len() != sockets.len() {
            let reason = format!("{} sockets came for {} doors", sockets.len(), hello.listeners.len());
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        Ok(Self { stream, hello, sockets: sockets.into_iter().map(Some).collect() })
    }

    /// Its listening socket of `door` at an address that `fits`.
    pub(crate) fn listener(&mut self, door: &str, fits: impl Fn(SocketAddr) -> bool) -> Option<TcpListener> {
        let index = self.hello.listeners.iter().position(|(name, at)| name == door && fits(*at))?;
        let listener = TcpListener::from(self.sockets.get_mut(index)?.take()?);
        listener.set_nonblocking(true).ok()?;
        Some(listener)
    }

    /// What it redirects, and the first token of each.
    pub(crate) fn tokens(&self) -> &[(IpNet, IpAddr)] {
        &self.hello.tokens
    }

    /// The folder of its pins.
    pub(crate) fn pins(&self) -> Option<&Path> {
        self.hello.pins.as_deref()
    }

    async fn ask(&mut self, ask: Ask) -> io::Result<Answer> {
        let answered = async {
            send(&mut self.stream, &ask).await?;
            receive(&mut self.stream).await?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
        };
        timeout(ANSWER, answered).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }
}

/// What the second server needs to take over.
pub(crate) struct TakeOver {
    pub(crate) gates: Gates,
    pub(crate) router: Arc<Router>,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) redirect: Option<Arc<Redirect>>,
    pub(crate) readiness: Readiness,
    /// Held until the doors are open.
    pub(crate) pending: ReadyGuard,
    pub(crate) stop: CancellationToken,
}

impl TakeOver {
    /// Takes over from `predecessor`, or from what dead servers have left, and opens the doors. Then keeps the connection
    /// open: as long as it is, the predecessor knows that this server lives.
    pub(crate) async fn run(self, predecessor: Option<Predecessor>, orphans: Orphans) {
        let stop = self.stop.clone();
        let _ = stop.run_until_cancelled(self.take(predecessor, orphans)).await;
    }

    async fn take(self, predecessor: Option<Predecessor>, orphans: Orphans) {
        // Only this task's own guard is left when everything else that a start waits for is there.
        while self.readiness.names().iter().any(|name| name == NODES) {
            sleep(CHECK).await;
        }
        let mut predecessor = predecessor;
        if let Some(before) = &mut predecessor {
            let started = Instant::now();
            match self.hand_over(before).await {
                Ok((told, came)) => tracing::info!(
                    server_id = before.hello.server_id,
                    told,
                    came,
                    took_ms = started.elapsed().as_millis(),
                    "took over from the server before: it finishes what it carries"
                ),
                Err(error) => {
                    tracing::warn!(server_id = before.hello.server_id, %error, "the server before ended meanwhile");
                }
            }
        } else {
            self.apply_routes().await;
        }
        orphans.remove();
        self.gates.doors.set(true);
        let Self { pending, .. } = self;
        pending.ready();
        if let Some(mut before) = predecessor {
            // It says nothing more; this ends when it does.
            let _ = receive::<Answer>(&mut before.stream).await;
        }
    }

    /// How many nodes' agents were told, and how many of them have come.
    async fn hand_over(&self, before: &mut Predecessor) -> io::Result<(usize, usize)> {
        let told = match before.ask(Ask::Agents).await? {
            Answer::Told(nodes) => nodes,
            Answer::Released => return Err(unexpected()),
        };
        let wanted: Vec<NodeName> = told.iter().filter_map(|node| node.parse().ok()).collect();
        let pause = CHECK + EACH * u32::try_from(wanted.len()).unwrap_or(u32::MAX);
        let (started, mut last) = (Instant::now(), (0, Instant::now()));
        let came = loop {
            let came = wanted.iter().filter(|node| self.sessions.get(node).is_some()).count();
            if came != last.0 {
                last = (came, Instant::now());
            }
            if came == wanted.len() || last.1.elapsed() > QUIET || started.elapsed() > LONGEST {
                break came;
            }
            sleep(pause).await;
        };
        self.apply_routes().await;
        match before.ask(Ask::Doors).await? {
            Answer::Released => Ok((told.len(), came)),
            Answer::Told(_) => Err(unexpected()),
        }
    }

    /// Brings the kernel to the current routes before the first connect is decided by them.
    async fn apply_routes(&self) {
        let Some(redirect) = self.redirect.clone() else { return };
        let router = self.router.clone();
        let applied = tokio::task::spawn_blocking(move || redirect.apply(&router.desired())).await;
        if let Ok(Err(error)) = applied {
            tracing::error!(%error, "the routes in the kernel are not current");
        }
    }
}

/// What a start waits for until the nodes are known.
pub(crate) const NODES: &str = "nodes";

fn unexpected() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "an answer to something else")
}
