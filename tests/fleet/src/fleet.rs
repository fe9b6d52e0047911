//! A fleet that runs a plan.

mod identities;
mod steps;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Result;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tunnel_pki::AgentIdentity;
use tunnel_runtime::blocking::set_disk;
use tunnel_runtime::clock::Clock;
use tunnel_runtime::files::create_private_directory;
use tunnel_server::pki::{Ca, Lifetimes, Revocation};

use crate::agent::{self, Agent};
use crate::client::Client;
use crate::cluster::Cluster;
use crate::konnectivity;
use crate::model::{Model, settles};
use crate::network::Net;
use crate::plan::{End, Plan, Step};
use crate::server::{self, Server, Start};

/// How often the fleet is looked at, and once nothing happens any more.
const LOOK: Duration = Duration::from_millis(100);
const LOOK_QUIET: Duration = Duration::from_millis(500);
/// At the end an agent may just renew its certificate, over a connection of its own.
const RENEWAL: Duration = Duration::from_secs(5);

/// A clock that is wrong by so much does no harm: certificates are valid five minutes before they are issued, and may be issued
/// and shown by clocks that are wrong in different directions.
const HARMLESS: Duration = Duration::from_secs(120);

/// A process knows at once what another one of its host does.
const AT_ONCE: Duration = Duration::from_millis(1);

/// Servers and agents, and the network between them.
pub(crate) struct Fleet {
    pub(crate) net: Net,
    /// The API server, in fleets that have one.
    pub(crate) cluster: Option<Cluster>,
    pub(crate) plan: Plan,
    dir: PathBuf,
    ca: Ca,
    identities: Vec<AgentIdentity>,
    /// The processes of each server and of each agent, the oldest first.
    pub(crate) servers: Vec<Vec<Server>>,
    pub(crate) agents: Vec<Vec<Agent>>,
    /// The second agents of nodes, whose disks were copied, by node.
    pub(crate) twins: BTreeMap<usize, Agent>,
    /// The last revocation or readmission of each node that has one.
    revoked: BTreeMap<usize, Revocation>,
    /// Clients that are connected.
    pub(crate) clients: JoinSet<Result<String>>,
    /// Number of the next process of each server, and of each agent.
    processes: Vec<usize>,
    agent_processes: Vec<usize>,
    /// Agents of which a process was killed, or may end without being told: the supervisor starts another one once none is left.
    killed: Vec<bool>,
    /// The times that messages between two processes of a host have taken, and until when each was so.
    busy: BTreeMap<Host, Vec<(Duration, Option<Instant>)>>,
    /// Until then an agent may use an epoch that its slow disk does not have yet.
    unstored: Instant,
    /// Reasons for which a host's clock is wrong.
    wrong: BTreeMap<Host, usize>,
    /// Reasons for each silent path, and the time since when.
    silent: BTreeMap<(Host, Host), (usize, Instant)>,
}

/// A host of the fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Host {
    Server(usize),
    Agent(usize),
    /// Where a copy of that agent's disk runs.
    Twin(usize),
}

impl Host {
    pub(crate) fn address(self) -> IpAddr {
        match self {
            Self::Server(index) => server::address(index).ip(),
            Self::Agent(index) => agent::host(index),
            Self::Twin(index) => agent::twin(index),
        }
    }

    pub(crate) fn clock(self) -> Clock {
        Clock::of(match self {
            Self::Server(index) => 2 * index + 1,
            Self::Agent(index) => 2 * index + 2,
            Self::Twin(index) => 2 * index + 1002,
        })
    }
}

/// Shows the right time.
pub(crate) const RIGHT: Clock = Clock::of(0);

/// One thing to do.
#[derive(Clone, Debug)]
enum Event {
    StartServer(usize),
    StartAgent(usize),
    Begin(Step),
    End(Step),
    /// Messages between two processes of a host take so long from now on.
    Busy(Host, Duration),
    /// One of two processes of a host ends, the connections of which last so long.
    EndOne(Host, End, Duration),
    Open(Client),
}

