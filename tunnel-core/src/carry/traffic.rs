//! Counts the bytes that are carried.

use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::metrics::counter::Counter;

/// Payload bytes of one connection so far. May be read while the connection runs.
#[derive(Debug, Default)]
pub struct Traffic {
    from_socket: AtomicU64,
    to_socket: AtomicU64,
    totals: Vec<Totals>,
}

/// Bytes of many connections, counted as they pass.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// Read from the sockets and handed to the tunnel.
    pub from_socket: Counter,
    /// Taken from the tunnel and written to the sockets.
    pub to_socket: Counter,
}

impl Traffic {
    /// Adds to each of these totals as well, for example those of a session and of the process.
    pub fn part_of(totals: Vec<Totals>) -> Self {
        Self { totals, ..Self::default() }
    }

    /// Bytes read from the socket and handed to the tunnel.
    pub fn from_socket(&self) -> u64 {
        self.from_socket.load(Ordering::Relaxed)
    }

    /// Bytes taken from the tunnel and written to the socket.
    pub fn to_socket(&self) -> u64 {
        self.to_socket.load(Ordering::Relaxed)
    }

    pub fn count_from_socket(&self, bytes: usize) {
        self.from_socket.fetch_add(bytes as u64, Ordering::Relaxed);
        for total in &self.totals {
            total.from_socket.inc_by(bytes as u64);
        }
    }

    pub fn count_to_socket(&self, bytes: usize) {
        self.to_socket.fetch_add(bytes as u64, Ordering::Relaxed);
        for total in &self.totals {
            total.to_socket.inc_by(bytes as u64);
        }
    }
}
