//! The side of the first server: hands over what it has, step by step, and takes it back should its successor die.

use std::future::pending;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tunnel_runtime::accept::{Gate, accept};
use tunnel_runtime::log_once::LogRarely;
use tunnel_runtime::takeover::{self, Copies, Stream, Successors, listen, receive, send};

use super::Gates;
use super::message::{Answer, Ask, Hello};
use crate::agent_port::Handover;
use crate::runtime::Runtime;
use crate::session::told_over;

/// How far a successor is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// There is none.
    #[default]
    Alone,
    /// One is taking over.
    Passing,
    /// One has taken over.
    Passed,
}

/// Hands this server's agents and listeners over to a successor.
pub struct Succession {
    pub runtime: Runtime,
    /// Those that a successor gets; dropped when this server stops, so that nothing waits in them.
    pub sockets: Arc<Copies>,
    pub gates: Gates,
    /// The admin port's.
    pub admin: Option<Gate>,
    pub handover: watch::Sender<Handover>,
    pub phase: watch::Sender<Phase>,
    /// See [`Succession::close`].
    pub closed: CancellationToken,
    /// True if this server does the work that a cluster must have from one server only.
    pub eligible: watch::Sender<bool>,
}

impl Succession {
    /// Waits for successors where `bind` says, until `stop`. As long as it cannot, a successor cannot bind its ports.
    pub async fn run<S: Successors>(
        self: Arc<Self>,
        bind: impl Fn() -> io::Result<S> + Send + Sync,
        stop: CancellationToken,
    ) {
        // Not before it has something to hand over.
        if stop.run_until_cancelled(self.gates.listeners.opened()).await.is_none() {
            return;
        }
        let (mut listening, failing) = (None, LogRarely::default());
        let serve = async {
            loop {
                let listener = listening.insert(listen(&bind).await);
                while listener.is_found() {
                    let mut stream = accept(|| listener.accept(), "takeover", &failing).await;
                    self.serve(&mut *stream).await;
                }
            }
        };
        tokio::select! {
            () = serve => {}
            () = stop.cancelled() => {}
            () = self.closed.cancelled() => {}
        }
        // A successor has its own there, or is about to: between a look and the removal it could replace this one.
        if let Some(listener) = listening.filter(|_| *self.phase.borrow() == Phase::Alone) {
            listener.remove();
        }
    }

    async fn serve(&self, stream: &mut dyn Stream) {
        self.phase.send_replace(Phase::Passing);
        let ended = self.pass(stream).await;
        let passed = *self.phase.borrow() == Phase::Passed;
        match ended {
            Ok(()) if passed => tracing::warn!("successor ended, resuming service"),
            Ok(()) => tracing::warn!("successor ended before it had taken over, resuming service"),
            Err(error) => tracing::warn!(%error, "failed to talk to the successor, resuming service"),
        }
        self.take_back().await;
        self.sockets.taken_back();
        self.phase.send_replace(Phase::Alone);
    }

    /// Ends when the successor does.
    async fn pass(&self, stream: &mut dyn Stream) -> io::Result<()> {
        let pid = takeover::successor(stream)?;
        self.sockets.greet(stream, env!("CARGO_PKG_VERSION"), self.hello()).await?;
        if let Some(admin) = &self.admin {
            admin.set(false);
        }
        tracing::info!(pid, "successor connected, handing over");
        loop {
            match receive(stream).await? {
                None => return Ok(()),
                Some(Ask::Agents) => {
                    self.gates.agents.set(false);
                    let nodes: Vec<_> =
                        self.runtime.sessions.live().iter().map(ToString::to_string).collect();
                    self.handover.send_replace(Handover::Agents { over: told_over(nodes.len()) });
                    send(stream, &Answer::Told(nodes)).await?;
                }
                Some(Ask::Listeners) => {
                    self.gates.listeners.set(false);
                    if let Some(redirect) = self.runtime.redirect.clone() {
                        let released = tokio::task::spawn_blocking(move || redirect.release()).await;
                        released.map_err(io::Error::other)?;
                    }
                    self.handover.send_replace(Handover::All);
                    send(stream, &Answer::Released).await?;
                    self.eligible.send_replace(false);
                    self.phase.send_replace(Phase::Passed);
                    tracing::info!("handed over to the successor, draining");
                }
                Some(Ask::Back) => {
                    self.gates.agents.set(true);
                    self.keep_agents();
                    // Those that were told to leave may still relay something, and end once they do not.
                    let back = self.runtime.sessions.all().into_iter();
                    let back = back.filter(|session| !session.moving.load(Ordering::Relaxed));
                    let nodes = back.map(|session| session.node.to_string()).collect();
                    send(stream, &Answer::Attached(nodes)).await?;
                }
                Some(Ask::Resume) => {
                    self.take_back().await;
                    send(stream, &Answer::Resumed).await?;
                    tracing::info!("successor handed back, resumed service");
                }
            }
        }
    }

