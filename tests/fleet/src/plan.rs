//! What happens to a fleet, from a seed.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

/// A fleet, and what happens to it.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) servers: usize,
    pub(crate) agents: usize,
    /// Open files of each server, by which its places are bounded.
    pub(crate) files: u32,
    /// What an agent's disk takes.
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
    /// Time in which all agents attach at first.
    pub(crate) patience: Duration,
}

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
    /// A server hands over to a successor on its host.
    Upgrade { server: usize },
    /// An agent ends, and starts again.
    Restart { agent: usize, lasts: Duration },
    /// The same, and nobody is told.
    PowerLoss { agent: usize, lasts: Duration },
    /// The agents' disks are slow.
    Disk { takes: Duration, lasts: Duration },
    /// The clocks jump.
    Clock { ahead: bool, by: Duration },
}

fn between(random: &mut StdRng, from: Duration, to: Duration) -> Duration {
    Duration::from_millis(random.random_range(from.as_millis() as u64..=to.as_millis() as u64))
}

impl Plan {
    pub(crate) fn of(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        if seed % 16 == 7 { Self::crowd(&mut random) } else { Self::fleet(&mut random) }
    }

    /// Many agents with slow disks that come at once, and few places.
    fn crowd(random: &mut StdRng) -> Self {
        let agents = random.random_range(24..=36);
        let delay = between(random, Duration::from_millis(10), Duration::from_millis(60));
        Self {
            servers: 1,
            agents,
            files: 128,
            disk: between(random, Duration::from_millis(1100), Duration::from_millis(1400)),
            delays: vec![vec![delay]; agents],
            between: Duration::from_millis(1),
            starts: vec![Duration::ZERO],
            spread: Duration::from_secs(2),
            steps: Vec::new(),
            patience: Duration::from_secs(90),
        }
    }

    fn fleet(random: &mut StdRng) -> Self {
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
            (pause, Step::of(random, servers, agents))
        });
        let steps = steps.collect();
        Self {
            servers,
            agents,
            files: 1024,
            disk: ms(2),
            delays,
            between: between(random, ms(1), ms(10)),
            starts,
            spread: ms(500),
            steps,
            patience: Duration::from_secs(25),
        }
    }
}

impl Step {
    fn of(random: &mut StdRng, servers: usize, agents: usize) -> Self {
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
            13..=16 => Self::Upgrade { server },
            17 => Self::Restart { agent, lasts: short },
            18..=19 => Self::PowerLoss { agent, lasts: short },
            20 => Self::Disk { takes: lasts / 4, lasts },
            _ => Self::Clock { ahead: random.random(), by: lasts * 20 },
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
            | Self::Disk { lasts, .. } => *lasts,
            Self::Forget { .. } | Self::Reset { .. } | Self::Upgrade { .. } | Self::Clock { .. } => {
                Duration::ZERO
            }
        }
    }
}
