//! Assigns the virtual addresses of nodes and pods, and decides when a virtual address may be reused.

#[cfg(test)]
mod tests;

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;
use std::time::{Duration, Instant};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use tunnel_runtime::NodeName;

/// Time for which the virtual address of a departed owner stays unused: a client may still have a connection to it.
pub const QUARANTINE: Duration = Duration::from_secs(600);

/// Maximum number of virtual addresses of one node, including those in quarantine: a node that keeps naming new addresses
/// must not use up the range.
const NODE_SHARE: usize = 64;
/// The same for blocks of pods.
const NODE_SHARE_BLOCKS: usize = 8;
/// The same for all contested addresses together.
const CONTESTED_SHARE: usize = 4096;

/// The last 16th of an IPv4 redirect range, at most 256 addresses, reserved for the redirect's self-test.
pub fn reserved_addresses(range: Ipv4Net) -> Ipv4Net {
    let prefix_len = (range.prefix_len() + 4).clamp(24, 32);
    Ipv4Net::new(range.broadcast(), prefix_len).map_or(range, |net| net.trunc())
}

/// The last 16th of an IPv6 redirect range, at most 256 addresses, likewise.
pub fn reserved_addresses_v6(range: Ipv6Net) -> Ipv6Net {
    let prefix_len = (range.prefix_len() + 4).clamp(120, 128);
    Ipv6Net::new(range.broadcast(), prefix_len).map_or(range, |net| net.trunc())
}

/// The target of a virtual address, or of a block of them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Owner {
    /// A node's address. Another node with the same address gets another virtual address.
    Node(NodeName, IpAddr),
    /// The addresses of a node's pods.
    Pods(NodeName, IpNet),
    /// An address that several nodes claim: its virtual address leads nowhere. If one claimant remains, it gets another virtual address.
    Contested(IpAddr),
}

impl Owner {
    fn is_ipv4(&self) -> bool {
        match self {
            Self::Node(_, address) | Self::Contested(address) => address.is_ipv4(),
            Self::Pods(_, range) => matches!(range, IpNet::V4(_)),
        }
    }

    fn node(&self) -> Option<&NodeName> {
        match self {
            Self::Node(node, _) | Self::Pods(node, _) => Some(node),
            Self::Contested(_) => None,
        }
    }

    /// Sort key, with addresses before pods. Only one owner has it at a time.
    fn key(&self) -> (bool, IpNet) {
        (matches!(self, Self::Pods(..)), self.net())
    }

    /// The share that the owner's virtual addresses count towards, and its limit.
    fn share(&self) -> (Share, usize) {
        match self {
            Self::Node(node, _) => (Share::Node(node.clone()), NODE_SHARE),
            Self::Pods(node, _) => (Share::Pods(node.clone()), NODE_SHARE_BLOCKS),
            Self::Contested(_) => (Share::Contested, CONTESTED_SHARE),
        }
    }

    /// The owner's addresses as a network.
    pub(super) fn net(&self) -> IpNet {
        match self {
            Self::Node(_, address) | Self::Contested(address) => IpNet::from(*address),
            Self::Pods(_, range) => *range,
        }
    }

    /// Number of addresses, and so of virtual addresses; None for more than 2^127.
    fn size(&self) -> Option<u128> {
        match self {
            Self::Node(..) | Self::Contested(_) => Some(1),
            Self::Pods(_, range) => {
                1_u128.checked_shl(u32::from(range.max_prefix_len() - range.prefix_len()))
            }
        }
    }
}

/// Reason that an owner gets no virtual address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lack {
    /// The node has its maximum.
    Share,
    /// The range is used up.
    Range,
}

#[derive(Debug, PartialEq, Eq, Hash)]
enum Share {
    Node(NodeName),
    Pods(NodeName),
    Contested,
}

/// Virtual addresses of both families.
#[derive(Debug)]
pub(super) struct VirtualAddresses {
    v4: Pool,
    v6: Pool,
}

