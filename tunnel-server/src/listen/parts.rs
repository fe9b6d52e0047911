//! The parts of the server that listeners are started with.

use std::sync::Arc;

use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tunnel_runtime::config::ConfigError;
use tunnel_runtime::reloaded::{FileMetrics, ReloadedFile};
use tunnel_runtime::takeover::Copies;

use super::callers::{CallerFiles, Callers, Followed, open};
use super::config::ListenersConfig;
use crate::admission::Shares;
use crate::agent_port::AgentPort;
use crate::caller::CallerTls;
use crate::listener::{
    self, Admission, ClusterServices, EgressSocket, EgressTls, Front, Listener, ListenerContext, Material,
    TargetTls,
};
use crate::maps::{Map, check, parse_file};
use crate::runtime::Runtime;
use crate::runtime::settings::Settings;
use crate::takeover::Gates;

/// The listeners' files. Each is read at start, which fails if the file is wrong, and followed from then on, with the
/// last good content in effect.
pub(crate) struct Files {
    pub(crate) callers: CallerFiles,
    pub(crate) targets: Followed<Material>,
    pub(crate) egress: Followed<EgressTls>,
    pub(crate) maps: Option<ReloadedFile<Vec<Map>>>,
}

impl Files {
    /// # Errors
    /// A file cannot be used, or a map in the file excludes another listener.
    pub(crate) fn open(config: &mut ListenersConfig, metrics: &FileMetrics) -> Result<Self, ConfigError> {
        let egress = config.egress.tls.as_ref().map(|tls| EgressTls::read(tls, metrics)).transpose()?;
        let targets = TargetTls::read(&config.listeners.targets, metrics)?;
        let callers = CallerFiles::open(config, metrics)?;
        let connect = &mut config.connect;
        let (maps, of_file) =
            open("--maps", "maps", connect.maps_file.as_deref(), parse_file, metrics)?.unzip();
        connect.maps_of_file = of_file.unwrap_or_default();
        check(&connect.all_maps()).map_err(|reason| ConfigError::without_value("--map", reason))?;
        config.check_addresses()?;
        Ok(Self { callers, targets, egress, maps })
    }
}

/// The parts that every listener is started with.
pub(crate) struct Parts<'a> {
    pub(crate) config: &'a ListenersConfig,
    pub(crate) runtime: &'a Runtime,
    pub(crate) registry: &'a Arc<Registry>,
    pub(crate) gates: &'a Gates,
    /// The listening sockets, for a successor.
    pub(crate) sockets: Arc<Copies>,
    pub(crate) callers: Callers,
    pub(crate) targets: Followed<Material>,
    /// The ConfigMap's ports.
    pub(crate) settings: watch::Receiver<Arc<Settings>>,
    pub(crate) maps: Option<ReloadedFile<Vec<Map>>>,
    /// For the egress listener, if it is to know them.
    pub(crate) services: Option<ClusterServices>,
    pub(crate) egress_socket: Option<EgressSocket>,
    pub(crate) egress: Followed<EgressTls>,
    /// None: the egress listener has no port.
    pub(crate) egress_tls: Option<CallerTls>,
    /// None: this is a redirector.
    pub(crate) agents: Option<Arc<AgentPort>>,
}

impl Parts<'_> {
    pub(super) fn context(&self) -> ListenerContext {
        self.callers.reception.context.clone()
    }

    /// Serves a socket. The drain waits for it to accept no more: it must not be over while what was accepted is not yet
    /// counted.
    pub(super) fn serve<D: Listener>(&self, listener: D, socket: TcpListener, shares: &Shares) {
        let served =
            listener::serve(listener, self.gates.listeners.guard(socket), self.context(), shares.clone());
        self.runtime.drain.spawn(served);
    }

    /// Makes a listener that speaks plain HTTP with clients and targets.
    pub(super) fn front(&self, listener: &'static str, admission: Admission) -> Front {
        let pods = self.callers.pods.clone();
        Front { listener, admission, tls: None, targets: None, pods, metrics: None }
    }
}
