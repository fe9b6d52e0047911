//! The events of a fleet, from a seed.

mod step;

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use self::step::between;
pub(crate) use self::step::{End, PathFault, Step, TwinEnd, Upgrade};
use crate::client::Client;
use crate::fleet::Host;
use crate::model::settles;

/// A fleet, and what happens to it.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) servers: usize,
    pub(crate) agents: usize,
    /// Number of them, the last ones, that are konnectivity's.
    pub(crate) of_konnectivity: usize,
    /// Number of servers that each agent has sessions with.
    pub(crate) links: usize,
    /// A server that has a successor waits to be stopped.
    pub(crate) in_cluster: bool,
    /// The servers follow an API server, and one of them writes to it.
    pub(crate) has_api: bool,
    /// Nodes are revoked: a server keeps what it knows of that in a folder, and reads it so often.
    pub(crate) reads: Option<Duration>,
    /// Open files of each server, by which its places are bounded.
    pub(crate) files: u32,
    /// Lifetime of all certificates.
    pub(crate) life: Duration,
    /// Time that an agent's disk takes.
    pub(crate) disk: Duration,
    /// One-way delays between each agent and each server.
    pub(crate) delays: Vec<Vec<Duration>>,
    /// One-way delay between any two servers.
    pub(crate) between: Duration,
    /// When each server starts for the first time.
    pub(crate) starts: Vec<Duration>,
    /// When agents start: within this time after the servers.
    pub(crate) spread: Duration,
    /// Each with the time since the one before.
    pub(crate) steps: Vec<(Duration, Step)>,
    /// Each with the time since the steps begin.
    pub(crate) clients: Vec<(Duration, Client)>,
    /// Time in which all agents attach at first.
    pub(crate) patience: Duration,
}

/// As in the product.
const LIFE: Duration = Duration::from_secs(30 * 86_400);

impl Plan {
    /// True if agents choose among the servers.
    pub(crate) fn is_limited(&self) -> bool {
        self.links < self.servers
    }

    pub(crate) fn is_of_konnectivity(&self, agent: usize) -> bool {
        agent >= self.agents - self.of_konnectivity
    }

    pub(crate) fn of(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let mut upgrades = StdRng::seed_from_u64(seed ^ 2);
        if seed % 16 == 7 {
            return Self::crowd(&mut random);
        }
        let mut plan = Self::fleet(&mut random, &mut upgrades);
        if seed % 8 == 1 {
            plan.replace_agents(&mut StdRng::seed_from_u64(seed ^ 3));
        }
        // Lower ones are kept for other faults.
        if seed % 8 == 5 && seed > 32 {
            plan.jump_clocks(&mut StdRng::seed_from_u64(seed ^ 4));
        }
        if seed % 8 == 3 && seed > 32 {
            plan.limit_links(&mut StdRng::seed_from_u64(seed ^ 5));
        }
        if seed % 8 == 6 && seed > 100 {
            plan.add_api(&mut StdRng::seed_from_u64(seed ^ 7));
        }
        if seed % 16 == 12 && seed > 1000 {
            plan.of_konnectivity = StdRng::seed_from_u64(seed ^ 8).random_range(1..plan.agents);
        }
        if seed % 32 == 10 && seed > 1000 {
            plan.add_twins(&mut StdRng::seed_from_u64(seed ^ 9));
        }
        if (matches!(seed % 32, 0 | 24) || seed % 64 == 46) && seed > 1000 {
            plan.add_revocations(&mut StdRng::seed_from_u64(seed ^ 10));
        }
        // The others are kept for faults of fleets without clients.
        if seed > 100 && !matches!(seed % 16, 4 | 5 | 9 | 11) {
            plan.add_clients(&mut StdRng::seed_from_u64(seed ^ 6));
        }
        if (seed / 32).is_multiple_of(2) && seed > 1000 && plan.of_konnectivity == 0 {
            plan.vary_sockets(&mut StdRng::seed_from_u64(seed ^ 11));
        }
        plan
    }

    /// Agents have successors as well.
    fn replace_agents(&mut self, random: &mut StdRng) {
        for _ in 0..random.random_range(2..=4) {
            let pause = between(random, Duration::from_millis(50), Duration::from_secs(20));
            let step = Step::Replace { agent: random.random_range(0..self.agents), how: Upgrade::of(random) };
            self.steps.insert(random.random_range(0..=self.steps.len()), (pause, step));
        }
    }

    /// Agents choose among the servers, one of which is killed while nothing else happens.
    fn limit_links(&mut self, random: &mut StdRng) {
        self.links = random.random_range(1..self.servers);
        let server = random.random_range(0..self.servers);
        let lasts = between(random, Duration::from_millis(50), Duration::from_secs(8));
        self.steps.insert(0, (Duration::from_secs(10), Step::Crash { server, lasts }));
    }