impl VirtualAddresses {
    /// Reserves the ends of the ranges for the redirect's self-tests.
    pub(super) fn new(v4: Ipv4Net, v6: Ipv6Net) -> Self {
        let (reserved, reserved_v6) = (reserved_addresses(v4).network(), reserved_addresses_v6(v6).network());
        Self {
            v4: Pool::new(u128::from(u32::from(v4.network())), u128::from(u32::from(reserved))),
            v6: Pool::new(u128::from(v6.network()), u128::from(reserved_v6)),
        }
    }

    /// Takes over the virtual addresses that earlier servers assigned, before the first assignment: an address of the same node
    /// keeps its virtual address, and one that is gone or another node's leaves it unused for the quarantine. `node` says whose
    /// the address or range was; if that is unknown, it keeps its virtual address at any node. Of two contradicting entries the
    /// first counts.
    pub(super) fn take_over(
        &mut self,
        found: &[(IpNet, IpAddr)],
        node: impl Fn(IpNet) -> Option<NodeName>,
        now: Instant,
    ) {
        let number = |virtual_address: IpAddr| match virtual_address {
            IpAddr::V4(virtual_address) => u128::from(u32::from(virtual_address)),
            IpAddr::V6(virtual_address) => u128::from(virtual_address),
        };
        let of = |v4: bool| {
            let same = found.iter().filter(move |(net, virtual_address)| {
                matches!(net, IpNet::V4(_)) == v4 && virtual_address.is_ipv4() == v4
            });
            same.map(|(net, virtual_address)| (*net, number(*virtual_address), node(*net)))
                .collect::<Vec<_>>()
        };
        self.v4.take_over(of(true), now);
        self.v6.take_over(of(false), now);
    }

    /// Returns each owner's virtual address, or the first of its block, or the reason that it has none. `owners` must be sorted
    /// by [`Owner::key`]. Owners keep their virtual addresses or get them back, others get new ones in order; virtual addresses without an
    /// owner stay unused for the quarantine.
    pub(super) fn assign(&mut self, owners: &[Owner], now: Instant) -> Vec<Result<IpAddr, Lack>> {
        let of = |v4: bool| owners.iter().filter(move |owner| owner.is_ipv4() == v4);
        let mut v4 = self.v4.assign(of(true), now).into_iter();
        let mut v6 = self.v6.assign(of(false), now).into_iter();
        let given = owners.iter().filter_map(|owner| {
            let number = if owner.is_ipv4() { v4.next() } else { v6.next() };
            number.map(|number| Ok(address(owner, number?)))
        });
        given.collect()
    }

    /// Time at which the next virtual address leaves quarantine.
    pub(super) fn due(&mut self, now: Instant) -> Option<Instant> {
        [self.v4.due(), self.v6.due()].into_iter().flatten().filter(|until| *until > now).min()
    }

    /// A virtual address of the same family that is never assigned.
    pub(super) fn unassigned(&self, like: IpAddr) -> IpAddr {
        match like {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::from(self.v4.unassigned as u32)),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::from(self.v6.unassigned)),
        }
    }
}

/// Converts a number of the owner's family; an IPv4 range's numbers fit into 32 bits.
fn address(owner: &Owner, number: u128) -> IpAddr {
    if owner.is_ipv4() {
        IpAddr::V4(Ipv4Addr::from(number as u32))
    } else {
        IpAddr::V6(Ipv6Addr::from(number))
    }
}

/// The number of an owner that has gone, until its quarantine ends.
#[derive(Debug)]
struct Departed {
    number: u128,
    since: Instant,
}

