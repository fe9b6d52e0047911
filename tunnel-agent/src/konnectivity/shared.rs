//! State shared by the streams with all servers.

use std::sync::Arc;
use std::sync::atomic::AtomicI64;

use tokio::sync::Semaphore;
use tunnel_link::konnectivity::Room;

use super::metrics::KonnectivityMetrics;
use crate::config::KonnectivityConfig;
use crate::dial::Dialler;
use crate::runtime::Runtime;

/// Maximum concurrent lookups of names. One that has missed its deadline counts until its threads end.
const LOOKUPS: usize = 128;

/// State shared by the streams with all servers.
pub struct Shared {
    pub(super) config: KonnectivityConfig,
    pub(super) runtime: Runtime,
    pub(super) dialler: Dialler,
    /// Limited to [`LOOKUPS`].
    pub(super) lookups: Arc<Semaphore>,
    /// Number of the last connection. A server identifies connections only by the agent's ID and this number, whichever
    /// stream they came by.
    pub(super) numbers: Arc<AtomicI64>,
    /// Bound of the bytes that wait for targets, over all servers.
    pub(super) room: Arc<Room>,
    pub(super) metrics: KonnectivityMetrics,
}

impl Shared {
    pub fn new(runtime: Runtime, config: KonnectivityConfig, metrics: KonnectivityMetrics) -> Self {
        Self {
            config,
            dialler: Dialler::new(&runtime),
            runtime,
            lookups: Arc::new(Semaphore::new(LOOKUPS)),
            numbers: first_number(),
            room: Arc::new(Room::of_process()),
            metrics,
        }
    }

    /// Identifiers by which servers choose agents: as given, or this node's name and addresses.
    pub(super) fn identifiers(&self) -> String {
        if let Some(given) = &self.config.identifiers {
            return given.clone();
        }
        let mut identifiers = format!("host={}", self.runtime.config.node_name);
        for address in self.runtime.addresses.borrow().iter() {
            let family = if address.is_ipv4() { "ipv4" } else { "ipv6" };
            identifiers += &format!("&{family}={address}");
        }
        identifiers
    }
}

/// Start of the connection numbers. Random, because another process with this agent's ID may still be attached.
fn first_number() -> Arc<AtomicI64> {
    const ROOM: i64 = 1 << 62;
    Arc::new(AtomicI64::new(rand::random_range(0..ROOM)))
}
