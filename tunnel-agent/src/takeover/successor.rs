//! Takeover, side of the first agent: lets a second one take over, and continues if that one dies.

use std::collections::BTreeSet;
use std::future::pending;
use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::OwnedMutexGuard;
use tokio_util::sync::CancellationToken;
use tunnel_runtime::accept::{Gate, accept};
use tunnel_runtime::lifecycle::Shutdown;
use tunnel_runtime::log_once::LogRarely;
use tunnel_runtime::takeover::{self, Copies, Stream, Successors, listen, receive, send};

use super::message::{Answer, Ask, Hello};
use crate::config::WhenReplaced;
use crate::handover::Phase;
use crate::runtime::Runtime;
use crate::session::Running;

/// Maximum wait for a renewal of the certificate that is in progress. A successor waits a minute for an answer.
pub(crate) const TAKE_OVER: Duration = Duration::from_secs(45);

/// Hands this agent's place over to a successor.
pub struct Succession {
    pub(super) runtime: Runtime,
    /// Copies of the listening sockets.
    copies: Arc<Copies>,
    admin: Option<Gate>,
    pub running: Arc<OnceLock<Running>>,
    /// Ends this agent.
    process: Shutdown,
    open: CancellationToken,
    /// Cancelled when this agent drains.
    closed: CancellationToken,
}

