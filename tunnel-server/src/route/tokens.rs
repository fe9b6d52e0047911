//! Assigns token addresses to nodes and pods, and decides when a token may be reused.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;
use std::time::{Duration, Instant};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use tunnel_core::identity::NodeName;

use crate::redirect::{reserved_tokens, reserved_tokens_v6};

/// How long the token of a departed owner stays unused: a client may still have a connection to it.
pub const QUARANTINE: Duration = Duration::from_secs(600);

/// How many tokens of addresses one node may hold, those in quarantine included: a node that names ever new addresses must
/// not use up the range.
const NODE_SHARE: usize = 64;
/// The same for blocks of pods.
const NODE_SHARE_BLOCKS: usize = 8;
/// The same for all contested addresses together.
const CONTESTED_SHARE: usize = 4096;

/// What a token, or a block of them, stands for.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Owner {
    /// A node's address. Another node with the same address has another token.
    Node(NodeName, IpAddr),
    /// The addresses of a node's pods.
    Pods(NodeName, IpNet),
    /// An address that several nodes claim: its token leads nowhere. A claimant that remains gets another.
    Contested(IpAddr),
}

impl Owner {
    fn is_ipv4(&self) -> bool {
        match self {
            Self::Node(_, address) | Self::Contested(address) => address.is_ipv4(),
            Self::Pods(_, range) => matches!(range, IpNet::V4(_)),
        }
    }

    /// Whose share of the tokens it is, and how large that share is.
    fn share(&self) -> (Share, usize) {
        match self {
            Self::Node(node, _) => (Share::Node(node.clone()), NODE_SHARE),
            Self::Pods(node, _) => (Share::Pods(node.clone()), NODE_SHARE_BLOCKS),
            Self::Contested(_) => (Share::Contested, CONTESTED_SHARE),
        }
    }

    /// The addresses.
    fn net(&self) -> IpNet {
        match self {
            Self::Node(_, address) | Self::Contested(address) => IpNet::from(*address),
            Self::Pods(_, range) => *range,
        }
    }

    /// How many addresses, and so tokens; None for more than 2^127.
    fn size(&self) -> Option<u128> {
        match self {
            Self::Node(..) | Self::Contested(_) => Some(1),
            Self::Pods(_, range) => {
                1_u128.checked_shl(u32::from(range.max_prefix_len() - range.prefix_len()))
            }
        }
    }
}

/// Why an owner gets no token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lack {
    /// The node has as many as it may.
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

/// Both families' tokens.
#[derive(Debug)]
pub(super) struct Tokens {
    v4: Pool,
    v6: Pool,
}

impl Tokens {
    /// The ends of the ranges are reserved for the redirect's self-tests.
    pub(super) fn new(v4: Ipv4Net, v6: Ipv6Net) -> Self {
        let (reserved, reserved_v6) = (reserved_tokens(v4).network(), reserved_tokens_v6(v6).network());
        Self {
            v4: Pool::new(u128::from(u32::from(v4.network())), u128::from(u32::from(reserved))),
            v6: Pool::new(u128::from(v6.network()), u128::from(reserved_v6)),
        }
    }

    /// Takes over what earlier servers have assigned, before the first assignment: an address keeps its token, and the
    /// token of an address that is gone stays unused for the quarantine. Of two that contradict each other the first counts.
    pub(super) fn take_over(&mut self, found: &[(IpNet, IpAddr)], now: Instant) {
        let number = |token: IpAddr| match token {
            IpAddr::V4(token) => u128::from(u32::from(token)),
            IpAddr::V6(token) => u128::from(token),
        };
        let of = |v4: bool| {
            let same = found
                .iter()
                .filter(move |(net, token)| matches!(net, IpNet::V4(_)) == v4 && token.is_ipv4() == v4);
            same.map(|(net, token)| (*net, number(*token))).collect::<Vec<_>>()
        };
        self.v4.take_over(of(true), now);
        self.v6.take_over(of(false), now);
    }

    /// To be called before any change at that time. True when there is more to assign than before.
    pub(super) fn advance(&mut self, now: Instant) -> bool {
        // Both have to.
        self.v4.advance(now) | self.v6.advance(now)
    }

    /// The owner has gone: nobody else gets its token, or its block, within the quarantine.
    pub(super) fn release(&mut self, owner: &Owner, now: Instant) {
        self.pool_mut(owner).release(owner, now);
    }

    /// The token, or the first of the block, that the owner has or had. Those that get theirs back come before those that
    /// need another.
    pub(super) fn restore(&mut self, owner: &Owner) -> Option<IpAddr> {
        let number = self.pool_mut(owner).restore(owner)?;
        Some(address(owner, number))
    }

    /// A token, or the first of a block, for an owner that had none.
    ///
    /// # Errors
    /// Why there is none.
    pub(super) fn acquire(&mut self, owner: &Owner) -> Result<IpAddr, Lack> {
        let number = self.pool_mut(owner).acquire(owner)?;
        Ok(address(owner, number))
    }

    fn pool_mut(&mut self, owner: &Owner) -> &mut Pool {
        if owner.is_ipv4() { &mut self.v4 } else { &mut self.v6 }
    }

    /// When the next token leaves its quarantine.
    pub(super) fn due(&mut self, now: Instant) -> Option<Instant> {
        [self.v4.due(), self.v6.due()].into_iter().flatten().filter(|until| *until > now).min()
    }

    /// A token of the same family that is never assigned.
    pub(super) fn unassigned(&self, like: IpAddr) -> IpAddr {
        match like {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::from(self.v4.unassigned as u32)),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::from(self.v6.unassigned)),
        }
    }
}

