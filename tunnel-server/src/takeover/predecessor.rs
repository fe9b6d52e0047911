//! The side of the second server: finds the first one, and takes over from it step by step.

use std::collections::HashSet;
use std::io;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tunnel_redirect::{Orphans, Others};
use tunnel_runtime::NodeName;
use tunnel_runtime::lifecycle::{ReadyGuard, Shutdown};
use tunnel_runtime::takeover;

use super::Gates;
use super::message::{Answer, Ask, Hello};
use crate::agent_port::Handover;
use crate::runtime::Runtime;
use crate::session::{longest, told_within};

/// How long no agent may have come before those that are missing are not waited for: one that was refused tries again within
/// four seconds.
const QUIET: Duration = Duration::from_secs(10);
/// How long what the other servers have is waited for.
const LINKED: Duration = Duration::from_secs(10);
/// How long the server before may take where this one goes on, or stops, all the same.
const BRIEFLY: Duration = Duration::from_secs(5);
/// How often to look.
const CHECK: Duration = Duration::from_millis(20);
/// The same for each node that is looked for.
const EACH: Duration = Duration::from_micros(5);

/// The server that runs on this host with the same state directory.
pub type Predecessor = takeover::Predecessor<Hello>;

/// The second server's means to take over.
pub struct TakeOver {
    pub runtime: Runtime,
    pub gates: Gates,
    /// Held until the listeners are open.
    pub pending: Option<ReadyGuard>,
    /// The hand-over that this server's own agents are told of.
    pub handover: watch::Sender<Handover>,
    /// How long agents may take to go back: a stop waits for them.
    pub drain_timeout: Duration,
}

/// The connection with the server before, which in a cluster waits to be stopped.
pub struct Before {
    leaving: CancellationToken,
    /// True in the end if it is there.
    taking: JoinHandle<bool>,
}

impl Before {
    /// Has it take back what this server has taken over from it, unless this one is to end at once. False: there is none.
    pub(crate) async fn take_back(&mut self, shutdown: &Shutdown) -> bool {
        self.leaving.cancel();
        tokio::select! {
            there = &mut self.taking => there.unwrap_or(false),
            () = shutdown.forced() => false,
        }
    }
}

impl TakeOver {
    /// Takes over from `predecessor`, or from what dead servers have left, and opens the listeners. Then keeps the connection
    /// open: as long as it is, the predecessor knows that this server lives.
    pub fn start(self, predecessor: Option<Predecessor>, orphans: Orphans) -> Before {
        let (leaving, stop) = (CancellationToken::new(), self.runtime.stop.clone());
        let tasks = self.runtime.tasks.clone();
        let taking = self.take(predecessor, orphans, leaving.clone());
        let taking = async move { stop.run_until_cancelled(taking).await.unwrap_or(false) };
        Before { leaving, taking: tasks.spawn(taking) }
    }

    /// Returns whether the predecessor is there in the end.
    async fn take(
        mut self,
        mut predecessor: Option<Predecessor>,
        orphans: Orphans,
        leaving: CancellationToken,
    ) -> bool {
        let taken = leaving.run_until_cancelled(self.take_over(predecessor.as_mut(), orphans)).await;
        // One that has not passed everything on goes on as soon as it sees the connection's end.
        let Some(others) = taken else { return predecessor.is_some() };
        self.gates.listeners.set(true);
        drop(self.pending.take());
        let Some(mut before) = predecessor else { return false };
        tokio::select! {
            () = before.ended() => {
                // Nothing listens any more where only it did.
                drop(before);
                // If it was killed its programs are there, which come first and go by what it knew.
                let _ = leaving.run_until_cancelled(others.remove_dead()).await;
                false
            }
            () = leaving.cancelled() => self.give_back(&mut before).await,
        }
    }

    /// Returns what others have pinned that may die.
    async fn take_over(&self, predecessor: Option<&mut Predecessor>, orphans: Orphans) -> Others {
        // Only this task's own guard is left when everything else that a start waits for is there.
        while self.runtime.readiness.names().iter().any(|name| name == NODES || name == PORTS) {
            sleep(CHECK).await;
        }
        let mut others = Others::default();
        if let Some(before) = predecessor {
            if let Some(redirect) = &self.runtime.redirect {
                // No successor of this one can have begun.
                others = redirect.others().await;
            }
            let started = Instant::now();
            self.find_fleet(before).await;
            match self.hand_over(before).await {
                Ok(moved) => {
                    log_moved(before, started, moved, "took over from the previous server");
                    before.refuse_rest();
                }
                Err(error) => {
                    let reason = without(&error);
                    tracing::warn!(server_id = before.own().server_id, reason, %error, "failed to take over from the previous server");
                }
            }
        } else {
            self.apply_routes().await;
        }
        orphans.remove();
        if let Some(redirect) = &self.runtime.redirect
            && let Err(error) = redirect.remove_dead_routes()
        {
            tracing::warn!(%error, "failed to remove the rules and routes of dead servers");
        }
        others
    }

