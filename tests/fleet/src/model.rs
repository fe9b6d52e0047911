//! Checks that hold for a fleet at all times, and how long each may take after a disturbance.

mod cluster;
mod few;
mod finish;
mod peers;
mod revocations;
mod twins;

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hasher as _};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use tokio::time::Instant;
use tunnel_runtime::NodeName;

use self::cluster::Told;
use self::revocations::Shut;
use self::twins::Twins;
use crate::agent;
use crate::fleet::{Fleet, Host};
use crate::plan::Plan;
use crate::server::{DRAIN, Server};
use crate::view::{OfAgent, OfServer, View};

/// An agent has a session with a server after so long without disturbance: at most a pause after failures (5 s, or 15 s
/// after a refusal), and what an agent takes to notice that a link is silent (`--keepalive` and its answer).
const ATTACHES: Duration = Duration::from_secs(32);
/// The same after an upgrade of that server.
const MOVES: Duration = Duration::from_secs(3);
/// Servers are linked after so long without disturbance: at most a pause after failures (5 s), and the time after which a
/// silent link is given up (2.5 s).
const LINKS: Duration = Duration::from_secs(12);
/// A server whose clock was wrong may have a certificate of that time. It looks every two seconds whether it needs another one.
const RENEWS: Duration = Duration::from_secs(4);
/// The same after an upgrade of the other server: it is dialled at once.
const LINKS_AGAIN: Duration = Duration::from_millis(1500);
/// A silent server is given up after 2.5 s and twice the last round trip, which are looked at every 0.5 s, and after what was
/// still on its way. A round trip may have been measured across an outage of up to a second.
const SILENCE: Duration = Duration::from_millis(5500);
/// Of two processes of a server one accepts, but for this time.
const ONE: Duration = Duration::from_secs(1);
/// A process that is told to end does so within this time: first it waits for a takeover, or until its predecessor has its agents
/// again, and then for its connections.
const ENDS: Duration = Duration::from_secs(5 * DRAIN.as_secs());
/// The same of an agent, whose `--drain-timeout` is 30 s.
const AGENT_ENDS: Duration = Duration::from_secs(70);
/// Neither an agent nor a server keeps a session on a path that is silent for so long: `--keepalive` is 10 s.
const GONE: Duration = Duration::from_secs(25);
/// An agent of konnectivity's has a stream with a server after so long without disturbance: it notices that one is silent after 80 s,
/// each attempt may lead to another server, lasts for 20 s if that one is silent, and is followed by a pause of at most 10 s.
const STREAMS: Duration = Duration::from_secs(180);
/// A server has no session of one on a path that is silent for so long: another stream of the agent waits 5 s for the end of the first.
const OF_STREAM_GONE: Duration = Duration::from_secs(GONE.as_secs() + 5);
/// Such an agent keeps no stream on a path that is silent for so long.
const STREAM_GONE: Duration = Duration::from_secs(90);
/// The other servers know of a session, and of its end, after so long.
const KNOWN: Duration = Duration::from_millis(500);

/// A process of a server, by the numbers of both.
type Process = (usize, usize);

/// Nothing has happened for so long.
const QUIET: Duration = Duration::from_secs(3);

/// A server refuses an agent whose new epoch is lower than that of its half-open session. The agent tries again after two minutes
/// at most, and by then the server has given up that session.
const REFUSED: Duration = Duration::from_secs(120 + GONE.as_secs());

/// Time after the last event until the fleet is as at first.
pub(crate) fn settles(plan: &Plan) -> Duration {
    let leaves = if plan.is_limited() { few::LEAVES } else { Duration::ZERO };
    let refused = if plan.may_lower_epochs() { REFUSED } else { Duration::ZERO };
    let told = if plan.has_api { cluster::SETTLES + cluster::ENROLS } else { Duration::ZERO };
    let attaches = if plan.of_konnectivity > 0 { STREAMS } else { ATTACHES };
    let contested = twins::settles(plan) + revocations::settles(plan);
    plan.patience.max(attaches) + leaves + refused + told + contested + Duration::from_secs(10)
}

