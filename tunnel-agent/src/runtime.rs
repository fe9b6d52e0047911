//! The handles that most parts of the agent work with.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use arc_swap::ArcSwap;
use ipnet::IpNet;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tunnel_runtime::lifecycle::{Readiness, Shutdown};

use crate::config::Config;
use crate::handover::Handover;
use crate::metrics::Metrics;
use crate::places::Places;
use crate::policy::Policy;

/// Made once, and cloned whole.
#[derive(Clone)]
pub struct Runtime {
    pub config: Arc<Config>,
    pub started: Instant,
    pub metrics: Metrics,
    pub places: Places,
    pub policy: Arc<Policy>,
    /// This node's addresses, as reported to the servers.
    pub addresses: watch::Sender<Arc<Vec<IpAddr>>>,
    /// Address ranges of this node's pods.
    pub pods: Arc<ArcSwap<Vec<IpNet>>>,
    pub readiness: Readiness,
    pub handover: Handover,
    /// Draining: accept nothing new and finish the open connections. Forced: end everything.
    pub shutdown: Shutdown,
    /// Cancelled when the time of the drain is over: servers are asked to end the connections that are left.
    pub ending: CancellationToken,
    /// Everything that the drain waits for.
    pub tasks: TaskTracker,
}

impl Runtime {
    pub fn new(config: Config, places: Places, metrics: Metrics) -> Self {
        let (addresses, pods) = (watch::Sender::default(), Arc::<ArcSwap<_>>::default());
        let (targets, admin) = (config.given.targets.clone(), config.given.admin_address);
        Self {
            policy: Arc::new(Policy::new(targets, admin, addresses.subscribe(), pods.clone())),
            config: Arc::new(config),
            started: Instant::now(),
            metrics,
            places,
            addresses,
            pods,
            readiness: Readiness::default(),
            handover: Handover::default(),
            shutdown: Shutdown::default(),
            ending: CancellationToken::new(),
            tasks: TaskTracker::new(),
        }
    }
}

/// A runtime with these flags, on a node with a loopback address.
#[cfg(test)]
pub(crate) fn of_flags(flags: &[&str]) -> Runtime {
    let config = crate::config::tests::config(flags).unwrap();
    let metrics = Metrics::new(&mut prometheus_client::registry::Registry::default());
    let runtime = Runtime::new(config, Places::new(1024, 1 << 30), metrics);
    runtime.addresses.send_replace(Arc::new(vec![IpAddr::from([127, 0, 0, 1])]));
    runtime
}
