//! What must hold of a fleet at any time, and how soon after which disturbance.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hasher as _};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use tokio::runtime::Handle;
use tokio::time::Instant;
use tunnel_runtime::NodeName;

use crate::agent;
use crate::fleet::{Fleet, Host};
use crate::server::{self, Server};

/// An agent has a session with a server after so long without disturbance: at most a pause after failures (15 s), and what an
/// agent takes to notice that a link is silent (`--keepalive` and its answer).
const ATTACHES: Duration = Duration::from_secs(32);
/// The same after an upgrade of that server.
const MOVES: Duration = Duration::from_secs(3);
/// Servers are linked after so long without disturbance: at most a pause after failures (5 s), and the time after which a
/// silent link is given up (2.5 s).
const LINKS: Duration = Duration::from_secs(12);
/// The same after an upgrade of the other server: it is dialled at once.
const LINKS_AGAIN: Duration = Duration::from_millis(1500);
/// A silent server is given up after 2.5 s, which are looked at every 0.5 s, and after what was still on its way.
const SILENCE: Duration = Duration::from_millis(3500);
/// The other servers know of a session after so long.
const KNOWN: Duration = Duration::from_millis(500);

/// What is known of the fleet so far.
pub(crate) struct Model {
    begin: Instant,
    /// The time by which each pair of hosts has to be linked.
    due: BTreeMap<(Host, Host), Instant>,
    nodes: Vec<NodeName>,
    /// The highest epoch of each node at each process of a server.
    epochs: BTreeMap<(String, usize), u64>,
    patience: Duration,
    state: String,
    trace: DefaultHasher,
}

impl Model {
    pub(crate) fn new(fleet: &Fleet) -> Self {
        Self {
            begin: Instant::now(),
            due: BTreeMap::new(),
            nodes: (0..fleet.plan.agents).filter_map(|index| agent::node(index).ok()).collect(),
            epochs: BTreeMap::new(),
            patience: fleet.plan.patience.max(ATTACHES),
            state: String::new(),
            trace: DefaultHasher::new(),
        }
    }

    /// Time after the last event until the fleet is as at first.
    pub(crate) fn settles(&self) -> Duration {
        self.patience + Duration::from_secs(30)
    }

    pub(crate) fn note(&mut self, what: &str) {
        let line = format!("{:9.3} {what}", self.begin.elapsed().as_secs_f64());
        self.trace.write(line.as_bytes());
        tracing::info!("{line}");
    }

    /// A hash of everything that was seen.
    pub(crate) fn trace(&self) -> u64 {
        self.trace.finish()
    }

    fn within(&mut self, one: Host, other: Host, time: Duration) {
        let due = self.due.entry((one.min(other), one.max(other))).or_insert_with(Instant::now);
        *due = (*due).max(Instant::now() + time);
    }

    /// A path is back, or a host. `None`: with every other host.
    pub(crate) fn disturbed(&mut self, host: Host, with: Option<Host>) {
        let others: Vec<Host> = match with {
            Some(other) => vec![other],
            None => (0..8).map(Host::Server).chain((0..self.nodes.len()).map(Host::Agent)).collect(),
        };
        for other in others {
            let servers = matches!((host, other), (Host::Server(_), Host::Server(_)));
            self.within(host, other, if servers { LINKS } else { self.patience });
        }
    }

    /// Agents cannot attach for this time.
    pub(crate) fn excused(&mut self, lasts: Duration) {
        for agent in 0..self.nodes.len() {
            for server in 0..8 {
                self.within(Host::Agent(agent), Host::Server(server), lasts + self.patience);
            }
        }
    }

    /// A server has a successor.
    pub(crate) fn upgraded(&mut self, server: usize) {
        for index in 0..8 {
            self.within(Host::Server(server), Host::Server(index), LINKS_AGAIN);
        }
        for index in 0..self.nodes.len() {
            self.within(Host::Server(server), Host::Agent(index), MOVES);
        }
    }

    fn is_due(&self, fleet: &Fleet, one: Host, other: Host) -> bool {
        let due = self.due.get(&(one.min(other), one.max(other)));
        fleet.silence_between(one, other).is_none() && due.is_some_and(|due| *due <= Instant::now())
    }

    /// Checks what must hold now.
    pub(crate) fn look(&mut self, fleet: &Fleet) -> Result<()> {
        let state = shown(fleet, &self.nodes);
        if state != self.state {
            self.note(&state);
            self.state = state;
        }
        for (index, server) in fleet.servers.iter().enumerate() {
            let Some(server) = server else { continue };
            self.sessions(server)?;
            self.attached(fleet, index, server)?;
            self.known(fleet, index, server)?;
            Self::given_up(fleet, index, server)?;
        }
        Ok(())
    }

