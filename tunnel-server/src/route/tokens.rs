//! Assigns token addresses to nodes and pods, and decides when a token may be reused.

use std::collections::{HashMap, HashSet, VecDeque};
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

#[derive(PartialEq, Eq, Hash)]
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

    /// Takes over what an earlier server has assigned, before the first assignment: an address keeps its token, and the
    /// token of an address that is gone stays unused for the quarantine.
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

    /// A token, or the first of a block, for each owner: the one that it has, or had within the quarantine, else
    /// another. Owners that are not listed lose theirs. None when the range is used up.
    pub(super) fn assign(&mut self, owners: Vec<Owner>, now: Instant) -> HashMap<Owner, Option<IpAddr>> {
        let (v4, v6): (Vec<_>, Vec<_>) = owners.into_iter().partition(Owner::is_ipv4);
        let mut tokens: HashMap<_, _> = HashMap::with_capacity(v4.len() + v6.len());
        for (owner, number) in self.v4.assign(v4, now) {
            // The pool numbers addresses of an IPv4 range, so the cast loses nothing.
            tokens.insert(owner, number.map(|number| IpAddr::V4(Ipv4Addr::from(number as u32))));
        }
        for (owner, number) in self.v6.assign(v6, now) {
            tokens.insert(owner, number.map(|number| IpAddr::V6(Ipv6Addr::from(number))));
        }
        tokens
    }

    /// Whether the owner has a token now.
    pub(super) fn has(&self, owner: &Owner) -> bool {
        let pool = if owner.is_ipv4() { &self.v4 } else { &self.v6 };
        pool.live.contains_key(owner)
    }

    /// When the next token leaves its quarantine.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        let departed = self.v4.departed.values().chain(self.v6.departed.values());
        let since = departed
            .map(|(_, since)| *since)
            .chain([&self.v4, &self.v6].map(Pool::found_since).into_iter().flatten());
        since.map(|since| since + QUARANTINE).filter(|until| *until > now).min()
    }

    /// A token of the same family that is never assigned.
    pub(super) fn unassigned(&self, like: IpAddr) -> IpAddr {
        match like {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::from(self.v4.unassigned as u32)),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::from(self.v6.unassigned)),
        }
    }
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
    departed: HashMap<Owner, (u128, Instant)>,
    /// The departed by the size of what they had, oldest first. An entry that differs from `departed` is stale.
    order: HashMap<u128, VecDeque<(Owner, Instant)>>,
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
            order: HashMap::new(),
        }
    }

    /// See [`Tokens::take_over`]. What lies outside the range, or overlaps, is left out: the range was another then.
    fn take_over(&mut self, mut found: Vec<(IpNet, u128)>, now: Instant) {
        found.sort_unstable_by_key(|(_, number)| *number);
        let mut free = VecDeque::new();
        let Some(mut rest) = self.free.pop_back() else { return };
        for (net, number) in found {
            let bits = u32::from(net.max_prefix_len() - net.prefix_len());
            let Some(size) = 1_u128.checked_shl(bits).filter(|size| number & (size - 1) == 0) else {
                continue;
            };
            let Some(end) = number.checked_add(size).filter(|end| *end <= rest.end) else { continue };
            if number < rest.start || self.found.contains_key(&net) {
                continue;
            }
            if rest.start < number {
                free.push_back(rest.start..number);
            }
            rest.start = end;
            self.found.insert(net, number);
        }
        if !rest.is_empty() {
            free.push_back(rest);
        }
        self.free = free;
        self.found_since = (!self.found.is_empty()).then_some(now);
    }

    fn found_since(&self) -> Option<Instant> {
        self.found_since
    }

    /// Those whose owners have not come within the quarantine are free.
    fn free_found(&mut self, now: Instant) {
        if self.found_since.is_some_and(|since| now.saturating_duration_since(since) >= QUARANTINE) {
            self.found_since = None;
            for (net, number) in self.found.drain() {
                let bits = u32::from(net.max_prefix_len() - net.prefix_len());
                // It was not larger than the range when it was found.
                let size = 1_u128.checked_shl(bits).unwrap_or(0);
                self.free.push_back(number..number + size);
            }
        }
    }

    fn assign(&mut self, owners: Vec<Owner>, now: Instant) -> Vec<(Owner, Option<u128>)> {
        self.free_found(now);
        let mut before = std::mem::take(&mut self.live);
        let mut assigned = Vec::with_capacity(owners.len());
        let mut without = Vec::new();
        for owner in owners {
            let kept = before
                .remove(&owner)
                .or_else(|| self.departed.remove(&owner).map(|(number, _)| number))
                .or_else(|| self.found.remove(&owner.net()));
            match kept {
                Some(number) => {
                    self.live.insert(owner.clone(), number);
                    assigned.push((owner, Some(number)));
                }
                None => without.push(owner),
            }
        }
        for (owner, number) in before {
            let size = owner.size().unwrap_or(1);
            self.departed.insert(owner.clone(), (number, now));
            self.order.entry(size).or_default().push_back((owner, now));
        }
        let mut held = self.held(&without, now);
        for owner in without {
            let (share, most) = owner.share();
            let held = held.entry(share).or_default();
            let number = owner.size().filter(|_| *held < most).and_then(|size| self.take(size, now));
            *held += usize::from(number.is_some());
            if let Some(number) = number {
                self.live.insert(owner.clone(), number);
            }
            assigned.push((owner, number));
        }
        assigned
    }

    /// How many tokens, or blocks, those hold who need more.
    fn held(&self, without: &[Owner], now: Instant) -> HashMap<Share, usize> {
        let wanting: HashSet<Share> = without.iter().map(|owner| owner.share().0).collect();
        let quarantined =
            self.departed.iter().filter(|(_, (_, since))| now.saturating_duration_since(*since) < QUARANTINE);
        let mut held = HashMap::new();
        if !wanting.is_empty() {
            for owner in self.live.keys().chain(quarantined.map(|(owner, _)| owner)) {
                let (share, _) = owner.share();
                if wanting.contains(&share) {
                    *held.entry(share).or_default() += 1;
                }
            }
        }
        held
    }

    /// One that left its quarantine, so that nodes that come and go do not use up the range, else a fresh one.
    fn take(&mut self, size: u128, now: Instant) -> Option<u128> {
        self.out_of_quarantine(size, now)
            .or_else(|| if size == 1 { self.fresh() } else { self.fresh_block(size) })
    }

    fn out_of_quarantine(&mut self, size: u128, now: Instant) -> Option<u128> {
        let order = self.order.get_mut(&size)?;
        while let Some((owner, since)) = order.front() {
            let number = match self.departed.get(owner) {
                Some((number, at)) if at == since => *number,
                // It came back meanwhile; if it left again, that is a later entry.
                _ => {
                    order.pop_front();
                    continue;
                }
            };
            if now.saturating_duration_since(*since) < QUARANTINE {
                return None;
            }
            self.departed.remove(owner);
            order.pop_front();
            return Some(number);
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{HashMap, HashSet};

    use proptest::prelude::*;

    /// `size` addresses from 198.18.0.0; one is the network's and one is never assigned.
    fn pool(size: u128) -> Pool {
        let first = u128::from(u32::from(Ipv4Addr::new(198, 18, 0, 0)));
        Pool::new(first, first + size)
    }

    fn owner(number: u8) -> Owner {
        Owner::Node(format!("edge-{number}").parse().unwrap(), IpAddr::from([10, 0, 0, number]))
    }

    fn one(pool: &mut Pool, number: u8, now: Instant) -> Option<String> {
        let assigned = pool.assign(vec![owner(number)], now);
        assigned[0].1.map(|token| Ipv4Addr::from(token as u32).to_string())
    }

    #[test]
    fn a_departed_owners_token_is_unused_for_ten_minutes() {
        let mut pool = pool(5);
        let start = Instant::now();
        let first = one(&mut pool, 1, start);
        assert_eq!(first.as_deref(), Some("198.18.0.2"));
        assert_eq!(one(&mut pool, 2, start).as_deref(), Some("198.18.0.3"));
        let almost = start + QUARANTINE - Duration::from_millis(1);
        assert_eq!(one(&mut pool, 3, almost).as_deref(), Some("198.18.0.4"));
        assert_eq!(one(&mut pool, 4, start + QUARANTINE), first, "the oldest departed one is free again");
    }

    #[test]
    fn an_owner_that_returns_in_time_gets_its_token_back() {
        let mut pool = pool(6);
        let start = Instant::now();
        let first = one(&mut pool, 1, start);
        one(&mut pool, 2, start);
        let later = start + Duration::from_secs(599);
        assert_eq!(one(&mut pool, 1, later), first);
        // It departs again now, so its quarantine begins again.
        one(&mut pool, 2, later);
        assert_ne!(one(&mut pool, 3, start + QUARANTINE + Duration::from_secs(1)), first);
    }

    #[test]
    fn a_used_up_range_is_reported_and_recovers() {
        let mut pool = pool(7);
        let start = Instant::now();
        let assigned = pool.assign((0..6).map(owner).collect(), start);
        assert_eq!(assigned.iter().filter_map(|(_, token)| *token).collect::<HashSet<_>>().len(), 5);
        assert_eq!(assigned.iter().filter(|(_, token)| token.is_none()).count(), 1);
        assert!(assigned.iter().all(|(_, token)| *token != Some(pool.unassigned)));
        assert_eq!(one(&mut pool, 100, start), None);
        assert!(one(&mut pool, 101, start + QUARANTINE).is_some());
    }

    fn pods(number: u8, range: &str) -> Owner {
        Owner::Pods(format!("edge-{number}").parse().unwrap(), range.parse().unwrap())
    }

    #[test]
    fn blocks_are_aligned_and_do_not_overlap() {
        let mut tokens = Tokens::new("198.18.0.0/22".parse().unwrap(), "fd00::/112".parse().unwrap());
        let wanted = [
            pods(1, "10.244.1.0/24"),
            pods(2, "10.244.2.0/25"),
            pods(3, "10.244.3.0/24"),
            pods(4, "10.244.4.0/24"),
            owner(1),
            owner(2),
        ];
        let given = tokens.assign(wanted.to_vec(), Instant::now());
        let text = |owner: &Owner| given[owner].map(|token| token.to_string());
        // The last addresses are the redirect's own; below them they are packed, each aligned to its size.
        assert_eq!(text(&wanted[0]).as_deref(), Some("198.18.2.0"));
        assert_eq!(text(&wanted[1]).as_deref(), Some("198.18.3.0"));
        assert_eq!(text(&wanted[2]).as_deref(), Some("198.18.1.0"));
        assert_eq!(text(&wanted[3]), None, "no room is left above the single tokens");
        assert_eq!(text(&wanted[4]).as_deref(), Some("198.18.0.2"));
    }

    #[test]
    fn a_departed_block_is_reused_for_the_same_size() {
        let mut tokens = Tokens::new("198.18.0.0/23".parse().unwrap(), "fd00::/112".parse().unwrap());
        let start = Instant::now();
        let (first, second, half) =
            (pods(1, "10.244.1.0/25"), pods(2, "10.244.2.0/25"), pods(3, "10.244.3.0/26"));
        let block = |given: HashMap<Owner, Option<IpAddr>>, owner: &Owner| given[owner];
        let one = block(tokens.assign(vec![first.clone()], start), &first);
        assert!(one.is_some());
        let two = block(tokens.assign(vec![second.clone()], start), &second);
        assert!(two.is_some() && two != one);
        let later = start + QUARANTINE;
        let other = block(tokens.assign(vec![second.clone(), half.clone()], later), &half);
        assert!(other.is_some() && other != one, "another size does not take it");
        let third = pods(4, "10.244.4.0/25");
        assert_eq!(block(tokens.assign(vec![second, half, third.clone()], later), &third), one);
    }

    #[test]
    fn what_an_earlier_server_assigned_stays() {
        let tokens = || Tokens::new("198.18.0.0/22".parse().unwrap(), "fd00::/112".parse().unwrap());
        let (mut before, start) = (tokens(), Instant::now());
        let wanted = vec![owner(1), owner(2), owner(3), pods(1, "10.244.1.0/24"), pods(2, "10.244.2.0/25")];
        let mut given = before.assign(wanted.clone(), start);
        // The first has left in the meantime.
        let gone = given.remove(&wanted[0]).flatten().unwrap();
        let mut found: Vec<_> =
            wanted[1..].iter().map(|owner| (owner.net(), given[owner].unwrap())).collect();
        // Of another range, not aligned, of the other family, and twice.
        for (net, token) in [
            ("10.9.0.0/32", "198.19.0.7"),
            ("10.9.1.0/24", "198.18.1.7"),
            ("10.9.2.0/32", "fd00::7"),
            ("10.9.3.0/32", "198.18.0.3"),
        ] {
            found.push((net.parse().unwrap(), token.parse().unwrap()));
        }
        let mut after = tokens();
        after.take_over(&found, start);
        let late = wanted[4].clone();
        let others = [wanted[1..4].to_vec(), vec![owner(4), pods(4, "10.244.4.0/25")]].concat();
        let again = after.assign(others.clone(), start);
        assert!(wanted[1..4].iter().all(|owner| again[owner] == given[owner]), "{again:?}");
        assert_eq!(again[&owner(4)], Some(gone), "a hole is filled");
        let block = again[&others[4]];
        assert!(block.is_some() && block != given[&late], "{block:?}");
        let with_late = [others, vec![late.clone()]].concat();
        assert_eq!(after.assign(with_late, start)[&late], given[&late], "it was kept for its owner");
    }

    #[test]
    fn found_tokens_without_an_owner_become_free_after_the_quarantine() {
        let (mut pool, start) = (pool(4), Instant::now());
        let found = u128::from(u32::from(Ipv4Addr::new(198, 18, 0, 2)));
        pool.take_over(vec![(owner(1).net(), found)], start);
        assert_eq!(one(&mut pool, 2, start).as_deref(), Some("198.18.0.3"));
        let both = |pool: &mut Pool, now| pool.assign(vec![owner(2), owner(3)], now)[1].1;
        assert_eq!(both(&mut pool, start + QUARANTINE - Duration::from_millis(1)), None);
        assert_eq!(both(&mut pool, start + QUARANTINE), Some(found));
    }

    #[test]
    fn a_range_larger_than_the_tokens_gets_none() {
        let mut tokens = Tokens::new("198.18.0.0/24".parse().unwrap(), "fd00::/112".parse().unwrap());
        let wanted = [pods(1, "10.0.0.0/8"), pods(2, "fd01::/64"), pods(3, "::/0"), pods(4, "0.0.0.0/0")];
        let given = tokens.assign(wanted.to_vec(), Instant::now());
        assert!(given.values().all(Option::is_none), "{given:?}");
    }

    #[test]
    fn a_share_is_the_same_for_all_at_once_and_one_by_one() {
        let mut tokens = Tokens::new("198.18.0.0/15".parse().unwrap(), "fd00::/64".parse().unwrap());
        let address = |n: usize| IpAddr::from((0x0a00_0000 + u32::try_from(n).unwrap()).to_be_bytes());
        let node: NodeName = "edge-1".parse().unwrap();
        let range = |n: usize| IpNet::new(address(n * 256), 24).unwrap();
        let mut owners: Vec<_> = (0..NODE_SHARE + 2).map(|n| Owner::Node(node.clone(), address(n))).collect();
        owners.extend((0..NODE_SHARE_BLOCKS + 2).map(|n| Owner::Pods(node.clone(), range(n))));
        owners.extend((0..CONTESTED_SHARE + 2).map(|n| Owner::Contested(address(n))));
        owners.push(owner(9));
        let now = Instant::now();
        let without = |given: HashMap<Owner, Option<IpAddr>>| {
            let mut counts = [0; 3];
            for (owner, _) in given.iter().filter(|(_, token)| token.is_none()) {
                counts[match owner {
                    Owner::Node(..) => 0,
                    Owner::Pods(..) => 1,
                    Owner::Contested(_) => 2,
                }] += 1;
            }
            counts
        };
        assert_eq!(without(tokens.assign(owners.clone(), now)), [2, 2, 2]);
        assert_eq!(without(tokens.assign(owners, now)), [2, 2, 2]);
        // Those that it had count until their quarantine ends.
        let other = vec![Owner::Node(node, address(1 << 20))];
        let almost = now + QUARANTINE - Duration::from_millis(1);
        assert_eq!(without(tokens.assign(other.clone(), now)), [1, 0, 0]);
        assert_eq!(tokens.due(now), Some(now + QUARANTINE));
        assert_eq!(tokens.due(now + QUARANTINE), None);
        assert_eq!(without(tokens.assign(other.clone(), almost)), [1, 0, 0]);
        assert_eq!(without(tokens.assign(other, now + QUARANTINE)), [0, 0, 0]);
    }

    #[test]
    fn the_second_token_of_a_range_is_never_assigned() {
        let tokens = Tokens::new("198.18.0.0/24".parse().unwrap(), "fd00::/112".parse().unwrap());
        let unassigned = |like: &str| tokens.unassigned(like.parse().unwrap()).to_string();
        assert_eq!(
            (unassigned("10.8.0.7"), unassigned("fd00:8::7")),
            ("198.18.0.1".into(), "fd00::1".into())
        );
    }

    #[test]
    fn whole_address_spaces_do_not_overflow() {
        let mut tokens = Tokens::new("128.0.0.0/1".parse().unwrap(), "::/0".parse().unwrap());
        let v6 = Owner::Contested("fd00::1".parse().unwrap());
        let assigned = tokens.assign(vec![owner(1), v6.clone()], Instant::now());
        assert_eq!(assigned[&v6], Some("::2".parse().unwrap()));
        assert_eq!(assigned[&owner(1)], Some("128.0.0.2".parse().unwrap()));
    }

    #[test]
    fn reserved_tokens_are_never_assigned() {
        let mut tokens = Tokens::new("198.18.0.0/24".parse().unwrap(), "fd00::/112".parse().unwrap());
        let assigned = tokens.assign((0..=255).map(owner).collect(), Instant::now());
        let given: HashSet<_> = assigned.values().flatten().collect();
        assert_eq!(given.len(), 256 - 16 - 2);
        assert!(!given.iter().any(|token| reserved_tokens("198.18.0.0/24".parse().unwrap()).contains(
            match token {
                IpAddr::V4(v4) => v4,
                IpAddr::V6(_) => panic!("{token}"),
            }
        )));
    }

    proptest! {
        /// Tokens are unique among present owners, stable while the owner is present, and not reused in quarantine.
        #[test]
        fn tokens_are_unique_stable_and_quarantined(rounds in prop::collection::vec((0u64..400, prop::collection::hash_set(0u8..12, 0..10)), 1..40)) {
            let mut pool = pool(31);
            let mut now = Instant::now();
            let mut last_use: HashMap<u128, (Owner, Instant)> = HashMap::new();
            let mut before: HashMap<Owner, u128> = HashMap::new();
            for (seconds, present) in rounds {
                // An owner that was present until now departs now at the earliest.
                now += Duration::from_secs(seconds);
                for (owner, token) in &before {
                    last_use.insert(*token, (owner.clone(), now));
                }
                let assigned = pool.assign(present.iter().map(|n| owner(*n)).collect(), now);
                prop_assert_eq!(assigned.len(), present.len());
                let mut seen = HashSet::new();
                for (owner, token) in &assigned {
                    // 12 owners with their quarantine always fit into 29 tokens.
                    let token = token.unwrap();
                    prop_assert!(seen.insert(token), "{token} twice");
                    if let Some(kept) = before.get(owner) {
                        prop_assert_eq!(*kept, token);
                    }
                    if let Some((other, until)) = last_use.get(&token) {
                        prop_assert!(other == owner || now - *until >= QUARANTINE, "{} too early", token);
                    }
                }
                before = assigned.into_iter().map(|(owner, token)| (owner, token.unwrap())).collect();
            }
        }
    }
}
