//! Checks of nodes that are revoked, and readmitted.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use tokio::time::Instant;
use tunnel_runtime::NodeName;

use super::cluster::{ENROLS, LISTED};
use super::twins::{RETURNS, STAYS_AWAY};
use super::{GONE, Model, Process};
use crate::fleet::{Fleet, Host};
use crate::plan::Plan;
use crate::server::{self, Server};

/// A server that knows of a revocation has ended the node's sessions after so long.
const ENDS: Duration = Duration::from_millis(200);
/// Limit while the agent does not answer or its server is taken over: three notices to the agent come first, each of which
/// waits two seconds for the answer.
const ENDS_UNHEARD: Duration = Duration::from_millis(200 + 3 * 2000);
/// A server knows what another one knows, or what was said on its host, after so long, and the time until it reads
/// that.
const SPREADS: Duration = Duration::from_secs(2);

/// In a cluster an agent asks for another certificate, which the leader may deny: it does not know yet that the node
/// is readmitted. The agent asks again after ten minutes.
const DENIED: Duration = Duration::from_secs(600);

/// State of these checks.
#[derive(Default)]
pub(super) struct Shut {
    /// How often servers read which nodes are revoked.
    reads: Duration,
    /// Time after which an agent has a session with a server that knows that it is readmitted.
    returns: Duration,
    /// The nodes that were revoked.
    said: BTreeMap<usize, Said>,
    /// Processes of servers that know of a node that it is revoked, and since when.
    known: BTreeMap<(Process, usize), Instant>,
    /// Agents that believe that they have a session with such a server, and since when.
    believe: BTreeMap<(usize, usize), Instant>,
    /// Servers that could know what was said of a node last, and since when.
    could: BTreeMap<(usize, usize), Instant>,
}

/// The last revocation or readmission of a node.
struct Said {
    /// It is revoked, not readmitted.
    revoked: bool,
    /// On the host of this server, unless there is an API server.
    server: usize,
    at: Instant,
}

impl Shut {
    pub(super) fn new(plan: &Plan) -> Self {
        Self { reads: plan.reads.unwrap_or_default(), returns: returns(plan), ..Self::default() }
    }

    fn spreads(&self) -> Duration {
        // A record that is learnt of another server is read from a file as well.
        self.reads + SPREADS
    }
}

fn returns(plan: &Plan) -> Duration {
    RETURNS + if plan.has_api { LISTED + DENIED + ENROLS } else { Duration::ZERO }
}

/// Time after which a node that was readmitted has sessions with all servers: those that do not know it yet refuse
/// its agent.
pub(super) fn settles(plan: &Plan) -> Duration {
    let servers = u32::try_from(plan.servers).unwrap_or(u32::MAX);
    plan.reads.map_or(Duration::ZERO, |reads| (reads + SPREADS) * servers + returns(plan))
}

impl Model {
    /// A node is revoked on the host of a server.
    pub(crate) fn revoked(&mut self, agent: usize, server: usize) {
        self.shut.said.insert(agent, Said { revoked: true, server, at: Instant::now() });
    }

    /// It is readmitted there, and its agent has started again with another certificate.
    pub(crate) fn readmitted(&mut self, agent: usize) {
        if let Some(said) = self.shut.said.get_mut(&agent) {
            (said.revoked, said.at) = (false, Instant::now());
        }
        for server in 0..self.servers {
            // Of the servers that do not know it yet, see below.
            self.within(Host::Agent(agent), Host::Server(server), self.shut.returns + self.patience);
        }
    }

    /// True if the server may refuse the node.
    pub(super) fn is_shut_out(&self, server: usize, agent: usize) -> bool {
        let knows =
            |((process, node), _): (&(Process, usize), &Instant)| process.0 == server && *node == agent;
        self.shut.said.get(&agent).is_some_and(|said| said.revoked) || self.shut.known.iter().any(knows)
    }

