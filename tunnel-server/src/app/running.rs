//! The server while it serves, and how it stops.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;
use tunnel_runtime::accept::reset_all;
use tunnel_runtime::admin::Serving;
use tunnel_runtime::config::HostPort;
use tunnel_runtime::lifecycle::Shutdown;

use crate::agent_port::{AgentPort, Handover};
use crate::listener::REDIRECT;
use crate::pki::{KnownNodes, ServerCertificate};
use crate::runtime::Runtime;
use crate::runtime::settings::Settings;
use crate::session::{Threads, told_within};
use crate::takeover::{Before, Succession};

/// Time for links and tasks to end once nothing is relayed any more.
const CLOSING: Duration = Duration::from_secs(3);

/// Channels between parts of the server.
pub struct Said {
    pub settings: watch::Sender<Arc<Settings>>,
    /// The other servers.
    pub peers: watch::Sender<Arc<BTreeSet<HostPort>>>,
    /// The nodes that may attach.
    pub known_nodes: watch::Sender<Option<Arc<KnownNodes>>>,
    pub handover: watch::Sender<Handover>,
    /// False while a successor does what one server alone may do.
    pub eligible: watch::Sender<bool>,
}

impl Said {
    /// `peers`: the other servers at the start.
    pub fn new(peers: BTreeSet<HostPort>) -> Self {
        Self {
            settings: watch::Sender::default(),
            peers: watch::Sender::new(Arc::new(peers)),
            known_nodes: watch::Sender::default(),
            handover: watch::Sender::default(),
            eligible: watch::Sender::new(true),
        }
    }
}

/// A server that serves.
pub struct Running {
    pub runtime: Runtime,
    /// None: this is a redirector.
    pub agent_port: Option<Arc<AgentPort>>,
    pub succession: Arc<Succession>,
    pub before: Before,
    // Held to the end: dropping these ends what they keep going.
    pub certificate: Option<Arc<ServerCertificate>>,
    pub said: Said,
    pub admin: Option<Serving>,
    pub threads: Threads,
}

impl Running {
    /// Serves until `shutdown`, or until a successor has taken over if `ends_when_passed`, then drains and stops.
    ///
    /// # Errors
    /// If the redirect cannot be stopped.
    pub async fn run(
        mut self,
        shutdown: Shutdown,
        drain_timeout: Duration,
        ends_when_passed: bool,
    ) -> anyhow::Result<()> {
        let (succession, own) = (self.succession.clone(), self.runtime.drain.shutdown().clone());
        tokio::select! {
            () = shutdown.draining() => tokio::select! {
                // Connections that a successor that is half-way has not got yet would fail.
                _ = tokio::time::timeout(drain_timeout, succession.settled()) => {}
                () = shutdown.forced() => {}
            },
            () = succession.passed(), if ends_when_passed => {
                // Should the successor die, the next server must be able to listen there while this one drains.
                self.admin = None;
            }
        }
        let force = async {
            shutdown.forced().await;
            own.force();
            std::future::pending::<()>().await;
        };
        tokio::select! {
            stopped = self.stop(drain_timeout) => stopped,
            () = force => Ok(()),
        }
    }

    /// Waits for the connections in flight, then ends links and tasks and, last, the redirect.
    async fn stop(mut self, drain_timeout: Duration) -> anyhow::Result<()> {
        let Runtime { redirect, drain, metrics, tasks, stop, readiness, sessions, .. } = self.runtime;
        let _stopping = readiness.pending("stopping");
        // For IPv6 the kernel sends the RST itself.
        let led_here = self.succession.sockets.take(REDIRECT, |address| address.is_ipv4());
        self.succession.close();
        let another = self.succession.has_successor() || self.before.take_back(drain.shutdown()).await;
        if another {
            // It answers there.
            self.admin = None;
        }
        if let Some(redirect) = &redirect {
            // Its programs are in place, and need not be found by their names.
            if another && redirect.finds_another().await {
                redirect.release();
            } else if let Err(error) = redirect.drain() {
                tracing::warn!(%error, "failed to refuse new connects to edge nodes while draining");
            }
        }
        // Another server may have the same socket, and accept from it.
        let alone = !another && !self.succession.sockets.are_sent();
        let routed = redirect.as_ref().is_some_and(|redirect| redirect.routed);
        // The routing rules stay for open connections, and lead new ones here too. Without a listener an IPv4 client would get no
        // answer: the kernel sends no RST from an address that is not local.
        let refusing = led_here.filter(|_| alone && routed);
        let refusing =
            refusing.map(|socket| AbortOnDropHandle::new(tokio::spawn(reset_all(socket, REDIRECT))));
        // The agents have sessions with the successor, and end those with this server when they are told that it stops. They are
        // told at different times: thousands of sessions that end at once would delay connections.
        let agents_leave = async {
            if another {
                drain.shutdown().forced_token().run_until_cancelled(sessions.none()).await;
            }
        };
        let patience = told_within(sessions.count(), drain_timeout);
        let (drained, _) = tokio::join!(
            drain.finish(drain_timeout, metrics.end_quiet()),
            tokio::time::timeout(patience, agents_leave),
        );
        stop.cancel();
        let closed = async {
            if let Some(agent_port) = &self.agent_port {
                agent_port.closed().await;
            }
            tasks.wait().await;
            // Without the redirect a reset may find no way to its client.
            drain.ended().await;
        };
        if tokio::time::timeout(CLOSING, closed).await.is_err() {
            tracing::debug!("links or tasks did not end in time");
        }
        if let Some(redirect) = redirect {
            tokio::task::spawn_blocking(move || redirect.stop()).await.context("stopping the redirect")?;
        }
        // No rule routes connections here any more.
        drop(refusing);
        tracing::info!(%drained, "stopped");
        Ok(())
    }
}
