//! Session epochs, which only grow: across restarts, and across a clock that was set back.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use parking_lot::Mutex;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;
use tunnel_runtime::blocking::blocking;
use tunnel_runtime::clock::Clock;
use tunnel_runtime::state_file::StateFile;

/// Maximum wait for the disk. The server waits for ten seconds, and flash that others write to may take longer.
const PATIENCE: Duration = Duration::from_secs(3);

/// Gives every session of this node a number higher than all before. Clones share it.
///
/// The number is the wall clock in milliseconds, or one more than the last epoch if the clock is behind: an edge node
/// without a battery-backed clock starts in the past, and a state directory may be lost, but not both at a time.
#[derive(Clone, Debug)]
pub(super) struct EpochSource(Arc<Source>);

#[derive(Debug)]
struct Source {
    /// Without it only a clock that is set back before a restart or a takeover does harm.
    file: Arc<StateFile<u64>>,
    last: Mutex<u64>,
    clock: Clock,
    /// Lets at most one thread wait for the disk.
    storing: Arc<Semaphore>,
}

impl EpochSource {
    /// Reads the last epoch. An unusable file is replaced with the next epoch: no more is lost than with a new state
    /// directory.
    pub(super) fn open(path: PathBuf, clock: Clock) -> Self {
        let file = StateFile::new(path);
        let (last, storing) = (Mutex::new(file.load().unwrap_or_default()), Arc::new(Semaphore::new(1)));
        Self(Arc::new(Source { file, last, clock, storing }))
    }

    /// Returns the next epoch, which is stored before it is used. A disk that is full, read-only or slow, even to read, does not
    /// stop the agent.
    ///
    /// # Errors
    /// Its thread has panicked.
    pub(super) async fn next(&self) -> io::Result<u64> {
        self.next_within(PATIENCE).await
    }

    async fn next_within(&self, patience: Duration) -> io::Result<u64> {
        let (choosing, mut chosen) = oneshot::channel();
        let source = self.0.clone();
        let storing = async move {
            let turn = source.storing.clone().acquire_owned().await.map_err(io::Error::other)?;
            let store = move || {
                source.read();
                // Nobody waits for it any more if reading has taken too long.
                let _ = choosing.send(source.choose());
                source.store();
                drop(turn);
            };
            blocking(store).await
        };
        let stored = timeout(patience, storing).await;
        let epoch = chosen.try_recv().unwrap_or_else(|_| self.0.choose());
        match stored {
            Ok(stored) => stored?,
            Err(_) => {
                let file = self.0.file.path().display();
                tracing::warn!(%file, epoch, "failed to store the session's epoch in time, using it all the same");
            }
        }
        Ok(epoch)
    }
}

impl Source {
    /// Another agent of this node, from which this one takes over, may have used higher epochs meanwhile.
    fn read(&self) {
        let read = self.file.read().ok().flatten().unwrap_or_default();
        let mut last = self.last.lock();
        *last = read.max(*last);
    }

    fn choose(&self) -> u64 {
        let now = self.clock.now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        let mut last = self.last.lock();
        *last = u64::try_from(now).unwrap_or(u64::MAX - 1).max(last.saturating_add(1));
        *last
    }

    /// Stores the last epoch. Others may have been chosen while waiting for the disk.
    fn store(&self) {
        let epoch = *self.last.lock();
        self.file.write(&epoch);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Chooses an epoch and waits until it is stored.
    fn next(source: &EpochSource) -> u64 {
        source.0.read();
        let epoch = source.0.choose();
        source.0.store();
        epoch
    }

    #[test]
    fn epochs_grow_across_restarts_and_clocks_set_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("epoch");
        let first = next(&EpochSource::open(path.clone(), Clock::default()));
        let source = EpochSource::open(path.clone(), Clock::default());
        let second = next(&source);
        assert!(second > first && next(&source) > second);
        // As if the clock had once been far ahead.
        let ahead = u64::MAX / 2;
        std::fs::write(&path, ahead.to_string()).unwrap();
        assert_eq!(next(&EpochSource::open(path, Clock::default())), ahead + 1);
    }

    #[test]
    fn two_agents_of_one_node_have_different_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("epoch");
        // The clock is behind.
        std::fs::write(&path, (u64::MAX / 2).to_string()).unwrap();
        let (before, after) =
            (EpochSource::open(path.clone(), Clock::default()), EpochSource::open(path, Clock::default()));
        let numbers = [&before, &after, &before, &before, &after].map(next);
        assert!(numbers.is_sorted_by(|a, b| a < b), "{numbers:?}");
    }

    #[test]
    fn an_unusable_file_is_replaced_and_an_unwritable_one_stops_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("epoch");
        for content in ["", "x", "-1", "18446744073709551616"] {
            std::fs::write(&path, content).unwrap();
            let epoch = next(&EpochSource::open(path.clone(), Clock::default()));
            assert!(epoch > 1_700_000_000_000, "{epoch}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), epoch.to_string());
        }
        // Its directory cannot be created.
        let source = EpochSource::open(path.join("epoch"), Clock::default());
        let first = next(&source);
        assert!(next(&source) > first);
    }

    #[tokio::test]
    async fn a_disk_that_takes_long_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("epoch");
        let stored = || std::fs::read_to_string(&path).unwrap();
        let source = EpochSource::open(path.clone(), Clock::default());
        let patient = async || source.next_within(Duration::from_secs(600)).await.unwrap();
        let first = patient().await;
        assert_eq!(stored(), first.to_string());
        // A thread is still reading or writing when the time is up.
        let second = source.next_within(Duration::ZERO).await.unwrap();
        assert!(second > first);
        let turn = source.0.storing.clone().acquire_owned().await.unwrap();
        let before = stored();
        assert!(before.parse::<u64>().unwrap() >= second, "{before} is stored, not {second}");
        // Another thread is still waiting for the disk.
        let third = source.next_within(Duration::ZERO).await.unwrap();
        assert!(third > second);
        assert_eq!(stored(), before);
        drop(turn);
        let fourth = patient().await;
        assert!(fourth > third);
        assert_eq!(stored(), fourth.to_string());
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_that_takes_long_to_read_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let source = EpochSource::open(dir.path().join("epoch"), Clock::default());
        tunnel_runtime::blocking::set_disk(|| PATIENCE * 20);
        let started = tokio::time::Instant::now();
        let first = source.next().await.unwrap();
        let second = source.next().await.unwrap();
        assert!(second > first);
        assert_eq!(started.elapsed(), PATIENCE * 2);
    }
}
