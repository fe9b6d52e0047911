//! Files that are read at start and whenever they change. The last good content stays in effect.

mod file_watch;

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use sha2::{Digest as _, Sha256};
use tokio_util::sync::CancellationToken;

pub use file_watch::FileWatch;

use crate::config::ConfigError;
use crate::files::read_at_most;

/// Interval at which the files are also polled: network file systems have no events, and watches are a limited
/// resource.
const POLL: Duration = Duration::from_secs(10);
/// Maximum size of a file, unless another limit is given.
const MAX_BYTES: u64 = 4 << 20;

/// Metrics of the followed files.
#[derive(Clone, Debug, Default)]
pub struct FileMetrics {
    reloads: Family<[(&'static str, &'static str); 2], Counter>,
    in_effect: Family<[(&'static str, &'static str); 1], Gauge>,
}

impl FileMetrics {
    /// `registry` has the prefix `postern`.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let help = "Changes of a file that were read, by file and outcome";
        registry.register("file_reloads", help, metrics.reloads.clone());
        let help = "0 while a file's present content is not in effect, but an older one";
        registry.register("file_in_effect", help, metrics.in_effect.clone());
        metrics
    }

    fn count(&self, file: &'static str, loaded: bool) {
        // Both series start at once, so that rates work from the first event.
        for (outcome, happened) in [("loaded", loaded), ("refused", !loaded)] {
            let counter = self.reloads.get_or_create(&[("file", file), ("outcome", outcome)]);
            counter.inc_by(happened.into());
        }
        self.in_effect.get_or_create(&[("file", file)]).set(loaded.into());
    }
}

/// A file, and the flag that names it.
#[derive(Clone, Debug)]
pub struct NamedFile {
    key: &'static str,
    path: PathBuf,
    most_bytes: u64,
    optional: bool,
}

impl NamedFile {
    pub fn new(key: &'static str, path: &Path) -> Self {
        Self { key, path: path.to_owned(), most_bytes: MAX_BYTES, optional: false }
    }

    /// Sets a maximum size other than the default.
    pub fn at_most(self, most_bytes: u64) -> Self {
        Self { most_bytes, ..self }
    }

    /// Allows the file to be missing.
    pub fn optional(self) -> Self {
        Self { optional: true, ..self }
    }

    /// Returns an error that names the flag and the file.
    pub fn error(&self, reason: impl Into<String>) -> ConfigError {
        ConfigError::new(self.key, self.path.display().to_string(), reason)
    }

    /// Returns the text; `None` if the file is optional and missing.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(&self) -> Result<Option<String>, ConfigError> {
        match text(&self.path, self.most_bytes) {
            Ok(text) => Ok(Some(text)),
            Err(error) if self.optional && error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.error(error.to_string())),
        }
    }

    /// Returns a value that differs after most changes of the file, without reading it: device, inode, size and change
    /// time.
    fn fingerprint(&self) -> Option<(u64, u64, u64, (i64, i64))> {
        let found = fs::metadata(&self.path).ok()?;
        Some((found.dev(), found.ino(), found.size(), (found.ctime(), found.ctime_nsec())))
    }
}

/// The texts of files, in order; `None` for an optional one that is missing.
pub type Texts = [Option<String>];

/// Parses the texts of files.
type Parse<T> = Arc<dyn Fn(&Texts) -> Result<T, ConfigError> + Send + Sync>;

/// The reason why the current content of files is not in effect; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Problem(Arc<Mutex<Option<ConfigError>>>);

impl Problem {
    /// Returns `None` if the content is in effect.
    pub fn get(&self) -> Option<ConfigError> {
        self.0.lock().clone()
    }

    fn set(&self, problem: Option<ConfigError>) {
        *self.0.lock() = problem;
    }
}

/// One file, or several that belong together, whose first content was good.
pub struct ReloadedFile<T> {
    what: &'static str,
    files: Vec<NamedFile>,
    parse: Parse<T>,
    metrics: FileMetrics,
    /// Result of the last read.
    last: Result<Content, ConfigError>,
    problem: Problem,
    /// Set when the last content was good but could not be applied. It is tried again, since the obstacle may go away.
    unapplied: bool,
}

