//! A network of memory: hosts with one address each, and paths between them that delay, fall silent and come back.

mod line;

use std::collections::BTreeMap;
use std::future::pending;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use rand::Rng as _;
use rand::rngs::StdRng;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use tunnel_agent::reach::{Connecting, Network};
use tunnel_link::link::Wire;
use tunnel_runtime::accept::Gate;
use tunnel_runtime::takeover::{Stream, Successors};
use tunnel_server::agent_port::Accept;

use self::line::{Connection, End};

/// How long a kernel waits before it sends a SYN again, for the first time.
const SYN: Duration = Duration::from_secs(1);
/// Maximum pause between two retransmissions, as the product sets it on a short path.
const RETRANSMISSION: Duration = Duration::from_secs(2);

/// The network. Clones share it.
#[derive(Clone)]
pub(crate) struct Net(Arc<Mutex<State>>);

struct State {
    random: StdRng,
    /// One-way delay of each path; the lower address first.
    delays: BTreeMap<(IpAddr, IpAddr), Duration>,
    /// Paths that are silent, with the time since when.
    silent: BTreeMap<(IpAddr, IpAddr), Instant>,
    listeners: BTreeMap<SocketAddr, Weak<Queue>>,
    /// Addresses of a load balancer, with those behind each.
    balanced: BTreeMap<SocketAddr, Vec<SocketAddr>>,
    /// Number of connections of each host to a load balancer.
    turns: BTreeMap<IpAddr, usize>,
    connections: BTreeMap<u64, Connection>,
    /// When each host dialled each address: last, and before.
    dials: BTreeMap<(IpAddr, SocketAddr), [Option<Instant>; 2]>,
    next: u64,
}

fn path(a: IpAddr, b: IpAddr) -> (IpAddr, IpAddr) {
    (a.min(b), a.max(b))
}

impl State {
    fn delay(&self, a: IpAddr, b: IpAddr) -> Duration {
        self.delays.get(&path(a, b)).copied().unwrap_or(Duration::from_millis(1))
    }

    /// Where a connection of a host goes.
    fn behind(&mut self, host: IpAddr, to: SocketAddr) -> SocketAddr {
        let Some(behind) = self.balanced.get(&to) else { return to };
        let turn = self.turns.entry(host).or_default();
        *turn += 1;
        behind.get(*turn % behind.len()).copied().unwrap_or(to)
    }

    fn is_silent(&self, a: IpAddr, b: IpAddr) -> bool {
        self.silent.contains_key(&path(a, b))
    }
}

impl Net {
    pub(crate) fn new(random: StdRng) -> Self {
        Self(Arc::new(Mutex::new(State {
            random,
            delays: BTreeMap::new(),
            silent: BTreeMap::new(),
            listeners: BTreeMap::new(),
            balanced: BTreeMap::new(),
            turns: BTreeMap::new(),
            connections: BTreeMap::new(),
            dials: BTreeMap::new(),
            next: 1,
        })))
    }

    pub(crate) fn set_delay(&self, a: IpAddr, b: IpAddr, delay: Duration) {
        self.0.lock().delays.insert(path(a, b), delay);
    }

    /// An address from which connections go on to these, in turn for each host.
    pub(crate) fn balance(&self, at: SocketAddr, behind: Vec<SocketAddr>) {
        self.0.lock().balanced.insert(at, behind);
    }

    /// The network as seen from a host, whose kernel asks whether the other end is there after so long without a byte.
    pub(crate) fn at(&self, host: IpAddr, keepalive: Duration) -> Arc<Host> {
        Arc::new(Host { net: self.clone(), host, keepalive })
    }

    /// Accepts connections while the gate is open. Processes that listen at one address share what waits there.
    pub(crate) fn listen(&self, at: SocketAddr, gate: Gate) -> Listener {
        let shared = self.listener(at);
        Listener { queue: shared.unwrap_or_else(|| self.bind(at)), gate }
    }

    /// Has a port in use until it is dropped. Processes of one host may share it.
    pub(crate) fn hold(&self, at: SocketAddr) -> Held {
        Held { _queue: self.listener(at).unwrap_or_else(|| self.bind(at)) }
    }

    /// Waits for successors, in the place of who has waited there.
    pub(crate) fn wait_at(&self, at: SocketAddr) -> Waiting {
        Waiting { net: self.clone(), at, queue: self.bind(at) }
    }

    fn bind(&self, at: SocketAddr) -> Arc<Queue> {
        let queue = Arc::new(Queue::new());
        self.0.lock().listeners.insert(at, Arc::downgrade(&queue));
        queue
    }

    fn listener(&self, at: SocketAddr) -> Option<Arc<Queue>> {
        self.0.lock().listeners.get(&at).and_then(Weak::upgrade)
    }

    /// True if a process listens there.
    pub(crate) fn has_listener(&self, at: SocketAddr) -> bool {
        self.listener(at).is_some()
    }

    /// Drops everything on the path from now on, without an error at either end.
    pub(crate) fn silence(&self, a: IpAddr, b: IpAddr) {
        self.0.lock().silent.entry(path(a, b)).or_insert_with(Instant::now);
    }