/// Runs the plan without the steps of these numbers. Returns what the model has to say of it.
///
/// # Errors
/// If the model finds something wrong.
pub(crate) async fn run(seed: u64, without: &[usize], dir: &Path) -> Result<Model> {
    let plan = Plan::of(seed);
    let mut random = StdRng::seed_from_u64(seed);
    random.random::<u64>();
    let begin = Instant::now();
    RIGHT.set(SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000));
    let disk = plan.disk;
    set_disk(move || disk);
    let mut events = events(&plan, without, &mut random);
    let last = events.keys().next_back().map_or(Duration::ZERO, |(at, _)| *at);
    let mut fleet = Fleet::new(plan, StdRng::seed_from_u64(seed ^ 1), dir)?;
    let mut model = Model::new(&fleet);
    let end = last + settles(&fleet.plan);
    while begin.elapsed() <= end {
        while let Some(entry) = events.first_entry().filter(|entry| entry.key().0 <= begin.elapsed()) {
            let event = entry.remove();
            model.note(&format!("{event:?}"));
            fleet.act(event, &mut model)?;
        }
        fleet.servers.iter_mut().for_each(|processes| processes.retain(|server| !server.has_ended()));
        fleet.agents.iter_mut().for_each(|processes| processes.retain(|agent| !agent.has_ended()));
        fleet.twins.retain(|_, agent| !agent.has_ended());
        fleet.restart_killed(&mut model)?;
        while let Some(client) = fleet.clients.try_join_next() {
            model.note(&client??);
        }
        model.look(&fleet)?;
        let look = begin.elapsed() + if model.is_quiet() { LOOK_QUIET } else { LOOK };
        let next = events.first_key_value().map_or(look, |((at, _), _)| look.min(*at));
        sleep_until(begin + next).await;
    }
    // Work that waits for a slow disk is a task, and servers always have some.
    set_disk(|| AT_ONCE);
    while let Err(error) = model.finish(&fleet) {
        if begin.elapsed() > end + RENEWAL {
            return Err(error);
        }
        sleep_until(Instant::now() + LOOK).await;
    }
    Ok(model)
}

fn copy_ca(from: &Path, to: &Path) -> Result<()> {
    let (from, to) = (from.join("ca"), to.join("ca"));
    if to.exists() {
        return Ok(());
    }
    create_private_directory(&to)?;
    for file in std::fs::read_dir(from)? {
        let file = file?;
        std::fs::copy(file.path(), to.join(file.file_name()))?;
    }
    Ok(())
}

fn hosts(plan: &Plan) -> impl Iterator<Item = Host> + use<> {
    (0..plan.servers).map(Host::Server).chain((0..plan.agents).map(Host::Agent))
}

fn lifetimes(plan: &Plan, clock: Clock) -> Lifetimes {
    Lifetimes { agent: plan.life, server: plan.life, clock }
}

/// Returns the plan's events, ordered by time. The number tells those of the same time apart.
fn events(plan: &Plan, without: &[usize], random: &mut StdRng) -> BTreeMap<(Duration, usize), Event> {
    let mut events = BTreeMap::new();
    let mut number = 0;
    let mut add = |at: Duration, event| {
        number += 1;
        events.insert((at, number), event);
    };
    for (index, at) in plan.starts.iter().enumerate() {
        add(*at, Event::StartServer(index));
    }
    for index in 0..plan.agents {
        add(plan.spread.mul_f64(random.random()), Event::StartAgent(index));
    }
    let begin = plan.starts.iter().max().copied().unwrap_or_default() + plan.patience;
    let mut at = begin;
    for (index, (pause, step)) in plan.steps.iter().enumerate() {
        at += *pause;
        if !without.contains(&index) {
            add(at, Event::Begin(step.clone()));
            let upgraded = match step {
                Step::Upgrade { server, how } => Some((Host::Server(*server), how)),
                Step::Replace { agent, how } => Some((Host::Agent(*agent), how)),
                _ => None,
            };
            if let Some((host, how)) = upgraded {
                if let Some((after, takes)) = how.busy {
                    add(at + after, Event::Busy(host, takes));
                }
                if let Some((after, end)) = how.end {
                    add(at + after, Event::EndOne(host, end, how.relays));
                }
            }
            add(at + step.lasts(), Event::End(step.clone()));
        }
    }
    for (at, client) in &plan.clients {
        add(begin + *at, Event::Open(client.clone()));
    }
    events
}

