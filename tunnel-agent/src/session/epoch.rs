//! Session epochs, which only grow: across restarts, and across a clock that was set back.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use tunnel_core::identity::write_atomically;
use tunnel_core::log_once::LogOnce;
use tunnel_core::text::printable;

/// Gives every session of this node a number higher than all before.
///
/// Wall-clock milliseconds, or one more than the last epoch where the clock is behind: an edge node without a
/// battery-backed clock starts in the past, and a state directory may be lost, but not both at a time.
#[derive(Debug)]
pub struct EpochSource {
    path: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    last: u64,
    /// Why the last one is not on disk.
    unsaved: LogOnce,
}

impl EpochSource {
    /// Reads the last epoch. A file that cannot be used is replaced with the next: no more is lost than with a new state
    /// directory.
    pub fn open(path: PathBuf) -> Self {
        let last = read(&path).unwrap_or_else(|reason| {
            tracing::warn!(path = %path.display(), "{reason}; the clock gives the next one");
            0
        });
        Self { path, state: Mutex::new(State { last, unsaved: LogOnce::default() }) }
    }

    /// The next epoch, on disk before it is used; a disk that is full or read-only does not keep the agent away.
    pub fn next(&self) -> u64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let State { last, unsaved } = &mut *state;
        // Another agent of this node, from which this one takes over, may have used higher ones meanwhile.
        *last = read(&self.path).unwrap_or_default().max(*last);
        *last = u64::try_from(now).unwrap_or(u64::MAX - 1).max(last.saturating_add(1));
        match write_atomically(&self.path, format!("{last}\n").as_bytes(), 0o600) {
            Ok(()) => {
                if unsaved.clear() {
                    tracing::info!(path = %self.path.display(), "the session's number is stored again");
                }
            }
            // By its kind: the text names a temporary file, another one each time.
            Err(error) if unsaved.is_new(error.kind()) => {
                tracing::error!(
                    path = %self.path.display(), %error,
                    "the session's number is not stored, which does harm only if this node's clock is set back before a \
                     restart: make the state directory writable (disk full or read-only?)"
                );
            }
            Err(_) => {}
        }
        *last
    }
}

/// The number in the file; 0 without one.
fn read(path: &Path) -> Result<u64, String> {
    match std::fs::read_to_string(path) {
        Ok(text) => {
            let text = text.trim();
            text.parse().map_err(|_| format!("{:?} is not a session number", printable(text, 40)))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(format!("the last session's number is not known ({error})")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_grow_across_restarts_and_clocks_set_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("epoch");
        let first = EpochSource::open(path.clone()).next();
        let source = EpochSource::open(path.clone());
        let second = source.next();
        assert!(second > first && source.next() > second);
        // As if the clock had been far ahead once.
        let ahead = u64::MAX / 2;
        std::fs::write(&path, ahead.to_string()).unwrap();
        assert_eq!(EpochSource::open(path).next(), ahead + 1);
    }

    #[test]
    fn two_agents_of_one_node_have_different_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("epoch");
        // Their clock is behind.
        std::fs::write(&path, (u64::MAX / 2).to_string()).unwrap();
        let (before, after) = (EpochSource::open(path.clone()), EpochSource::open(path));
        let numbers = [before.next(), after.next(), before.next(), before.next(), after.next()];
        assert!(numbers.is_sorted_by(|a, b| a < b), "{numbers:?}");
    }

    #[test]
    fn an_unusable_file_is_replaced_and_an_unwritable_one_stops_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("epoch");
        for content in ["", "x", "-1", "18446744073709551616"] {
            std::fs::write(&path, content).unwrap();
            let next = EpochSource::open(path.clone()).next();
            assert!(next > 1_700_000_000_000, "{next}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{next}\n"));
        }
        let source = EpochSource::open(dir.path().join("gone/epoch"));
        let first = source.next();
        assert!(source.next() > first);
    }
}