/// Digest of the files' texts.
type Content = [u8; 32];

impl<T: Send + 'static> ReloadedFile<T> {
    /// Reads files for the first time. `what` names them in the log and in metrics.
    ///
    /// # Errors
    /// The files cannot be used, and there is no earlier content.
    pub fn open(
        what: &'static str,
        files: Vec<NamedFile>,
        parse: impl Fn(&Texts) -> Result<T, ConfigError> + Send + Sync + 'static,
        metrics: &FileMetrics,
    ) -> Result<(Self, T), ConfigError> {
        let texts = read_all(&files)?;
        let content = parse(&texts)?;
        metrics.count(what, true);
        let (parse, last) = (Arc::new(parse), Ok(digest(&texts)));
        let (metrics, problem) = (metrics.clone(), Problem::default());
        Ok((Self { what, files, parse, metrics, last, problem, unapplied: false }, content))
    }

    /// Calls [`Self::open`] for one file.
    ///
    /// # Errors
    /// The file cannot be used.
    pub fn open_one(
        what: &'static str,
        file: NamedFile,
        parse: impl Fn(&str) -> Result<T, String> + Send + Sync + 'static,
        metrics: &FileMetrics,
    ) -> Result<(Self, T), ConfigError> {
        let named = file.clone();
        let parse = move |texts: &Texts| {
            let text = texts.first().and_then(Option::as_deref).unwrap_or_default();
            parse(text).map_err(|reason| named.error(reason))
        };
        Self::open(what, vec![file], parse, metrics)
    }

    /// Returns a handle for the status.
    pub fn problem(&self) -> Problem {
        self.problem.clone()
    }

    /// Reads again whenever a file changes, until `stop`. Passes good content to `apply`, which may still reject it,
    /// and then gets it again at every poll.
    pub async fn run<F>(mut self, apply: impl Fn(T) -> F, stop: CancellationToken)
    where
        F: Future<Output = Result<(), String>>,
    {
        let mut watch = FileWatch::new(self.what);
        let mut seen = None;
        loop {
            let files = self.files.clone();
            // A network file system may block.
            let looked = tokio::task::spawn_blocking(move || {
                // Before reading, so that a later change causes an event; each time, because symlinks may have changed.
                watch.follow(files.iter().map(|file| file.path.as_path()));
                let found: Vec<_> = files.iter().map(NamedFile::fingerprint).collect();
                (watch, found)
            });
            let looked = tokio::select! {
                () = stop.cancelled() => return,
                looked = looked => looked,
            };
            let found;
            (watch, found) = looked.unwrap_or_else(|_| (FileWatch::new(self.what), Vec::new()));
            // With a problem, reads again even if no file has changed: reading itself may have failed, as with too many
            // open files.
            if seen.as_ref() != Some(&found) || self.problem.get().is_some() {
                self.reload(&apply).await;
            }
            seen = Some(found);
            tokio::select! {
                () = stop.cancelled() => return,
                Some(()) = watch.event() => {
                    stop.run_until_cancelled(watch.settle()).await;
                    // A change of the same size within one clock tick does not change the fingerprint, so read anyway.
                    seen = None;
                }
                () = tokio::time::sleep(POLL) => {}
            }
        }
    }

    async fn reload<F: Future<Output = Result<(), String>>>(&mut self, apply: &impl Fn(T) -> F) {
        let (files, parse) = (self.files.clone(), self.parse.clone());
        let (last, retry) = (self.last.clone(), self.unapplied);
        // A network file system may block, and a large file takes seconds to parse.
        let read = tokio::task::spawn_blocking(move || {
            let texts = read_all(&files);
            let found = texts.as_ref().map(|texts| digest(texts)).map_err(Clone::clone);
            if found == last && !retry {
                return None;
            }
            Some((found, texts.and_then(|texts| parse(&texts))))
        });
        let (found, parsed) = match read.await {
            Ok(None) => return,
            Ok(Some(read)) => read,
            Err(panicked) => {
                let error = self.error(panicked.to_string());
                (Err(error.clone()), Err(error))
            }
        };
        let loaded = match parsed {
            Ok(content) => {
                let applied = apply(content).await;
                self.unapplied = applied.is_err();
                applied.map_err(|reason| self.error(reason))
            }
            Err(error) => {
                self.unapplied = false;
                Err(error)
            }
        };
        let again = std::mem::replace(&mut self.last, found) == self.last;
        let before = self.problem.get();
        self.problem.set(loaded.as_ref().err().cloned());
        if again && before.is_some() && before.as_ref() == loaded.as_ref().err() {
            // Already logged and counted.
            return;
        }
        self.metrics.count(self.what, loaded.is_ok());
        let what = self.what;
        match loaded {
            Ok(()) => tracing::info!(what, "reloaded the file"),
            Err(error) if self.unapplied => {
                tracing::error!(what, %error, "failed to apply the file, retrying");
            }
            Err(error) => {
                tracing::error!(what, %error, "failed to reload the file, keeping its last good content");
            }
        }
    }

    /// Returns an error of all files together.
    fn error(&self, reason: String) -> ConfigError {
        match self.files.first() {
            Some(file) => file.error(reason),
            None => ConfigError::without_value(self.what, reason),
        }
    }
}

