//! Checks that hold for a fleet at all times, and how long each may take after a disturbance.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hasher as _};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use tokio::runtime::Handle;
use tokio::time::Instant;
use tunnel_runtime::NodeName;

use crate::agent;
use crate::fleet::{Fleet, Host};
use crate::server::Server;
use crate::view::View;

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
/// A silent server is given up after 2.5 s and twice the last round trip, which are looked at every 0.5 s, and after what was
/// still on its way. A round trip may have been measured across an outage of up to a second.
const SILENCE: Duration = Duration::from_millis(5500);
/// The other servers know of a session after so long.
const KNOWN: Duration = Duration::from_millis(500);

/// Nothing has happened for so long.
const QUIET: Duration = Duration::from_secs(10);

/// State of the checks of one run.
pub(crate) struct Model {
    begin: Instant,
    /// The time by which each pair of hosts has to be linked.
    due: BTreeMap<(Host, Host), Instant>,
    nodes: Vec<NodeName>,
    servers: usize,
    /// The highest epoch of each node at each process of a server.
    epochs: BTreeMap<((usize, usize), usize), u64>,
    patience: Duration,
    /// As it was seen last.
    view: View,
    /// When something happened last.
    noted: Instant,
    trace: DefaultHasher,
}

impl Model {
    pub(crate) fn new(fleet: &Fleet) -> Self {
        Self {
            begin: Instant::now(),
            due: BTreeMap::new(),
            nodes: (0..fleet.plan.agents).filter_map(|index| agent::node(index).ok()).collect(),
            servers: fleet.plan.servers,
            epochs: BTreeMap::new(),
            patience: fleet.plan.patience.max(ATTACHES),
            view: View::default(),
            noted: Instant::now(),
            trace: DefaultHasher::new(),
        }
    }

    /// Time after the last event until the fleet is as at first.
    pub(crate) fn settles(&self) -> Duration {
        self.patience + Duration::from_secs(10)
    }

    pub(crate) fn note(&mut self, what: &str) {
        let line = format!("{:9.3} {what}", self.begin.elapsed().as_secs_f64());
        self.trace.write(line.as_bytes());
        self.noted = Instant::now();
        tracing::info!("{line}");
    }

    pub(crate) fn is_quiet(&self) -> bool {
        self.noted.elapsed() > QUIET
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
            None => {
                (0..self.servers).map(Host::Server).chain((0..self.nodes.len()).map(Host::Agent)).collect()
            }
        };
        for other in others {
            let servers = matches!((host, other), (Host::Server(_), Host::Server(_)));
            self.within(host, other, if servers { LINKS } else { self.patience });
        }
    }

    /// Agents cannot attach for this time.
    pub(crate) fn excused(&mut self, lasts: Duration) {
        for agent in 0..self.nodes.len() {
            for server in 0..self.servers {
                self.within(Host::Agent(agent), Host::Server(server), lasts + self.patience);
            }
        }
    }

    /// A server has a successor.
    pub(crate) fn upgraded(&mut self, server: usize) {
        for index in 0..self.servers {
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
        let view = View::of(fleet, &self.nodes);
        if view != self.view {
            self.note(&view.to_string());
            self.view = view;
        }
        for (index, server) in fleet.servers.iter().enumerate() {
            let Some(server) = server else { continue };
            self.sessions(server)?;
            self.attached(fleet, index, server)?;
            self.known(fleet, index, server)?;
            self.given_up(fleet, index, server)?;
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
            let highest = self.epochs.entry((server.process, agent)).or_default();
            let (epoch, node) = (session.epoch, &session.node);
            ensure!(epoch >= *highest, "{}: {node} has epoch {epoch} after {highest}", server.id);
            *highest = epoch;
        }
        Ok(())
    }

    /// Agents are attached, and both ends mean the same session.
    fn attached(&self, fleet: &Fleet, index: usize, server: &Server) -> Result<()> {
        let Some(seen) = &self.view.servers[index] else { return Ok(()) };
        for (number, node) in self.nodes.iter().enumerate() {
            let Some(agent) = &self.view.agents[number] else { continue };
            if !self.is_due(fleet, Host::Server(index), Host::Agent(number)) {
                continue;
            }
            let (here, there) = (seen.epochs[number], agent.epochs[index]);
            ensure!(
                here.is_some() && here == there,
                "{node} is not attached to {}: its session is {there:?}, the server's {here:?}",
                server.id
            );
        }
        Ok(())
    }

    /// A server that does not answer is given up: another one may have its nodes as well.
    fn given_up(&self, fleet: &Fleet, index: usize, server: &Server) -> Result<()> {
        let Some(seen) = &self.view.servers[index] else { return Ok(()) };
        for other in &seen.linked {
            let silence = fleet.silence_between(Host::Server(index), Host::Server(*other));
            ensure!(
                silence.is_none_or(|lasts| lasts < SILENCE),
                "{} is linked with server-{other}, which is silent for {SILENCE:?}",
                server.id
            );
        }
        Ok(())
    }

    /// The other servers know whom this one has.
    fn known(&self, fleet: &Fleet, index: usize, server: &Server) -> Result<()> {
        for (other, follower) in fleet.servers.iter().enumerate() {
            let (Some(follower), Some(seen)) = (follower, &self.view.servers[other]) else { continue };
            if other == index || !self.is_due(fleet, Host::Server(index), Host::Server(other)) {
                continue;
            }
            for session in server.sessions.all() {
                let Some(node) = self.nodes.iter().position(|node| *node == session.node) else { continue };
                ensure!(
                    session.since.elapsed() < KNOWN || seen.holders[node].contains(&server.process),
                    "{} does not know that {} has {}",
                    follower.id,
                    server.id,
                    session.node
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
