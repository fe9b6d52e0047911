//! Checks of what is written to the cluster.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tokio::time::Instant;

use super::{Model, Process};
use crate::fleet::{Fleet, Host};
use crate::server::Server;
use crate::view::OfServer;

/// One writes after so long: a Lease lasts for 15 s, others look at it every 3 s, and pause for 10 s after a request that fails,
/// which takes 4 s.
const LEADS: Duration = Duration::from_secs(40);
/// A node's condition is as its leader sees the node after so long: an agent that a server has never seen has 30 s, one that was
/// last at a server out of reach 60 s; a failed write is tried again within 30 s.
const WRITTEN: Duration = Duration::from_secs(100);
/// A process knows which Nodes there are after so long: it watches them again at most 30 s after a failure.
pub(super) const LISTED: Duration = Duration::from_secs(60);
/// An agent has a certificate so long after one leads: it reads every two minutes whether its request is answered, and pauses for at
/// most a minute after a failure.
pub(super) const ENROLS: Duration = Duration::from_secs(120 + 60);
/// One writes, and has written the conditions of the nodes that are up: those wait for no server out of reach.
pub(super) const SETTLES: Duration = Duration::from_secs(140);

/// State of these checks.
pub(super) struct Told {
    /// Processes that go on and reach the API server, with the time since when.
    able: BTreeMap<Process, Instant>,
    /// Time since which no process leads.
    leaderless: Option<Instant>,
    /// The process that writes and reaches the API server, and since when.
    leader: Option<(Process, Instant)>,
    /// True for each node that it has a way to, and since when.
    ways: Vec<(bool, Instant)>,
    /// Agents without a certificate, and since when the API server and a leader could give them one.
    enrolling: BTreeMap<usize, Instant>,
    /// Agents without a Node, and since when.
    deleted: BTreeMap<usize, Instant>,
    /// True once a Node was deleted: a server that does not reach the API server may refuse its agent for longer.
    deletes: bool,
}

impl Told {
    pub(super) fn new(nodes: usize) -> Self {
        let ways = vec![(false, Instant::now()); nodes];
        Self {
            able: BTreeMap::new(),
            leaderless: None,
            leader: None,
            ways,
            enrolling: BTreeMap::new(),
            deleted: BTreeMap::new(),
            deletes: false,
        }
    }
}

impl Model {
    /// The Node of an agent is deleted.
    pub(crate) fn deleted(&mut self, agent: usize) {
        self.told.deleted.insert(agent, Instant::now());
        self.told.deletes = true;
    }

    /// It is made again.
    pub(crate) fn made(&mut self, agent: usize) {
        self.told.deleted.remove(&agent);
        for server in 0..self.servers {
            // Its certificate is older than the Node.
            self.within(Host::Agent(agent), Host::Server(server), LISTED + ENROLS + self.patience);
        }
    }

    /// A server may reach the API server again, or all do.
    pub(crate) fn reached(&mut self, server: Option<usize>) {
        if !self.told.deletes {
            return;
        }
        for server in (0..self.servers).filter(|index| server.is_none_or(|server| server == *index)) {
            for agent in 0..self.nodes.len() {
                self.within(Host::Agent(agent), Host::Server(server), LISTED + self.patience);
            }
        }
    }

    /// True if the server may not know the Nodes yet. While it has no file with those of an earlier process either, it waits.
    pub(super) fn may_not_know_nodes(&self, fleet: &Fleet, server: usize) -> bool {
        let knows = |process: &OfServer| {
            self.told.able.get(&process.process).is_some_and(|able| able.elapsed() >= LISTED)
        };
        fleet.cluster.is_some() && !self.view.servers[server].iter().any(knows)
    }

    /// True if the server may refuse the agent. A session of one that has no Node fails.
    pub(super) fn may_refuse(&self, fleet: &Fleet, server: usize, agent: usize) -> Result<bool> {
        let Some(cluster) = fleet.cluster.as_ref().filter(|_| self.told.deletes) else { return Ok(false) };
        let Some(since) = self.told.deleted.get(&agent) else { return Ok(!cluster.is_reached_by(server)) };
        for seen in self.view.servers[server].iter().filter(|seen| seen.epochs[agent].is_some()) {
            let able = self.told.able.get(&seen.process);
            ensure!(
                able.is_none_or(|able| (*able).max(*since).elapsed() < LISTED),
                "server-{server} has a session of {}, which has had no Node for {LISTED:?}",
                self.nodes[agent]
            );
        }
        Ok(true)
    }