/// The owner says of which family the number is; an IPv4 range's fit into 32 bits.
fn address(owner: &Owner, number: u128) -> IpAddr {
    if owner.is_ipv4() {
        IpAddr::V4(Ipv4Addr::from(number as u32))
    } else {
        IpAddr::V6(Ipv6Addr::from(number))
    }
}

/// What an owner that has gone had.
#[derive(Debug)]
struct Departed {
    number: u128,
    since: Instant,
    /// Whether it counts as the node's share: until its quarantine ends.
    held: bool,
}

/// The numbers of one range's addresses.
#[derive(Debug)]
struct Pool {
    unassigned: u128,
    /// What was never assigned, ascending. Single tokens are taken from below, and blocks from above, so that they stay
    /// aligned without holes between single tokens.
    free: VecDeque<Range<u128>>,
    /// Tokens of an earlier server whose owners have not come yet, and since when.
    found: HashMap<IpNet, u128>,
    found_since: Option<Instant>,
    live: HashMap<Owner, u128>,
    departed: HashMap<Owner, Departed>,
    /// Those in quarantine, oldest first. An entry that differs from `departed` is stale.
    quarantined: VecDeque<(Owner, Instant)>,
    /// Those that left it, by the size of what they had, oldest first; likewise.
    reusable: HashMap<u128, VecDeque<(Owner, Instant)>>,
    /// How many tokens, or blocks, each has, those in quarantine included.
    held: HashMap<Share, usize>,
}

impl Pool {
    /// From `first` to `end`, exclusive. The first address of a range is its network's, and the second is never assigned.
    fn new(first: u128, end: u128) -> Self {
        Self {
            unassigned: first + 1,
            free: std::iter::once(first + 2..end).collect(),
            found: HashMap::new(),
            found_since: None,
            live: HashMap::new(),
            departed: HashMap::new(),
            quarantined: VecDeque::new(),
            reusable: HashMap::new(),
            held: HashMap::new(),
        }
    }

    /// See [`Tokens::take_over`]. What lies outside the range, or overlaps with what came before, is left out: the range was
    /// another then.
    fn take_over(&mut self, found: Vec<(IpNet, u128)>, now: Instant) {
        // By their first number.
        let mut free: BTreeMap<u128, u128> =
            self.free.drain(..).map(|range| (range.start, range.end)).collect();
        for (net, number) in found {
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
            // Nothing may be left on either side.
            free.extend([(start, number), (end, last)]);
            self.found.insert(net, number);
        }
        let ranges = free.into_iter().map(|(start, end)| start..end);
        self.free = ranges.filter(|range| !range.is_empty()).collect();
        self.found_since = (!self.found.is_empty()).then_some(now);
    }

    /// Frees what has been in quarantine for long enough, and the tokens whose owners have not come within it.
    fn advance(&mut self, now: Instant) -> bool {
        let mut freed = false;
        if self.found_since.is_some_and(|since| now.saturating_duration_since(since) >= QUARANTINE) {
            self.found_since = None;
            for (net, number) in self.found.drain() {
                let bits = u32::from(net.max_prefix_len() - net.prefix_len());
                // It was not larger than the range when it was found.
                let size = 1_u128.checked_shl(bits).unwrap_or(0);
                self.free.push_back(number..number + size);
                freed = true;
            }
        }
        let over = |since: Instant| now.saturating_duration_since(since) >= QUARANTINE;
        while let Some((owner, since)) = self.quarantined.pop_front_if(|(_, since)| over(*since)) {
            let Some(departed) = self.departed.get_mut(&owner) else { continue };
            if departed.since == since && std::mem::take(&mut departed.held) {
                unhold(&mut self.held, &owner);
                self.reusable.entry(owner.size().unwrap_or(1)).or_default().push_back((owner, since));
                freed = true;
            }
        }
        freed
    }

    fn release(&mut self, owner: &Owner, now: Instant) {
        let Some(number) = self.live.remove(owner) else { return };
        self.departed.insert(owner.clone(), Departed { number, since: now, held: true });
        self.quarantined.push_back((owner.clone(), now));
    }

    fn restore(&mut self, owner: &Owner) -> Option<u128> {
        if let Some(number) = self.live.get(owner) {
            return Some(*number);
        }
        let (number, held) = match self.departed.remove(owner) {
            Some(departed) => (departed.number, departed.held),
            None => (self.found.remove(&owner.net())?, false),
        };
        if !held {
            *self.held.entry(owner.share().0).or_default() += 1;
        }
        self.live.insert(owner.clone(), number);
        Some(number)
    }

    fn acquire(&mut self, owner: &Owner) -> Result<u128, Lack> {
        let (share, most) = owner.share();
        let size = owner.size().ok_or(Lack::Range)?;
        if self.held.get(&share).is_some_and(|held| *held >= most) {
            return Err(Lack::Share);
        }
        let number = self.take(size).ok_or(Lack::Range)?;
        *self.held.entry(share).or_default() += 1;
        self.live.insert(owner.clone(), number);
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

    /// One that left its quarantine, so that nodes that come and go do not use up the range, else a fresh one.
    fn take(&mut self, size: u128) -> Option<u128> {
        self.out_of_quarantine(size).or_else(|| if size == 1 { self.fresh() } else { self.fresh_block(size) })
    }

    fn out_of_quarantine(&mut self, size: u128) -> Option<u128> {
        let reusable = self.reusable.get_mut(&size)?;
        while let Some((owner, since)) = reusable.pop_front() {
            // Else it came back meanwhile; if it left again, that is a later entry.
            if self.departed.get(&owner).is_some_and(|departed| departed.since == since && !departed.held) {
                return self.departed.remove(&owner).map(|departed| departed.number);
            }
        }
        None
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