    /// A server that knows that a node is revoked has no session of it, and soon all servers know it.
    pub(super) fn shut(&mut self, fleet: &Fleet) -> Result<()> {
        if fleet.plan.reads.is_none() {
            return Ok(());
        }
        let now = Instant::now();
        let mut known = BTreeMap::new();
        for process in fleet.servers.iter().flatten() {
            let shuts_out = |node: &NodeName| process.says(node) == Some(true);
            for (agent, node) in self.nodes.iter().enumerate().filter(|(_, node)| shuts_out(node)) {
                let key = (process.process, agent);
                let since = self.shut.known.get(&key).copied().unwrap_or(now);
                known.insert(key, since);
                if let Some(session) = process.runtime.sessions.get(node) {
                    let (index, host) = (process.process.0, Host::Agent(agent));
                    let heard = fleet.silence_between(Host::Server(index), host).is_none()
                        && process.is_settled()
                        && fleet.servers[index].len() == 1;
                    ensure!(
                        since.elapsed() < if heard { ENDS } else { ENDS_UNHEARD } && session.since <= since,
                        "{} has a session of {node}, {:?} after it knew that this is revoked",
                        process.id,
                        since.elapsed()
                    );
                }
            }
        }
        let before = std::mem::replace(&mut self.shut.known, known);
        // Its agent may just have been refused for the last time.
        let readmits: BTreeSet<_> = before
            .keys()
            .filter(|key| !self.shut.known.contains_key(key))
            .map(|key| (key.0.0, key.1))
            .collect();
        for (server, agent) in readmits {
            self.within(Host::Agent(agent), Host::Server(server), self.shut.returns + self.patience);
        }
        self.believes()?;
        self.spreads(fleet)?;
        self.stays_away(fleet)
    }

    /// An agent that is shut out notices it. At each attempt it has a session for a moment, until it is refused.
    fn believes(&mut self) -> Result<()> {
        let before = std::mem::take(&mut self.shut.believe);
        for (process, agent) in self.shut.known.keys() {
            let key = (process.0, *agent);
            if self.view.agents[*agent].iter().any(|process| process.attached[key.0]) {
                let since = before.get(&key).copied().unwrap_or_else(Instant::now);
                ensure!(
                    since.elapsed() < GONE + SPREADS,
                    "{} believes that it has a session with server-{}, which shuts it out",
                    self.nodes[*agent],
                    key.0
                );
                self.shut.believe.insert(key, since);
            }
        }
        Ok(())
    }

    /// A server on whose host it was said that a node is revoked, or readmitted, knows it, and so does each that is linked with
    /// one that knows it. In a cluster servers believe each other only the former, and the API server both.
    fn spreads(&mut self, fleet: &Fleet) -> Result<()> {
        let mut could = BTreeMap::new();
        for (agent, said) in &self.shut.said {
            let knows = |server: &Server| server.says(&self.nodes[*agent]) == Some(said.revoked);
            for index in 0..self.servers {
                let tells = |other: usize| {
                    other != index
                        && (said.revoked || fleet.cluster.is_none())
                        && self.goes_on(other)
                        && self.is_due(fleet, Host::Server(index), Host::Server(other))
                        && fleet.server(other).is_some_and(knows)
                };
                let said_here = match &fleet.cluster {
                    None => index == said.server,
                    Some(_) => !self.may_not_know_nodes(fleet, index),
                };
                if !said_here && !(0..self.servers).any(tells) {
                    continue;
                }
                let since = self.shut.could.get(&(index, *agent)).copied().unwrap_or_else(Instant::now);
                let since = since.max(said.at);
                could.insert((index, *agent), since);
                let ignorant = fleet.servers[index].iter().find(|server| server.goes_on() && !knows(server));
                if let Some(server) = ignorant.filter(|_| since.elapsed() >= self.shut.spreads()) {
                    let what = if said.revoked { "revoked" } else { "readmitted" };
                    bail!("{} does not know that {} is {what}", server.id, self.nodes[*agent]);
                }
            }
        }
        self.shut.could = could;
        Ok(())
    }

    /// An agent that is refused dials rarely.
    fn stays_away(&self, fleet: &Fleet) -> Result<()> {
        for ((process, agent), known) in &self.shut.known {
            let Some(since) = self.calm_since(fleet, process.0, *agent) else { continue };
            let dials = fleet.net.dials(Host::Agent(*agent).address(), server::address(process.0));
            if let [Some(last), Some(before)] = dials
                && before > since.max(*known)
            {
                ensure!(
                    last - before >= STAYS_AWAY[0],
                    "{} dials server-{}, which shuts it out, {:?} after it has done so",
                    self.nodes[*agent],
                    process.0,
                    last - before
                );
            }
        }
        Ok(())
    }
}
