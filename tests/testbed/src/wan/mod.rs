//! A wide-area path between an edge and its router: delay, rate, a drop-tail buffer, loss, reordering, outages.
//!
//! Not every kernel has netem, so this is a forwarder in user space: packets sent into the TUN device on one side come
//! out of the one on the other side, later or never. TCP, NAT and routing are the kernel's own. The choice of lost
//! packets depends only on the seed and the packet's number.

mod forward;
mod line;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use tun_rs::{DeviceBuilder, SyncDevice};

use crate::netns::Namespace;
use forward::Forwarder;
use line::Line;

/// Properties of a path.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Path {
    /// Round-trip time of an empty path; half of it in each direction.
    pub rtt: Duration,
    /// Rate to the edge, in bit/s.
    pub down: u64,
    /// Rate from the edge, in bit/s.
    pub up: u64,
    /// Buffer of each direction, in round trips at its rate.
    pub buffer: f64,
    pub loss: Loss,
    /// Share of the packets that are overtaken by packets sent up to a quarter of a round trip later.
    pub reordered: f64,
    /// MTU of the devices on both sides, in bytes.
    pub mtu: u16,
    pub seed: u64,
}

/// Packet loss, apart from packets that find the buffer full.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Loss {
    None,
    /// Each packet with this probability.
    Random(f64),
    /// This share of all packets, in bursts of this mean length (Gilbert's model).
    Bursts {
        rate: f64,
        length: f64,
    },
}

impl Path {
    /// Makes a symmetric path with `mbit` Mbit/s in each direction.
    pub const fn new(rtt_ms: u64, mbit: u64) -> Self {
        Self::asymmetric(rtt_ms, mbit * 1_000_000, mbit * 1_000_000)
    }

    /// Makes a path with a separate rate for each direction, in bit/s.
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

/// A path in use. Dropping it ends it.
#[derive(Debug)]
pub struct Wan {
    path: Mutex<Path>,
    down: Forwarder,
    up: Forwarder,
}

/// Packet counters of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub delivered: u64,
    /// Lost by the path's loss, or in an outage.
    pub lost: u64,
    /// Dropped because the buffer was full.
    pub overflowed: u64,
}

impl Wan {
    /// Makes a device in each namespace and forwards between them. Addresses and routes are up to the caller.
    pub(crate) fn start(path: Path, router: (&Namespace, &str), edge: (&Namespace, &str)) -> Result<Self> {
        let (at_router, at_edge) = (open(router, path.mtu)?, open(edge, path.mtu)?);
        let (down, up) = path.lines();
        Ok(Self {
            path: Mutex::new(path),
            down: Forwarder::start("wan-down", down, at_router.clone(), at_edge.clone())?,
            up: Forwarder::start("wan-up", up, at_edge, at_router)?,
        })
    }

    /// Changes the path; packets in flight arrive as before. MTU and seed stay.
    pub fn set(&self, path: Path) {
        *lock(&self.path) = path;
        self.down.line().set(&path, path.down);
        self.up.line().set(&path, path.up);
    }

    pub fn path(&self) -> Path {
        *lock(&self.path)
    }

    /// Begins or ends an outage: no packet arrives, and neither side gets an error.
    pub fn set_out(&self, out: bool) {
        self.down.line().set_out(out);
        self.up.line().set_out(out);
    }

    /// Returns the counters of the direction to the edge and of the direction back.
    pub fn counts(&self) -> (Counts, Counts) {
        (self.down.line().counts(), self.up.line().counts())
    }
}

/// Opens a TUN device in a namespace, up.
fn open((ns, device): (&Namespace, &str), mtu: u16) -> Result<Arc<SyncDevice>> {
    let opened = ns.run(|| {
        let builder = DeviceBuilder::new().name(device).mtu(mtu);
        let opened = builder.build_sync().with_context(|| format!("making the TUN device {device}"))?;
        opened.set_nonblocking(true).context("a TUN device that does not block")?;
        Ok(opened)
    })?;
    // A long queue would be a second buffer, but one shorter than a TCP burst would lose packets by itself.
    ns.ip(&format!("link set {device} txqueuelen 2000 up"))?;
    Ok(Arc::new(opened))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
