//! Session epochs, which only grow: across restarts, and across a clock that was set back.

use std::io;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use tunnel_core::identity::write_atomically;

/// The epoch file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum EpochError {
    #[error("{path}: {source}; the state directory must be readable and writable", path = path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{path}: {value:?} is not a session number; remove the file, and a new one is created", path = path.display())]
    Malformed { path: PathBuf, value: String },
}

/// Gives every session of this node a number higher than all before.
///
/// Wall-clock milliseconds, or one more than the last epoch where the clock is behind: an edge node without a
/// battery-backed clock starts in the past, and a state directory may be lost, but not both at a time.
#[derive(Debug)]
pub struct EpochSource {
    path: PathBuf,
    last: Mutex<u64>,
}

impl EpochSource {
    /// Reads the last epoch.
    ///
    /// # Errors
    /// The file exists but cannot be read, or holds no number.
    pub fn open(path: PathBuf) -> Result<Self, EpochError> {
        let last = match std::fs::read_to_string(&path) {
            Ok(text) => {
                let value = text.trim().to_owned();
                value.parse().map_err(|_| EpochError::Malformed { path: path.clone(), value })?
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
            Err(source) => return Err(EpochError::Io { path, source }),
        };
        Ok(Self { path, last: Mutex::new(last) })
    }

    /// The next epoch, on disk before it is used.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn next(&self) -> Result<u64, EpochError> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let next = u64::try_from(now).unwrap_or(u64::MAX - 1).max(last.saturating_add(1));
        write_atomically(&self.path, format!("{next}\n").as_bytes(), 0o600)
            .map_err(|source| EpochError::Io { path: self.path.clone(), source })?;
        *last = next;
        Ok(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_grow_across_restarts_and_clocks_set_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("epoch");
        let first = EpochSource::open(path.clone()).unwrap().next().unwrap();
        let source = EpochSource::open(path.clone()).unwrap();
        let second = source.next().unwrap();
        assert!(second > first && source.next().unwrap() > second);
        // As if the clock had been far ahead once.
        let ahead = u64::MAX / 2;
        std::fs::write(&path, ahead.to_string()).unwrap();
        assert_eq!(EpochSource::open(path.clone()).unwrap().next().unwrap(), ahead + 1);
        std::fs::write(&path, "x").unwrap();
        assert!(EpochSource::open(path).unwrap_err().to_string().contains("\"x\" is not a session number"));
    }
}
