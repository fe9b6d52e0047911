//! Clients of every edge by every way, which connect again and again until they are stopped.
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::client::connect_from;
use postern_testbed::netns::Namespace;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::error::Elapsed;
use tokio::time::{sleep, timeout};

use super::felt::Felt;
use super::stream::{Load, Patience, Wrong, exchange};
use crate::common::THIRD;
use crate::https::{KUBELET, client_hello};

/// Pause between two connections of a client.
const PACE: Duration = Duration::from_millis(25);

/// Current addresses of the edges.
#[derive(Debug)]
pub(super) struct Addresses(Vec<AtomicU32>);

impl Addresses {
    pub(super) fn of(testbed: &Testbed) -> Self {
        Self(testbed.edges().iter().map(|edge| AtomicU32::new(edge.address.to_bits())).collect())
    }

    pub(super) fn get(&self, edge: usize) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.0[edge].load(Ordering::Relaxed))
    }

    pub(super) fn set(&self, edge: usize, address: Ipv4Addr) {
        self.0[edge].store(address.to_bits(), Ordering::Relaxed);
    }
}

/// A way to reach an edge.
#[derive(Clone, Debug)]
pub(super) enum Way {
    /// Through the redirect of the cloud host, to the edge's current IPv4 address.
    Redirect(Arc<Addresses>),
    /// Through the redirect, to an IPv6 address.
    RedirectV6(IpAddr),
    /// Through the https listener of a server, from the server's own host.
    Listener(Namespace, Ipv4Addr),
}

impl Way {
    /// Returns the server through which it goes, counted from 0.
    fn server(&self) -> usize {
        match self {
            Self::Redirect(_) | Self::RedirectV6(_) => 0,
            Self::Listener(_, server) => 1 + usize::from(*server == THIRD),
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Redirect(_) => f.write_str("the redirect"),
            Self::RedirectV6(_) => f.write_str("the redirect of IPv6"),
            Self::Listener(_, server) => write!(f, "the https listener of {server}"),
        }
    }
}

/// A client's edge, and its way to reach it.
#[derive(Clone, Debug)]
pub(super) struct Client {
    pub(super) edge: usize,
    pub(super) name: String,
    pub(super) way: Way,
}

impl Client {
    pub(super) async fn run(&self, load: Load, patience: Patience, wrong: &Wrong) -> Result<()> {
        let Patience { connect: limit, stall } = patience;
        let node = u8::try_from(self.edge).context("the edge's number")?;
        let (stream, first) = match &self.way {
            Way::Redirect(addresses) => (connect(addresses.get(self.edge).into(), limit).await?, Vec::new()),
            Way::RedirectV6(address) => (connect(*address, limit).await?, Vec::new()),
            Way::Listener(ns, server) => {
                let listener = SocketAddr::new((*server).into(), 10263);
                (connect_from(ns, listener, limit).await.context("connecting")?, client_hello(&self.name)?)
            }
        };
        exchange(stream, node, &first, load, stall, wrong).await
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} by {}", self.name, self.way)
    }
}

async fn connect(address: IpAddr, limit: Duration) -> Result<TcpStream> {
    let connecting = TcpStream::connect(SocketAddr::new(address, KUBELET));
    timeout(limit, connecting).await.context("connect() took too long")?.context("connecting")
}

fn is_slow(error: &anyhow::Error) -> bool {
    let timed_out = |error: &std::io::Error| error.kind() == std::io::ErrorKind::TimedOut;
    error.is::<Elapsed>() || error.downcast_ref().is_some_and(timed_out)
}

#[derive(Debug, Default)]
pub(super) struct Served {
    whole: AtomicU64,
    failed: AtomicU64,
    /// Failures that no fault explains.
    unexplained: Mutex<Vec<String>>,
}

/// Clients that run until they are stopped.
pub(super) struct Clients {
    stop: Arc<AtomicBool>,
    tasks: JoinSet<()>,
    served: Vec<(Client, Arc<Served>)>,
}

impl Clients {
    /// Starts clients whose load the seed determines.
    pub(super) fn start(
        clients: &[Client],
        patience: Patience,
        seed: u64,
        felt: &Felt,
        wrong: &Wrong,
    ) -> Self {
        let (stop, mut tasks, mut all) = (Arc::new(AtomicBool::new(false)), JoinSet::new(), Vec::new());
        for (number, client) in (0..).zip(clients) {
            let served = Arc::new(Served::default());
            all.push((client.clone(), served.clone()));
            let (client, stop, felt, wrong) = (client.clone(), stop.clone(), felt.clone(), wrong.clone());
            let mut rng = StdRng::seed_from_u64(seed.wrapping_add(number));
            tasks.spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let from = Instant::now();
                    let count = match client.run(Load::any(&mut rng), patience, &wrong).await {
                        Ok(()) => &served.whole,
                        Err(error) => {
                            // On a busy machine one may only be slow.
                            if !is_slow(&error) && !felt.explains(client.edge, client.way.server(), from) {
                                let what = format!("{client}: {error:#}");
                                served.unexplained.lock().unwrap_or_else(PoisonError::into_inner).push(what);
                            }
                            &served.failed
                        }
                    };
                    count.fetch_add(1, Ordering::Relaxed);
                    sleep(PACE).await;
                }
            });
        }
        Self { stop, tasks, served: all }
    }

    /// Fails if a connection failed that no fault explains.
    pub(super) fn expect_explained(&self) -> Result<()> {
        for (_, served) in &self.served {
            let unexplained = served.unexplained.lock().unwrap_or_else(PoisonError::into_inner);
            ensure!(unexplained.is_empty(), "no fault explains that these failed: {unexplained:#?}");
        }
        Ok(())
    }

    /// Stops them; returns the number of complete connections, the number of failed ones, and the ways by which none
    /// was complete.
    pub(super) async fn stop(mut self) -> Result<(u64, u64, Vec<String>)> {
        self.stop.store(true, Ordering::Relaxed);
        while let Some(ended) = self.tasks.join_next().await {
            ended.context("a client panicked")?;
        }
        let (mut whole, mut failed, mut never) = (0, 0, Vec::new());
        for (client, served) in &self.served {
            let here = served.whole.load(Ordering::Relaxed);
            whole += here;
            failed += served.failed.load(Ordering::Relaxed);
            never.extend((here == 0).then(|| client.to_string()));
        }
        Ok((whole, failed, never))
    }
}
