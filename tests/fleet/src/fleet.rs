//! A fleet that runs a plan.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::Result;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tunnel_pki::AgentIdentity;
use tunnel_runtime::blocking::set_disk;
use tunnel_runtime::clock::{set_wall_clock, wall_clock};
use tunnel_server::pki::{Ca, Lifetimes};

use crate::agent::{self, Agent};
use crate::model::Model;
use crate::network::Net;
use crate::plan::{Plan, Step};
use crate::server::{self, Server};

/// How often the fleet is looked at, and once nothing happens any more.
const LOOK: Duration = Duration::from_millis(100);
const LOOK_QUIET: Duration = Duration::from_millis(500);

/// Servers and agents, and the network between them.
pub(crate) struct Fleet {
    pub(crate) net: Net,
    pub(crate) plan: Plan,
    dir: PathBuf,
    ca: Ca,
    identities: Vec<Arc<AgentIdentity>>,
    pub(crate) servers: Vec<Option<Server>>,
    pub(crate) agents: Vec<Option<Agent>>,
    /// Number of the next process of each server.
    processes: Vec<usize>,
    /// Servers that hand over.
    pub(crate) leaving: Vec<JoinHandle<()>>,
    /// Reasons for each silent path, and the time since when.
    silent: BTreeMap<(Host, Host), (usize, Instant)>,
}

/// A host of the fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Host {
    Server(usize),
    Agent(usize),
}

impl Host {
    fn address(self) -> std::net::IpAddr {
        match self {
            Self::Server(index) => server::address(index).ip(),
            Self::Agent(index) => agent::host(index),
        }
    }
}

/// One thing to do.
#[derive(Clone, Debug)]
enum Event {
    StartServer(usize),
    StartAgent(usize),
    Begin(Step),
    End(Step),
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
    set_wall_clock(SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000));
    let disk = plan.disk;
    set_disk(move || disk);
    let mut events = events(&plan, without, &mut random);
    let last = events.keys().next_back().map_or(Duration::ZERO, |(at, _)| *at);
    let mut fleet = Fleet::new(plan, StdRng::seed_from_u64(seed ^ 1), dir)?;
    let mut model = Model::new(&fleet);
    let end = last + model.settles();
    while begin.elapsed() <= end {
        while let Some(entry) = events.first_entry().filter(|entry| entry.key().0 <= begin.elapsed()) {
            let event = entry.remove();
            model.note(&format!("{event:?}"));
            fleet.act(event, &mut model)?;
        }
        model.look(&fleet)?;
        let look = begin.elapsed() + if model.is_quiet() { LOOK_QUIET } else { LOOK };
        let next = events.first_key_value().map_or(look, |((at, _), _)| look.min(*at));
        sleep_until(begin + next).await;
    }
    model.finish(&fleet)?;
    Ok(model)
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
    let mut at = plan.starts.iter().max().copied().unwrap_or_default() + plan.patience;
    for (index, (pause, step)) in plan.steps.iter().enumerate() {
        at += *pause;
        if !without.contains(&index) {
            add(at, Event::Begin(step.clone()));
            add(at + step.lasts(), Event::End(step.clone()));
        }
    }
    events
}

impl Fleet {
    fn new(plan: Plan, random: StdRng, dir: &Path) -> Result<Self> {
        let ca = Ca::load_or_create(&dir.join("ca"), Lifetimes::default())?;
        let identities = (0..plan.agents).map(|index| agent::identity(&ca, index)).collect::<Result<_>>()?;
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
        Ok(Self {
            net,
            dir: dir.to_owned(),
            ca,
            identities,
            servers: (0..plan.servers).map(|_| None).collect(),
            agents: (0..plan.agents).map(|_| None).collect(),
            processes: vec![0; plan.servers],
            leaving: Vec::new(),
            silent: BTreeMap::new(),
            plan,
        })
    }

    fn start_server(&mut self, index: usize) -> Result<Option<Server>> {
        let process = (index, self.processes[index]);
        self.processes[index] += 1;
        let dir = self.dir.join(server::id_of(process));
        let count = self.plan.servers;
        let server = Server::start(&self.net, &self.ca, &dir, process, count, self.plan.files)?;
        Ok(self.servers[index].replace(server))
    }