/// The virtual addresses of one range, as numbers.
#[derive(Debug)]
struct Pool {
    unassigned: u128,
    /// Never assigned numbers, ascending, followed by those of `found` that nobody claimed. Single virtual addresses are taken
    /// from below and blocks from above, so that blocks stay aligned without holes between single virtual addresses.
    free: VecDeque<Range<u128>>,
    /// Virtual addresses of an earlier server whose owners have not come yet, with the owner's node if it is known; taken over at
    /// `found_since`.
    found: HashMap<IpNet, (u128, Option<NodeName>)>,
    found_since: Option<Instant>,
    /// Sorted by key.
    live: Vec<(Owner, u128)>,
    departed: HashMap<Owner, Departed>,
    /// Owners in quarantine, oldest first. An entry that differs from `departed` is stale.
    quarantined: VecDeque<(Owner, Instant)>,
    /// Numbers that left quarantine, by size, oldest first.
    reusable: HashMap<u128, VecDeque<u128>>,
    /// Number of virtual addresses or blocks of each share, including those in quarantine.
    held: HashMap<Share, usize>,
    /// Sizes of which nothing is left at present.
    used_up: HashSet<u128>,
}

impl Pool {
    /// Covers `first` to `end`, exclusive. The first number is the network's address, and the second is never assigned.
    fn new(first: u128, end: u128) -> Self {
        Self {
            unassigned: first + 1,
            free: std::iter::once(first + 2..end).collect(),
            found: HashMap::new(),
            found_since: None,
            live: Vec::new(),
            departed: HashMap::new(),
            quarantined: VecDeque::new(),
            reusable: HashMap::new(),
            held: HashMap::new(),
            used_up: HashSet::new(),
        }
    }

    /// See [`VirtualAddresses::take_over`]. Skips entries outside the range or overlapping earlier ones: they come from another
    /// range.
    fn take_over(&mut self, found: Vec<(IpNet, u128, Option<NodeName>)>, now: Instant) {
        // Start to end.
        let mut free: BTreeMap<u128, u128> =
            self.free.drain(..).map(|range| (range.start, range.end)).collect();
        for (net, number, node) in found {
            let bits = u32::from(net.max_prefix_len() - net.prefix_len());
            let Some(size) = 1_u128.checked_shl(bits).filter(|size| number & (size - 1) == 0) else {
                continue;
            };
            let Some(end) = number.checked_add(size) else { continue };
            let Some((start, last)) = free.range(..=number).next_back().map(|(start, last)| (*start, *last))
            else {
                continue;
            };
            if last < end || self.found.contains_key(&net) {
                continue;
            }
            // Either part may be empty; empty ranges are dropped below.
            free.extend([(start, number), (end, last)]);
            self.found.insert(net, (number, node));
        }
        let ranges = free.into_iter().map(|(start, end)| start..end);
        self.free = ranges.filter(|range| !range.is_empty()).collect();
        self.found_since = (!self.found.is_empty()).then_some(now);
    }

