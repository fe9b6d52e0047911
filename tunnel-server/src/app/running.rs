//! The server while it serves, and how it stops.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::watch;
use tunnel_runtime::admin::Serving;
use tunnel_runtime::config::HostPort;

use crate::agent_port::{AgentPort, Handover};
use crate::pki::{KnownNodes, ServerCertificate};
use crate::runtime::Runtime;
use crate::runtime::settings::Settings;
use crate::takeover::{Before, Succession};

/// Time for links and tasks to end once nothing is relayed any more.
const CLOSING: Duration = Duration::from_secs(3);

/// Channels between parts of the server.
pub(super) struct Said {
    pub(super) settings: watch::Sender<Arc<Settings>>,
    /// The other servers.
    pub(super) peers: watch::Sender<Arc<BTreeSet<HostPort>>>,
    /// The nodes that may attach.
    pub(super) known_nodes: watch::Sender<Option<Arc<KnownNodes>>>,
    pub(super) handover: watch::Sender<Handover>,
    /// False while a successor does what one server alone may do.
    pub(super) eligible: watch::Sender<bool>,
}

impl Said {
    /// `peers`: the other servers at the start.
    pub(super) fn new(peers: BTreeSet<HostPort>) -> Self {
        Self {
            settings: watch::Sender::default(),
            peers: watch::Sender::new(Arc::new(peers)),
            known_nodes: watch::Sender::default(),
            handover: watch::Sender::default(),
            eligible: watch::Sender::new(true),
        }
    }
}

pub(super) struct Running {
    pub(super) runtime: Runtime,
    /// None: this is a redirector.
    pub(super) agent_port: Option<Arc<AgentPort>>,
    pub(super) succession: Arc<Succession>,
    pub(super) before: Before,
    // Held to the end: dropping these ends what they keep going.
    pub(super) _certificate: Option<Arc<ServerCertificate>>,
    pub(super) _said: Said,
    pub(super) admin: Option<Serving>,
}

impl Running {
    /// Waits for the connections in flight, then ends links and tasks and, last, the redirect.
    pub(super) async fn stop(mut self, drain_timeout: Duration) -> anyhow::Result<()> {
        let Runtime { redirect, drain, metrics, tasks, stop, readiness, .. } = self.runtime;
        let _stopping = readiness.pending("stopping");
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
        let drained = drain.finish(drain_timeout, metrics.end_quiet()).await;
        stop.cancel();
        let closed = async {
            if let Some(agent_port) = &self.agent_port {
                agent_port.closed().await;
            }
            tasks.wait().await;
        };
        if tokio::time::timeout(CLOSING, closed).await.is_err() {
            tracing::debug!("links or tasks did not end in time");
        }
        if let Some(redirect) = redirect {
            tokio::task::spawn_blocking(move || redirect.stop()).await.context("stopping the redirect")?;
        }
        tracing::info!(%drained, "stopped");
        Ok(())
    }
}
