//! Takeover, side of the first agent: lets a second one take over, and continues if that one dies.

use std::collections::BTreeSet;
use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::sync::MutexGuard;
use tokio_util::sync::CancellationToken;
use tunnel_core::admin::Accepting;
use tunnel_core::identity::files::create_private_directory;
use tunnel_core::lifecycle::Shutdown;
use tunnel_core::log_once::LogOnce;
use tunnel_core::takeover::{self, Copies, Listener, receive, send, socket_path};

use super::message::{Answer, Ask, Hello};
use crate::identity::IdentityKeeper;
use crate::session::{Handover, LinkSet, Phase};

/// Maximum wait for a renewal of the certificate that is in progress.
const RENEWAL: Duration = Duration::from_secs(1);
/// Retry interval for creating the socket on a full or read-only disk, and for accepting.
const RETRY: Duration = Duration::from_secs(10);

/// Hands this agent's place over to a successor.
pub(crate) struct Succession {
    socket: PathBuf,
    /// Copies of the admin port and of the listeners to the cloud.
    copies: Copies,
    admin: Option<Accepting>,
    handover: Handover,
    running: OnceLock<(Arc<LinkSet>, Arc<IdentityKeeper>)>,
    /// Ends this agent once a successor has taken over.
    ends: Option<Shutdown>,
    open: CancellationToken,
    /// Cancelled when this agent drains.
    closed: CancellationToken,
}

impl Succession {
    pub(crate) fn new(
        state_dir: &Path,
        copies: Copies,
        admin: Option<Accepting>,
        handover: Handover,
        ends: Option<Shutdown>,
    ) -> Self {
        Self {
            socket: socket_path(state_dir),
            copies,
            admin,
            handover,
            running: OnceLock::new(),
            ends,
            open: CancellationToken::new(),
            closed: CancellationToken::new(),
        }
    }

    /// Lets successors take over from now on: this agent has the node's place.
    pub(crate) fn open(&self) {
        self.open.cancel();
    }

    /// Waits for [`Self::open`].
    pub(crate) async fn opened(&self) {
        self.open.cancelled().await;
    }

    /// Adds a listening socket for a successor.
    pub(crate) fn add(&self, name: &str, at: SocketAddr, socket: OwnedFd) {
        self.copies.add(name, at, socket);
    }

    /// Only the first call has an effect.
    pub(crate) fn set_running(&self, links: Arc<LinkSet>, keeper: Arc<IdentityKeeper>) {
        let _ = self.running.set((links, keeper));
    }

    /// Serves successors once this agent has the node's place. Never returns.
    pub(crate) async fn run(self: Arc<Self>) {
        self.opened().await;
        let _renewals = self.serve_all().await;
        pending::<()>().await;
    }

    /// Serves successors. Returns when one ends while this agent drains. The returned guard stops renewals: by then the
    /// place, the socket and the files may be those of the successor's own successor.
    async fn serve_all(&self) -> Option<MutexGuard<'_, ()>> {
        let mut listener = self.listen().await;
        loop {
            match listener.accept().await {
                Ok(stream) => {
                    let mut renewals = None;
                    self.serve(stream, &mut renewals).await;
                    if self.closed.is_cancelled() {
                        return renewals;
                    }
                    drop(renewals);
                    if !listener.is_found() {
                        listener = self.listen().await;
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a successor");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }

    async fn listen(&self) -> Listener {
        let mut failing = LogOnce::default();
        loop {
            if let Some(directory) = self.socket.parent() {
                // The directory does not exist before the first enrolment. An error here recurs in the next step.
                let _ = create_private_directory(directory);
            }
            match Listener::bind(&self.socket) {
                Ok(listener) => return listener,
                Err(error) if failing.is_new(error.kind()) => {
                    let path = self.socket.display();
                    tracing::warn!(%path, %error, "no other agent can take over from this one; it is tried again");
                }
                Err(_) => {}
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    async fn serve<'a>(&'a self, mut stream: UnixStream, renewals: &mut Option<MutexGuard<'a, ()>>) {
        let ended = self.pass(&mut stream, renewals).await;
        if self.closed.is_cancelled() {
            return tracing::debug!("the successor has ended: this agent finishes what it carries");
        }
        match ended {
            Ok(()) => tracing::warn!("the successor has ended: this agent goes on"),
            Err(error) => tracing::warn!(%error, "the successor is not understood: this agent goes on"),
        }
        if let Some(admin) = &self.admin {
            admin.set(true);
        }
        self.handover.set(Phase::Alone);
    }

    /// Serves one successor. Returns when it ends.
    async fn pass<'a>(
        &'a self,
        stream: &mut UnixStream,
        renewals: &mut Option<MutexGuard<'a, ()>>,
    ) -> io::Result<()> {
        let pid = takeover::successor(stream)?;
        if let Some((_, keeper)) = self.running.get() {
            // Both agents would write the same files.
            *renewals = tokio::time::timeout(RENEWAL, keeper.hold_pending_key()).await.ok();
        }
        let attached = self.running.get().map(|(links, _)| links.attached_at()).unwrap_or_default();
        self.handover.set(Phase::Passing(BTreeSet::new()));
        self.copies.greet(stream, env!("CARGO_PKG_VERSION"), Hello { attached }).await?;
        if let Some(admin) = &self.admin {
            admin.set(false);
        }
        tracing::info!(pid, "another agent takes over from this one");
        while let Some(ask) = receive(stream).await? {
            match ask {
                Ask::Attached(servers) => {
                    self.handover.set_attached(servers);
                    send(stream, &Answer::Done).await?;
                }
                Ask::Finish => {
                    self.handover.set(Phase::Passed);
                    send(stream, &Answer::Done).await?;
                    tracing::info!("the other agent has taken over: this one finishes what it carries");
                    if let Some(shutdown) = &self.ends {
                        shutdown.begin();
                    }
                }
            }
        }
        Ok(())
    }

    /// Stops handing over. Removes the socket, unless a successor has its own there.
    pub(crate) fn close(&self) {
        self.copies.close();
        self.closed.cancel();
        if self.open.is_cancelled() && self.handover.is_alone() {
            let _ = std::fs::remove_file(&self.socket);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_agent_that_drains_leaves_the_socket_to_its_successors_successor() {
        let state = tempfile::tempdir().unwrap();
        let handover = Handover::default();
        let first = Succession::new(state.path(), Copies::default(), None, handover.clone(), None);
        let agents = async {
            let mut second = loop {
                match takeover::Predecessor::<Hello>::find(state.path()).await {
                    Some(first) => break first,
                    None => tokio::task::yield_now().await,
                }
            };
            let Answer::Done = second.ask(&Ask::Finish).await.unwrap();
            first.close();
            // The second agent had its own socket there, and has handed its place over.
            let third = Listener::bind(&socket_path(state.path())).unwrap();
            drop(second);
            third
        };
        let both = async { tokio::join!(first.serve_all(), agents) };
        let (_, third) = tokio::time::timeout(Duration::from_secs(10), both).await.unwrap();
        assert!(third.is_found(), "the next agent finds the first one");
        assert!(handover.has_passed(), "the first one dials again");
    }
}
