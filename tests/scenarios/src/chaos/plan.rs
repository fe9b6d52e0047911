//! The plan of faults, drawn from a seed: the same seed gives the same sequence.
use std::fmt;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{Rng as _, SeedableRng as _};

/// Maximum number of faults at the same time.
const AT_ONCE: usize = 3;
/// Pause between two steps in milliseconds; one in ten is longer.
const PAUSE: std::ops::Range<u64> = 100..1_200;
const LONG_PAUSE: std::ops::Range<u64> = 1_200..8_000;
/// Steps of a round. After the last one there is no fault any more.
const STEPS: usize = 10;
/// Number of rounds after which each kind of fault has begun.
pub(super) const ALL: usize = 3;
/// Number of kinds of faults.
const KINDS: usize = 16;
/// The edge whose agent has a session with every server.
pub(super) const ATTACHED_EVERYWHERE: usize = 0;

/// A fault. Servers and edges are counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    // Faults that last.
    ServerKilled(usize),
    ServerStopped(usize),
    ServerFrozen(usize),
    ServersApart(usize, usize),
    AgentKilled(usize),
    AgentFrozen(usize),
    LinkCut(usize),
    /// The node has lost its label.
    Unlabelled(usize),
    /// Another node has its address.
    Impostor(usize),
    /// Two hundred additional nodes exist.
    Crowd,
    // Momentary faults.
    ServerUpgraded(usize),
    /// The successor dies after this number of milliseconds.
    SuccessorDies(usize, u64),
    AgentUpgraded(usize),
    AddressChanged(usize),
    MappingsForgotten,
    /// One step of a rotation of the CA.
    CaRotated,
}

/// A part of the system that two simultaneous faults cannot share.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Server(usize),
    Agent(usize),
    Uplink(usize),
    Node(usize),
    Nodes,
}

impl Fault {
    pub(super) fn lasts(self) -> bool {
        matches!(
            self,
            Self::ServerKilled(_)
                | Self::ServerStopped(_)
                | Self::ServerFrozen(_)
                | Self::ServersApart(..)
                | Self::AgentKilled(_)
                | Self::AgentFrozen(_)
                | Self::LinkCut(_)
                | Self::Unlabelled(_)
                | Self::Impostor(_)
                | Self::Crowd
        )
    }

    /// Reports whether a connection to this edge through this server may fail by it, until all has recovered. Edge
    /// [`ATTACHED_EVERYWHERE`] needs no other server than the client's own.
    pub(super) fn touches(self, edge: usize, server: usize) -> bool {
        match self {
            Self::ServerKilled(at)
            | Self::ServerStopped(at)
            | Self::ServerFrozen(at)
            | Self::ServerUpgraded(at)
            | Self::SuccessorDies(at, _) => at == server || edge != ATTACHED_EVERYWHERE,
            Self::ServersApart(one, other) => {
                edge != ATTACHED_EVERYWHERE && (one == server || other == server)
            }
            Self::AgentKilled(at)
            | Self::AgentFrozen(at)
            | Self::LinkCut(at)
            | Self::Unlabelled(at)
            | Self::Impostor(at)
            | Self::AgentUpgraded(at)
            | Self::AddressChanged(at) => at == edge,
            Self::MappingsForgotten | Self::CaRotated => true,
            Self::Crowd => false,
        }
    }

    fn parts(self) -> Vec<Part> {
        match self {
            Self::ServerKilled(at)
            | Self::ServerStopped(at)
            | Self::ServerFrozen(at)
            | Self::ServerUpgraded(at)
            | Self::SuccessorDies(at, _) => vec![Part::Server(at)],
            Self::ServersApart(..) | Self::MappingsForgotten | Self::CaRotated => Vec::new(),
            Self::AgentKilled(at) | Self::AgentFrozen(at) | Self::AgentUpgraded(at) => vec![Part::Agent(at)],
            Self::LinkCut(at) => vec![Part::Uplink(at)],
            Self::Unlabelled(at) | Self::Impostor(at) => vec![Part::Node(at)],
            Self::AddressChanged(at) => vec![Part::Uplink(at), Part::Node(at)],
            Self::Crowd => vec![Part::Nodes],
        }
    }

    fn excludes(self, other: Self) -> bool {
        let parts = other.parts();
        let same_pair = matches!((self, other), (Self::ServersApart(..), Self::ServersApart(..)));
        same_pair || self.parts().iter().any(|part| parts.contains(part))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Begins(Fault),
    Ends(Fault),
}

/// One step: a pause, followed by changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) pause: Duration,
    pub(super) change: Change,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pause = self.pause.as_millis();
        match self.change {
            Change::Begins(fault) if fault.lasts() => write!(f, "after {pause} ms begins {fault:?}"),
            Change::Begins(fault) => write!(f, "after {pause} ms {fault:?}"),
            Change::Ends(fault) => write!(f, "after {pause} ms ends {fault:?}"),
        }
    }
}