impl Fleet {
    fn new(plan: Plan, random: StdRng, dir: &Path) -> Result<Self> {
        let hosts = hosts(&plan).collect::<Vec<_>>();
        hosts.iter().for_each(|host| host.clock().set(RIGHT.now()));
        let ca = Ca::load_or_create(&dir.join("ca"), lifetimes(&plan, RIGHT))?;
        let identities = (0..plan.agents).map(|index| agent::identity(&ca, index, SystemTime::UNIX_EPOCH));
        let identities = identities.collect::<Result<Vec<_>>>()?;
        let net = Net::new(random);
        for (agent, delays) in plan.delays.iter().enumerate() {
            for (server, delay) in delays.iter().enumerate() {
                net.set_delay(agent::host(agent), server::address(server).ip(), *delay);
            }
        }
        for one in 0..plan.servers {
            for other in 0..one {
                net.set_delay(server::address(one).ip(), server::address(other).ip(), plan.between);
            }
        }
        net.balance(konnectivity::BALANCER, (0..plan.servers).map(konnectivity::address).collect());
        let nodes = identities.iter().map(|identity| identity.node.clone()).collect::<Vec<_>>();
        Ok(Self {
            net,
            cluster: plan.has_api.then(|| Cluster::new(plan.servers, &nodes)),
            dir: dir.to_owned(),
            ca,
            identities,
            servers: (0..plan.servers).map(|_| Vec::new()).collect(),
            agents: (0..plan.agents).map(|_| Vec::new()).collect(),
            twins: BTreeMap::new(),
            revoked: BTreeMap::new(),
            clients: JoinSet::new(),
            processes: vec![0; plan.servers],
            agent_processes: vec![0; plan.agents],
            killed: vec![false; plan.agents],
            busy: BTreeMap::new(),
            unstored: Instant::now(),
            wrong: BTreeMap::new(),
            silent: BTreeMap::new(),
            plan,
        })
    }

    fn start_server(&mut self, index: usize) -> Result<()> {
        let process = (index, self.processes[index]);
        self.processes[index] += 1;
        let clock = Host::Server(index).clock();
        let own = self.state_at(Host::Server(index));
        let (state_dir, of_ca) = if self.cluster.is_some() {
            // Processes of a server find what those before them knew. Each server has a copy of the cluster's CA.
            copy_ca(self.ca.state_dir(), &own)?;
            (own.clone(), own)
        } else if self.plan.reads.is_some() {
            (own, self.ca.state_dir().to_owned())
        } else {
            (self.dir.join(server::id_of(process)), self.ca.state_dir().to_owned())
        };
        let start = Start {
            net: &self.net,
            cluster: self.cluster.as_ref(),
            ca: Ca::open(&of_ca, lifetimes(&self.plan, clock))?,
            clock,
            state_dir,
            process,
            count: self.plan.servers,
            files: self.plan.files,
            konnectivity: self.plan.of_konnectivity > 0,
            ends_when_passed: !self.plan.in_cluster,
            reads: self.plan.reads,
        };
        self.servers[index].push(start.start()?);
        Ok(())
    }

    /// The process of a server that has the clients' connections, or the latest one.
    pub(crate) fn server(&self, index: usize) -> Option<&Server> {
        let processes = &self.servers[index];
        processes.iter().rev().find(|server| server.accepts()).or(processes.last())
    }

    /// How long it takes until one process of a host knows what another one does.
    pub(crate) fn busy(&self, host: Host) -> Duration {
        // Later messages have arrived too.
        let is_over =
            |takes: Duration, until: Option<Instant>| until.is_some_and(|at| at.elapsed() > takes * 2);
        let still =
            self.busy.get(&host).into_iter().flatten().filter(|(takes, until)| !is_over(*takes, *until));
        still.map(|(takes, _)| *takes).max().unwrap_or(AT_ONCE)
    }

    fn set_busy(&mut self, host: Host, takes: Option<Duration>) {
        let (waits, comes) = match host {
            Host::Server(index) => server::takeover(index),
            Host::Agent(_) | Host::Twin(_) => agent::takeover(host),
        };
        self.net.set_delay(waits.ip(), comes, takes.unwrap_or(AT_ONCE));
        let times = self.busy.entry(host).or_default();
        if let Some((_, until)) = times.last_mut() {
            until.get_or_insert_with(Instant::now);
        }
        times.extend(takes.map(|takes| (takes, None)));
    }

