//! The servers to connect to: from `--server`, or found through the API server.

use std::sync::Arc;

use kube::Client;
use tokio::sync::watch;
use tunnel_kube::{ClientSettings, connect_lasting};
use tunnel_runtime::config::{ConfigError, HostPort};
use tunnel_runtime::lifecycle::ReadyGuard;

use crate::config::Config;
use crate::kube::discover::Discovery;

pub(crate) struct Servers {
    /// None when standalone.
    pub(crate) api: Option<Client>,
    given: watch::Sender<Arc<Vec<HostPort>>>,
    found: Option<Discovery>,
}

impl Servers {
    /// Makes a client of the API server if one is configured, and looks for the servers there unless they are given.
    ///
    /// # Errors
    /// The kubeconfig cannot be used.
    pub(crate) async fn open(config: &Config) -> Result<Self, ConfigError> {
        let given = watch::Sender::new(Arc::new(config.servers.clone()));
        let Some(options) = config.kube.clone() else { return Ok(Self { api: None, given, found: None }) };
        let (kubeconfig, namespace) = (options.kubeconfig, options.namespace);
        let (api, _) = connect_lasting(kubeconfig, namespace, ClientSettings::AGENT).await?;
        let find = || Discovery::start(api.clone(), &options.service, &config.given.state_dir);
        let found = config.servers.is_empty().then(find);
        Ok(Self { api: Some(api), given, found })
    }

    /// The servers known at each moment. Empty until the first are found.
    pub(crate) fn known(&self) -> watch::Receiver<Arc<Vec<HostPort>>> {
        self.found.as_ref().map_or_else(|| self.given.subscribe(), Discovery::servers)
    }

    /// Reason why the known servers may be out of date.
    pub(crate) fn trouble(&self) -> Option<String> {
        self.found.as_ref().and_then(Discovery::trouble)
    }

    /// Becomes ready once any server is known.
    pub(crate) async fn ready_once_known(self: Arc<Self>, pending: ReadyGuard) {
        if self.known().wait_for(|servers| !servers.is_empty()).await.is_ok() {
            pending.ready();
        }
    }
}
