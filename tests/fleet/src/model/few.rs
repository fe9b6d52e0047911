//! Checks for agents that have sessions with some of the servers only.

use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::time::Instant;

use super::{ATTACHES, MOVES, Model};
use crate::fleet::{Fleet, Host};

/// An agent of a server that is killed has a session with another one after so long: a server may be restarting for one second,
/// and agents look each second.
const TAKES_OVER: Duration = Duration::from_secs(4);
/// A substitute is left after so long: the better servers must have served for 30 s.
pub(super) const LEAVES: Duration = Duration::from_secs(45);

impl Model {
    /// The path between an agent and a server becomes silent.
    pub(crate) fn silenced(&mut self, fleet: &Fleet, agent: usize, server: usize) {
        if fleet.plan.is_limited() {
            for other in (0..self.servers).filter(|other| *other != server) {
                self.within(Host::Agent(agent), Host::Server(other), ATTACHES);
            }
        }
    }

    /// A server is killed, while nothing else happens.
    pub(crate) fn killed(&mut self, fleet: &Fleet, server: usize) {
        if !fleet.plan.is_limited() || self.view.servers.iter().any(|processes| processes.len() != 1) {
            return;
        }
        for agent in 0..self.nodes.len() {
            let quiet =
                |server| self.is_due(fleet, Host::Agent(agent), Host::Server(server)) && self.goes_on(server);
            if self.view.agents[agent].len() == 1
                && (0..self.servers).all(quiet)
                && self.is_attached(agent, server)
            {
                self.promised[agent] = Some(Instant::now() + TAKES_OVER);
            }
        }
    }

    /// All processes of a server end: its agents may have to attach to other servers.
    pub(super) fn leaves(&mut self, server: usize) {
        for agent in 0..self.nodes.len() {
            self.within(Host::Server(server), Host::Agent(agent), TAKES_OVER + MOVES);
        }
    }

    /// Something else happens.
    pub(crate) fn promises_nothing(&mut self) {
        self.promised.fill(None);
    }

    /// An agent has as many sessions as it is to have, or with all servers that it can reach.
    pub(super) fn limited(&self, fleet: &Fleet) -> Result<()> {
        let now = Instant::now();
        for (agent, node) in self.nodes.iter().enumerate() {
            if self.view.agents[agent].is_empty() || self.moving[agent] > now {
                continue;
            }
            let reached = |server: &usize| {
                self.goes_on(*server)
                    && fleet.silence_between(Host::Server(*server), Host::Agent(agent)).is_none()
            };
            let reached: Vec<_> = (0..self.servers).filter(reached).collect();
            let attached = reached.iter().filter(|server| self.is_attached(agent, **server)).count();
            if self.promised[agent].is_some_and(|by| by <= now) {
                ensure!(attached > 0, "{node} has no session {TAKES_OVER:?} after its server was killed");
            }
            let settled = |server| self.is_settled(Host::Server(server), Host::Agent(agent));
            let wanted = fleet.plan.links.min(reached.len());
            ensure!(
                attached >= wanted || !(0..self.servers).all(settled),
                "{node} has {attached} sessions with servers {reached:?}, not {wanted}"
            );
        }
        Ok(())
    }

    /// True if both ends mean the same session.
    fn is_attached(&self, agent: usize, server: usize) -> bool {
        let mut here = self.view.servers[server].iter().filter_map(|process| process.epochs[agent]);
        here.any(|here| self.view.agents[agent].iter().any(|process| process.epochs[server] == Some(here)))
    }
}
