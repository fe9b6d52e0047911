//! A wide-area path between an edge and its router: delay, rate, a drop-tail buffer, loss, reordering, outages.
//!
//! Not every kernel has netem, so this is a forwarder in user space: what is sent into the TUN device on one side comes out
//! of the one on the other, later or never. TCP, NAT and routing are the kernel's own. Which packets are lost depends on the
//! seed and on the packet's number alone.

mod forward;
mod line;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use tun_rs::{DeviceBuilder, SyncDevice};

use crate::netns::Namespace;
use forward::Forwarder;
use line::Line;

/// What a path does to packets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Path {
    /// Round-trip time of an empty path; half of it each way.
    pub rtt: Duration,
    /// To the edge, in bit/s.
    pub down: u64,
    /// From the edge, in bit/s.
    pub up: u64,
    /// The buffer before each way, in round trips at its rate.
    pub buffer: f64,
    pub loss: Loss,
    /// The part of the packets that is overtaken by those sent up to a quarter of a round trip later.
    pub reordered: f64,
    /// Of the devices on both sides, in bytes.
    pub mtu: u16,
    pub seed: u64,
}

/// Which packets get lost, apart from those that find the buffer full.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Loss {
    None,
    /// Each with this probability.
    Random(f64),
    /// So many of all, in bursts of this mean length (Gilbert's model).
    Bursts {
        rate: f64,
        length: f64,
    },
}

impl Path {
    /// A symmetric path with `mbit` Mbit/s each way.
    pub const fn new(rtt_ms: u64, mbit: u64) -> Self {
        Self::asymmetric(rtt_ms, mbit * 1_000_000, mbit * 1_000_000)
    }

    /// A path with a rate of its own each way, in bit/s.
    pub const fn asymmetric(rtt_ms: u64, down: u64, up: u64) -> Self {
        let rtt = Duration::from_millis(rtt_ms);
        Self { rtt, down, up, buffer: 1.0, loss: Loss::None, reordered: 0.0, mtu: 1500, seed: 1 }
    }

    fn lines(&self) -> (Line, Line) {
        (Line::new(self, self.down, self.seed), Line::new(self, self.up, self.seed.wrapping_add(1)))
    }

    #[must_use]
    pub const fn lossy(mut self, loss: Loss) -> Self {
        self.loss = loss;
        self
    }
}

/// A path in use. It ends when this is dropped.
#[derive(Debug)]
pub struct Wan {
    path: Mutex<Path>,
    down: Forwarder,
    up: Forwarder,
}

/// What has happened to the packets of one way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub delivered: u64,
    /// By the path's loss, or in an outage.
    pub lost: u64,
    /// They found the buffer full.
    pub overflowed: u64,
}

impl Wan {
    /// Makes a device in each namespace and forwards between them. Addresses and routes are the caller's.
    pub(crate) fn start(path: Path, router: (&Namespace, &str), edge: (&Namespace, &str)) -> Result<Self> {
        let (at_router, at_edge) = (open(router, path.mtu)?, open(edge, path.mtu)?);
        let (down, up) = path.lines();
        Ok(Self {
            path: Mutex::new(path),
            down: Forwarder::start("wan-down", down, at_router.clone(), at_edge.clone())?,
            up: Forwarder::start("wan-up", up, at_edge, at_router)?,
        })
    }

    /// Changes the path; what is under way arrives as it would have. The MTU and the seed stay.
    pub fn set(&self, path: Path) {
        *lock(&self.path) = path;
        self.down.line().set(&path, path.down);
        self.up.line().set(&path, path.up);
    }

    pub fn path(&self) -> Path {
        *lock(&self.path)
    }

    /// Begins or ends an outage: nothing arrives, and neither side gets an error.
    pub fn set_out(&self, out: bool) {
        self.down.line().set_out(out);
        self.up.line().set_out(out);
    }

    /// Of the way to the edge and of the way back.
    pub fn counts(&self) -> (Counts, Counts) {
        (self.down.line().counts(), self.up.line().counts())
    }
}

/// A TUN device in a namespace, up.
fn open((ns, device): (&Namespace, &str), mtu: u16) -> Result<Arc<SyncDevice>> {
    let opened = ns.run(|| {
        let builder = DeviceBuilder::new().name(device).mtu(mtu);
        let opened = builder.build_sync().with_context(|| format!("making the TUN device {device}"))?;
        opened.set_nonblocking(true).context("a TUN device that does not block")?;
        Ok(opened)
    })?;
    // A long queue would be a second buffer, but one that is shorter than a burst of TCP would lose packets by itself.
    ns.ip(&format!("link set {device} txqueuelen 2000 up"))?;
    Ok(Arc::new(opened))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
