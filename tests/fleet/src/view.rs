//! The visible state of a fleet. It is looked at ten times a second: nothing here makes text before something has changed.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use tunnel_agent::session::LinkPhase;
use tunnel_runtime::NodeName;
use tunnel_server::session::Session;

use crate::agent::{self, Agent, Sessions};
use crate::fleet::Fleet;
use crate::server::{self, Server};

#[derive(Default, PartialEq)]
pub(crate) struct View {
    /// The processes of each server, the oldest first.
    pub(crate) servers: Vec<Vec<OfServer>>,
    /// The processes of each agent likewise.
    pub(crate) agents: Vec<Vec<OfAgent>>,
    /// The second agents of nodes.
    pub(crate) twins: BTreeMap<usize, OfAgent>,
    open: usize,
}

/// State of a server, by node.
#[derive(PartialEq)]
pub(crate) struct OfServer {
    pub(crate) process: (usize, usize),
    pub(crate) is_settled: bool,
    pub(crate) accepts: bool,
    pub(crate) goes_on: bool,
    /// It writes to the cluster.
    leads: bool,
    pub(crate) epochs: Vec<Option<u64>>,
    /// True where the session is that of the node's second agent.
    pub(crate) of_twin: Vec<bool>,
    /// Processes of other servers that have the node.
    pub(crate) holders: Vec<Vec<(usize, usize)>>,
    /// Servers that it is linked with.
    pub(crate) linked: Vec<usize>,
}

/// A process of an agent, and its links, by server.
#[derive(PartialEq)]
pub(crate) struct OfAgent {
    process: usize,
    stage: (bool, bool, bool),
    /// It has an identity.
    pub(crate) enrolled: bool,
    phases: Vec<LinkPhase>,
    /// True for each server that it takes itself to be attached to.
    pub(crate) attached: Vec<bool>,
    /// Of its session, where it is attached.
    pub(crate) epochs: Vec<Option<u64>>,
}

impl View {
    pub(crate) fn of(fleet: &Fleet, nodes: &[NodeName]) -> Self {
        let servers = fleet.servers.iter();
        let servers =
            servers.map(|processes| processes.iter().map(|server| OfServer::of(server, nodes)).collect());
        let of = |agent: &Agent| OfAgent::of(agent, fleet);
        let agents = fleet.agents.iter().map(|processes| processes.iter().map(of).collect());
        let twins = fleet.twins.iter().map(|(index, twin)| (*index, of(twin)));
        let (agents, twins) = (agents.collect(), twins.collect());
        Self { servers: servers.collect(), agents, twins, open: fleet.net.open().len() }
    }

    /// The process of a server that has the clients' connections, or the latest one.
    pub(crate) fn server(&self, index: usize) -> Option<&OfServer> {
        let processes = &self.servers[index];
        processes.iter().rev().find(|server| server.accepts).or(processes.last())
    }
}

impl OfServer {
    /// True if the process, or another server that it knows of, has the node.
    pub(crate) fn reaches(&self, node: usize) -> bool {
        self.epochs[node].is_some() || !self.holders[node].is_empty()
    }

    fn of(server: &Server, nodes: &[NodeName]) -> Self {
        let holders = |node| {
            let holders = server.runtime.peers.holders(node);
            holders.iter().filter_map(|peer| server::process(&peer.server_id)).collect()
        };
        let sessions: Vec<_> = nodes.iter().map(|node| server.runtime.sessions.get(node)).collect();
        let of_twin = |(index, session): (usize, &Option<Arc<Session>>)| {
            session.as_ref().is_some_and(|session| session.peer.ip() == agent::twin(index))
        };
        let linked = server.runtime.peers.all();
        Self {
            process: server.process,
            is_settled: server.is_settled(),
            accepts: server.accepts(),
            goes_on: server.goes_on(),
            leads: server.leads(),
            epochs: sessions.iter().map(|session| session.as_ref().map(|session| session.epoch)).collect(),
            of_twin: sessions.iter().enumerate().map(of_twin).collect(),
            holders: nodes.iter().map(holders).collect(),
            linked: linked.iter().filter_map(|peer| Some(server::process(&peer.server_id)?.0)).collect(),
        }
    }
}

impl OfAgent {
    fn of(agent: &Agent, fleet: &Fleet) -> Self {
        let mut seen = Self {
            process: agent.process,
            stage: agent.stage(),
            enrolled: true,
            phases: Vec::new(),
            attached: vec![false; fleet.plan.servers],
            epochs: vec![None; fleet.plan.servers],
        };
        match &agent.sessions {
            Sessions::Links(running) => {
                seen.enrolled = running.get().is_some();
                for link in running.get().map(|running| running.links.status()).unwrap_or_default() {
                    seen.phases.push(link.phase);
                    if link.phase == LinkPhase::Attached
                        && let Some(index) = server::index(&link.address)
                    {
                        seen.attached[index] = true;
                        seen.epochs[index] = Some(link.epoch);
                    }
                }
            }
            Sessions::OfKonnectivity(streams) => {
                for stream in streams.status().attached.iter().filter(|stream| !stream.draining) {
                    seen.phases.push(LinkPhase::Attached);
                    let Some(process) = server::process(&stream.server_id) else { continue };
                    seen.attached[process.0] = true;
                    // The agent does not know the session's number.
                    let server = fleet.servers[process.0].iter().find(|server| server.process == process);
                    let epoch = server.and_then(|server| server.epoch(&agent.runtime.config.node_name));
                    seen.epochs[process.0] = seen.epochs[process.0].max(epoch);
                }
            }
        }
        seen
    }

    /// The first letters of its links' phases.
    fn letters(&self) -> String {
        self.phases.iter().filter_map(|phase| format!("{phase:?}").chars().next()).collect()
    }

    /// How far a takeover is.
    pub(crate) fn stage(&self) -> (usize, (bool, bool, bool)) {
        (self.process, self.stage)
    }
}

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for server in self.servers.iter().flatten() {
            let (index, process) = server.process;
            let settled = if server.is_settled { "" } else { "!" };
            let accepts = if server.accepts { "+" } else { "" };
            let leads = if server.leads { "*" } else { "" };
            write!(f, "server-{index}.{process}{accepts}{settled}{leads}[")?;
            for ((epoch, of_twin), holders) in server.epochs.iter().zip(&server.of_twin).zip(&server.holders)
            {
                let twin = if *of_twin { "'" } else { "" };
                write!(f, " {}{twin}/", epoch.map_or(0, |epoch| epoch % 1_000_000))?;
                let holders: Vec<_> =
                    holders.iter().map(|(index, process)| format!("{index}.{process}")).collect();
                f.write_str(&holders.join("+"))?;
            }
            f.write_str(" ] ")?;
        }
        for (index, agent) in self.agents.iter().enumerate() {
            for process in agent {
                write!(f, "edge-{index}.{}:{} ", process.process, process.letters())?;
            }
        }
        for (index, twin) in &self.twins {
            write!(f, "edge-{index}':{} ", twin.letters())?;
        }
        write!(f, "{} open", self.open)
    }
}
