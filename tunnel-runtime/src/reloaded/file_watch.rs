//! Reports changes of files, including through symlinks.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use notify::event::{AccessKind, AccessMode, ModifyKind};
use notify::{ErrorKind, EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Time without events after which a writer is considered done: one that does not rename causes several events.
const QUIET: Duration = Duration::from_millis(100);
/// Maximum time for which events delay reading.
const LONGEST_WAIT: Duration = Duration::from_secs(2);
/// Maximum time for which a writer that has not closed the file delays reading. A shell empties a file before the program starts
/// that writes it, and half a file may be valid.
const LONGEST_WRITE: Duration = Duration::from_secs(10);

type Names = BTreeSet<OsString>;

/// Watches the directories whose entries determine the file at a path. A rename into place and a ConfigMap's swap of
/// its `..data` link are events of a directory, not of the file.
pub struct FileWatch {
    what: &'static str,
    watcher: Option<RecommendedWatcher>,
    events: mpsc::Receiver<()>,
    directories: BTreeSet<PathBuf>,
    /// Names of the files.
    names: Names,
    /// Names of files in these directories that were written to and not closed since.
    written: Arc<Mutex<Names>>,
    /// Set once it has been said that a directory has no events.
    warned: bool,
}

impl FileWatch {
    /// `what` names the files in the warning that there are no events.
    pub fn new(what: &'static str) -> Self {
        // A capacity of one is enough: an event only means that something changed.
        let (wake, events) = mpsc::channel(1);
        let written = Arc::<Mutex<Names>>::default();
        let of_handler = written.clone();
        let handler = move |event: notify::Result<notify::Event>| {
            if let Ok(event) = &event {
                note(&mut of_handler.lock(), event);
            }
            // Reading the file here is an access too, and must not cause another read.
            let read_only = matches!(&event, Ok(event) if matches!(event.kind, EventKind::Access(kind)
                if !matches!(kind, AccessKind::Close(AccessMode::Write))));
            if !read_only {
                // If the channel is full, a read is due anyway.
                let _ = wake.try_send(());
            }
        };
        let watcher = notify::recommended_watcher(handler).inspect_err(|error| warn(what, error)).ok();
        let (directories, names) = (BTreeSet::new(), Names::new());
        Self { what, watcher, events, directories, names, written, warned: false }
    }

    /// Returns `None` if there can be no events.
    pub async fn event(&mut self) -> Option<()> {
        self.events.recv().await
    }

    /// Waits until the writer seems to be done.
    pub async fn settle(&mut self) {
        let quiet = async { while let Ok(Some(())) = timeout(QUIET, self.events.recv()).await {} };
        // After a timeout too, it is time to read.
        let _ = timeout(LONGEST_WAIT, quiet).await;
        let (names, written) = (&self.names, &self.written);
        let is_written = || !names.is_disjoint(&written.lock());
        let closed = async { while is_written() && self.events.recv().await.is_some() {} };
        if timeout(LONGEST_WRITE, closed).await.is_err() {
            written.lock().clear();
        }
    }

    /// Watches the directories that determine the files at these paths now. Errors are not fatal: polling continues.
    pub fn follow<'a>(&mut self, paths: impl IntoIterator<Item = &'a Path>) {
        let Some(watcher) = &mut self.watcher else { return };
        let paths: Vec<_> = paths.into_iter().collect();
        // One that is missing may be about to be written.
        let found = paths.iter().map(|path| path.canonicalize().unwrap_or_else(|_| path.to_path_buf()));
        self.names = found.filter_map(|path| Some(path.file_name()?.to_owned())).collect();
        let wanted: BTreeSet<_> = paths.into_iter().flat_map(directories).collect();
        for gone in self.directories.difference(&wanted) {
            if let Err(error) = watcher.unwatch(gone) {
                tracing::debug!(path = %gone.display(), %error, "failed to unwatch a directory");
            }
        }
        self.directories = wanted
            .into_iter()
            .filter(|directory| {
                self.directories.contains(directory)
                    || watcher
                        .watch(directory, RecursiveMode::NonRecursive)
                        .inspect_err(|error| {
                            tracing::debug!(path = %directory.display(), %error, "failed to watch a directory");
                            if used_up(error).is_some() && !std::mem::replace(&mut self.warned, true) {
                                warn(self.what, error);
                            }
                        })
                        .is_ok()
            })
            .collect();
    }
}

