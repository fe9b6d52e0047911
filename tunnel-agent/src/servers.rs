//! The servers to connect to: from `--server`, or found through the API server.

use std::sync::Arc;

use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;
use tunnel_core::config::HostPort;
use tunnel_core::lifecycle::ReadyGuard;

use crate::config::Config;
use crate::kube::ApiServer;
use crate::kube::discover::Discovery;

pub(crate) enum Servers {
    Given(watch::Sender<Arc<Vec<HostPort>>>),
    Found(Discovery),
}

impl Servers {
    pub(crate) fn new(config: &Config, api: Option<&Arc<ApiServer>>) -> Self {
        match (api, &config.kube) {
            (Some(api), Some(kube)) if config.servers.is_empty() => {
                Self::Found(Discovery::start(api.clone(), &kube.service, &config.given.state_dir))
            }
            _ => Self::Given(watch::Sender::new(Arc::new(config.servers.clone()))),
        }
    }

    /// The servers known at each moment. Empty until the first are found.
    pub(crate) fn known(&self) -> watch::Receiver<Arc<Vec<HostPort>>> {
        match self {
            Self::Given(servers) => servers.subscribe(),
            Self::Found(discovery) => discovery.servers(),
        }
    }

    /// Reason why the known servers may be out of date.
    pub(crate) fn trouble(&self) -> Option<String> {
        match self {
            Self::Given(_) => None,
            Self::Found(discovery) => discovery.trouble(),
        }
    }

    /// Becomes ready once any server is known.
    pub(crate) fn ready_once_known(&self, pending: ReadyGuard) -> AbortOnDropHandle<()> {
        let mut known = self.known();
        AbortOnDropHandle::new(tokio::spawn(async move {
            if known.wait_for(|servers| !servers.is_empty()).await.is_ok() {
                pending.ready();
            }
        }))
    }
}
