//! The things that happen in a plan.

use std::time::Duration;

use rand::Rng as _;
use rand::rngs::StdRng;

use crate::fleet::Host;

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
    /// An agent is killed, and no server gets a FIN or RST.
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
    /// A copy of an agent's disk runs on another host at the same time, so far away from the servers.
    Twin { agent: usize, delay: Duration, end: TwinEnd, lasts: Duration },
    /// The path between such a host and a server fails.
    TwinPath { agent: usize, server: usize, how: PathFault, lasts: Duration },
    /// A node is revoked on the host of a server, or in the cluster, and readmitted.
    Revoke { agent: usize, server: usize, lasts: Duration },
}

/// An end of the second agent of a node.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TwinEnd {
    Stopped,
    Killed,
    /// It is killed, and no server gets a FIN or RST.
    PowerLoss,
}

impl TwinEnd {
    pub(super) fn of(random: &mut StdRng) -> Self {
        match random.random_range(0..3) {
            0 => Self::Stopped,
            1 => Self::Killed,
            _ => Self::PowerLoss,
        }
    }
}

/// A fault of a path.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PathFault {
    Silence,
    Forget,
    Reset,
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
    pub(super) fn of(random: &mut StdRng) -> Self {
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

pub(super) fn between(random: &mut StdRng, from: Duration, to: Duration) -> Duration {
    Duration::from_millis(random.random_range(from.as_millis() as u64..=to.as_millis() as u64))
}

impl Step {
    pub(super) fn of(random: &mut StdRng, upgrades: &mut StdRng, servers: usize, agents: usize) -> Self {
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
            | Self::NoNode { lasts, .. }
            | Self::Twin { lasts, .. }
            | Self::TwinPath { lasts, .. }
            | Self::Revoke { lasts, .. } => *lasts,
            Self::Upgrade { how, .. } | Self::Replace { how, .. } => how.lasts(),
            Self::Forget { .. } | Self::Reset { .. } | Self::Clock { .. } => Duration::ZERO,
        }
    }

    /// The host that an agent runs on, if the step is about that.
    pub(crate) fn host_of_agent(&self) -> Option<Host> {
        match self {
            Self::Silence { agent, .. }
            | Self::Offline { agent, .. }
            | Self::Forget { agent, .. }
            | Self::Reset { agent, .. }
            | Self::Replace { agent, .. }
            | Self::Restart { agent, .. }
            | Self::PowerLoss { agent, .. }
            | Self::Reinstall { agent, .. } => Some(Host::Agent(*agent)),
            Self::Twin { agent, .. } | Self::TwinPath { agent, .. } => Some(Host::Twin(*agent)),
            _ => None,
        }
    }
}