    fn start_agent(&mut self, index: usize) -> Result<()> {
        let dir = self.dir.join(format!("agent-{index}"));
        let identity = self.identities[index].clone();
        let agent = Agent::start(&self.net, index, identity, &dir, self.plan.servers)?;
        self.agents[index] = Some(agent);
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

    /// For how long nothing has passed between two hosts.
    pub(crate) fn silence_between(&self, one: Host, other: Host) -> Option<Duration> {
        let silent = self.silent.get(&(one, other)).or(self.silent.get(&(other, one)));
        silent.map(|(_, since)| since.elapsed())
    }

    fn act(&mut self, event: Event, model: &mut Model) -> Result<()> {
        match event {
            Event::StartServer(index) => {
                drop(self.start_server(index)?);
                model.disturbed(Host::Server(index), None);
            }
            Event::StartAgent(index) => {
                self.start_agent(index)?;
                model.disturbed(Host::Agent(index), None);
            }
            Event::Begin(step) => self.begin(&step, model)?,
            Event::End(step) => self.end(&step, model)?,
        }
        Ok(())
    }

    fn begin(&mut self, step: &Step, model: &mut Model) -> Result<()> {
        match step {
            Step::Silence { agent, server, .. } => self.silence(Host::Agent(*agent), Host::Server(*server)),
            Step::Offline { agent, .. } => {
                for server in 0..self.plan.servers {
                    self.silence(Host::Agent(*agent), Host::Server(server));
                }
            }
            Step::Partition { one, other, .. } => {
                self.silence(Host::Server(*one.min(other)), Host::Server(*one.max(other)));
            }
            Step::Forget { agent, server } => {
                self.net.forget(agent::host(*agent), server::address(*server).ip());
                model.disturbed(Host::Agent(*agent), Some(Host::Server(*server)));
            }
            Step::Reset { agent, server } => {
                self.net.reset(agent::host(*agent), server::address(*server).ip());
                model.disturbed(Host::Agent(*agent), Some(Host::Server(*server)));
            }
            Step::Crash { server, .. } => {
                self.net.close(server::address(*server));
                self.servers[*server] = None;
            }
            Step::Upgrade { server } => {
                // One that is down has nothing to hand over.
                if self.servers[*server].is_some()
                    && let Some(before) = self.start_server(*server)?
                {
                    self.leaving.push(tokio::spawn(before.hand_over()));
                    model.upgraded(*server);
                }
            }
            Step::Restart { agent, .. } => self.agents[*agent] = None,
            Step::PowerLoss { agent, .. } => {
                for server in 0..self.plan.servers {
                    self.net.forget(agent::host(*agent), server::address(server).ip());
                }
                self.agents[*agent] = None;
            }
            Step::Disk { takes, lasts } => {
                let takes = *takes;
                set_disk(move || takes);
                model.excused(*lasts);
            }
            Step::Clock { ahead: true, by } => set_wall_clock(wall_clock() + *by),
            Step::Clock { ahead: false, by } => set_wall_clock(wall_clock() - *by),
        }
        Ok(())
    }

    fn end(&mut self, step: &Step, model: &mut Model) -> Result<()> {
        match step {
            Step::Silence { agent, server, .. } => {
                self.heal(Host::Agent(*agent), Host::Server(*server));
                model.disturbed(Host::Agent(*agent), Some(Host::Server(*server)));
            }
            Step::Offline { agent, .. } => {
                for server in 0..self.plan.servers {
                    self.heal(Host::Agent(*agent), Host::Server(server));
                }
                model.disturbed(Host::Agent(*agent), None);
            }
            Step::Partition { one, other, .. } => {
                self.heal(Host::Server(*one.min(other)), Host::Server(*one.max(other)));
                model.disturbed(Host::Server(*one), Some(Host::Server(*other)));
            }
            Step::Crash { server, .. } => {
                // It may have crashed twice.
                if self.servers[*server].is_none() {
                    drop(self.start_server(*server)?);
                }
                model.disturbed(Host::Server(*server), None);
            }
            Step::Restart { agent, .. } | Step::PowerLoss { agent, .. } => {
                if self.agents[*agent].is_none() {
                    self.start_agent(*agent)?;
                }
                model.disturbed(Host::Agent(*agent), None);
            }
            Step::Disk { .. } => {
                let disk = self.plan.disk;
                set_disk(move || disk);
            }
            Step::Forget { .. } | Step::Reset { .. } | Step::Upgrade { .. } | Step::Clock { .. } => {}
        }
        Ok(())
    }
}
