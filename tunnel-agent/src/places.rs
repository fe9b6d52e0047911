//! Limit of concurrent connections of this agent, for all servers and workloads together.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tunnel_link::link::MAX_STREAMS;
use tunnel_runtime::lifecycle::raise_open_files;
use tunnel_runtime::limits::Limits;
use tunnel_runtime::memory::connections;

/// Minimum number of files reserved for links, the admin port and the program itself.
const OWN_FILES: u32 = 64;
/// Streams of a link that relay no connection, but control calls.
const CALLS: u32 = 16;
/// Minimum limit, even with few files or little memory.
const LEAST: u32 = 16;

/// Limits connections by open files and memory.
#[derive(Clone, Debug)]
pub struct Places {
    limit: u32,
    free: Arc<Semaphore>,
}

/// The place of one connection. Dropping it frees it.
pub(crate) type Place = OwnedSemaphorePermit;

impl Places {
    /// Uses three quarters of the files and a third of the memory (in bytes). Data held for stalled receivers and the
    /// program itself take the rest.
    pub fn new(open_files: u32, memory: u64) -> Self {
        let by_files = open_files.saturating_sub(OWN_FILES.max(open_files / 4));
        let limit = by_files.min(connections(memory / 3)).max(LEAST);
        Self { limit, free: Arc::new(Semaphore::new(limit as usize)) }
    }

    /// Raises the limit of open files and logs the limits found.
    pub(crate) fn of_process() -> Self {
        let (open_files, limits) = (raise_open_files(), Limits::of_process());
        limits.log(open_files);
        let places = Self::new(open_files, limits.memory.amount);
        tracing::info!(connections = places.limit, "limit of concurrent connections");
        places
    }

    pub(crate) fn limit(&self) -> u32 {
        self.limit
    }

    /// Number of connections now.
    pub fn taken(&self) -> usize {
        (self.limit as usize).saturating_sub(self.free.available_permits())
    }

    /// Maximum streams that a server may open on a link.
    pub(crate) fn streams(&self) -> u32 {
        self.limit.saturating_add(CALLS).min(MAX_STREAMS)
    }

    /// None if all are taken.
    pub(crate) fn take(&self) -> Option<Place> {
        self.free.clone().try_acquire_owned().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_bounded_by_files_and_by_memory() {
        let limit = |open_files, memory: u64| Places::new(open_files, memory).limit();
        assert_eq!(limit(1_048_576, 64 << 20), 2_427);
        assert_eq!(limit(1_048_576, 192 << 20), 7_281);
        assert_eq!(limit(1_024, 192 << 20), 768);
        assert_eq!(limit(128, 192 << 20), 64);
        assert_eq!((limit(0, 0), limit(10, 1 << 30)), (LEAST, LEAST));
        // LimitNOFILE=infinity, on a machine without another limit.
        for open_files in [1_073_741_816, u32::MAX] {
            assert_eq!(limit(open_files, 64 << 20), 2_427);
            let places = Places::new(open_files, u64::MAX);
            assert!(places.take().is_some() && places.streams() == MAX_STREAMS);
        }
    }

    #[test]
    fn a_place_that_is_given_back_is_free() {
        let places = Places::new(0, 0);
        let mut held: Vec<_> = std::iter::from_fn(|| places.take()).collect();
        assert_eq!((held.len(), places.streams()), (LEAST as usize, LEAST + CALLS));
        held.pop();
        assert!(places.take().is_some());
    }
}
