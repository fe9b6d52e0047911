//! Checks of two agents of one node: a disk was copied, and both run. A server keeps the session that came last, and
//! the agent that lost it comes back with its old epoch, after a pause. So they do not take turns.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::time::Instant;
use tunnel_server::session::Session;

use super::{GONE, Model, Process};
use crate::fleet::{Fleet, Host};
use crate::plan::Plan;
use crate::server::{self, Server};

/// An agent that was replaced dials again after at least and at most so long.
pub(super) const STAYS_AWAY: [Duration; 2] = [Duration::from_secs(60), Duration::from_secs(120)];
/// An agent has the sessions of the other one after so long, once that one is gone: the server may notice it just
/// after the agent has dialled and was refused.
pub(super) const RETURNS: Duration = Duration::from_secs(GONE.as_secs() + STAYS_AWAY[1].as_secs());

/// State of these checks.
#[derive(Default)]
pub(super) struct Twins {
    /// Nodes that have two agents.
    now: BTreeSet<usize>,
    /// Nodes that have had two, and until when a session of the second one may be left.
    ever: BTreeMap<usize, Option<Instant>>,
    /// When what has happened to a server, to a node's agents or to a path between them has no consequences any more.
    calm: BTreeMap<(usize, usize), Instant>,
    /// Nothing has happened to this server and this node since the node's second agent came.
    undisturbed: BTreeSet<(usize, usize)>,
    /// The epoch of the session that each process of a server had when it was seen last, and when.
    seen: BTreeMap<(Process, usize), (u64, Instant)>,
}

impl Twins {
    /// Something has happened between a server and an agent, which has consequences until then.
    pub(super) fn happened(&mut self, one: Host, other: Host, until: Instant) {
        if let (Host::Server(server), Host::Agent(agent) | Host::Twin(agent))
        | (Host::Agent(agent) | Host::Twin(agent), Host::Server(server)) = (one, other)
        {
            let calm = self.calm.entry((server, agent)).or_insert(until);
            *calm = (*calm).max(until);
            self.undisturbed.remove(&(server, agent));
        }
    }

    /// The second agents.
    pub(super) fn hosts(&self) -> Vec<Host> {
        self.now.iter().copied().map(Host::Twin).collect()
    }

    pub(super) fn has(&self, agent: usize) -> bool {
        self.now.contains(&agent)
    }

    /// True if a server may have a session of a second agent of the node.
    fn may_be_left(&self, agent: usize) -> bool {
        self.ever.get(&agent).is_some_and(|until| until.is_none_or(|until| until > Instant::now()))
    }
}

/// Time for which one of two agents of a node may keep the other one out.
pub(super) fn settles(plan: &Plan) -> Duration {
    if plan.has_twins() { RETURNS } else { Duration::ZERO }
}

impl Model {
    /// A node has a second agent.
    pub(crate) fn doubled(&mut self, fleet: &Fleet, agent: usize) {
        let calm: Vec<_> = (0..self.servers).filter(|server| self.is_calm(fleet, *server, agent)).collect();
        self.twins.now.insert(agent);
        self.twins.ever.insert(agent, None);
        self.disturbed(Host::Twin(agent), None);
        self.twins.undisturbed.extend(calm.into_iter().map(|server| (server, agent)));
    }

    /// That agent goes.
    pub(crate) fn single(&mut self, agent: usize) {
        self.twins.now.remove(&agent);
        self.twins.ever.insert(agent, Some(Instant::now() + GONE));
    }

    /// Something is about to happen to an agent, or is over: if its node has another one, that one may take its
    /// sessions, and lose them again.
    pub(crate) fn contested(&mut self, host: Option<Host>) {
        let (agent, other) = match host {
            Some(Host::Agent(agent)) => (agent, Host::Twin(agent)),
            Some(Host::Twin(agent)) => (agent, Host::Agent(agent)),
            _ => return,
        };
        if !self.twins.ever.contains_key(&agent) {
            return;
        }
        for server in (0..self.servers).map(Host::Server) {
            let due = Instant::now() + RETURNS + self.patience;
            let before = self.due.entry((server, other)).or_insert(due);
            *before = (*before).max(due);
            self.twins.happened(server, other, Instant::now() + self.patience);
        }
    }

    /// Since when the server and the agents of the node have been left alone for long enough.
    pub(super) fn calm_since(&self, fleet: &Fleet, server: usize, agent: usize) -> Option<Instant> {
        let silent = |host| fleet.silence_between(Host::Server(server), host).is_some();
        let since = *self.twins.calm.get(&(server, agent))?;
        let calm = since < Instant::now()
            && !silent(Host::Agent(agent))
            && !silent(Host::Twin(agent))
            && self.goes_on(server)
            && self.view.servers[server].len() == 1
            && self.view.agents[agent].len() == 1;
        calm.then_some(since)
    }

    fn is_calm(&self, fleet: &Fleet, server: usize, agent: usize) -> bool {
        self.calm_since(fleet, server, agent).is_some()
    }

    /// A session of a node that has, or had, two agents: it belongs to one of them, and it follows a newer one only
    /// once that has ended. Returns false if the node has always had one agent.
    pub(super) fn of_two(&mut self, server: &Server, agent: usize, session: &Session) -> Result<bool> {
        if !self.twins.ever.contains_key(&agent) {
            return Ok(false);
        }
        let (node, peer) = (&session.node, session.peer.ip());
        let of_twin = peer == Host::Twin(agent).address();
        let own = peer == Host::Agent(agent).address() || (of_twin && self.twins.may_be_left(agent));
        ensure!(own, "{}: {node} is at {peer}", server.id);
        let now = Instant::now();
        let before = self.twins.seen.insert((server.process, agent), (session.epoch, now));
        if let Some((epoch, seen)) = before.filter(|(epoch, _)| *epoch > session.epoch) {
            let ended = server.runtime.sessions.last_end(node).is_some_and(|end| end.at >= seen);
            ensure!(
                ended || self.epochs_fall,
                "{}: {node} has epoch {} in the place of {epoch}",
                server.id,
                session.epoch
            );
        }
        if let Some((epoch, seen)) = before.filter(|(epoch, _)| *epoch != session.epoch) {
            let calm = self.twins.calm.get(&(server.process.0, agent)).is_some_and(|since| *since < seen);
            ensure!(
                !calm || !self.twins.has(agent),
                "{}: {node} has epoch {} after {epoch}, though nothing happens",
                server.id,
                session.epoch
            );
        }
        Ok(true)
    }

    /// Two agents of a node do not take turns, and the one that has no session with a server dials that rarely.
    pub(super) fn two(&self, fleet: &Fleet) -> Result<()> {
        for agent in &self.twins.now {
            for server in 0..self.servers {
                let Some(since) = self.calm_since(fleet, server, *agent) else { continue };
                let (node, to) = (&self.nodes[*agent], server::address(server));
                for host in [Host::Agent(*agent), Host::Twin(*agent)] {
                    if let [Some(last), Some(before)] = fleet.net.dials(host.address(), to)
                        && before > since
                    {
                        ensure!(
                            last - before >= STAYS_AWAY[0],
                            "{node} at {host:?} dials server-{server} {:?} after it has done so",
                            last - before
                        );
                    }
                }
                if self.twins.undisturbed.contains(&(server, *agent)) {
                    let newest = self.view.servers[server].iter().any(|seen| seen.of_twin[*agent]);
                    ensure!(newest, "server-{server} does not have the session of {node} that came last");
                }
            }
        }
        Ok(())
    }
}