/// An endless sequence of rounds of faults.
#[derive(Debug)]
pub(super) struct Plan {
    rng: StdRng,
    servers: usize,
    edges: usize,
    /// The next kinds. Each kind comes once before any is repeated, unless a lasting fault delays it.
    next: Vec<usize>,
}

impl Plan {
    pub(super) fn new(seed: u64, servers: usize, edges: usize) -> Self {
        Self { rng: StdRng::seed_from_u64(seed), servers, edges, next: Vec::new() }
    }

    /// Returns the next round: all faults that begin in it end in it.
    pub(super) fn round(&mut self) -> Vec<Step> {
        let (mut steps, mut active) = (Vec::new(), Vec::<Fault>::new());
        while steps.len() < STEPS || !active.is_empty() {
            let range = if self.rng.random_bool(0.1) { LONG_PAUSE } else { PAUSE };
            let pause = Duration::from_millis(self.rng.random_range(range));
            let full = active.len() == AT_ONCE || steps.len() >= STEPS;
            let ends = full || (!active.is_empty() && self.rng.random_bool(0.4));
            let change = if ends {
                let at = self.rng.random_range(0..active.len());
                Change::Ends(active.remove(at))
            } else {
                let fault = self.fault(&active);
                if fault.lasts() {
                    active.push(fault);
                }
                Change::Begins(fault)
            };
            steps.push(Step { pause, change });
        }
        steps
    }

    fn fault(&mut self, active: &[Fault]) -> Fault {
        loop {
            let (server, edge) =
                (self.rng.random_range(0..self.servers), self.rng.random_range(0..self.edges));
            let other = (server + self.rng.random_range(1..self.servers)) % self.servers;
            let after = self.rng.random_range(0..1_500);
            let all: [Fault; KINDS] = [
                Fault::ServerKilled(server),
                Fault::ServerStopped(server),
                Fault::ServerFrozen(server),
                Fault::ServersApart(server, other),
                Fault::AgentKilled(edge),
                Fault::AgentFrozen(edge),
                Fault::LinkCut(edge),
                Fault::Unlabelled(edge),
                Fault::Impostor(edge),
                Fault::Crowd,
                Fault::ServerUpgraded(server),
                Fault::SuccessorDies(server, after),
                Fault::AgentUpgraded(edge),
                Fault::AddressChanged(edge),
                Fault::MappingsForgotten,
                Fault::CaRotated,
            ];
            let fits = |kind: &usize| active.iter().all(|other| !all[*kind].excludes(*other));
            if let Some(at) = self.next.iter().position(fits) {
                return all[self.next.remove(at)];
            }
            let mut kinds: Vec<usize> = (0..KINDS).collect();
            kinds.shuffle(&mut self.rng);
            self.next.append(&mut kinds);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(seed: u64) -> Vec<Step> {
        let mut plan = Plan::new(seed, 3, 4);
        (0..20).flat_map(|_| plan.round()).collect()
    }

    #[test]
    fn a_seed_is_a_sequence() {
        assert_eq!(rounds(7), rounds(7));
        assert_ne!(rounds(7), rounds(8));
    }

    #[test]
    fn the_first_rounds_have_every_kind() {
        for seed in 1..=100 {
            let mut plan = Plan::new(seed, 3, 4);
            let steps: Vec<Step> = (0..ALL).flat_map(|_| plan.round()).collect();
            let begun = steps.iter().filter_map(|step| match step.change {
                Change::Begins(fault) => Some(std::mem::discriminant(&fault)),
                Change::Ends(_) => None,
            });
            assert_eq!(begun.collect::<std::collections::HashSet<_>>().len(), KINDS, "seed {seed}");
        }
    }

    #[test]
    fn what_begins_in_a_round_ends_in_it_and_no_two_faults_have_the_same_part() {
        let mut plan = Plan::new(1, 3, 4);
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..100 {
            let mut active: Vec<Fault> = Vec::new();
            for step in plan.round() {
                match step.change {
                    Change::Begins(fault) => {
                        assert!(
                            active.iter().all(|other| !fault.excludes(*other)),
                            "{fault:?} in {active:?}"
                        );
                        seen.insert(format!("{fault:?}").split('(').next().unwrap().to_owned());
                        active.extend(fault.lasts().then_some(fault));
                    }
                    Change::Ends(fault) => {
                        let at =
                            active.iter().position(|other| *other == fault).expect("an end without a begin");
                        active.remove(at);
                    }
                }
                assert!(active.len() <= AT_ONCE);
            }
            assert!(active.is_empty(), "{active:?} at the end of a round");
        }
        assert_eq!(seen.len(), 16, "{seen:?}");
    }
}
