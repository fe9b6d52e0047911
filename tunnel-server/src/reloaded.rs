//! Small files that are read at the start and whenever they change. The last good content stays in effect.

use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::fcntl::OFlag;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

use crate::inventory::FileWatch;

/// The file is also read this often: network file systems have no events, and watches are a limited resource.
const POLL: Duration = Duration::from_secs(10);
/// Larger files are refused.
const MAX_BYTES: u64 = 4 << 20;

/// The files, as metrics name them.
const FILES: [&str; 4] = ["policy", "client-ca", "tokens", "maps"];

/// What is known of these files.
#[derive(Clone, Debug, Default)]
pub(crate) struct FileMetrics {
    reloads: Family<[(&'static str, &'static str); 2], Counter>,
    in_effect: Family<[(&'static str, &'static str); 1], Gauge>,
}

impl FileMetrics {
    /// `registry` has the prefix `postern`.
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let help = "Changes of a file that were read, by file and outcome";
        registry.register("file_reloads", help, metrics.reloads.clone());
        let help = "0 while a file's present content is not in effect, but an older one";
        registry.register("file_in_effect", help, metrics.in_effect.clone());
        // Series start at once, so that rates work from the first event on.
        for file in FILES {
            for outcome in ["loaded", "refused"] {
                let _ = metrics.reloads.get_or_create(&[("file", file), ("outcome", outcome)]);
            }
            metrics.in_effect.get_or_create(&[("file", file)]).set(1);
        }
        metrics
    }

    fn count(&self, file: &'static str, loaded: bool) {
        let outcome = if loaded { "loaded" } else { "refused" };
        self.reloads.get_or_create(&[("file", file), ("outcome", outcome)]).inc();
        self.in_effect.get_or_create(&[("file", file)]).set(loaded.into());
    }
}

/// Makes something of a file's text, or says why not.
type Parse<T> = fn(&str) -> Result<T, String>;

/// A file whose first content was good.
#[derive(Debug)]
pub(crate) struct ReloadedFile<T> {
    what: &'static str,
    path: PathBuf,
    parse: Parse<T>,
    metrics: FileMetrics,
    /// What the last reading found.
    last: Result<String, String>,
    /// Why that, though good in itself, is not in effect. It is tried again: what was in its way may go.
    unapplied: Option<String>,
}

impl<T: Send + 'static> ReloadedFile<T> {
    /// Reads it for the first time. `what` names it in the log and in metrics.
    ///
    /// # Errors
    /// Why it cannot be used: there is no last good content yet.
    pub(crate) fn open(
        what: &'static str,
        path: &Path,
        parse: Parse<T>,
        metrics: &FileMetrics,
    ) -> Result<(Self, T), String> {
        let text = read(path)?;
        let content = parse(&text)?;
        metrics.count(what, true);
        let (path, metrics) = (path.to_owned(), metrics.clone());
        Ok((Self { what, path, parse, metrics, last: Ok(text), unapplied: None }, content))
    }

    /// Reads it again whenever it changes, until `stop`, and passes good content on to `apply`, which may still refuse it, and
    /// is then asked again at every poll.
    pub(crate) async fn run<F>(mut self, apply: impl Fn(T) -> F, stop: CancellationToken)
    where
        F: Future<Output = Result<(), String>>,
    {
        let mut watch = FileWatch::new(self.what);
        loop {
            // Before the reading, so that a later change is an event; each time, since symlinks may point elsewhere now.
            watch.follow(&self.path);
            self.reload(&apply).await;
            tokio::select! {
                () = stop.cancelled() => return,
                Some(()) = watch.event() => watch.settle().await,
                () = tokio::time::sleep(POLL) => {}
            }
        }
    }

    async fn reload<F: Future<Output = Result<(), String>>>(&mut self, apply: &impl Fn(T) -> F) {
        let path = self.path.clone();
        // A network file system may let it wait.
        let text = tokio::task::spawn_blocking(move || read(&path)).await;
        let text = text.unwrap_or_else(|panicked| Err(panicked.to_string()));
        let again = text == self.last;
        if again && self.unapplied.is_none() {
            return;
        }
        let before = self.unapplied.take();
        let loaded = match text.as_deref().map_err(Clone::clone).and_then(|text| (self.parse)(text)) {
            Ok(content) => {
                let applied = apply(content).await;
                self.unapplied = applied.as_ref().err().cloned();
                applied
            }
            Err(reason) => Err(reason),
        };
        self.last = text;
        if again && self.unapplied.is_some() && self.unapplied == before {
            // It was said and counted.
            return;
        }
        self.metrics.count(self.what, loaded.is_ok());
        let (file, what) = (self.path.display(), self.what);
        match loaded {
            Ok(()) => tracing::info!(%file, what, "the file's new content is in effect"),
            Err(reason) => {
                tracing::error!(%file, what, "the file is not usable, its last good content stays in effect: {reason}");
            }
        }
    }
}

/// The text of a file.
///
/// # Errors
/// Why it cannot be read.
pub(crate) fn read(path: &Path) -> Result<String, String> {
    let text = || -> io::Result<String> {
        // Opening must not block on a FIFO.
        let file = OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("it is not a regular file"));
        }
        let mut text = String::new();
        if file.take(MAX_BYTES + 1).read_to_string(&mut text)? as u64 > MAX_BYTES {
            return Err(io::Error::other(format!("larger than {} MiB", MAX_BYTES >> 20)));
        }
        Ok(text)
    };
    text().map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};
    use tokio::sync::mpsc;

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
        assert!(ReloadedFile::open("test", &path, number, &metrics).unwrap_err().contains("No such file"));
        assert!(read(dir.path()).unwrap_err().contains("not a regular file"));
        std::fs::write(&path, "x").unwrap();
        assert_eq!(ReloadedFile::open("test", &path, number, &metrics).unwrap_err(), "\"x\" is not a number");
        std::fs::write(&path, "1").unwrap();
        let (file, first) = ReloadedFile::open("test", &path, number, &metrics).unwrap();
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
        let (mut file, _) = ReloadedFile::open("test", &path, number, &metrics).unwrap();
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
        // What is wrong in itself stays so.
        std::fs::write(&path, "x").unwrap();
        for _ in 0..2 {
            file.reload(&apply).await;
            assert_eq!(count("refused"), 3);
        }
    }
}
