//! Limit on the data waiting for the targets of all streams that share a process's memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tunnel_runtime::memory::stall_budget;

/// Maximum for all streams together, in bytes, regardless of the memory.
const MOST: usize = 64 << 20;

/// Bytes that may wait for targets on several streams together. Each stream has an equal part, so that none takes
/// another's.
#[derive(Debug)]
pub struct Room {
    bytes: usize,
    streams: AtomicUsize,
    waiting: AtomicUsize,
}

impl Room {
    pub const fn new(bytes: usize) -> Self {
        Self { bytes, streams: AtomicUsize::new(0), waiting: AtomicUsize::new(0) }
    }

    /// Returns the room of this process, from its budget for receivers that do not read.
    pub fn of_process() -> Self {
        Self::new(stall_budget().min(MOST))
    }

    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Acquire)
    }
}

/// One stream's part of the room.
#[derive(Debug)]
pub(super) struct Part {
    room: Arc<Room>,
    total: Arc<Total>,
}

/// Bytes waiting for all targets of a stream, including connections that outlive it.
#[derive(Debug)]
pub(super) struct Total {
    room: Arc<Room>,
    waiting: AtomicUsize,
}

impl Part {
    pub(super) fn new(room: Arc<Room>) -> Self {
        room.streams.fetch_add(1, Ordering::AcqRel);
        let total = Arc::new(Total { room: room.clone(), waiting: AtomicUsize::new(0) });
        Self { room, total }
    }

    pub(super) fn total(&self) -> Arc<Total> {
        self.total.clone()
    }

    /// Returns how many bytes may wait on this stream, given the current number of streams.
    pub(super) fn bytes(&self) -> usize {
        self.room.bytes / self.room.streams.load(Ordering::Acquire).max(1)
    }

    pub(super) fn is_exceeded(&self) -> bool {
        self.total.waiting.load(Ordering::Acquire) > self.bytes()
    }

    /// True if connections that outlive their stream would take the room of others.
    pub(super) fn is_scarce(&self) -> bool {
        self.room.waiting.load(Ordering::Acquire) > self.room.bytes / 2
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.room.streams.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Total {
    pub(super) fn add(&self, bytes: usize) {
        self.waiting.fetch_add(bytes, Ordering::AcqRel);
        self.room.waiting.fetch_add(bytes, Ordering::AcqRel);
    }

    pub(super) fn take(&self, bytes: usize) {
        self.waiting.fetch_sub(bytes, Ordering::AcqRel);
        self.room.waiting.fetch_sub(bytes, Ordering::AcqRel);
    }
}
