//! Three servers that know each other and four agents behind NAT, the faults put into them, and their recovery.
use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use postern_testbed::agent::{self, Agent};
use postern_testbed::inventory::Inventory;
use postern_testbed::netns::Namespace;
use postern_testbed::process::Process;
use postern_testbed::server::{Builder, Server};
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, NEIGHBOUR, Testbed, maps};

use super::felt::Felt;
use super::load::{Addresses, Client, Way};
use super::nodes::Nodes;
use super::plan::{Change, Fault};
use super::rotation::Rotation;
use super::stream::{Load, Patience, Wrong};
use crate::common::THIRD;
use crate::held::{ALLOCATOR, Held, of_process};

pub(super) const SERVERS: usize = 3;
pub(super) const EDGES: usize = 4;
/// Time limit for recovery after the last fault has ended. A silent link is given up after 22 s, and the next attempt
/// follows up to ten seconds later; a server that waits for missing agents takes over after ten.
const WORKS: Duration = Duration::from_secs(75);
/// Pause before a program that ended by itself is started again (`RestartSec=`).
const RESTART: Duration = Duration::from_secs(1);
/// Time limit for a program to end after its stop signal.
const ENDS: Duration = Duration::from_secs(30);

/// Number of servers with which each agent has a session; edge 2 knows only the second server.
const SESSIONS: [usize; EDGES] = [3, 1, 1, 2];