    /// One session for each node, by the node itself, and never an older one after a newer one.
    fn sessions(&mut self, server: &Server) -> Result<()> {
        for session in server.sessions.all() {
            let Some(agent) = self.nodes.iter().position(|node| *node == session.node) else {
                bail!("{} has a session of {}", server.id, session.node);
            };
            let host = agent::host(agent);
            ensure!(session.peer.ip() == host, "{}: {} is at {}", server.id, session.node, session.peer);
            let highest = self.epochs.entry((server.id.clone(), agent)).or_default();
            let (epoch, node) = (session.epoch, &session.node);
            ensure!(epoch >= *highest, "{}: {node} has epoch {epoch} after {highest}", server.id);
            *highest = epoch;
        }
        Ok(())
    }

    /// Agents are attached, and both ends mean the same session.
    fn attached(&self, fleet: &Fleet, index: usize, server: &Server) -> Result<()> {
        for (number, node) in self.nodes.iter().enumerate() {
            let Some(agent) = &fleet.agents[number] else { continue };
            if !self.is_due(fleet, Host::Server(index), Host::Agent(number)) {
                continue;
            }
            let (here, there) = (server.epoch(node), agent.epoch(index));
            ensure!(
                here.is_some() && here == there,
                "{node} is not attached to {}: its session is {there:?}, the server's {here:?}",
                server.id
            );
        }
        Ok(())
    }

    /// A server that does not answer is given up: another one may have its nodes as well.
    fn given_up(fleet: &Fleet, index: usize, server: &Server) -> Result<()> {
        for other in 0..fleet.servers.len() {
            let silence = fleet.silence_between(Host::Server(index), Host::Server(other));
            let address = server::address(other).to_string();
            let linked = || server.peers.all().iter().any(|peer| peer.address == address);
            ensure!(
                silence.is_none_or(|lasts| lasts < SILENCE) || !linked(),
                "{} is linked with server-{other}, which is silent for {SILENCE:?}",
                server.id
            );
        }
        Ok(())
    }

    /// The other servers know whom this one has.
    fn known(&self, fleet: &Fleet, index: usize, server: &Server) -> Result<()> {
        for (other, follower) in fleet.servers.iter().enumerate() {
            let Some(follower) = follower else { continue };
            if other == index || !self.is_due(fleet, Host::Server(index), Host::Server(other)) {
                continue;
            }
            for session in server.sessions.all() {
                let node = &session.node;
                let knows = || follower.peers.holders(node).iter().any(|peer| peer.server_id == server.id);
                ensure!(
                    session.since.elapsed() < KNOWN || knows(),
                    "{} does not know that {} has {node}",
                    follower.id,
                    server.id
                );
            }
        }
        Ok(())
    }

    /// Checks that nothing is left over.
    pub(crate) fn finish(&mut self, fleet: &Fleet) -> Result<()> {
        let (servers, agents) = (fleet.plan.servers, fleet.plan.agents);
        ensure!(
            fleet.leaving.iter().all(tokio::task::JoinHandle::is_finished),
            "a server has not handed over"
        );
        for agent in fleet.agents.iter().flatten() {
            let (tasks, links) = (agent.runtime.tasks.len(), agent.links.status().len());
            ensure!((tasks, links) == (servers, servers), "an agent has {tasks} tasks and {links} links");
        }
        for server in fleet.servers.iter().flatten() {
            let linked: Vec<_> = server.peers.all().iter().map(|peer| peer.server_id.clone()).collect();
            ensure!(linked.len() == servers - 1, "{} is linked with {linked:?}", server.id);
        }
        let open = fleet.net.open();
        let wanted = servers * agents + servers * (servers - 1);
        ensure!(open.len() == wanted, "{} connections instead of {wanted}: {open:?}", open.len());
        self.note(&format!("{} tasks", Handle::current().metrics().num_alive_tasks()));
        Ok(())
    }
}

/// What can be seen of the fleet.
fn shown(fleet: &Fleet, nodes: &[NodeName]) -> String {
    let mut text = String::new();
    for server in fleet.servers.iter().flatten() {
        // A string takes everything.
        let _ = write!(text, "{}{}[", server.id, if server.is_settled() { "" } else { "!" });
        for node in nodes {
            let epoch = server.epoch(node).map_or(0, |epoch| epoch % 1_000_000);
            let holders = server.peers.holders(node);
            let holders: Vec<_> =
                holders.iter().map(|peer| peer.server_id.trim_start_matches("server-")).collect();
            let _ = write!(text, " {epoch}/{}", holders.join("+"));
        }
        text.push_str(" ] ");
    }
    for (index, agent) in fleet.agents.iter().enumerate() {
        let Some(agent) = agent else { continue };
        let phases: Vec<_> = agent.links.status().iter().map(|link| format!("{:?}", link.phase)).collect();
        let _ = write!(text, "edge-{index}:{} ", phases.iter().map(|phase| &phase[..1]).collect::<String>());
    }
    let _ = write!(text, "{} open", fleet.net.open().len());
    text
}