    /// At most one process writes to the cluster, soon one does, and what it writes is true.
    pub(super) fn told(&mut self, fleet: &Fleet) -> Result<()> {
        let Some(cluster) = &fleet.cluster else { return Ok(()) };
        let all = || fleet.servers.iter().flatten();
        let able = |server: &Server| {
            server.goes_on() && server.is_settled() && cluster.is_reached_by(server.process.0)
        };
        let known = std::mem::take(&mut self.told.able);
        let since = |process: Process| known.get(&process).copied().unwrap_or_else(Instant::now);
        self.told.able = all()
            .filter(|server| able(server))
            .map(|server| (server.process, since(server.process)))
            .collect();
        let leading: Vec<_> = all().filter(|server| server.leads()).collect();
        ensure!(
            leading.len() <= 1,
            "{} write to the cluster",
            leading.iter().map(|server| server.id.as_str()).collect::<Vec<_>>().join(" and ")
        );
        let Some(leader) = leading.first() else {
            let since = *self.told.leaderless.get_or_insert_with(Instant::now);
            let waits = |at: &Instant| since.max(*at).elapsed() > LEADS;
            ensure!(
                !self.told.able.values().any(waits),
                "no process has led for {LEADS:?}; {:?} has the Lease",
                cluster.holder()
            );
            self.told.leader = None;
            return Ok(());
        };
        self.told.leaderless = None;
        if !cluster.is_reached_by(leader.process.0) {
            self.told.leader = None;
            return Ok(());
        }
        let since = match self.told.leader {
            Some((process, since)) if process == leader.process => since,
            _ => Instant::now(),
        };
        self.told.leader = Some((leader.process, since));
        let mut processes = self.view.servers[leader.process.0].iter();
        let Some(seen) = processes.find(|one| one.process == leader.process) else { return Ok(()) };
        for (number, (node, way)) in self.nodes.iter().zip(&mut self.told.ways).enumerate() {
            let has = seen.reaches(number);
            if way.0 != has || self.told.deleted.contains_key(&number) {
                *way = (has, Instant::now());
            }
            if since.max(way.1).elapsed() > WRITTEN {
                let (condition, wanted) = (cluster.condition(node), if has { "True" } else { "False" });
                ensure!(
                    condition.as_deref() == Some(wanted),
                    "{} has said {condition:?} of {node} for {WRITTEN:?}, not {wanted}",
                    leader.id
                );
            }
        }
        Ok(())
    }

    /// An agent without a certificate gets one.
    pub(super) fn enrolled(&mut self, fleet: &Fleet) -> Result<()> {
        let Some(cluster) = &fleet.cluster else { return Ok(()) };
        let may = self.told.leader.is_some() && cluster.is_reached_by_nodes();
        for (index, processes) in self.view.agents.iter().enumerate() {
            if !may || processes.is_empty() || processes.iter().any(|process| process.enrolled) {
                self.told.enrolling.remove(&index);
                continue;
            }
            let since = *self.told.enrolling.entry(index).or_insert_with(Instant::now);
            ensure!(since.elapsed() < ENROLS, "{} has had no certificate for {ENROLS:?}", self.nodes[index]);
        }
        Ok(())
    }

    /// At the end one process writes, and all nodes have tunnels.
    pub(super) fn all_is_told(&self, fleet: &Fleet) -> Result<()> {
        let Some(cluster) = &fleet.cluster else { return Ok(()) };
        let (leader, _) = self.told.leader.context("no process leads")?;
        for node in &self.nodes {
            let condition = cluster.condition(node);
            ensure!(condition.as_deref() == Some("True"), "{leader:?} says {condition:?} of {node}");
        }
        Ok(())
    }
}
