//! Reports changes of files, including through symlinks.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Time without events after which a writer is considered done: one that does not rename causes several events.
const QUIET: Duration = Duration::from_millis(100);
/// Maximum time for which events delay reading.
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// Watches the directories whose entries determine the file at a path. A rename into place and a ConfigMap's swap of
/// its `..data` link are events of a directory, not of the file.
pub struct FileWatch {
    watcher: Option<RecommendedWatcher>,
    events: mpsc::Receiver<()>,
    directories: BTreeSet<PathBuf>,
}

impl FileWatch {
    /// `what` names the files in the warning that there are no events.
    pub fn new(what: &'static str) -> Self {
        // A capacity of one is enough: an event only means that something changed.
        let (wake, events) = mpsc::channel(1);
        let handler = move |event: notify::Result<notify::Event>| {
            // Reading the file here is an access too, and must not cause another read.
            let read_only = matches!(&event, Ok(event) if matches!(event.kind, EventKind::Access(kind)
                if !matches!(kind, notify::event::AccessKind::Close(notify::event::AccessMode::Write))));
            if !read_only {
                // If the channel is full, a read is due anyway.
                let _ = wake.try_send(());
            }
        };
        let watcher = notify::recommended_watcher(handler)
            .inspect_err(
                |error| tracing::warn!(%error, what, "failed to watch for file events, polling every 10 s"),
            )
            .ok();
        Self { watcher, events, directories: BTreeSet::new() }
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
    }

    /// Watches the directories that determine the files at these paths now. Errors are not fatal: polling continues.
    pub fn follow<'a>(&mut self, paths: impl IntoIterator<Item = &'a Path>) {
        let Some(watcher) = &mut self.watcher else { return };
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
                        .inspect_err(
                            |error| tracing::debug!(path = %directory.display(), %error, "failed to watch a directory"),
                        )
                        .is_ok()
            })
            .collect();
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