pub(super) struct Fleet<'a> {
    testbed: &'a Testbed,
    hosts: [(&'a Namespace, Ipv4Addr); SERVERS],
    servers: Vec<Server<'a>>,
    agents: Vec<Agent<'a>>,
    /// Programs that successors are taking over from.
    replaced: Vec<Replaced<'a>>,
    /// Names of the programs that are meant to be dead now.
    down: BTreeSet<String>,
    /// Servers started since the last time without faults. A fault may hit one before it can end properly: it may have
    /// no signal handlers yet, or fail to bind its ports.
    young: BTreeSet<usize>,
    nodes: Nodes,
    rotation: Rotation,
    clients: Vec<Client>,
    felt: Felt,
    /// Number of restarts of programs that had ended by themselves, as by an init system.
    pub(super) restarts: usize,
    /// Earliest time of the next restart.
    next_restart: Instant,
}

enum Replaced<'a> {
    Server { server: Server<'a>, young: bool },
    Agent(Agent<'a>),
}

impl Replaced<'_> {
    fn process(&mut self) -> &mut Process {
        match self {
            Self::Server { server, .. } => &mut server.process,
            Self::Agent(agent) => &mut agent.process,
        }
    }

    fn is_young(&self) -> bool {
        matches!(self, Self::Server { young: true, .. })
    }
}

impl<'a> Fleet<'a> {
    /// Starts everything. `others` are the hosts of the second and the third server.
    pub(super) async fn start(testbed: &'a Testbed, others: [&'a Namespace; SERVERS - 1]) -> Result<Self> {
        let hosts = [(&testbed.cloud, CLOUD), (others[0], NEIGHBOUR), (others[1], THIRD)];
        let all = hosts.map(|(_, address)| format!("{address}:10262")).join(",");
        let prepare = |builder: Builder<'a>| {
            builder.envs(ALLOCATOR).flag(format!("--peers={all}")).flag("--drain-timeout=8s")
        };
        let first = prepare(Builder::new(testbed)).start().await?;
        let second = prepare(Builder::sharing_ca(&first, others[0], NEIGHBOUR, "neighbour")?).start().await?;
        let third = prepare(Builder::sharing_ca(&first, others[1], THIRD, "third")?).start().await?;
        let servers = vec![first, second, third];
        let mut agents = Vec::new();
        for (at, (flags, enrols)) in
            [(vec![], 0), (vec![], 1), (vec!["--max-servers=1"], 0), (vec!["--max-servers=2"], 0)]
                .into_iter()
                .enumerate()
        {
            let others = servers.iter().enumerate().filter(|(other, _)| at != 1 && *other != enrols);
            let others = others.map(|(_, server)| format!("--server={}", server.agent_address()));
            let builder = agent::Builder::new(&servers[enrols], at + 1).envs(ALLOCATOR);
            let builder =
                others.chain(flags.iter().map(ToString::to_string)).fold(builder, agent::Builder::flag);
            agents.push(builder.token(servers[enrols].token(&testbed.edge(at + 1).name)?).spawn()?);
        }
        let addresses = Arc::new(Addresses::of(testbed));
        let mut clients = Vec::new();
        for (at, edge) in testbed.edges().iter().enumerate() {
            let ways = [
                Way::Redirect(addresses.clone()),
                Way::RedirectV6(edge.address_v6.into()),
                Way::Listener(others[0].clone(), NEIGHBOUR),
                Way::Listener(others[1].clone(), THIRD),
            ];
            clients.extend(ways.map(|way| Client { edge: at, name: edge.name.clone(), way }));
        }
        let nodes = Nodes::new(Inventory::of(testbed)?, addresses);
        Ok(Self {
            testbed,
            hosts,
            servers,
            agents,
            replaced: Vec::new(),
            down: BTreeSet::new(),
            young: BTreeSet::new(),
            nodes,
            rotation: Rotation::default(),
            clients,
            felt: Felt::default(),
            restarts: 0,
            next_restart: Instant::now(),
        })
    }

    pub(super) fn clients(&self) -> &[Client] {
        &self.clients
    }

    /// Returns the faults that may still be felt.
    pub(super) fn felt(&self) -> &Felt {
        &self.felt
    }

    pub(super) async fn apply(&mut self, change: Change) -> Result<()> {
        match change {
            Change::Begins(fault) => {
                self.felt.begins(fault);
                self.begin(fault).await
            }
            Change::Ends(fault) => self.end(fault).await,
        }
        .with_context(|| format!("{change:?}"))
    }

    async fn begin(&mut self, fault: Fault) -> Result<()> {
        match fault {
            Fault::ServerKilled(at) => {
                self.down.insert(server_name(at));
                kill(&mut self.servers[at].process).await
            }
            Fault::ServerStopped(at) => {
                self.down.insert(server_name(at));
                signal(&mut self.servers[at].process, Signal::SIGTERM)
            }
            Fault::ServerFrozen(at) => signal(&mut self.servers[at].process, Signal::SIGSTOP),
            Fault::ServersApart(one, other) => self.part("-I", one, other),
            Fault::AgentKilled(at) => {
                self.down.insert(agent_name(at));
                kill(&mut self.agents[at].process).await
            }
            Fault::AgentFrozen(at) => signal(&mut self.agents[at].process, Signal::SIGSTOP),
            Fault::LinkCut(at) => self.testbed.cut_link(at + 1),
            Fault::Unlabelled(at) => self.nodes.change(self.testbed, |nodes| nodes.unlabelled.insert(at)),
            Fault::Impostor(at) => self.nodes.change(self.testbed, |nodes| nodes.impostors.insert(at)),
            Fault::Crowd => {
                self.nodes.change(self.testbed, |nodes| std::mem::replace(&mut nodes.crowd, true))
            }
            Fault::ServerUpgraded(at) => {
                let next = self.servers[at].successor()?;
                let (server, young) =
                    (std::mem::replace(&mut self.servers[at], next), !self.young.insert(at));
                self.replaced.push(Replaced::Server { server, young });
                Ok(())
            }
            Fault::SuccessorDies(at, after) => {
                let mut successor = self.servers[at].successor()?;
                tokio::time::sleep(Duration::from_millis(after)).await;
                kill(&mut successor.process).await
            }
            Fault::AgentUpgraded(at) => {
                let next = self.agents[at].successor()?;
                self.replaced.push(Replaced::Agent(std::mem::replace(&mut self.agents[at], next)));
                Ok(())
            }
            Fault::AddressChanged(at) => self.nodes.move_edge(self.testbed, at),
            Fault::MappingsForgotten => self.testbed.forget_mappings(),
            Fault::CaRotated => self.rotation.step(&self.servers[0], &self.agents),
        }
    }

    async fn end(&mut self, fault: Fault) -> Result<()> {
        match fault {
            Fault::ServerKilled(at) => self.start_again(at)?,
            Fault::ServerStopped(at) => {
                let status = self.servers[at].process.wait_exit(ENDS).await?;
                let fine = status.code() == Some(0) || self.young.contains(&at);
                ensure!(fine, "told to stop, it ended with {status}");
                self.start_again(at)?;
            }
            Fault::ServerFrozen(at) => signal(&mut self.servers[at].process, Signal::SIGCONT)?,
            Fault::ServersApart(one, other) => self.part("-D", one, other)?,
            Fault::AgentKilled(at) => self.agents[at].start_again()?,
            Fault::AgentFrozen(at) => signal(&mut self.agents[at].process, Signal::SIGCONT)?,
            Fault::LinkCut(at) => self.testbed.restore_link(at + 1)?,
            Fault::Unlabelled(at) => self.nodes.change(self.testbed, |nodes| nodes.unlabelled.remove(&at))?,
            Fault::Impostor(at) => self.nodes.change(self.testbed, |nodes| nodes.impostors.remove(&at))?,
            Fault::Crowd => self.nodes.change(self.testbed, |nodes| std::mem::take(&mut nodes.crowd))?,
            Fault::ServerUpgraded(_)
            | Fault::SuccessorDies(..)
            | Fault::AgentUpgraded(_)
            | Fault::AddressChanged(_)
            | Fault::MappingsForgotten
            | Fault::CaRotated => {}
        }
        if let Fault::ServerKilled(at) | Fault::ServerStopped(at) = fault {
            self.down.remove(&server_name(at));
        }
        if let Fault::AgentKilled(at) = fault {
            self.down.remove(&agent_name(at));
        }
        Ok(())
    }

    fn part(&self, change: &str, one: usize, other: usize) -> Result<()> {
        let ((here, near), (there, far)) = (self.hosts[one], self.hosts[other]);
        here.iptables(&format!("{change} INPUT -s {far} -j DROP"))?;
        there.iptables(&format!("{change} INPUT -s {near} -j DROP"))
    }

    /// Restarts programs that ended by themselves, as an init system does: a server that had handed over to a successor
    /// that then died, and one that could not bind ports that its predecessor still held.
    pub(super) fn supervise(&mut self) -> Result<()> {
        let restarts = self.restarts;
        if Instant::now() >= self.next_restart {
            self.restart_dead()?;
        }
        if self.restarts > restarts {
            self.next_restart = Instant::now() + RESTART;
        }
        self.forget_replaced()
    }

    fn start_again(&mut self, server: usize) -> Result<()> {
        self.young.insert(server);
        self.servers[server].spawn_again()
    }

    fn restart_dead(&mut self) -> Result<()> {
        for at in 0..self.servers.len() {
            if !self.down.contains(&server_name(at)) && self.servers[at].process.ended()?.is_some() {
                self.start_again(at)?;
                self.restarts += 1;
            }
        }
        for at in 0..self.agents.len() {
            if !self.down.contains(&agent_name(at)) && self.agents[at].process.ended()?.is_some() {
                self.agents[at].start_again()?;
                self.restarts += 1;
            }
        }
        Ok(())
    }

    /// Drops replaced programs that have ended properly.
    fn forget_replaced(&mut self) -> Result<()> {
        let mut left = Vec::new();
        for mut replaced in self.replaced.drain(..) {
            match replaced.process().ended()? {
                None => left.push(replaced),
                Some(status) => {
                    let fine = status.code() == Some(0) || replaced.is_young();
                    let name = replaced.process().name();
                    ensure!(fine, "{name} was replaced, and ended with {status}");
                }
            }
        }
        self.replaced = left;
        Ok(())
    }

    /// Waits until everything works again; returns the time taken.
    pub(super) async fn works(&mut self, wrong: &Wrong) -> Result<Duration> {
        let begin = Instant::now();
        let state = async || {
            self.supervise()?;
            self.state().await
        };
        wait_until("the fleet to be whole", WORKS, state, |state| state.is_empty()).await?;
        self.young.clear();
        let reached = async || {
            for client in &self.clients {
                let run = client.run(Load::SMALL, Patience::SHORT, wrong);
                run.await.with_context(|| client.to_string())?;
            }
            Ok(())
        };
        let left = WORKS.saturating_sub(begin.elapsed());
        wait_until("every edge to be reached by every way", left, reached, |()| true).await?;
        self.felt.recovered();
        Ok(begin.elapsed())
    }

    /// Describes everything that does not work yet.
    async fn state(&mut self) -> Result<String> {
        let mut sessions = [0; EDGES];
        for (at, server) in self.servers.iter().enumerate() {
            let (ready, why) = server.get("/readyz").await?;
            if ready != 200 {
                return Ok(format!("{} is not ready: {why}", server_name(at)));
            }
            let status = server.status().await?;
            let peers = status["peers"].as_array().map_or(0, Vec::len);
            if peers != SERVERS - 1 {
                return Ok(format!("{} has {peers} peers", server_name(at)));
            }
            let nodes = status["nodes"].as_array().context("no nodes")?;
            for (edge, sessions) in self.testbed.edges().iter().zip(&mut sessions) {
                let Some(node) = nodes.iter().find(|node| node["name"] == edge.name.as_str()) else {
                    return Ok(format!("{} does not know {}", server_name(at), edge.name));
                };
                *sessions += usize::from(node["connected"] == true);
            }
            if nodes.len() != EDGES {
                return Ok(format!("{} knows {} nodes", server_name(at), nodes.len()));
            }
        }
        for (at, (have, want)) in sessions.iter().zip(SESSIONS).enumerate() {
            // One session more until the agent leaves the substitute.
            if have < &want {
                return Ok(format!("{} has {have} of {want} sessions", agent_name(at)));
            }
        }
        let redirect = &self.servers[0].status().await?["redirect"];
        if redirect["state"] != "on" || redirect["routes"] != 2 * EDGES || redirect["routes_down"] != 0 {
            return Ok(format!("the redirect is {redirect}"));
        }
        let replaced: Vec<_> =
            self.replaced.iter_mut().map(|replaced| replaced.process().name().to_owned()).collect();
        Ok(if replaced.is_empty() { String::new() } else { format!("{replaced:?} were replaced, and go on") })
    }

    /// Returns the resources held by all programs once no connection is open.
    pub(super) async fn held(&self) -> Result<Held> {
        let idle = async || {
            let mut open = 0.0;
            for server in &self.servers {
                open += server.metric("postern_connections_active", &[]).await?;
            }
            Ok(open)
        };
        wait_until("every connection to end", Duration::from_secs(30), idle, |open| *open == 0.0).await?;
        let mut held = Held::new();
        for (at, server) in self.servers.iter().enumerate() {
            held.extend(of_process(&server_name(at), &server.metrics().await?)?);
        }
        for (at, agent) in self.agents.iter().enumerate() {
            held.extend(of_process(&agent_name(at), &agent.metrics().await?)?);
        }
        for (map, entries) in maps::entries(self.servers[0].process.pid())? {
            held.insert(format!("entries of {map}"), f64::from(u32::try_from(entries)?));
        }
        ensure!(held.contains_key("entries of ROUTES_V4"), "no map of routes among {held:?}");
        let lines = |text: String| text.lines().count() as f64;
        let routes = self.testbed.cloud.output("ip", "-4 route show table local")?;
        held.insert("local routes".to_owned(), lines(routes));
        let pins = std::fs::read_dir(self.testbed.bpffs().join("postern")).context("the pins")?;
        held.insert("folders of pins".to_owned(), pins.count() as f64);
        Ok(held)
    }
}

fn server_name(at: usize) -> String {
    format!("server {}", at + 1)
}

fn agent_name(at: usize) -> String {
    format!("agent {}", at + 1)
}

/// If it has ended meanwhile, it is just as dead.
async fn kill(process: &mut Process) -> Result<()> {
    match process.ended()? {
        None => process.crash().await,
        Some(_) => Ok(()),
    }
}

fn signal(process: &mut Process, signal: Signal) -> Result<()> {
    match process.ended()? {
        None => process.signal(signal),
        Some(_) => Ok(()),
    }
}
