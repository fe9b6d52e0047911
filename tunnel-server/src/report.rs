//! Assembles the status from the parts that know.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tunnel_core::admin;
use tunnel_core::identity::NodeName;
use tunnel_core::lifecycle::Readiness;

use crate::inventory::SourceStatus;
use crate::metrics::Metrics;
use crate::redirect::Redirect;
use crate::route::Router;
use crate::session::{Session, Sessions};
use crate::status::{
    DoorStatus, InventoryStatus, NodeStatus, ProgramStatus, RedirectState, RedirectStatus, SessionStatus,
    StatusReport,
};

/// The agents' door, whose connections are tunnels.
pub const AGENTS: &str = "agents";

/// Tells about the source of the nodes.
pub type SourceReport = Box<dyn Fn() -> SourceStatus + Send + Sync>;

/// Knows everybody who knows a part of the status. Clones share it.
#[derive(Clone)]
pub struct Reporter(Arc<Parts>);

struct Parts {
    server_id: String,
    started: Instant,
    readiness: Readiness,
    sessions: Arc<Sessions>,
    router: Arc<Router>,
    source: SourceReport,
    metrics: Metrics,
    redirect: Option<Arc<Redirect>>,
    doors: Mutex<Vec<(&'static str, SocketAddr)>>,
}

impl Reporter {
    /// Without doors.
    pub fn new(
        server_id: &str,
        readiness: &Readiness,
        sessions: &Arc<Sessions>,
        router: &Arc<Router>,
        source: SourceReport,
        metrics: &Metrics,
        redirect: Option<Arc<Redirect>>,
    ) -> Self {
        Self(Arc::new(Parts {
            server_id: server_id.to_owned(),
            started: Instant::now(),
            readiness: readiness.clone(),
            sessions: Arc::clone(sessions),
            router: Arc::clone(router),
            source,
            metrics: metrics.clone(),
            redirect,
            doors: Mutex::default(),
        }))
    }

    /// Shows a door from now on.
    pub fn door(&self, name: &'static str, address: SocketAddr) {
        self.0.doors.lock().unwrap_or_else(PoisonError::into_inner).push((name, address));
    }

    /// For the admin endpoints.
    pub fn status(&self) -> Arc<admin::Status> {
        let reporter = self.clone();
        Arc::new(move || {
            let report = reporter.report();
            serde_json::to_value(report)
                .unwrap_or_else(|error| serde_json::json!({ "error": error.to_string() }))
        })
    }

    /// The status at this moment.
    pub fn report(&self) -> StatusReport {
        let parts = &self.0;
        let snapshot = parts.router.snapshot();
        StatusReport {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            server_id: parts.server_id.clone(),
            uptime_s: parts.started.elapsed().as_secs(),
            ready: parts.readiness.is_ready(),
            pending: parts.readiness.names(),
            nodes: parts.nodes(),
            doors: parts.doors(),
            redirect: parts.redirect(),
            inventory: InventoryStatus {
                source: (parts.source)(),
                conflicts: snapshot.conflicts().iter().map(Into::into).collect(),
            },
        }
    }
}

impl Parts {
    fn nodes(&self) -> Vec<NodeStatus> {
        let mut live: HashMap<NodeName, Arc<Session>> =
            self.sessions.all().into_iter().map(|session| (session.node.clone(), session)).collect();
        let snapshot = self.router.snapshot();
        let mut nodes: Vec<NodeStatus> = snapshot
            .nodes()
            .map(|node| {
                let session = live.remove(&node.name);
                self.node(node.name.clone(), node.addresses.clone(), true, session.as_deref())
            })
            .collect();
        nodes.extend(
            live.into_iter().map(|(name, session)| self.node(name, Vec::new(), false, Some(&session))),
        );
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        nodes
    }

    fn node(
        &self,
        name: NodeName,
        addresses: Vec<IpAddr>,
        in_inventory: bool,
        session: Option<&Session>,
    ) -> NodeStatus {
        NodeStatus {
            addresses,
            in_inventory,
            connected: session.is_some(),
            session: session.map(|session| SessionStatus {
                peer: session.peer,
                epoch: session.epoch,
                since_s: session.since.elapsed().as_secs(),
                rtt_ms: session.rtt.last().map(|rtt| rtt.as_secs_f64() * 1e3),
                agent_version: session.agent_version.clone(),
                connections: session.connections.load(Ordering::Relaxed),
                stalled: session.stalls.blocked(),
                bytes_to_node: session.carried.from_socket.get(),
                bytes_from_node: session.carried.to_socket.get(),
            }),
            last_seen_s: self.sessions.last_seen(&name).map(|ago| ago.as_secs()),
            name,
        }
    }

    fn doors(&self) -> Vec<DoorStatus> {
        let doors = self.doors.lock().unwrap_or_else(PoisonError::into_inner);
        doors
            .iter()
            .map(|(name, address)| {
                let (active, accepted) = if *name == AGENTS {
                    (self.sessions.all().len() as u64, None)
                } else {
                    let active = u64::try_from(self.metrics.active_at(name)).unwrap_or_default();
                    (active, Some(self.metrics.ended_at(name) + active))
                };
                DoorStatus {
                    name: (*name).to_owned(),
                    address: *address,
                    connections_active: active,
                    accepted,
                }
            })
            .collect()
    }

    fn redirect(&self) -> RedirectStatus {
        let Some(redirect) = &self.redirect else { return RedirectStatus::default() };
        let health = redirect.health();
        let desired = self.router.desired();
        let counters = redirect.counters();
        let reason =
            health.problem.or(health.stale).or_else(|| counters.as_ref().err().map(ToString::to_string));
        RedirectStatus {
            state: if reason.is_some() { RedirectState::Degraded } else { RedirectState::On },
            reason,
            mended: health.restored,
            counters: counters
                .unwrap_or_default()
                .into_iter()
                .map(|(name, count)| (name.to_owned(), count))
                .collect(),
            routes: desired.routes.len(),
            routes_down: desired.routes.values().filter(|target| !target.up).count(),
            excluded: desired.excluded.len(),
            programs: redirect
                .program_info()
                .into_iter()
                .map(|program| ProgramStatus {
                    name: program.hook.to_owned(),
                    instructions: program.verified_instructions,
                })
                .collect(),
        }
    }
}