    /// See [`VirtualAddresses::assign`]. An owner that stays costs one comparison.
    fn assign<'a>(
        &mut self,
        owners: impl Iterator<Item = &'a Owner>,
        now: Instant,
    ) -> Vec<Result<u128, Lack>> {
        let mut before = std::mem::take(&mut self.live).into_iter().peekable();
        let mut owners: Vec<(&Owner, Option<u128>)> = owners.map(|owner| (owner, None)).collect();
        for (owner, kept) in &mut owners {
            while let Some((gone, number)) = before.next_if(|(other, _)| other.key() < owner.key()) {
                self.release(gone, number, now);
            }
            *kept = before.next_if(|(other, _)| other == *owner).map(|(_, number)| number);
        }
        before.for_each(|(gone, number)| self.release(gone, number, now));
        self.advance(now);
        for (owner, kept) in owners.iter_mut().filter(|(_, kept)| kept.is_none()) {
            *kept = self.restore(owner);
        }
        let mut given = Vec::with_capacity(owners.len());
        for (owner, kept) in owners {
            let number = kept.map_or_else(|| self.acquire(owner), Ok);
            self.live.extend(number.ok().map(|number| (owner.clone(), number)));
            given.push(number);
        }
        given
    }

    fn release(&mut self, owner: Owner, number: u128, now: Instant) {
        self.quarantined.push_back((owner.clone(), now));
        self.departed.insert(owner, Departed { number, since: now });
    }

    /// Frees numbers whose quarantine is over, and those of `found` that nobody claimed in that time.
    fn advance(&mut self, now: Instant) {
        let over = |since: Instant| now.saturating_duration_since(since) >= QUARANTINE;
        if self.found_since.is_some_and(over) {
            self.found_since = None;
            for (net, (number, _)) in self.found.drain() {
                let bits = u32::from(net.max_prefix_len() - net.prefix_len());
                // Not larger than the range, as checked when it was taken over.
                let size = 1_u128.checked_shl(bits).unwrap_or(0);
                self.free.push_back(number..number + size);
            }
        }
        while let Some((owner, since)) = self.quarantined.pop_front_if(|(_, since)| over(*since)) {
            if self.departed.get(&owner).is_some_and(|departed| departed.since == since)
                && let Some(departed) = self.departed.remove(&owner)
            {
                unhold(&mut self.held, &owner);
                self.reusable.entry(owner.size().unwrap_or(1)).or_default().push_back(departed.number);
            }
        }
        self.used_up.clear();
    }

    /// The owner's earlier number, if any.
    fn restore(&mut self, owner: &Owner) -> Option<u128> {
        if let Some(departed) = self.departed.remove(owner) {
            return Some(departed.number);
        }
        let Entry::Occupied(found) = self.found.entry(owner.net()) else { return None };
        // A connection of the other node's clients must not reach this one.
        if found.get().1.as_ref().is_some_and(|node| owner.node() != Some(node)) {
            return None;
        }
        let (number, _) = found.remove();
        *self.held.entry(owner.share().0).or_default() += 1;
        Some(number)
    }

    fn acquire(&mut self, owner: &Owner) -> Result<u128, Lack> {
        let (share, most) = owner.share();
        let size = owner.size().ok_or(Lack::Range)?;
        if self.held.get(&share).is_some_and(|held| *held >= most) {
            return Err(Lack::Share);
        }
        if self.used_up.contains(&size) {
            return Err(Lack::Range);
        }
        let Some(number) = self.take(size) else {
            self.used_up.insert(size);
            return Err(Lack::Range);
        };
        *self.held.entry(share).or_default() += 1;
        Ok(number)
    }

    fn due(&mut self) -> Option<Instant> {
        while let Some((owner, since)) = self.quarantined.front() {
            if self.departed.get(owner).is_some_and(|departed| departed.since == *since) {
                break;
            }
            self.quarantined.pop_front();
        }
        let oldest = self.quarantined.front().map(|(_, since)| *since);
        oldest.into_iter().chain(self.found_since).min().map(|since| since + QUARANTINE)
    }

    /// Takes a number that left quarantine, so that nodes that come and go do not use up the range, else a fresh one.
    fn take(&mut self, size: u128) -> Option<u128> {
        let reusable = self.reusable.get_mut(&size).and_then(VecDeque::pop_front);
        reusable.or_else(|| if size == 1 { self.fresh() } else { self.fresh_block(size) })
    }

    fn fresh(&mut self) -> Option<u128> {
        loop {
            let lowest = self.free.front_mut()?;
            if let Some(number) = lowest.next() {
                return Some(number);
            }
            self.free.pop_front();
        }
    }

    fn fresh_block(&mut self, size: u128) -> Option<u128> {
        for index in (0..self.free.len()).rev() {
            let range = self.free[index].clone();
            // Sizes are powers of two: rounding down aligns.
            let Some(first) = range.end.checked_sub(size).map(|last| last & !(size - 1)) else { continue };
            if first < range.start {
                continue;
            }
            self.free[index] = range.start..first;
            if first + size < range.end {
                self.free.insert(index + 1, first + size..range.end);
            }
            return Some(first);
        }
        None
    }
}

fn unhold(held: &mut HashMap<Share, usize>, owner: &Owner) {
    let share = owner.share().0;
    if let Some(count) = held.get_mut(&share) {
        *count -= 1;
        if *count == 0 {
            held.remove(&share);
        }
    }
}