    /// Waits until it is known where the nodes of the other servers are: until then connects to them would fail here, and the
    /// server before, as long as it runs, relays them.
    async fn find_fleet(&self, before: &mut Predecessor) {
        let fleet = before.own().fleet.iter();
        let mut missing: Vec<NodeName> = fleet.filter_map(|node| node.parse().ok()).collect();
        let found = async {
            loop {
                missing.retain(|node| {
                    self.runtime.peers.holders(node).is_empty() && self.runtime.sessions.get(node).is_none()
                });
                if missing.is_empty() {
                    return;
                }
                sleep(pause(missing.len())).await;
            }
        };
        let found = tokio::select! {
            found = timeout(LINKED, found) => found,
            () = before.ended() => return,
        };
        if found.is_err() {
            let (nodes, example) = (missing.len(), missing.first().map(NodeName::as_str));
            tracing::warn!(nodes, example, "nodes of other servers not found during the takeover");
        }
    }

    /// How many nodes' agents were told, and how many of them have come.
    async fn hand_over(&self, before: &mut Predecessor) -> io::Result<(usize, usize)> {
        let Answer::Told(told) = before.ask(&Ask::Agents).await? else { return Err(unexpected()) };
        let mut missing: Vec<NodeName> = told.iter().filter_map(|node| node.parse().ok()).collect();
        let mut waiting = Waiting::new(missing.len(), longest(missing.len()));
        let came = loop {
            missing.retain(|node| self.runtime.sessions.get(node).is_none());
            let came = waiting.all - missing.len();
            if waiting.is_over(came) {
                break came;
            }
            tokio::select! {
                () = sleep(pause(missing.len())) => {}
                // Nobody else accepts.
                () = before.ended() => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        };
        self.apply_routes().await;
        // It accepts none any more, and lets go of the redirect once it can.
        match before.ask_within(BRIEFLY, &Ask::Listeners).await? {
            Answer::Released => Ok((told.len(), came)),
            _ => Err(unexpected()),
        }
    }

    /// This server is told to stop, and the one before goes on: it gets the agents, and then the listeners. False: it has ended.
    async fn give_back(&self, before: &mut Predecessor) -> bool {
        let started = Instant::now();
        match self.hand_back(before).await {
            Ok(moved) => {
                log_moved(before, started, moved, "handed back to the previous server");
                true
            }
            Err(error) => {
                tracing::warn!(server_id = before.own().server_id, %error, "failed to hand back to the previous server");
                // If it lives it goes on all the same, once this connection ends.
                matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::InvalidData)
            }
        }
    }

    /// How many nodes' agents were told, and how many of them have gone back.
    async fn hand_back(&self, before: &mut Predecessor) -> io::Result<(usize, usize)> {
        self.gates.agents.set(false);
        before.refuse_nothing().await;
        let mut back = attached(before).await?;
        let told = self.runtime.sessions.live();
        // In half the time that they have, the last of them can be back.
        let over = told_within(told.len(), self.drain_timeout);
        self.handover.send_replace(Handover::Agents { over });
        let mut waiting = Waiting::new(told.len(), self.drain_timeout);
        let came = loop {
            let came = told.iter().filter(|node| back.contains(node.as_str())).count();
            if waiting.is_over(came) {
                break came;
            }
            sleep(pause(told.len())).await;
            back = attached(before).await?;
        };
        // Connections that come now wait until the other one accepts.
        self.gates.listeners.set(false);
        match before.ask_within(BRIEFLY, &Ask::Resume).await? {
            Answer::Resumed => Ok((told.len(), came)),
            _ => Err(unexpected()),
        }
    }

    /// Brings the kernel to the current routes before the first connect is decided by them.
    async fn apply_routes(&self) {
        let Some(redirect) = self.runtime.redirect.clone() else { return };
        let router = self.runtime.router.clone();
        let applied = tokio::task::spawn_blocking(move || redirect.apply(|| router.desired())).await;
        if let Ok(Err(error)) = applied {
            tracing::error!(%error, "failed to write the routes to the kernel");
        }
    }
}

/// The wait for agents that were told to move.
struct Waiting {
    all: usize,
    ends: Instant,
    /// Number of those that have come, and when the last of them came.
    last: (usize, Instant),
}

impl Waiting {
    fn new(all: usize, longest: Duration) -> Self {
        let now = Instant::now();
        Self { all, ends: now + longest, last: (0, now) }
    }

    fn is_over(&mut self, came: usize) -> bool {
        let now = Instant::now();
        if came != self.last.0 {
            self.last = (came, now);
        }
        came == self.all || now - self.last.1 > QUIET || now > self.ends
    }
}