    /// Ends a silence. What was sent meanwhile arrives when it is sent again.
    pub(crate) fn heal(&self, a: IpAddr, b: IpAddr) {
        let mut wakers = Vec::new();
        {
            let mut state = self.0.lock();
            let Some(since) = state.silent.remove(&path(a, b)) else { return };
            let State { random, connections, .. } = &mut *state;
            for connection in connections.values_mut().filter(|connection| connection.is_on(a, b)) {
                // The pause doubles: the next one is as long as what has passed.
                let pause = since.elapsed().min(RETRANSMISSION).mul_f64(random.random());
                connection.resume(Instant::now() + pause, &mut wakers);
            }
        }
        wakers.into_iter().for_each(std::task::Waker::wake);
    }

    /// A NAT forgets the connections between two hosts, or one of them loses its power: they are silent for ever.
    pub(crate) fn forget(&self, a: IpAddr, b: IpAddr) {
        let mut state = self.0.lock();
        state
            .connections
            .values_mut()
            .filter(|connection| connection.is_on(a, b))
            .for_each(Connection::forget);
    }

    /// Resets the connections between two hosts.
    pub(crate) fn reset(&self, a: IpAddr, b: IpAddr) {
        let mut wakers = Vec::new();
        for connection in self.0.lock().connections.values_mut().filter(|connection| connection.is_on(a, b)) {
            connection.reset(&mut wakers);
        }
        wakers.into_iter().for_each(std::task::Waker::wake);
    }

    /// Opens a connection. The listener gets the other end.
    fn open_to(&self, host: IpAddr, to: SocketAddr, keepalive: Duration) -> io::Result<End> {
        let queue = self.listener(to).ok_or(io::ErrorKind::ConnectionRefused)?;
        let mut state = self.0.lock();
        let number = state.next;
        state.next += 1;
        let dials = state.dials.entry((host, to)).or_default();
        *dials = [Some(Instant::now()), dials[0]];
        let from = SocketAddr::new(host, 10_000 + u16::try_from(number % 50_000).unwrap_or(0));
        state.connections.insert(number, Connection::new(from, to, keepalive));
        drop(state);
        let (near, far) = (End::new(self, number, 0, from, to), End::new(self, number, 1, to, from));
        queue.sender.send((far, from)).map_err(|_| io::ErrorKind::ConnectionRefused)?;
        Ok(near)
    }

    /// Opens a connection to who waits there for successors.
    pub(crate) fn succeed(&self, host: IpAddr, to: SocketAddr) -> io::Result<Box<dyn Stream>> {
        Ok(Box::new(self.open_to(host, to, Duration::MAX)?))
    }

    /// When a host dialled an address the last two times.
    pub(crate) fn dials(&self, host: IpAddr, to: SocketAddr) -> [Option<Instant>; 2] {
        self.0.lock().dials.get(&(host, to)).copied().unwrap_or_default()
    }

    /// The connections of which neither end is closed, by the hosts that they are between.
    pub(crate) fn open(&self) -> Vec<(SocketAddr, SocketAddr)> {
        self.0
            .lock()
            .connections
            .values()
            .filter(|connection| connection.is_open())
            .map(Connection::ends)
            .collect()
    }
}

/// A host's network.
pub(crate) struct Host {
    net: Net,
    host: IpAddr,
    keepalive: Duration,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the network of {}", self.host)
    }
}

impl Network for Host {
    fn connect(&self, to: SocketAddr) -> Connecting {
        let (net, host, keepalive) = (self.net.clone(), self.host, self.keepalive);
        Box::pin(async move {
            let (to, mut pause) = (net.0.lock().behind(host, to), SYN);
            while net.0.lock().is_silent(host, to.ip()) {
                sleep(pause).await;
                pause *= 2;
            }
            let delay = net.0.lock().delay(host, to.ip());
            sleep(delay).await;
            let end = net.open_to(host, to, keepalive);
            sleep(delay).await;
            Ok(Box::new(end?) as _)
        })
    }
}

/// Connections that wait in a listening socket. They end with the last process that has the socket.
struct Queue {
    sender: mpsc::UnboundedSender<(End, SocketAddr)>,
    incoming: tokio::sync::Mutex<mpsc::UnboundedReceiver<(End, SocketAddr)>>,
}

impl Queue {
    fn new() -> Self {
        let (sender, incoming) = mpsc::unbounded_channel();
        Self { sender, incoming: incoming.into() }
    }

    async fn next(&self) -> (End, SocketAddr) {
        match self.incoming.lock().await.recv().await {
            Some(accepted) => accepted,
            // The queue has a sender.
            None => pending().await,
        }
    }
}

/// A port in use.
pub(crate) struct Held {
    _queue: Arc<Queue>,
}

/// A server's listener.
pub(crate) struct Listener {
    queue: Arc<Queue>,
    gate: Gate,
}

impl Accept for Listener {
    async fn accept(&mut self, _: &'static str) -> (Wire, SocketAddr) {
        loop {
            self.gate.opened().await;
            tokio::select! {
                biased;
                () = self.gate.closed() => {}
                (end, from) = self.queue.next() => return (Box::new(end), from),
            }
        }
    }
}

/// Where a process waits for its successors.
pub(crate) struct Waiting {
    net: Net,
    at: SocketAddr,
    queue: Arc<Queue>,
}

impl Successors for Waiting {
    async fn accept(&self) -> io::Result<Box<dyn Stream>> {
        Ok(Box::new(self.queue.next().await.0))
    }

    fn is_found(&self) -> bool {
        self.net.listener(self.at).is_some_and(|queue| Arc::ptr_eq(&queue, &self.queue))
    }

    fn remove(&self) {
        if self.is_found() {
            self.net.0.lock().listeners.remove(&self.at);
        }
    }
}
