//! Reports changes of files, through any symlinks.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::mpsc;
use tokio::time::timeout;

/// A writer that does not rename needs a moment between its first and its last event.
const QUIET: Duration = Duration::from_millis(100);
/// Events do not delay a reading for longer.
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// Watches the directories whose entries decide what a path means: a rename into place and a ConfigMap's swap of its
/// `..data` link are events of a directory, not of the file.
pub(crate) struct FileWatch {
    watcher: Option<RecommendedWatcher>,
    events: mpsc::Receiver<()>,
    directories: BTreeSet<PathBuf>,
}

impl FileWatch {
    /// `what` is named when there can be no events.
    pub(crate) fn new(what: &'static str) -> Self {
        // One place is enough: an event only means that something changed.
        let (wake, events) = mpsc::channel(1);
        let handler = move |event: notify::Result<notify::Event>| {
            // Our own reading is an access too, and must not cause another one.
            let read_only = matches!(&event, Ok(event) if matches!(event.kind, EventKind::Access(kind)
                if !matches!(kind, notify::event::AccessKind::Close(notify::event::AccessMode::Write))));
            if !read_only {
                // When the channel is full, a reading is due anyway.
                let _ = wake.try_send(());
            }
        };
        let watcher = notify::recommended_watcher(handler)
            .inspect_err(|error| tracing::warn!(%error, what, "no file events; this is checked every 10 s"))
            .ok();
        Self { watcher, events, directories: BTreeSet::new() }
    }

    /// None when there can be no events.
    pub(crate) async fn event(&mut self) -> Option<()> {
        self.events.recv().await
    }

    /// Waits until the writer seems to be done.
    pub(crate) async fn settle(&mut self) {
        let quiet = async { while let Ok(Some(())) = timeout(QUIET, self.events.recv()).await {} };
        // Either way it is time to read.
        let _ = timeout(LONGEST_WAIT, quiet).await;
    }

    /// Watches the directories that decide what these paths mean now. Errors are not fatal: the poll remains.
    pub(crate) fn follow<'a>(&mut self, paths: impl IntoIterator<Item = &'a Path>) {
        let Some(watcher) = &mut self.watcher else { return };
        let wanted: BTreeSet<_> = paths.into_iter().flat_map(directories).collect();
        for gone in self.directories.difference(&wanted) {
            if let Err(error) = watcher.unwatch(gone) {
                tracing::debug!(directory = %gone.display(), %error, "unwatching");
            }
        }
        self.directories = wanted
            .into_iter()
            .filter(|directory| {
                self.directories.contains(directory)
                    || watcher
                        .watch(directory, RecursiveMode::NonRecursive)
                        .inspect_err(
                            |error| tracing::debug!(directory = %directory.display(), %error, "watching"),
                        )
                        .is_ok()
            })
            .collect();
    }
}

/// The directory of the path, of what it links to, and so on.
fn directories(path: &Path) -> BTreeSet<PathBuf> {
    /// As many links as Linux itself follows (path_resolution(7)).
    const MAX_LINKS: usize = 40;
    let mut directories = BTreeSet::new();
    let mut current = path.to_owned();
    for _ in 0..MAX_LINKS {
        let parent =
            current.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        directories.insert(parent.to_owned());
        // Kubernetes: nodes.yaml -> ..data/nodes.yaml, and ..data -> ..2024_01_01. The link that is swapped may be the
        // parent, so it is followed too.
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
