//! The events of a fleet, from a seed.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

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

/// By how much all clocks jump back at a time.
const BACK: Duration = Duration::from_secs(30);

/// One thing that happens.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// The path between an agent and a server is silent.
    Silence { agent: usize, server: usize, lasts: Duration },
    /// All paths of an agent are silent.
    Offline { agent: usize, lasts: Duration },
    /// The path between two servers is silent.
    Partition { one: usize, other: usize, lasts: Duration },
    /// A NAT forgets the connections of an agent with a server.
    Forget { agent: usize, server: usize },
    /// The connections of an agent with a server are reset.
    Reset { agent: usize, server: usize },
    /// A server ends, and another process of it starts later.
    Crash { server: usize, lasts: Duration },
    /// A server has a successor on its host, which takes over.
    Upgrade { server: usize, how: Upgrade },
    /// An agent has a successor on its node, which takes over.
    Replace { agent: usize, how: Upgrade },
    /// An agent ends, and starts again.
    Restart { agent: usize, lasts: Duration },
    /// The same, and nobody is told.
    PowerLoss { agent: usize, lasts: Duration },
    /// An agent ends, and starts again without its files.
    Reinstall { agent: usize, lasts: Duration },
    /// The agents' disks are slow.
    Disk { takes: Duration, lasts: Duration },
    /// The clocks jump, all at once.
    Clock { ahead: bool, by: Duration },
    /// The clock of one host jumps, and is set right later.
    WrongClock { host: Host, ahead: bool, by: Duration, lasts: Duration },
    /// A server cannot reach the API server, or none can: nothing passes, or connections are refused.
    NoApi { server: Option<usize>, silent: bool, lasts: Duration },
    /// An agent's Node is deleted, and made again.
    NoNode { agent: usize, lasts: Duration },
}

/// How a takeover goes, of a server or of an agent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Upgrade {
    /// The first process is stopped after this time, if it has not ended.
    pub(crate) stops: Duration,
    /// From the first time on, what one of the two does reaches the other after the second one: the host is busy.
    pub(crate) busy: Option<(Duration, Duration)>,
    /// Connections of a server that ends last so long.
    pub(crate) relays: Duration,
    /// One of the two ends, after this time.
    pub(crate) end: Option<(Duration, End)>,
}

/// An end of one of two processes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    SuccessorKilled,
    SuccessorStopped,
    PredecessorKilled,
    PredecessorStopped,
}

impl End {
    pub(crate) fn is_killed(self) -> bool {
        matches!(self, Self::SuccessorKilled | Self::PredecessorKilled)
    }

    /// The process that ends, of so many, the oldest first. It may have ended already.
    pub(crate) fn of(self, processes: usize) -> Option<usize> {
        let last = processes.checked_sub(1)?;
        match self {
            Self::SuccessorKilled | Self::SuccessorStopped => Some(last),
            Self::PredecessorKilled | Self::PredecessorStopped => last.checked_sub(1),
        }
    }
}

impl Upgrade {
    fn of(random: &mut StdRng) -> Self {
        let ms = Duration::from_millis;
        let stops = between(random, ms(3_000), ms(40_000));
        let busy = random.random_bool(0.3).then(|| {
            // Before the first question, or any other.
            let after = if random.random() { ms(10) } else { between(random, ms(10), ms(1_000)) };
            (after, between(random, ms(1_000), ms(12_000)))
        });
        let relays = between(random, ms(0), ms(8_000));
        let end = random.random_bool(0.5).then(|| {
            let end = match random.random_range(0..4) {
                0 => End::SuccessorKilled,
                1 => End::SuccessorStopped,
                2 => End::PredecessorKilled,
                _ => End::PredecessorStopped,
            };
            (between(random, ms(10), ms(15_000)), end)
        });
        Self { stops, busy, relays, end }
    }

