//! State kept across restarts: one value in a file of the state directory, as JSON.

use std::io;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::blocking::blocking;
use crate::files::{PRIVATE_FILE, create_private_directory, read_at_most, write_atomically};
use crate::log_once::LogOnce;
use crate::text::printable;

/// Maximum size of a file, for reading and writing. The largest one, for a cluster of 100,000 nodes, has about 20 MiB.
const MAX_BYTES: u64 = 256 << 20;

/// A file with a value. A full or read-only disk stops nothing: a failed write is logged, once while the condition
/// lasts.
#[derive(Debug)]
pub struct StateFile<T> {
    path: PathBuf,
    failing: Mutex<LogOnce>,
    of: PhantomData<fn(T) -> T>,
}

impl<T: Serialize + DeserializeOwned + Send + 'static> StateFile<T> {
    pub fn new(path: PathBuf) -> Arc<Self> {
        Arc::new(Self { path, failing: Mutex::default(), of: PhantomData })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the value written last. `None` if there is no file, or an unusable one, which is logged.
    pub fn load(&self) -> Option<T> {
        self.read().unwrap_or_else(|reason| {
            let path = self.path.display();
            tracing::warn!(%path, error = reason, "failed to read the state file, starting without it");
            None
        })
    }

    /// Returns the value written last; `None` if there is no file.
    ///
    /// # Errors
    /// Returns the reason for not being able to use the file.
    pub fn read(&self) -> Result<Option<T>, String> {
        let text = match read_at_most(&self.path, MAX_BYTES) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.to_string()),
        };
        serde_json::from_slice(&text).map(Some).map_err(|error| printable(&error.to_string(), 200))
    }

    /// Replaces the value. True if that succeeded. Blocks on the disk.
    pub fn write(&self, value: &T) -> bool {
        let written = self.try_write(value);
        let mut failing = self.failing.lock();
        let path = self.path.display();
        match &written {
            Ok(()) => {
                if failing.clear() {
                    tracing::info!(%path, "state file writable again");
                }
            }
            // Compare only the kind: the message names a temporary file, a new one each time.
            Err(error) if failing.is_new(error.kind()) => {
                let fix = "make room on the disk, or make the directory writable";
                tracing::error!(%path, %error, fix, "failed to write the state file, a restart will use an older one or none");
            }
            Err(_) => {}
        }
        written.is_ok()
    }

    fn try_write(&self, value: &T) -> io::Result<()> {
        let text = serde_json::to_vec(value)?;
        if text.len() as u64 > MAX_BYTES {
            return Err(io::Error::other(format!("{} bytes, at most {MAX_BYTES} are allowed", text.len())));
        }
        if let Some(directory) = self.path.parent() {
            create_private_directory(directory).map_err(io::Error::other)?;
        }
        write_atomically(&self.path, &text, PRIVATE_FILE)
    }

    /// [`Self::write`] on a thread that may block.
    pub async fn save(self: &Arc<Self>, value: T) -> bool {
        self.save_what(move || Some(value)).await
    }

    /// Returns true also if there is nothing to write.
    async fn save_what(self: &Arc<Self>, value: impl FnOnce() -> Option<T> + Send + 'static) -> bool {
        let file = self.clone();
        let work = move || value().is_none_or(|value| file.write(&value));
        blocking(work).await.unwrap_or(false)
    }

    /// Writes the current value after each change until `stop`, including the last change, at most once per `pause`.
    /// Failed writes are retried. `value` is called on a thread that may block; it returns `None` while there is no
    /// value.
    pub async fn keep(
        self: Arc<Self>,
        mut changed: watch::Receiver<u64>,
        value: impl Fn() -> Option<T> + Clone + Send + 'static,
        pause: Duration,
        stop: CancellationToken,
    ) {
        loop {
            tokio::select! {
                // A change from before `stop` is still written.
                biased;
                known = changed.changed() => if known.is_err() { return },
                () = stop.cancelled() => return,
            }
            if !self.save_what(value.clone()).await {
                if stop.is_cancelled() {
                    return;
                }
                changed.mark_changed();
            }
            let _ = stop.run_until_cancelled(tokio::time::sleep(pause)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_value_is_found_again_and_an_unusable_file_is_as_none() {
        let directory = tempfile::tempdir().unwrap();
        let file = StateFile::<Vec<u32>>::new(directory.path().join("state/numbers.json"));
        assert_eq!(file.read(), Ok(None));
        assert!(file.write(&vec![1, 2]));
        assert_eq!(file.read(), Ok(Some(vec![1, 2])));
        assert_eq!(fs::metadata(file.path()).unwrap().permissions().mode() & 0o777, 0o600);
        for text in ["", "[1", "[\"a\"]", "{}"] {
            fs::write(file.path(), text).unwrap();
            assert!(file.read().is_err() && file.load().is_none(), "{text:?}");
        }
        fs::remove_file(file.path()).unwrap();
        nix::unistd::mkfifo(file.path(), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(file.read(), Err("it is not a regular file".to_owned()));
    }

    #[tokio::test(start_paused = true)]
    async fn changes_are_written_together_the_last_one_too_and_again_once_there_is_room() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state/number.json");
        // A file in the place of the directory.
        fs::write(directory.path().join("state"), "").unwrap();
        let file = StateFile::<u64>::new(path);
        let (number, changed) = watch::channel(0);
        let (now, stop) = (changed.clone(), CancellationToken::new());
        let value = move || Some(*now.borrow());
        let pause = Duration::from_secs(2);
        let keeping = tokio::spawn(file.clone().keep(changed, value, pause, stop.clone()));
        number.send_replace(1);
        tokio::time::sleep(pause).await;
        assert!(file.read().is_err());
        fs::remove_file(directory.path().join("state")).unwrap();
        tokio::time::sleep(2 * pause).await;
        assert_eq!(file.read(), Ok(Some(1)));
        number.send_replace(2);
        tokio::time::sleep(pause / 4).await;
        number.send_replace(3);
        tokio::time::sleep(pause / 4).await;
        assert_eq!(file.read(), Ok(Some(2)));
        stop.cancel();
        keeping.await.unwrap();
        assert_eq!(file.read(), Ok(Some(3)));
    }
}
