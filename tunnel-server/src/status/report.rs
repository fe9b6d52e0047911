//! Reads the status from the parts of the running server.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tunnel_routing::inventory::{DEFAULT_KUBELET_PORT, InventoryNode};
use tunnel_runtime::NodeName;
use tunnel_runtime::admin;

use super::model::{
    FailureStatus, FailuresStatus, InventoryStatus, LinkStatus, ListenerStatus, NodeStatus, PeerStatus,
    PodsWay, RedirectState, RedirectStatus, SessionStatus, StatusReport,
};
use crate::inventory::SourceStatus;
use crate::runtime::Runtime;
use crate::runtime::role::Role;
use crate::session::{Link, Session};

/// The agent port's name among the listeners. What it accepts are links, so its connections are the sessions.
pub const AGENTS: &str = "agents";

impl LinkStatus {
    fn of(link: &Link) -> Self {
        let flow = &link.flow;
        let limits = flow.limits();
        Self {
            number: link.number,
            connections: link.connections(),
            rtt_ms: flow.rtt.last().map(milliseconds),
            delivery_rate: flow.rate(),
            retransmits: flow.retransmits(),
            window_limited: limits.map(|limits| limits.receive_window),
            buffer_limited: limits.map(|limits| limits.send_buffer),
            window: flow.window(),
        }
    }
}

impl SessionStatus {
    fn of(session: &Session) -> Self {
        Self {
            peer: session.peer,
            epoch: session.epoch,
            since_s: session.since.elapsed().as_secs(),
            rtt_ms: session.links.rtt().map(milliseconds),
            agent_version: session.agent_version.clone(),
            links: session.links.all().iter().map(|link| LinkStatus::of(link)).collect(),
            connections: session.links.connections(),
            stalled: session.stalls.blocked(),
            bytes_to_node: session.relayed.from_socket.get(),
            bytes_from_node: session.relayed.to_socket.get(),
        }
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Reports on the source of the nodes.
pub type SourceReport = Box<dyn Fn() -> SourceStatus + Send + Sync>;

/// The parts of the server that the status is read from.
pub struct Reporter {
    pub runtime: Runtime,
    pub role: Role,
    pub started: Instant,
    pub source: SourceReport,
    /// Names and addresses of the listeners.
    pub listeners: Vec<(&'static str, SocketAddr)>,
}

impl Reporter {
    /// The answer of `/status`, computed on each request.
    pub fn into_status(self) -> Arc<admin::Status> {
        Arc::new(move || admin::to_json(&self.report()))
    }

    fn report(&self) -> StatusReport {
        let snapshot = self.runtime.router.snapshot();
        StatusReport {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            server_id: self.runtime.server_id.clone(),
            role: self.role,
            uptime_s: self.started.elapsed().as_secs(),
            ready: self.runtime.readiness.is_ready(),
            pending: self.runtime.readiness.names(),
            nodes: self.nodes(),
            listeners: self.listeners(),
            peers: self.peers(),
            redirect: self.redirect(),
            failures: self.failures(),
            inventory: InventoryStatus {
                source: (self.source)(),
                conflicts: snapshot.conflicts().iter().map(Into::into).collect(),
            },
        }
    }

    fn nodes(&self) -> Vec<NodeStatus> {
        let sessions = self.runtime.sessions.all();
        let snapshot = self.runtime.router.snapshot();
        let known = snapshot.nodes().map(|node| (node.name.clone(), (Some(node), None)));
        let mut nodes: BTreeMap<NodeName, (Option<&InventoryNode>, _)> = known.collect();
        for session in sessions {
            let name = session.node.clone();
            nodes.entry(name).or_default().1 = Some(session);
        }
        nodes.into_iter().map(|(name, (known, live))| self.node(name, known, live.as_deref())).collect()
    }

    fn node(&self, name: NodeName, known: Option<&InventoryNode>, session: Option<&Session>) -> NodeStatus {
        let end = self.runtime.sessions.last_end(&name);
        let leaving = self.runtime.sessions.leaving_of(&name);
        NodeStatus {
            addresses: known.map(|node| node.addresses.clone()).unwrap_or_default(),
            kubelet_port: known.map_or(DEFAULT_KUBELET_PORT, |node| node.kubelet_port),
            in_inventory: known.is_some(),
            connected: session.is_some(),
            via: self.runtime.peers.holders(&name).iter().map(|peer| peer.server_id.clone()).collect(),
            session: session.map(SessionStatus::of),
            leaving: leaving.iter().map(|session| SessionStatus::of(session)).collect(),
            last_seen_s: end.as_ref().map(|end| end.at.elapsed().as_secs()),
            last_end: end.and_then(|end| end.reason.map(|reason| reason.to_string())),
            name,
        }
    }

    fn peers(&self) -> Vec<PeerStatus> {
        let mut peers: Vec<_> = self
            .runtime
            .peers
            .all()
            .iter()
            .map(|peer| PeerStatus {
                server_id: peer.server_id.clone(),
                version: peer.version.clone(),
                address: peer.address.clone(),
                since_s: peer.since.elapsed().as_secs(),
                rtt_ms: peer.links.rtt().map(milliseconds),
                draining: peer.is_draining(),
                nodes: peer.nodes().len(),
                connections: peer.links.connections(),
                bytes_to_node: peer.relayed.from_socket.get(),
                bytes_from_node: peer.relayed.to_socket.get(),
            })
            .collect();
        peers.sort_by(|a, b| a.server_id.cmp(&b.server_id));
        peers
    }

    fn listeners(&self) -> Vec<ListenerStatus> {
        self.listeners
            .iter()
            .map(|(name, address)| {
                let (active, accepted) = if *name == AGENTS {
                    (self.runtime.sessions.all().len() as u64, None)
                } else {
                    let active = u64::try_from(self.runtime.metrics.active_at(name)).unwrap_or_default();
                    (active, Some(self.runtime.metrics.ended_at(name) + active))
                };
                ListenerStatus {
                    name: (*name).to_owned(),
                    address: *address,
                    connections_active: active,
                    accepted,
                }
            })
            .collect()
    }

    fn failures(&self) -> Vec<FailuresStatus> {
        let hops = self.runtime.metrics.failures.all().into_iter();
        hops.map(|(hop, failures)| FailuresStatus {
            hop: hop.as_str().to_owned(),
            count: failures.count,
            recent: failures
                .recent
                .into_iter()
                .map(|failure| FailureStatus {
                    ago_s: failure.at.elapsed().as_secs(),
                    listener: failure.listener.to_owned(),
                    client: failure.client,
                    node: failure.node,
                    destination: failure.destination,
                    outcome: failure.outcome.as_str().to_owned(),
                    detail: failure.detail,
                })
                .collect(),
        })
        .collect()
    }

    fn redirect(&self) -> RedirectStatus {
        let Some(redirect) = &self.runtime.redirect else { return RedirectStatus::default() };
        let health = redirect.health();
        let desired = self.runtime.router.desired();
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
            routes: desired.table.routes.len(),
            routes_down: desired.routes().filter(|(_, target)| !target.up).count(),
            excluded: desired.table.excluded.len(),
            ports: desired.ports.iter().copied().collect(),
            clients: desired.table.clients.iter().copied().collect(),
            programs: [],
            not_pinned: redirect.not_pinned.clone(),
            pods: if redirect.routed { PodsWay::Route } else { PodsWay::Connect },
            not_by_route: redirect.not_routed.clone(),
        }
    }
}