impl Succession {
    pub fn new(
        runtime: Runtime,
        copies: Arc<Copies>,
        admin: Option<Gate>,
        running: Arc<OnceLock<Running>>,
        process: Shutdown,
    ) -> Self {
        Self {
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
    pub fn open(&self) {
        self.open.cancel();
    }

    pub(crate) fn is_open(&self) -> bool {
        self.open.is_cancelled()
    }

    /// Waits for [`Self::open`].
    pub(crate) async fn opened(&self) {
        self.open.cancelled().await;
    }

    /// Serves successors, which come where `bind` says, once this agent has the node's place. Never returns.
    pub async fn run<S: Successors>(self: Arc<Self>, bind: impl Fn() -> io::Result<S> + Send + Sync) {
        self.opened().await;
        let _renewals = self.serve_all(&bind).await;
        pending::<()>().await;
    }

    /// Serves successors. Returns when this agent drains, or when one ends meanwhile. The returned guard stops
    /// renewals: by then the place, the socket and the files may be those of the successor's own successor.
    async fn serve_all<S: Successors>(
        &self,
        bind: &(impl Fn() -> io::Result<S> + Send + Sync),
    ) -> Option<OwnedMutexGuard<()>> {
        let mut listener = listen(bind).await;
        let failing = LogRarely::default();
        loop {
            let mut stream = tokio::select! {
                biased;
                () = self.closed.cancelled() => {
                    listener.remove();
                    return None;
                }
                stream = accept(|| listener.accept(), "takeover", &failing) => stream,
            };
            let mut renewals = None;
            self.serve(&mut *stream, &mut renewals).await;
            if self.closed.is_cancelled() {
                // The successor's own successor may be about to replace it, between a look and the removal.
                if !self.runtime.handover.has_passed() {
                    listener.remove();
                }
                return renewals;
            }
            drop(renewals);
            if !listener.is_found() {
                listener = listen(bind).await;
            }
        }
    }

    async fn serve(&self, stream: &mut dyn Stream, renewals: &mut Option<OwnedMutexGuard<()>>) {
        // One that has taken over sees by the connection's end that this agent's listeners are closed.
        let drains = async {
            self.closed.cancelled().await;
            self.runtime.handover.passed().await;
        };
        let ended = tokio::select! {
            biased;
            ended = self.pass(stream, renewals) => ended,
            () = drains => Ok(()),
        };
        if self.closed.is_cancelled() {
            return tracing::debug!("successor not served any more, this agent drains");
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
        stream: &mut dyn Stream,
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
                        held = self.hold_renewals(TAKE_OVER) => held,
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

    /// Waits, at most for `limit`, until this agent renews its certificate no more. Another agent, which writes the same
    /// files, gets the node's place only after this wait.
    pub(crate) async fn hold_renewals(&self, limit: Duration) -> Option<OwnedMutexGuard<()>> {
        let keeper = &self.running.get()?.keeper;
        let held = tokio::time::timeout(limit, keeper.hold_pending_key()).await;
        held.inspect_err(|_| tracing::warn!("failed to end a renewal before the takeover")).ok()
    }

    /// Stops handing over, but for a successor that has begun.
    pub fn close(&self) {
        self.copies.close();
        self.closed.cancel();
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use tokio::sync::mpsc;
    use tokio::task::AbortHandle;
    use tunnel_pki::Holder;
    use tunnel_pki::enrol::{EnrollConfig, IdentityKeeper, IdentityMetrics, Recovery};
    use tunnel_runtime::clock::Clock;
    use tunnel_runtime::takeover::{Listener, socket_path};

    use super::*;
    use crate::app;
    use crate::doctor::tests::{Ca, agent};
    use crate::runtime::of_flags;
    use crate::session::{LinkSet, Shared};
    use crate::takeover::{Predecessor, take_over};

    fn succession(state_dir: &std::path::Path) -> Arc<Succession> {
        let state_dir = format!("--state-dir={}", state_dir.display());
        let runtime = of_flags(&["--server=a:1", "--when-replaced=wait", &state_dir]);
        Arc::new(Succession::new(runtime, Arc::default(), None, Arc::default(), Shutdown::default()))
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
            reach: config.reach.clone(),
            clock: Clock::default(),
        };
        let now = SystemTime::now();
        let identity = agent(&Ca::new(), "edge-1", now, now + Duration::from_secs(86_400));
        let keeper =
            Arc::new(IdentityKeeper::start(enroll, identity, IdentityMetrics::default(), Recovery::Token));
        let shared = Shared::new(succession.runtime.clone(), keeper.subscribe(), mpsc::channel(1).0);
        let _ = succession.running.set(Running { links: LinkSet::new(shared), keeper: keeper.clone() });
        keeper
    }

    fn at(state: &tempfile::TempDir) -> impl Fn() -> io::Result<Listener> + Send + Sync + use<> {
        let path = socket_path(state.path());
        move || Listener::bind(&path)
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
        let (first, bind) = (succession(state.path()), at(&state));
        let agents = async {
            let mut second = find(&state).await;
            let Answer::Done = second.ask(&Ask::Finish).await.unwrap();
            first.close();
            // The second agent had its own socket there, and has handed its place over.
            let third = bind().unwrap();
            // It no longer keeps listeners for the first one.
            second.ended().await;
            third
        };
        let both = async { tokio::join!(first.serve_all(&bind), agents) };
        let (_, third) = tokio::time::timeout(Duration::from_secs(10), both).await.unwrap();
        assert!(third.is_found(), "the next agent finds the first one");
        assert!(first.runtime.handover.has_passed(), "the first one dials again");
    }

    #[tokio::test]
    async fn an_agent_that_ends_removes_the_socket() {
        let state = tempfile::tempdir().unwrap();
        let (first, bind) = (succession(state.path()), at(&state));
        let ended = async { tokio::join!(first.serve_all(&bind), async { first.close() }).0.is_none() };
        assert!(tokio::time::timeout(Duration::from_secs(10), ended).await.unwrap());
        assert!(!socket_path(state.path()).exists());

        let (first, bind) = (succession(state.path()), at(&state));
        let dies = async {
            let _second = find(&state).await;
            first.close();
        };
        let ended = async { tokio::join!(first.serve_all(&bind), dies) };
        tokio::time::timeout(Duration::from_secs(10), ended).await.unwrap();
        assert!(!socket_path(state.path()).exists(), "its successor has ended first");
    }

    /// Stops an agent that has taken over and has a connection. Returns the task that keeps the agent before waiting.
    fn stop(second: &Arc<Succession>) -> AbortHandle {
        let before = tokio::spawn(pending::<()>()).abort_handle();
        second.open();
        let (of, kept) = (second.clone(), before.clone());
        of.runtime.tasks.spawn(pending::<()>());
        of.process.begin();
        tokio::spawn(async move {
            app::end(&of.runtime, &of, Some(kept), &of.process, None, std::future::ready(())).await;
        });
        before
    }

    #[tokio::test(start_paused = true)]
    async fn the_agent_before_comes_back_once_a_renewal_has_ended_or_soon() {
        for ends in [true, false] {
            let state = tempfile::tempdir().unwrap();
            let second = succession(state.path());
            let renewing = run(&second).hold_pending_key().await;
            let before = stop(&second);
            tokio::time::sleep(Duration::from_secs(2)).await;
            assert!(!before.is_finished(), "two agents may write the key");
            assert!(!second.runtime.shutdown.is_draining(), "nobody has the node's place");
            let _renewing = (!ends).then_some(renewing);
            tokio::time::sleep(Duration::from_secs(if ends { 0 } else { 2 })).await;
            tokio::time::sleep(Duration::from_millis(1)).await;
            assert!(before.is_finished() && second.runtime.shutdown.is_draining());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_agent_before_does_not_come_back_while_another_one_takes_over() {
        let state = tempfile::tempdir().unwrap();
        let second = succession(state.path());
        let _keeper = run(&second);
        second.runtime.handover.set(Phase::Passing(BTreeSet::new()));
        let before = stop(&second);
        let shutdown = second.runtime.shutdown.clone();
        tokio::time::timeout(Duration::from_secs(31), shutdown.draining()).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(!before.is_finished() && !shutdown.is_forced(), "two agents take the place");
    }

    #[tokio::test]
    async fn only_one_agent_writes_the_key() {
        let state = tempfile::tempdir().unwrap();
        let (first, second) = (succession(state.path()), succession(state.path()));
        let (before, after) = (run(&first), run(&second));
        let renewing = before.hold_pending_key().await;
        let bind = at(&state);
        tokio::spawn(async move { first.serve_all(&bind).await });
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
