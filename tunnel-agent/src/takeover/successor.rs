//! Takeover, side of the first agent: lets a second one take over, and continues if that one dies.

use std::collections::BTreeSet;
use std::future::pending;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::sync::OwnedMutexGuard;
use tokio_util::sync::CancellationToken;
use tunnel_runtime::admin::Accepting;
use tunnel_runtime::files::create_private_directory;
use tunnel_runtime::lifecycle::Shutdown;
use tunnel_runtime::log_once::LogOnce;
use tunnel_runtime::takeover::{self, Copies, Listener, receive, send, socket_path};

use super::message::{Answer, Ask, Hello};
use crate::config::WhenReplaced;
use crate::handover::Phase;
use crate::runtime::Runtime;
use crate::session::Running;

/// Maximum wait for a renewal of the certificate that is in progress. A successor waits a minute for an answer.
const RENEWAL: Duration = Duration::from_secs(45);
/// Retry interval for creating the socket on a full or read-only disk, and for accepting.
const RETRY: Duration = Duration::from_secs(10);

/// Hands this agent's place over to a successor.
pub(crate) struct Succession {
    pub(super) runtime: Runtime,
    socket: PathBuf,
    /// Copies of the listening sockets.
    copies: Arc<Copies>,
    admin: Option<Accepting>,
    pub(crate) running: Arc<OnceLock<Running>>,
    /// Ends this agent.
    process: Shutdown,
    open: CancellationToken,
    /// Cancelled when this agent drains.
    closed: CancellationToken,
}