/// State of the checks of one run.
pub(crate) struct Model {
    begin: Instant,
    /// The time by which each pair of hosts has to be linked.
    due: BTreeMap<(Host, Host), Instant>,
    /// Hosts whose clocks are wrong, and pairs that may not be linked before these are right.
    wrong: BTreeSet<Host>,
    /// When the clocks of hosts became right again.
    righted: BTreeMap<Host, Instant>,
    waiting: BTreeSet<(Host, Host)>,
    nodes: Vec<NodeName>,
    /// Index of the first agent that is konnectivity's.
    of_konnectivity: usize,
    servers: usize,
    /// The highest epoch of each node at each process of a server.
    epochs: BTreeMap<(Process, usize), u64>,
    /// True once an agent may have lost its last epoch.
    epochs_fall: bool,
    /// Since when none or both of a server's processes accept.
    not_one: BTreeMap<usize, (usize, Instant)>,
    /// Since when a process of a server takes another one for the holder of a node that it does not have.
    stale: BTreeMap<(Process, Process, usize), Instant>,
    /// Until when the two ends of a node's sessions may differ, as an agent takes over from another one.
    moving: Vec<Instant>,
    /// When an agent has to have a session, after its server was killed.
    promised: Vec<Option<Instant>>,
    /// Since when a process of a server ends, and of an agent.
    ending: BTreeMap<Process, Instant>,
    ending_agents: BTreeMap<Process, Instant>,
    patience: Duration,
    told: Told,
    twins: Twins,
    shut: Shut,
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
            wrong: BTreeSet::new(),
            righted: BTreeMap::new(),
            waiting: BTreeSet::new(),
            nodes: (0..fleet.plan.agents).filter_map(|index| agent::node(index).ok()).collect(),
            of_konnectivity: fleet.plan.agents - fleet.plan.of_konnectivity,
            servers: fleet.plan.servers,
            epochs: BTreeMap::new(),
            epochs_fall: false,
            not_one: BTreeMap::new(),
            stale: BTreeMap::new(),
            moving: vec![Instant::now(); fleet.plan.agents],
            promised: vec![None; fleet.plan.agents],
            ending: BTreeMap::new(),
            ending_agents: BTreeMap::new(),
            patience: fleet.plan.patience.max(ATTACHES),
            told: Told::new(fleet.plan.agents),
            twins: Twins::default(),
            shut: Shut::new(&fleet.plan),
            view: View::default(),
            noted: Instant::now(),
            trace: DefaultHasher::new(),
        }
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
        let pair = (one.min(other), one.max(other));
        let is_slow = [one, other].iter().any(|host| self.is_of_konnectivity(*host));
        let time = if is_slow { time.max(STREAMS) } else { time };
        let due = self.due.entry(pair).or_insert_with(Instant::now);
        let renewed =
            [one, other].into_iter().filter_map(|host| self.righted.get(&host).map(|at| *at + RENEWS));
        *due = (*due).max(renewed.fold(Instant::now(), Instant::max) + time);
        self.twins.happened(one, other, Instant::now() + time.max(self.patience));
        if self.wrong.contains(&one) || self.wrong.contains(&other) {
            self.waiting.insert(pair);
        }
    }

    fn is_of_konnectivity(&self, host: Host) -> bool {
        matches!(host, Host::Agent(index) if index >= self.of_konnectivity)
    }

    /// The clock of a host is wrong. This ends no session, but certificates may not be valid for a new one.
    pub(crate) fn wrong(&mut self, host: Host) {
        self.wrong.insert(host);
        let attaching = self
            .due
            .iter()
            .filter(|((one, other), due)| (*one == host || *other == host) && **due > Instant::now());
        self.waiting.extend(attaching.map(|(pair, _)| *pair));
    }

    /// The clock of a host is right again.
    pub(crate) fn right(&mut self, host: Host) {
        self.wrong.remove(&host);
        self.righted.insert(host, Instant::now());
        for (one, other) in std::mem::take(&mut self.waiting) {
            let servers = matches!((one, other), (Host::Server(_), Host::Server(_)));
            // Inserted again if the other one's is still wrong.
            self.within(one, other, if servers { LINKS } else { self.patience });
        }
    }

    /// A path is back, or a host. `None`: with every other host.
    pub(crate) fn disturbed(&mut self, host: Host, with: Option<Host>) {
        let others: Vec<Host> = match with {
            Some(other) => vec![other],
            None => {
                let hosts = (0..self.servers).map(Host::Server).chain((0..self.nodes.len()).map(Host::Agent));
                hosts.chain(self.twins.hosts()).collect()
            }
        };
        for other in others {
            let time = match (host, other) {
                (Host::Server(_), Host::Server(_)) => LINKS,
                (Host::Agent(_) | Host::Twin(_), _) if self.epochs_fall => self.patience + REFUSED,
                _ => self.patience,
            };
            self.within(host, other, time);
        }
    }

    /// A clock is set while an epoch is used that is not stored yet, or is lost: a successor may choose a lower one.
    pub(crate) fn epochs_may_fall(&mut self) {
        self.epochs_fall = true;
    }

    /// Agents cannot attach for this time.
    pub(crate) fn excused(&mut self, lasts: Duration) {
        for agent in (0..self.nodes.len()).map(Host::Agent).chain(self.twins.hosts()) {
            for server in 0..self.servers {
                self.within(agent, Host::Server(server), lasts + self.patience);
            }
        }
    }

    /// A takeover of a server got on.
    fn upgraded(&mut self, fleet: &Fleet, server: usize) {
        let busy = fleet.busy(Host::Server(server)) * 2;
        for index in 0..self.servers {
            // The other one may be between two processes as well: the one has closed, and the other does not know it yet.
            let busy = busy.max(fleet.busy(Host::Server(index)) * 2);
            self.within(Host::Server(server), Host::Server(index), LINKS_AGAIN + busy);
        }
        for agent in (0..self.nodes.len()).map(Host::Agent).chain(self.twins.hosts()) {
            self.within(Host::Server(server), agent, MOVES + busy);
        }
    }

    /// One of an agent's processes is told to end, and another one goes on.
    pub(crate) fn given_back(&mut self, agent: usize, busy: Duration) {
        for server in 0..self.servers {
            self.within(Host::Agent(agent), Host::Server(server), MOVES + busy * 2);
        }
    }

    fn is_due(&self, fleet: &Fleet, one: Host, other: Host) -> bool {
        fleet.silence_between(one, other).is_none() && self.is_settled(one, other)
    }

    /// True if the time is up by which they have to be linked, unless the path is silent.
    fn is_settled(&self, one: Host, other: Host) -> bool {
        let pair = (one.min(other), one.max(other));
        let due = self.due.get(&pair).filter(|_| !self.waiting.contains(&pair));
        due.is_some_and(|due| *due <= Instant::now())
    }

    /// Checks what must hold now.
    pub(crate) fn look(&mut self, fleet: &Fleet) -> Result<()> {
        let view = View::of(fleet, &self.nodes);
        if view != self.view {
            self.note(&view.to_string());
            let (before, mut enrol) = (std::mem::replace(&mut self.view, view), Vec::new());
            for (index, processes) in self.view.agents.iter().enumerate() {
                let stages = |all: &[OfAgent]| all.iter().map(OfAgent::stage).collect::<Vec<_>>();
                let enrolled = |all: &[OfAgent]| all.iter().any(|process| process.enrolled);
                if before.agents.get(index).is_some_and(|before| !enrolled(before)) && enrolled(processes) {
                    enrol.push(index);
                }
                if before.agents.get(index).is_some_and(|before| stages(before) != stages(processes)) {
                    self.moving[index] = Instant::now() + MOVES + fleet.busy(Host::Agent(index)) * 2;
                }
            }
            for agent in enrol {
                self.disturbed(Host::Agent(agent), None);
            }
            for index in 0..self.servers {
                let went_on = before.servers.get(index).is_some_and(|all| all.iter().any(|one| one.goes_on));
                if fleet.plan.is_limited() && went_on && !self.goes_on(index) {
                    self.leaves(index);
                }
                let of = |view: &View| view.servers.get(index).map(|all| stages(all));
                if of(&before) == of(&self.view) {
                    continue;
                }
                if before.servers.get(index).is_some_and(|all| !all.iter().any(|process| process.goes_on)) {
                    // Its agents were told to leave, and pause between attempts.
                    self.disturbed(Host::Server(index), None);
                } else {
                    self.upgraded(fleet, index);
                }
            }
        }
        for (index, processes) in fleet.servers.iter().enumerate() {
            for server in processes {
                self.sessions(server)?;
                self.ends(fleet, server)?;
            }
            self.one_accepts(fleet, index)?;
            let Some(server) = fleet.server(index).filter(|_| self.goes_on(index)) else { continue };
            self.attached(fleet, index, server)?;
            self.known(fleet, index, server)?;
            self.given_up(fleet, index, server)?;
        }
        for (index, agent) in fleet.agents.iter().enumerate() {
            for process in agent.iter().filter(|process| !process.goes_on()) {
                let key = (index, process.process);
                let since = self.ending_agents.entry(key).or_insert_with(Instant::now);
                let within = AGENT_ENDS + fleet.busy(Host::Agent(index)) * 4;
                ensure!(since.elapsed() < within, "edge-{index}.{} does not end", process.process);
            }
        }
        if fleet.plan.is_limited() {
            self.limited(fleet)?;
        }
        self.two(fleet)?;
        self.shut(fleet)?;
        self.told(fleet)?;
        self.enrolled(fleet)?;
        self.outdated(fleet)
    }

    fn goes_on(&self, index: usize) -> bool {
        self.view.servers[index].iter().any(|process| process.goes_on)
    }

    /// Of the processes of a server that go on, exactly one accepts.
    fn one_accepts(&mut self, fleet: &Fleet, index: usize) -> Result<()> {
        let processes = &self.view.servers[index];
        let accept = processes.iter().filter(|process| process.accepts).count();
        if accept == 1 || !self.goes_on(index) || (accept == 0 && self.may_not_know_nodes(fleet, index)) {
            self.not_one.remove(&index);
            return Ok(());
        }
        let busy = match accept {
            // The first one closes, and opens again once it sees that its successor was stopped before it got the answer.
            0 => fleet.busy(Host::Server(index)) * 2,
            // A process that is told to stop asks its predecessor to resume, and accepts until it has an answer, or until it
            // sees that the predecessor has ended. Each takes a message's time.
            _ if processes.len() > 2 => fleet.busy(Host::Server(index)) * 2,
            // The successor waits so long until the first one no longer accepts.
            _ => fleet.busy(Host::Server(index)).saturating_sub(Duration::from_secs(5)),
        };
        let (number, within) = (processes.len(), ONE + busy);
        let (as_many, since) = self.not_one.entry(index).or_insert((accept, Instant::now()));
        if *as_many != accept {
            (*as_many, *since) = (accept, Instant::now());
        }
        ensure!(since.elapsed() < within, "{accept} of {number} processes of server-{index} accept");
        Ok(())
    }

    /// A process that is told to end ends in time.
    fn ends(&mut self, fleet: &Fleet, server: &Server) -> Result<()> {
        if server.ends() {
            let since = self.ending.entry(server.process).or_insert_with(Instant::now);
            let within = ENDS + fleet.busy(Host::Server(server.process.0)) * 4;
            ensure!(since.elapsed() < within, "{} does not end within {within:?}", server.id);
        }
        Ok(())
    }

    /// One session for each node, by the node itself, and never an older one after a newer one.
    fn sessions(&mut self, server: &Server) -> Result<()> {
        for session in server.runtime.sessions.all() {
            let Some(agent) = self.nodes.iter().position(|node| *node == session.node) else {
                bail!("{} has a session of {}", server.id, session.node);
            };
            if self.of_two(server, agent, &session)? {
                continue;
            }
            let host = agent::host(agent);
            ensure!(session.peer.ip() == host, "{}: {} is at {}", server.id, session.node, session.peer);
            let highest = self.epochs.entry((server.process, agent)).or_default();
            let (epoch, node) = (session.epoch, &session.node);
            ensure!(
                epoch >= *highest || self.epochs_fall,
                "{}: {node} has epoch {epoch} after {highest}",
                server.id
            );
            *highest = epoch;
        }
        Ok(())
    }

    /// No session outlasts a silent path, at either end.
    fn outlasts(&self, fleet: &Fleet, index: usize, number: usize, seen: &OfServer) -> Result<()> {
        let (drops, leaves) =
            if number < self.of_konnectivity { (GONE, GONE) } else { (OF_STREAM_GONE, STREAM_GONE) };
        let twin = self.view.twins.get(&number).into_iter();
        let agents = [Host::Agent(number), Host::Twin(number)];
        let processes = [self.view.agents[number].iter().collect::<Vec<_>>(), twin.collect()];
        for ((host, processes), of_twin) in agents.into_iter().zip(processes).zip([false, true]) {
            let Some(lasts) = fleet.silence_between(Host::Server(index), host) else { continue };
            let here = seen.epochs[number].filter(|_| seen.of_twin[number] == of_twin);
            let node = &self.nodes[number];
            ensure!(
                lasts < drops || here.is_none(),
                "server-{index} has a session of {node} that outlasts its path: {here:?}",
            );
            ensure!(
                lasts < leaves || !processes.iter().any(|process| process.attached[index]),
                "{node} has a session with server-{index} that outlasts its path",
            );
        }
        Ok(())
    }

    /// Agents are attached, both ends mean the same session, and clients' connections reach it.
    fn attached(&self, fleet: &Fleet, index: usize, server: &Server) -> Result<()> {
        let Some(seen) = self.view.server(index) else { return Ok(()) };
        for (number, node) in self.nodes.iter().enumerate() {
            let agent = &self.view.agents[number];
            if self.may_refuse(fleet, index, number)?
                || self.is_shut_out(index, number)
                || !agent.iter().any(|process| process.enrolled)
            {
                continue;
            }
            let there = agent.iter().chain(self.view.twins.get(&number));
            let there: Vec<_> = there.filter_map(|process| process.epochs[index]).collect();
            self.outlasts(fleet, index, number, seen)?;
            let host = Host::Server(index);
            let due = self.is_due(fleet, host, Host::Agent(number))
                || (self.twins.has(number) && self.is_due(fleet, host, Host::Twin(number)));
            if fleet.plan.is_limited() || !due {
                continue;
            }
            let processes = &self.view.servers[index];
            let here: Vec<_> = processes.iter().filter_map(|process| process.epochs[number]).collect();
            // The server has the successor's session a moment before the successor knows it.
            let moves = self.moving[number] > Instant::now() && !here.is_empty();
            ensure!(
                moves || there.iter().any(|there| here.contains(there)),
                "{node} is not attached to {}: its session is {there:?}, the server's {here:?}",
                server.id
            );
            // A takeover of four messages outlasts the old sessions then, which agents keep for 30 s.
            let outlasted =
                processes.len() > 1 && fleet.busy(Host::Server(index)) * 4 > Duration::from_secs(25);
            ensure!(
                outlasted || seen.reaches(number),
                "{} accepts connections, but has no way to {node}",
                server.id
            );
        }
        Ok(())
    }
}

/// How far the processes of a server are in a takeover.
fn stages(processes: &[OfServer]) -> Vec<((usize, usize), bool, bool)> {
    processes.iter().map(|process| (process.process, process.is_settled, process.accepts)).collect()
}