    /// The servers have an API server, which they do not reach at times. An agent is away for long enough for its node's condition.
    fn add_api(&mut self, random: &mut StdRng) {
        self.has_api = true;
        // A server would compute its routes as slowly: both are work on a thread that may block.
        self.steps.retain(|(_, step)| !matches!(step, Step::Disk { .. }));
        let second = Duration::from_secs(1);
        for _ in 0..random.random_range(2..=5) {
            let server = random.random_bool(0.7).then(|| random.random_range(0..self.servers));
            let lasts = between(random, second / 2, second * 60);
            let step = Step::NoApi { server, silent: random.random(), lasts };
            self.insert(random, step);
        }
        let lasts = between(random, second * 60, second * 150);
        let agent = random.random_range(0..self.agents);
        self.insert(random, Step::Offline { agent, lasts });
        if random.random() {
            let lasts = between(random, second, second * 150);
            let agent = random.random_range(0..self.agents);
            self.insert(random, Step::NoNode { agent, lasts });
        }
        if random.random() {
            let lasts = between(random, second / 20, second * 4);
            let agent = random.random_range(0..self.agents);
            self.insert(random, Step::Reinstall { agent, lasts });
        }
    }

    /// The disk of an agent is copied, and both run: at first while other things happen, then while nothing else does.
    fn add_twins(&mut self, random: &mut StdRng) {
        let second = Duration::from_secs(1);
        self.steps.truncate(4);
        let agent = random.random_range(0..self.agents);
        let lasts = between(random, second * 20, second * 150);
        let step = self.twin(random, agent, lasts);
        let pause = between(random, second / 20, second * 20);
        self.steps.insert(random.random_range(0..=self.steps.len() / 2), (pause, step));
        for _ in 0..random.random_range(1..=3) {
            let server = random.random_range(0..self.servers);
            let (how, lasts) = match random.random_range(0..4) {
                0 => (PathFault::Forget, Duration::ZERO),
                1 => (PathFault::Reset, Duration::ZERO),
                _ => (PathFault::Silence, between(random, second / 20, second * 60)),
            };
            self.insert(random, Step::TwinPath { agent, server, how, lasts });
        }
        let (begins, over) = self.over();
        let (begin, lasts) = (over + settles(self), second * 150);
        let agent = random.random_range(0..self.agents);
        let step = self.twin(random, agent, lasts);
        self.steps.push((begin - begins, step));
        for _ in 0..random.random_range(2..=6) {
            // Once both have come, and before one goes.
            let at = begin + between(random, second * 40, lasts - second * 10);
            self.add_client(random, at, true);
        }
    }

    fn twin(&self, random: &mut StdRng, agent: usize, lasts: Duration) -> Step {
        let delay = between(random, Duration::from_millis(1), Duration::from_millis(100));
        Step::Twin { agent, delay, end: TwinEnd::of(random), lasts }
    }

    pub(crate) fn has_twins(&self) -> bool {
        self.steps.iter().any(|(_, step)| matches!(step, Step::Twin { .. }))
    }

    /// One or two nodes are revoked.
    fn add_revocations(&mut self, random: &mut StdRng) {
        let second = Duration::from_secs(1);
        // After an event, or at the latest after ten seconds.
        self.reads = Some(between(random, second / 10, second * 10));
        // Records that a server learns of another one would be as slow. An agent that has no certificate while it is revoked
        // asks for one again after ten minutes, and after one of two reasons as well.
        self.steps.retain(|(_, step)| {
            !matches!(step, Step::Disk { .. } | Step::NoNode { .. } | Step::Reinstall { .. })
        });
        let first = random.random_range(0..self.agents);
        for agent in (first..self.agents).take(random.random_range(1..=2)) {
            let server = random.random_range(0..self.servers);
            let lasts = between(random, second / 2, second * 150);
            self.insert(random, Step::Revoke { agent, server, lasts });
        }
    }

    fn insert(&mut self, random: &mut StdRng, step: Step) {
        let pause = between(random, Duration::from_millis(50), Duration::from_secs(20));
        self.steps.insert(random.random_range(0..=self.steps.len()), (pause, step));
    }

    /// True if a clock may be set while an agent uses an epoch that is not stored yet, or before it loses its files.
    pub(crate) fn may_lower_epochs(&self) -> bool {
        let has = |wanted: fn(&Step) -> bool| self.steps.iter().any(|(_, step)| wanted(step));
        has(|step| matches!(step, Step::Disk { .. } | Step::Reinstall { .. } | Step::Revoke { .. }))
            && has(|step| matches!(step, Step::Clock { .. } | Step::WrongClock { .. }))
    }

    /// Clients connect meanwhile. Others do so later, while nothing fails and a server or an agent has a successor.
    fn add_clients(&mut self, random: &mut StdRng) {
        let (begins, over) = self.over();
        for _ in 0..random.random_range(3..=8) {
            let at = between(random, Duration::ZERO, over);
            self.add_client(random, at, false);
        }
        let begin = over + settles(self);
        let stops = between(random, Duration::from_secs(3), Duration::from_secs(8));
        let how = Upgrade { stops, busy: None, relays: Duration::ZERO, end: None };
        let step = match random.random_bool(0.3) {
            true => Step::Replace { agent: random.random_range(0..self.agents), how },
            false => Step::Upgrade { server: random.random_range(0..self.servers), how },
        };
        self.steps.push((begin - begins, step));
        let before = Duration::from_secs(3);
        for _ in 0..random.random_range(4..=10) {
            let at = begin - before + between(random, Duration::ZERO, before + stops * 2);
            self.add_client(random, at, true);
        }
    }