    fn lasts(&self) -> Duration {
        let end = self.end.map_or(Duration::ZERO, |(after, _)| after + RESTARTS);
        let busy = self.busy.map_or(Duration::ZERO, |(after, takes)| after + takes * 5);
        self.stops.max(end).max(busy)
    }
}

/// A server that ends is started again after so long.
const RESTARTS: Duration = Duration::from_secs(2);
/// As in the product.
const LIFE: Duration = Duration::from_secs(30 * 86_400);

fn between(random: &mut StdRng, from: Duration, to: Duration) -> Duration {
    Duration::from_millis(random.random_range(from.as_millis() as u64..=to.as_millis() as u64))
}

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
        // The others are kept for faults of fleets without clients.
        if seed > 100 && !matches!(seed % 16, 4 | 5 | 9 | 11) {
            plan.add_clients(&mut StdRng::seed_from_u64(seed ^ 6));
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

    fn insert(&mut self, random: &mut StdRng, step: Step) {
        let pause = between(random, Duration::from_millis(50), Duration::from_secs(20));
        self.steps.insert(random.random_range(0..=self.steps.len()), (pause, step));
    }

    /// True if a clock may be set while an agent uses an epoch that is not stored yet, or before it loses its files.
    pub(crate) fn may_lower_epochs(&self) -> bool {
        let has = |wanted: fn(&Step) -> bool| self.steps.iter().any(|(_, step)| wanted(step));
        has(|step| matches!(step, Step::Disk { .. } | Step::Reinstall { .. }))
            && has(|step| matches!(step, Step::Clock { .. } | Step::WrongClock { .. }))
    }

    /// Clients connect meanwhile. Others do so later, while nothing fails and a server or an agent has a successor.
    fn add_clients(&mut self, random: &mut StdRng) {
        let (mut begins, mut over) = (Duration::ZERO, Duration::ZERO);
        for (pause, step) in &self.steps {
            begins += *pause;
            over = over.max(begins + step.lasts());
        }
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

impl Step {
    fn of(random: &mut StdRng, upgrades: &mut StdRng, servers: usize, agents: usize) -> Self {
        let (agent, server) = (random.random_range(0..agents), random.random_range(0..servers));
        let lasts = between(random, Duration::from_millis(50), Duration::from_secs(40));
        let short = lasts / 10;
        match random.random_range(0..22) {
            0..=2 => Self::Silence { agent, server, lasts },
            3..=4 => Self::Offline { agent, lasts },
            5..=6 => Self::Partition { one: server, other: (server + 1) % servers, lasts },
            7..=8 => Self::Forget { agent, server },
            9..=10 => Self::Reset { agent, server },
            11..=12 => Self::Crash { server, lasts: short },
            13..=16 => Self::Upgrade { server, how: Upgrade::of(upgrades) },
            17 => Self::Restart { agent, lasts: short },
            18..=19 => Self::PowerLoss { agent, lasts: short },
            20 => Self::Disk { takes: lasts / 4, lasts },
            _ => {
                // Far back, no certificate would be valid yet: each begins five minutes before it is issued.
                let (ahead, most) = if random.random() { (true, lasts * 20) } else { (false, BACK) };
                Self::Clock { ahead, by: most.min(lasts * 20) }
            }
        }
    }

    /// Time until it is over.
    pub(crate) fn lasts(&self) -> Duration {
        match self {
            Self::Silence { lasts, .. }
            | Self::Offline { lasts, .. }
            | Self::Partition { lasts, .. }
            | Self::Crash { lasts, .. }
            | Self::Restart { lasts, .. }
            | Self::PowerLoss { lasts, .. }
            | Self::Reinstall { lasts, .. }
            | Self::Disk { lasts, .. }
            | Self::WrongClock { lasts, .. }
            | Self::NoApi { lasts, .. }
            | Self::NoNode { lasts, .. } => *lasts,
            Self::Upgrade { how, .. } | Self::Replace { how, .. } => how.lasts(),
            Self::Forget { .. } | Self::Reset { .. } | Self::Clock { .. } => Duration::ZERO,
        }
    }
}