    fn how_to_start(&self, index: usize, at: Host, process: usize) -> agent::Start<'_> {
        agent::Start {
            net: &self.net,
            index,
            at,
            process,
            identity: &self.identities[index],
            cluster: self.cluster.as_ref(),
            state_dir: self.state_at(at),
            servers: self.plan.servers,
            links: self.plan.links,
            ends_when_passed: !self.plan.in_cluster,
        }
    }

    /// The state directory that the processes of a host share.
    fn state_at(&self, host: Host) -> PathBuf {
        self.dir.join(match host {
            Host::Server(index) => format!("server-{index}"),
            Host::Agent(index) => format!("agent-{index}"),
            Host::Twin(index) => format!("twin-{index}"),
        })
    }

    fn start_agent(&mut self, index: usize) -> Result<()> {
        let process = self.agent_processes[index];
        self.agent_processes[index] += 1;
        let start = self.how_to_start(index, Host::Agent(index), process);
        let agent = match self.plan.is_of_konnectivity(index) {
            true => start.start_of_konnectivity()?,
            false => start.start()?,
        };
        self.agents[index].push(agent);
        self.killed[index] = false;
        Ok(())
    }

    /// An agent that has passed everything on ends, also if its successor was killed meanwhile.
    fn restart_killed(&mut self, model: &mut Model) -> Result<()> {
        for index in 0..self.plan.agents {
            if self.killed[index] && self.agents[index].is_empty() {
                self.restart_agent(index, model)?;
            }
        }
        Ok(())
    }

    /// Starts an agent again, unless one of its processes goes on.
    fn restart_agent(&mut self, index: usize, model: &mut Model) -> Result<()> {
        if !self.agents[index].iter().any(Agent::goes_on) {
            self.start_agent(index)?;
            model.disturbed(Host::Agent(index), None);
        }
        Ok(())
    }

    fn silence(&mut self, one: Host, other: Host) {
        self.silent.entry((one, other)).or_insert_with(|| (0, Instant::now())).0 += 1;
        self.net.silence(one.address(), other.address());
    }

    fn heal(&mut self, one: Host, other: Host) {
        let Some((reasons, _)) = self.silent.get_mut(&(one, other)) else { return };
        *reasons -= 1;
        if *reasons == 0 {
            self.silent.remove(&(one, other));
            self.net.heal(one.address(), other.address());
        }
    }

    fn clocks_jump(&self, model: &mut Model) {
        if Instant::now() < self.unstored {
            model.epochs_may_fall();
        }
    }

    /// For how long nothing has passed between two hosts.
    pub(crate) fn silence_between(&self, one: Host, other: Host) -> Option<Duration> {
        let silent = self.silent.get(&(one, other)).or(self.silent.get(&(other, one)));
        silent.map(|(_, since)| since.elapsed())
    }

    fn act(&mut self, event: Event, model: &mut Model) -> Result<()> {
        if !matches!(event, Event::Open(_)) {
            model.promises_nothing();
        }
        match event {
            Event::StartServer(index) => {
                self.start_server(index)?;
                model.disturbed(Host::Server(index), None);
            }
            Event::StartAgent(index) => {
                self.start_agent(index)?;
                model.disturbed(Host::Agent(index), None);
            }
            Event::Begin(step) => {
                model.contested(step.host_of_agent());
                self.begin(&step, model)?;
            }
            Event::End(step) => {
                model.contested(step.host_of_agent());
                self.end(&step, model)?;
            }
            Event::Busy(host, takes) => self.set_busy(host, Some(takes)),
            Event::EndOne(Host::Server(index), end, relays) => self.end_one(index, end, relays, model),
            Event::EndOne(Host::Agent(index) | Host::Twin(index), end, relays) => {
                self.end_agent(index, end, relays, model);
            }
            Event::Open(client) => self.open(client),
        }
        Ok(())
    }

    /// A client connects, unless no process of its server accepts.
    fn open(&mut self, client: Client) {
        let Some(server) = self.server(client.server).filter(|server| server.accepts()) else { return };
        let (listener, killed) = (server.clients(), server.runtime.stop.clone());
        self.clients.spawn(client.run(self.net.clone(), listener, killed));
    }

    /// Starts a server again, unless one of its processes goes on.
    fn restart_server(&mut self, index: usize, model: &mut Model) -> Result<()> {
        if self.servers[index].iter().all(Server::ends) {
            self.start_server(index)?;
            model.disturbed(Host::Server(index), None);
        }
        Ok(())
    }

    /// Ends one of two processes of an agent.
    fn end_agent(&mut self, index: usize, end: End, relays: Duration, model: &mut Model) {
        let busy = self.busy(Host::Agent(index));
        let processes = &mut self.agents[index];
        let Some(number) = end.of(processes.len()) else { return };
        if end.is_killed() {
            drop(processes.remove(number));
            self.killed[index] = true;
            return model.disturbed(Host::Agent(index), None);
        }
        processes[number].relay(relays);
        processes[number].stop();
        if !self.plan.in_cluster && !busy.is_zero() {
            // The first one ends as well if its successor's word, that it has taken over, is on its way.
            self.killed[index] = true;
            model.disturbed(Host::Agent(index), None);
        } else if processes.iter().any(Agent::goes_on) {
            model.given_back(index, busy);
        } else {
            model.disturbed(Host::Agent(index), None);
        }
    }

    /// Ends one of two processes of a server.
    fn end_one(&mut self, index: usize, end: End, relays: Duration, model: &mut Model) {
        let processes = &mut self.servers[index];
        let Some(number) = end.of(processes.len()) else { return };
        if end.is_killed() {
            drop(processes.remove(number));
            model.disturbed(Host::Server(index), None);
        } else {
            processes[number].relay(relays);
            processes[number].stop();
        }
    }
}