/// The nodes whose agents are with the server before, which accepts them again.
async fn attached(before: &mut Predecessor) -> io::Result<HashSet<String>> {
    match before.ask_within(BRIEFLY, &Ask::Back).await? {
        Answer::Attached(nodes) => Ok(nodes.into_iter().collect()),
        _ => Err(unexpected()),
    }
}

/// Name of the part that a start waits for until the nodes are known.
pub(crate) const NODES: &str = "nodes";
/// The same until the ports of the ConfigMap are.
pub(crate) const PORTS: &str = "ports";

/// Between two looks for so many nodes.
fn pause(nodes: usize) -> Duration {
    CHECK + EACH * u32::try_from(nodes).unwrap_or(u32::MAX)
}

/// Logs that so many nodes' agents were told to move, and that so many of them came.
fn log_moved(before: &Predecessor, started: Instant, (agents, attached): (usize, usize), done: &str) {
    let (server_id, duration_ms) = (&before.own().server_id, started.elapsed().as_millis());
    tracing::info!(server_id, agents, attached, duration_ms, "{done}");
}

/// Why this server goes on without the one before.
fn without(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::TimedOut => "no answer",
        io::ErrorKind::InvalidData => "unexpected answer",
        _ => "it ended during the takeover",
    }
}

fn unexpected() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "unexpected answer")
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::path::Path;

    use prometheus_client::registry::Registry;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream, UnixStream};
    use tunnel_runtime::takeover::{Copies, receive, send};

    use super::*;
    use crate::session::Workers;

    async fn answer(first: &mut UnixStream, ask: Ask, answer: &Answer) {
        assert_eq!(receive(first).await.unwrap(), Some(ask));
        send(first, answer).await.unwrap();
    }

    fn take_over() -> TakeOver {
        let mut registry = Registry::default();
        let router = crate::runtime::without_nodes(&mut registry);
        TakeOver {
            runtime: Runtime::new(router, Workers::here(), &mut registry),
            gates: Gates::new(false),
            pending: None,
            handover: watch::Sender::default(),
            drain_timeout: BRIEFLY,
        }
    }

    #[tokio::test]
    async fn what_only_the_first_server_listens_on_is_refused_until_that_one_goes_on() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let copy = listener.as_fd().try_clone_to_owned().unwrap();
        let copies = Copies::new(vec![("metrics".to_owned(), address, copy)]);
        let (mut first, stream) = UnixStream::pair().unwrap();
        copies.greet(&mut first, "1.2.3", Hello::default()).await.unwrap();
        let before = Predecessor::at(Path::new("takeover"), Box::new(stream)).await;
        let mut before = take_over().start(before, Orphans::default());

        answer(&mut first, Ask::Agents, &Answer::Told(Vec::new())).await;
        let mut waits = TcpStream::connect(address).await.unwrap();
        let early = timeout(Duration::from_millis(50), waits.read_u8()).await;
        assert!(early.is_err(), "the first server still accepts");
        answer(&mut first, Ask::Listeners, &Answer::Released).await;
        assert_eq!(waits.read_u8().await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);

        // As in a cluster, where the first one is still there when the second is told to stop.
        let goes_on = async {
            answer(&mut first, Ask::Back, &Answer::Attached(Vec::new())).await;
            let mut client = TcpStream::connect(address).await.unwrap();
            let reset = timeout(Duration::from_millis(50), client.read_u8()).await;
            assert!(reset.is_err(), "the second server still resets its clients");
            listener.accept().await.unwrap();
            answer(&mut first, Ask::Resume, &Answer::Resumed).await;
        };
        let shutdown = Shutdown::default();
        let (there, ()) = tokio::join!(before.take_back(&shutdown), goes_on);
        assert!(there);
    }

    #[tokio::test]
    async fn a_first_server_that_ends_while_it_takes_back_is_not_left_to_go_on() {
        for lives in [true, false] {
            let (mut first, stream) = UnixStream::pair().unwrap();
            Copies::default().greet(&mut first, "1.2.3", Hello::default()).await.unwrap();
            let before = Predecessor::at(Path::new("takeover"), Box::new(stream)).await;
            let take_over = take_over();
            let listeners = take_over.gates.listeners.clone();
            let mut before = take_over.start(before, Orphans::default());
            answer(&mut first, Ask::Agents, &Answer::Told(Vec::new())).await;
            answer(&mut first, Ask::Listeners, &Answer::Released).await;
            listeners.opened().await;

            let fails = async {
                assert_eq!(receive(&mut first).await.unwrap(), Some(Ask::Back));
                match lives {
                    true => send(&mut first, &Answer::Released).await.unwrap(),
                    false => first.shutdown().await.unwrap(),
                }
            };
            let shutdown = Shutdown::default();
            let (there, ()) = tokio::join!(before.take_back(&shutdown), fails);
            assert_eq!(there, lives, "routes and agents are left to nobody, or taken from it");
        }
    }
}