    /// Some clients read late, or never, or go in the middle.
    fn vary_sockets(&mut self, random: &mut StdRng) {
        for (at, client) in std::mem::take(&mut self.clients) {
            self.clients.push((at, client.with_socket(random)));
        }
        for index in 0..self.clients.len() {
            let number = u16::try_from(self.clients.len()).unwrap_or(u16::MAX);
            let (at, client) = &self.clients[index];
            let beside = client.beside(number).map(|beside| (*at + Duration::from_millis(500), beside));
            self.clients.extend(beside);
        }
    }

    /// When the last step begins, and when all are over.
    fn over(&self) -> (Duration, Duration) {
        let (mut begins, mut over) = (Duration::ZERO, Duration::ZERO);
        for (pause, step) in &self.steps {
            begins += *pause;
            over = over.max(begins + step.lasts());
        }
        (begins, over)
    }

    fn add_client(&mut self, random: &mut StdRng, at: Duration, completes: bool) {
        let number = u16::try_from(self.clients.len()).unwrap_or(u16::MAX);
        // One that takes a new stream only after a while has connections that fail meanwhile.
        let agents = if completes { self.agents - self.of_konnectivity } else { self.agents };
        let mut client = Client::of(random, number, (self.servers, agents), completes);
        client.of_konnectivity = self.is_of_konnectivity(client.node);
        self.clients.push((at, client));
    }

    /// The clocks of some hosts are wrong for a time, and certificates may last for less than that.
    fn jump_clocks(&mut self, random: &mut StdRng) {
        let minute = Duration::from_secs(60);
        self.life = minute * [60, 720, 7200, 43_200][random.random_range(0..4)];
        // All certificates would be over at once.
        self.steps.retain(|(_, step)| !matches!(step, Step::Clock { .. }));
        for _ in 0..random.random_range(2..=5) {
            let host = match random.random() {
                true => Host::Agent(random.random_range(0..self.agents)),
                false => Host::Server(random.random_range(0..self.servers)),
            };
            // Up to six days. Renewals look at the clock every ten minutes.
            let mut by = minute * (1 << random.random_range(0..14));
            let ahead = random.random();
            // An agent that is more than a day ahead and comes back is refused while the server has its session, as a copied identity
            // would be, and then waits for a minute or two.
            if ahead && matches!(host, Host::Agent(_)) {
                by = by.min(minute * 60 * 20);
            }
            let most = if random.random_bool(0.3) { minute * 15 } else { minute };
            let lasts = between(random, Duration::from_secs(1), most);
            let pause = between(random, Duration::from_millis(50), Duration::from_secs(20));
            let step = Step::WrongClock { host, ahead, by, lasts };
            self.steps.insert(random.random_range(0..=self.steps.len()), (pause, step));
        }
    }

    /// Many agents with slow disks that come at once, and few places.
    fn crowd(random: &mut StdRng) -> Self {
        let agents = random.random_range(24..=36);
        let delay = between(random, Duration::from_millis(10), Duration::from_millis(60));
        Self {
            servers: 1,
            agents,
            of_konnectivity: 0,
            links: 1,
            in_cluster: false,
            has_api: false,
            reads: None,
            files: 128,
            life: LIFE,
            disk: between(random, Duration::from_millis(2200), Duration::from_millis(2800)),
            delays: vec![vec![delay]; agents],
            between: Duration::from_millis(1),
            starts: vec![Duration::ZERO],
            spread: Duration::from_secs(2),
            steps: Vec::new(),
            clients: Vec::new(),
            patience: Duration::from_secs(90),
        }
    }

    fn fleet(random: &mut StdRng, upgrades: &mut StdRng) -> Self {
        let ms = Duration::from_millis;
        let (servers, agents) = (random.random_range(2..=3), random.random_range(2..=4));
        let near = |random: &mut StdRng| between(random, ms(1), ms(100));
        let delays = (0..agents).map(|_| (0..servers).map(|_| near(random)).collect()).collect();
        let late = random.random_bool(0.5);
        let starts = (0..servers).map(|index| match index {
            0 => Duration::ZERO,
            _ if late => between(random, ms(0), ms(30_000)),
            _ => between(random, ms(0), ms(500)),
        });
        let starts = starts.collect();
        let number = random.random_range(3..=8);
        let steps = (0..number).map(|_| {
            let pause = between(random, ms(50), ms(20_000));
            (pause, Step::of(random, upgrades, servers, agents))
        });
        let steps = steps.collect();
        Self {
            servers,
            agents,
            of_konnectivity: 0,
            links: servers,
            in_cluster: upgrades.random(),
            has_api: false,
            reads: None,
            files: 1024,
            life: LIFE,
            disk: ms(2),
            delays,
            between: between(random, ms(1), ms(10)),
            starts,
            spread: ms(500),
            steps,
            clients: Vec::new(),
            patience: Duration::from_secs(25),
        }
    }
}