fn read_all(files: &[NamedFile]) -> Result<Vec<Option<String>>, ConfigError> {
    files.iter().map(NamedFile::read).collect()
}

fn digest(texts: &Texts) -> Content {
    let mut digest = Sha256::new();
    for text in texts {
        // No text has the length that stands for a missing one.
        digest.update(text.as_ref().map_or(u64::MAX, |text| text.len() as u64).to_be_bytes());
        digest.update(text.as_deref().unwrap_or_default());
    }
    digest.finalize().into()
}

/// Reads the text of a file.
///
/// # Errors
/// The file cannot be read.
pub fn read(path: &Path) -> Result<String, String> {
    text(path, MAX_BYTES).map_err(|error| error.to_string())
}

fn text(path: &Path, most_bytes: u64) -> io::Result<String> {
    String::from_utf8(read_at_most(path, most_bytes)?)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "stream did not contain valid UTF-8"))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use tokio::sync::mpsc;

    use super::*;

    fn number(text: &str) -> Result<u32, String> {
        text.trim().parse().map_err(|_| format!("{text:?} is not a number"))
    }

    async fn next(changes: &mut mpsc::UnboundedReceiver<u32>) -> u32 {
        tokio::time::timeout(Duration::from_secs(30), changes.recv()).await.unwrap().unwrap()
    }

    #[tokio::test]
    async fn good_content_replaces_and_bad_content_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("number");
        let metrics = FileMetrics::default();
        let open = || ReloadedFile::open_one("test", NamedFile::new("--number", &path), number, &metrics);
        let reason = || open().map(drop).unwrap_err().reason;
        assert!(reason().contains("No such file"));
        assert!(read(dir.path()).unwrap_err().contains("not a regular file"));
        std::fs::write(&path, "x").unwrap();
        assert_eq!(reason(), "\"x\" is not a number");
        std::fs::write(&path, "1").unwrap();
        let (file, first) = open().unwrap();
        assert_eq!(first, 1);
        let stop = CancellationToken::new();
        let (sender, mut changes) = mpsc::unbounded_channel();
        let refused = Arc::new(Mutex::new(0));
        let refusals = refused.clone();
        let apply = move |number: u32| {
            let answer = if number == 13 { Err("unlucky".to_owned()) } else { Ok(()) };
            match answer {
                Ok(()) => sender.send(number).unwrap(),
                Err(_) => *refusals.lock().unwrap() += 1,
            }
            std::future::ready(answer)
        };
        let running = tokio::spawn(file.run(apply, stop.clone()));
        let put = |text: &str| {
            let new = dir.path().join("new");
            std::fs::write(&new, text).unwrap();
            std::fs::rename(&new, &path).unwrap();
        };
        put("2");
        assert_eq!(next(&mut changes).await, 2);
        let in_effect = || metrics.in_effect.get_or_create(&[("file", "test")]).get();
        let deadline = std::time::Instant::now() + Duration::from_secs(30);
        put("x");
        while in_effect() == 1 {
            assert!(std::time::Instant::now() < deadline, "bad content was not noticed");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        put("13");
        while *refused.lock().unwrap() == 0 {
            assert!(std::time::Instant::now() < deadline, "the content was not passed on");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(in_effect(), 0);
        put("3");
        assert_eq!(next(&mut changes).await, 3);
        stop.cancel();
        running.await.unwrap();
    }

    #[tokio::test]
    async fn what_could_not_be_applied_is_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("number");
        let metrics = FileMetrics::default();
        std::fs::write(&path, "1").unwrap();
        let named = NamedFile::new("--number", &path);
        let (mut file, _) = ReloadedFile::open_one("test", named, number, &metrics).unwrap();
        let in_the_way = Mutex::new(Some("taken"));
        let applied = Mutex::new(Vec::new());
        let apply = |number: u32| {
            applied.lock().unwrap().push(number);
            let reason = in_the_way.lock().unwrap().map(str::to_owned);
            std::future::ready(reason.map_or(Ok(()), Err))
        };
        let count = |outcome: &'static str| {
            metrics.reloads.get_or_create(&[("file", "test"), ("outcome", outcome)]).get()
        };
        std::fs::write(&path, "2").unwrap();
        for _ in 0..3 {
            file.reload(&apply).await;
            assert_eq!((count("loaded"), count("refused")), (1, 1), "it is counted once");
        }
        *in_the_way.lock().unwrap() = Some("forbidden");
        file.reload(&apply).await;
        assert_eq!(count("refused"), 2, "another reason");
        *in_the_way.lock().unwrap() = None;
        for _ in 0..2 {
            file.reload(&apply).await;
            assert_eq!((count("loaded"), count("refused")), (2, 2));
        }
        assert_eq!(*applied.lock().unwrap(), [2; 5]);
        assert_eq!(metrics.in_effect.get_or_create(&[("file", "test")]).get(), 1);
        // Content that cannot be parsed is not tried again.
        std::fs::write(&path, "x").unwrap();
        for _ in 0..2 {
            file.reload(&apply).await;
            assert_eq!(count("refused"), 3);
        }
    }

    #[tokio::test]
    async fn several_files_are_one_and_an_optional_one_may_come_and_go() {
        let dir = tempfile::tempdir().unwrap();
        let metrics = FileMetrics::default();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        std::fs::write(&one, "a").unwrap();
        let files = vec![NamedFile::new("--one", &one), NamedFile::new("--two", &two).optional()];
        let join =
            |texts: &Texts| Ok(texts.iter().map(|text| text.as_deref().unwrap_or("-")).collect::<String>());
        let (mut file, first) = ReloadedFile::open("test", files, join, &metrics).unwrap();
        assert_eq!(first, "a-");
        let (problem, seen) = (file.problem(), Mutex::new(Vec::new()));
        let apply = |text| {
            seen.lock().unwrap().push(text);
            std::future::ready(Ok(()))
        };
        for text in ["b", "", ""] {
            std::fs::write(&two, text).unwrap();
            file.reload(&apply).await;
        }
        std::fs::remove_file(&two).unwrap();
        file.reload(&apply).await;
        assert_eq!(*seen.lock().unwrap(), ["ab", "a", "a-"]);
        std::fs::remove_file(&one).unwrap();
        file.reload(&apply).await;
        assert_eq!(problem.get().unwrap().key, "--one");
        std::fs::write(&one, "a").unwrap();
        file.reload(&apply).await;
        assert_eq!(problem.get(), None);
        assert_eq!(seen.lock().unwrap().len(), 4, "the content is in effect again");
    }
}