    fn hello(&self) -> Hello {
        let redirect = self.runtime.redirect.as_ref();
        Hello {
            server_id: self.runtime.server_id.clone(),
            pins: redirect.and_then(|redirect| redirect.pinned_in()),
            virtual_addresses: redirect.map(|redirect| redirect.virtual_addresses()).unwrap_or_default(),
            fleet: self.runtime.peers.nodes().0.iter().map(ToString::to_string).collect(),
        }
    }

    /// Hands no agents over any more.
    fn keep_agents(&self) {
        // Asked for again and again, and also where nothing was handed over: the other servers take each change for a drain.
        self.handover
            .send_if_modified(|handover| std::mem::replace(handover, Handover::Nothing) != Handover::Nothing);
    }

    async fn take_back(&self) {
        if let Some(redirect) = self.runtime.redirect.clone() {
            let (resumed, router) = (redirect.clone(), self.runtime.router.clone());
            let resume = move || {
                // The agents that have come back a moment ago are in it.
                if let Err(error) = resumed.apply(|| router.desired()) {
                    tracing::error!(%error, "failed to write the routes to the kernel");
                }
                resumed.resume()
            };
            match tokio::task::spawn_blocking(resume).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::error!(%error, "failed to re-enable the redirect"),
                Err(error) => tracing::error!(%error, "failed to re-enable the redirect"),
            }
            // The next successor has not begun. To see that this one is dead takes seconds.
            tokio::spawn(redirect.others().await.remove_dead());
        }
        if let Some(admin) = &self.admin {
            admin.set(true);
        }
        self.keep_agents();
        self.gates.agents.set(true);
        self.gates.listeners.set(true);
        self.eligible.send_replace(true);
    }

    /// True if there is a successor that has its programs in place, and gets the agents or has them.
    pub(crate) fn has_successor(&self) -> bool {
        *self.handover.borrow() != Handover::Nothing
    }

    /// Closes the copies of the listening sockets, so that nothing waits in them once this server accepts no more. No other
    /// successor comes.
    pub(crate) fn close(&self) {
        self.sockets.close();
        self.closed.cancel();
    }

    /// Waits until the successor has taken over; for ever if there is never one.
    pub(crate) async fn passed(&self) {
        if self.phase.subscribe().wait_for(|phase| *phase == Phase::Passed).await.is_err() {
            pending::<()>().await;
        }
    }

    /// Waits until no successor is half-way.
    pub(crate) async fn settled(&self) {
        let _ = self.phase.subscribe().wait_for(|phase| *phase != Phase::Passing).await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    use prometheus_client::registry::Registry;

    use super::*;
    use crate::session::Workers;

    fn succession() -> Arc<Succession> {
        let mut registry = Registry::default();
        let router = crate::runtime::without_nodes(&mut registry);
        Arc::new(Succession {
            runtime: Runtime::new(router, Workers::here(), &mut registry),
            sockets: Arc::default(),
            gates: Gates::new(true),
            admin: None,
            handover: watch::Sender::default(),
            phase: watch::Sender::default(),
            closed: CancellationToken::new(),
            eligible: watch::Sender::default(),
        })
    }

    /// No successor comes there.
    struct Deserted;

    impl Successors for Deserted {
        async fn accept(&self) -> io::Result<Box<dyn Stream>> {
            pending().await
        }

        fn is_found(&self) -> bool {
            true
        }

        fn remove(&self) {}
    }

    #[tokio::test(start_paused = true)]
    async fn a_socket_that_cannot_be_made_is_tried_again() {
        let (attempts, stop) = (Arc::<AtomicUsize>::default(), CancellationToken::new());
        let counted = attempts.clone();
        let bind = move || match counted.fetch_add(1, Ordering::Relaxed) {
            0 => Err(io::ErrorKind::ReadOnlyFilesystem.into()),
            _ => Ok(Deserted),
        };
        let running = tokio::spawn(succession().run(bind, stop.clone()));
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(attempts.load(Ordering::Relaxed), 2);
        stop.cancel();
        running.await.unwrap();
    }

    #[tokio::test]
    async fn nobody_is_told_of_a_successor_that_ended_before_it_asked_for_anything() {
        let succession = succession();
        let mut handover = succession.handover.subscribe();
        succession.take_back().await;
        assert!(!handover.has_changed().unwrap(), "the other servers are told that this one drains");
        succession.handover.send_replace(Handover::All);
        succession.take_back().await;
        assert_eq!(*handover.borrow_and_update(), Handover::Nothing);
    }
}