impl Succession {
    pub(crate) fn new(
        runtime: Runtime,
        copies: Arc<Copies>,
        admin: Option<Accepting>,
        running: Arc<OnceLock<Running>>,
        process: Shutdown,
    ) -> Self {
        Self {
            socket: socket_path(&runtime.config.given.state_dir),
            runtime,
            copies,
            admin,
            running,
            process,
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

    /// Serves successors once this agent has the node's place. Never returns.
    pub(crate) async fn run(self: Arc<Self>) {
        self.opened().await;
        let _renewals = self.serve_all().await;
        pending::<()>().await;
    }

    /// Serves successors. Returns when one ends while this agent drains. The returned guard stops renewals: by then the
    /// place, the socket and the files may be those of the successor's own successor.
    async fn serve_all(&self) -> Option<OwnedMutexGuard<()>> {
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
                    tracing::warn!(%error, "failed to accept a successor");
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
                    tracing::warn!(%path, %error, "failed to listen for successors, retrying");
                }
                Err(_) => {}
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    async fn serve(&self, mut stream: UnixStream, renewals: &mut Option<OwnedMutexGuard<()>>) {
        let ended = self.pass(&mut stream, renewals).await;
        if self.closed.is_cancelled() {
            return tracing::debug!("successor ended during the drain");
        }
        match ended {
            Ok(()) => tracing::warn!("successor ended, this agent goes on"),
            Err(error) => tracing::warn!(%error, "failed to serve the successor, this agent goes on"),
        }
        if let Some(admin) = &self.admin {
            admin.set(true);
        }
        self.runtime.handover.set(Phase::Alone);
    }

    /// Serves one successor. Returns when it ends.
    async fn pass(
        &self,
        stream: &mut UnixStream,
        renewals: &mut Option<OwnedMutexGuard<()>>,
    ) -> io::Result<()> {
        let pid = takeover::successor(stream)?;
        let attached = self.running.get().map(|running| running.links.attached_at()).unwrap_or_default();
        self.runtime.handover.set(Phase::Passing(BTreeSet::new()));
        self.copies.greet(stream, env!("CARGO_PKG_VERSION"), Hello { attached }).await?;
        if let Some(admin) = &self.admin {
            admin.set(false);
        }
        tracing::info!(pid, "another agent takes over");
        while let Some(ask) = receive(stream).await? {
            match ask {
                Ask::Attached(servers) => {
                    self.runtime.handover.set_attached(servers);
                    send(stream, &Answer::Done).await?;
                }
                Ask::Finish => {
                    *renewals = tokio::select! {
                        held = self.hold_renewals() => held,
                        // The successor sends nothing until it is answered.
                        ended = receive::<Ask>(stream) => return ended.map(drop),
                    };
                    self.runtime.handover.set(Phase::Passed);
                    send(stream, &Answer::Done).await?;
                    tracing::info!(pid, "another agent has taken over");
                    if self.runtime.config.when_replaced == WhenReplaced::Exit {
                        self.process.begin();
                    }
                }
            }
        }
        Ok(())
    }

    /// Waits until this agent renews its certificate no more. The successor, which writes the same files, does so only
    /// after that.
    async fn hold_renewals(&self) -> Option<OwnedMutexGuard<()>> {
        let keeper = &self.running.get()?.keeper;
        let held = tokio::time::timeout(RENEWAL, keeper.hold_pending_key()).await;
        held.inspect_err(|_| tracing::warn!("failed to end a renewal before the takeover")).ok()
    }

    /// Stops handing over. Removes the socket, unless a successor has its own there.
    pub(crate) fn close(&self) {
        self.copies.close();
        self.closed.cancel();
        if self.open.is_cancelled() && self.runtime.handover.is_alone() {
            let _ = std::fs::remove_file(&self.socket);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use tokio::sync::mpsc;
    use tunnel_pki::Holder;
    use tunnel_pki::enrol::{EnrollConfig, IdentityKeeper, IdentityMetrics, Recovery};

    use super::*;
    use crate::doctor::tests_support::{Ca, agent};
    use crate::runtime::of_flags;
    use crate::session::{LinkSet, Shared};
    use crate::takeover::{Predecessor, take_over};

    fn succession(state_dir: &std::path::Path) -> Arc<Succession> {
        let state_dir = format!("--state-dir={}", state_dir.display());
        let runtime = of_flags(&["--server=a:1", "--when-replaced=wait", &state_dir]);
        Arc::new(Succession::new(runtime, Arc::default(), None, Arc::default(), Shutdown::new()))
    }

    /// Gives the agent an identity that has just been issued.
    fn run(succession: &Succession) -> Arc<IdentityKeeper> {
        let config = &succession.runtime.config;
        let enroll = EnrollConfig {
            servers: Vec::new(),
            holder: Holder::Agent,
            node: config.node_name.clone(),
            state_dir: config.given.state_dir.clone(),
            token: None,
            ca_hash: None,
            reach: config.reach.clone(),
        };
        let now = SystemTime::now();
        let identity = agent(&Ca::new(), "edge-1", now, now + Duration::from_secs(86_400));
        let keeper =
            Arc::new(IdentityKeeper::start(enroll, identity, IdentityMetrics::default(), Recovery::Token));
        let shared = Shared::new(succession.runtime.clone(), keeper.subscribe(), mpsc::channel(1).0);
        let _ = succession.running.set(Running { links: LinkSet::new(shared), keeper: keeper.clone() });
        keeper
    }

    async fn find(state: &tempfile::TempDir) -> Predecessor {
        loop {
            match Predecessor::find(state.path()).await {
                Some(first) => break first,
                None => tokio::task::yield_now().await,
            }
        }
    }

    #[tokio::test]
    async fn an_agent_that_drains_leaves_the_socket_to_its_successors_successor() {
        let state = tempfile::tempdir().unwrap();
        let first = succession(state.path());
        let agents = async {
            let mut second = find(&state).await;
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
        assert!(first.runtime.handover.has_passed(), "the first one dials again");
    }

    #[tokio::test]
    async fn only_one_agent_writes_the_key() {
        let state = tempfile::tempdir().unwrap();
        let (first, second) = (succession(state.path()), succession(state.path()));
        let (before, after) = (run(&first), run(&second));
        let renewing = before.hold_pending_key().await;
        tokio::spawn(async move { first.serve_all().await });
        let found = find(&state).await;
        let (held, pending) =
            (after.hold_pending_key().await, second.runtime.readiness.pending("taking over"));
        let links = second.running.get().unwrap().links.clone();
        tokio::spawn(take_over(found, links, second.clone(), pending, held));
        let early = tokio::time::timeout(Duration::from_millis(1500), after.hold_pending_key()).await;
        assert!(early.is_err(), "it writes while the other one renews");
        drop(renewing);
        let renews = tokio::time::timeout(Duration::from_secs(10), after.hold_pending_key()).await;
        assert!(renews.is_ok() && second.runtime.readiness.is_ready());
        let again = tokio::time::timeout(Duration::from_millis(50), before.hold_pending_key()).await;
        assert!(again.is_err(), "the first one renews again");
    }
}