fn warn(what: &str, error: &notify::Error) {
    tracing::warn!(%error, what, used_up = used_up(error), "failed to watch for file events, polling every 10 s");
}

/// Returns the limit that the kernel's error means: "Too many open files" is rarely about those (inotify_init(2)), nor is "No space
/// left on device" about a disk (inotify_add_watch(2)).
fn used_up(error: &notify::Error) -> Option<&'static str> {
    match &error.kind {
        ErrorKind::Io(error) if error.raw_os_error() == Some(Errno::EMFILE as i32) => {
            Some("the sysctl fs.inotify.max_user_instances, or else the limit of open files")
        }
        ErrorKind::MaxFilesWatch => Some("the sysctl fs.inotify.max_user_watches"),
        _ => None,
    }
}

/// Notes a file that is being written, or is no longer.
fn note(written: &mut Names, event: &notify::Event) {
    let names = event.paths.iter().filter_map(|path| path.file_name());
    match event.kind {
        EventKind::Modify(ModifyKind::Data(_)) => written.extend(names.map(ToOwned::to_owned)),
        EventKind::Access(AccessKind::Close(AccessMode::Write))
        | EventKind::Modify(ModifyKind::Name(_))
        | EventKind::Remove(_) => names.for_each(|name| {
            written.remove(name);
        }),
        _ => {}
    }
}

/// Returns the directory of the path, and that of each symlink's target in turn.
fn directories(path: &Path) -> BTreeSet<PathBuf> {
    /// The same limit as in Linux (path_resolution(7)).
    const MAX_LINKS: usize = 40;
    let mut directories = BTreeSet::new();
    let mut current = path.to_owned();
    for _ in 0..MAX_LINKS {
        let parent =
            current.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        directories.insert(parent.to_owned());
        // Kubernetes: nodes.yaml -> ..data/nodes.yaml, and ..data -> ..2024_01_01. The link that is swapped may be the
        // parent directory, so that is followed too.
        if let Ok(target) = std::fs::read_link(parent) {
            let above = parent.parent().unwrap_or(Path::new("/"));
            directories.insert(above.to_owned());
            directories.insert(above.join(target));
        }
        match std::fs::read_link(&current) {
            Ok(target) => current = parent.join(target),
            Err(_) => break,
        }
    }
    directories
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;

    use super::*;

    #[test]
    fn a_limit_of_the_kernel_is_named() {
        let of = |errno: Errno| used_up(&notify::Error::io(errno.into()));
        assert!(of(Errno::EMFILE).unwrap().contains("fs.inotify.max_user_instances"));
        assert_eq!(of(Errno::ENOENT), None);
        let watches = notify::Error::new(ErrorKind::MaxFilesWatch);
        assert!(used_up(&watches).unwrap().contains("fs.inotify.max_user_watches"));
    }

    #[tokio::test]
    async fn a_file_is_read_once_its_writer_has_closed_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens.csv");
        std::fs::write(&path, "old").unwrap();
        let mut watch = FileWatch::new("test");
        watch.follow([path.as_path()]);
        // As a shell that redirects the output of a slow program.
        let mut file = File::create(&path).unwrap();
        watch.event().await.unwrap();
        assert!(timeout(QUIET * 3, watch.settle()).await.is_err(), "it is empty");
        file.write_all(b"new").unwrap();
        assert!(timeout(QUIET * 3, watch.settle()).await.is_err(), "there may be more");
        drop(file);
        timeout(LONGEST_WRITE / 2, watch.settle()).await.unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
        // A file beside it that stays open delays nothing.
        let mut other = File::create(dir.path().join("log")).unwrap();
        other.write_all(b"line").unwrap();
        watch.event().await.unwrap();
        timeout(LONGEST_WRITE / 2, watch.settle()).await.unwrap();
    }
}
