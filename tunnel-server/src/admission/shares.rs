//! A listener's part of the open files, shared by sources and nodes; also the connections that one agent accepts,
//! shared by sources.
//!
//! A node may have as many connections as there are free places, a source half as many. So a node that everybody wants
//! gets half of the listener's places, one greedy source gets a third, two get a quarter each, and some are left for
//! the next one (Choudhury and Hahne, "Dynamic queue length thresholds", 1998). No share has to be configured. A source
//! gets less than a node, so that it cannot take all that a node may have.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use tunnel_runtime::NodeName;

use super::source_key;

#[derive(Clone, Debug)]
pub(crate) struct Shares {
    pub(crate) limit: u32,
    counts: Arc<Mutex<Counts>>,
    /// Places of unauthenticated connections; `None` if they have no separate bound here.
    unauthenticated: Option<Arc<Shares>>,
}

#[derive(Debug, Default)]
struct Counts {
    total: u32,
    sources: HashMap<IpAddr, u32>,
    nodes: HashMap<NodeName, u32>,
}

/// Reason for which a connection gets no place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Full {
    #[error(
        "all {limit} connections that this listener may have are open: raise the limit of open files (ulimit -n) or of memory, whichever \
         is the lower one (docs/operate/limits.md)"
    )]
    Listener { limit: u32 },
    #[error(
        "{source_key} has {open} connections open, and this listener has only {free} of its {limit} left"
    )]
    Source { source_key: IpAddr, open: u32, free: u32, limit: u32 },
    #[error("{node} has {open} connections open, and this listener has only {free} of its {limit} left")]
    Node { node: NodeName, open: u32, free: u32, limit: u32 },
    #[error(
        "{source_key} has {open} connections open to this node, whose agent has room for {limit}, and {free} of these are left"
    )]
    Agent { source_key: IpAddr, open: u32, free: u32, limit: u32 },
    #[error(
        "too many unauthenticated connections and requests from {source_key} (all sources together: {limit})"
    )]
    Unauthenticated { source_key: IpAddr, limit: u32 },
}

impl Full {
    /// Value of the metric's label `reason`.
    pub(crate) const fn label(&self) -> &'static str {
        match self {
            Self::Listener { .. } => "listener",
            Self::Source { .. } => "source",
            Self::Node { .. } => "node",
            Self::Agent { .. } => "agent",
            Self::Unauthenticated { .. } => "unauthenticated",
        }
    }

    pub(crate) const LABELS: [&str; 5] = ["listener", "source", "node", "agent", "unauthenticated"];
}

impl Shares {
    /// Allows `limit` connections at a time.
    pub(crate) fn new(limit: u32) -> Self {
        Self { limit, counts: Arc::default(), unauthenticated: None }
    }

    /// Makes a connection also hold a place among `unauthenticated` until its sender is known.
    pub(crate) fn with_unauthenticated(self, unauthenticated: &Arc<Shares>) -> Self {
        Self { unauthenticated: Some(unauthenticated.clone()), ..self }
    }

    /// Takes a place for a connection from `source`.
    pub(crate) fn admit(&self, source: IpAddr) -> Result<Share, Full> {
        self.admit_as(source_key(source))
    }

    /// Takes a place for a source key, such as this host at one node's virtual address.
    pub(crate) fn admit_as(&self, source: IpAddr) -> Result<Share, Full> {
        let limit = self.limit;
        // All local clients look alike. Where they name the node themselves, only the node's share bounds them.
        self.take(source, source.is_loopback()).map_err(|(open, free)| match free {
            0 => Full::Listener { limit },
            _ => Full::Source { source_key: source, open, free, limit },
        })
    }

    /// Takes a place for a connection that another server forwards, for which that has taken its client's share.
    pub(crate) fn admit_forwarded(&self, client: IpAddr) -> Result<Share, Full> {
        self.take(client, true).map_err(|_| Full::Listener { limit: self.limit })
    }

    /// Maximum number of connections of one source.
    pub(crate) fn most_of(&self, source: IpAddr) -> u32 {
        if source_key(source).is_loopback() { self.limit } else { self.limit.div_ceil(2) }
    }

    /// Returns the same shares with the limit that an agent accepts now, which may change.
    pub(crate) fn within(&self, limit: u32) -> Self {
        Self { limit, ..self.clone() }
    }

    /// Takes one of an agent's places, where all local clients together count as one source.
    pub(crate) fn admit_at_agent(&self, source: IpAddr) -> Result<Share, Full> {
        let limit = self.limit;
        self.take(source, false).map_err(|(open, free)| Full::Agent { source_key: source, open, free, limit })
    }

    /// Refuses a source that has half as many connections as there are free places. The error holds its number of
    /// connections and the number of free places.
    fn take(&self, source: IpAddr, unbounded: bool) -> Result<Share, (u32, u32)> {
        let mut counts = self.counts.lock();
        let free = self.limit.saturating_sub(counts.total);
        let open = counts.sources.get(&source).copied().unwrap_or(0);
        if free == 0 || (open >= free.div_ceil(2) && !unbounded) {
            return Err((open, free));
        }
        counts.total += 1;
        counts.sources.insert(source, open + 1);
        Ok(Share { shares: self.clone(), source, node: None, agent: None, unauthenticated: None })
    }

    /// Takes a place for an unauthenticated connection from `source`, which counts as such until [`Share::known`].
    pub(crate) fn admit_unauthenticated(&self, source: IpAddr) -> Result<Share, Full> {
        let mut place = self.admit(source)?;
        place.unauthenticated = self.unauthenticated(source)?.map(Box::new);
        Ok(place)
    }

    /// Takes only a place among unauthenticated ones, for another request on a connection that already has its own
    /// place.
    pub(crate) fn unauthenticated(&self, source: IpAddr) -> Result<Option<Share>, Full> {
        let Some(unauthenticated) = &self.unauthenticated else { return Ok(None) };
        let full = |_| Full::Unauthenticated { source_key: source_key(source), limit: unauthenticated.limit };
        unauthenticated.admit(source).map(Some).map_err(full)
    }
}

/// An admitted connection; dropping it frees its place.
#[derive(Debug)]
pub(crate) struct Share {
    shares: Shares,
    source: IpAddr,
    node: Option<NodeName>,
    agent: Option<Box<Share>>,
    unauthenticated: Option<Box<Share>>,
}

impl Share {
    /// Called when the sender and the node are known: the connection no longer counts as unauthenticated.
    pub(crate) fn known(&mut self) {
        self.unauthenticated = None;
    }

    /// Takes one of the places of the node's agent too, which is attached to this server.
    pub(crate) fn reaches_agent(&mut self, places: &Shares) -> Result<(), Full> {
        self.agent = Some(Box::new(places.admit_at_agent(self.source)?));
        Ok(())
    }

    /// Counts the connection as one of `node` too.
    pub(crate) fn reaches(&mut self, node: &NodeName) -> Result<(), Full> {
        let limit = self.shares.limit;
        let mut counts = self.shares.counts.lock();
        // Its own place is taken already and counts as free here; otherwise the last one could not be used.
        let free = limit.saturating_sub(counts.total) + 1;
        let open = counts.nodes.get(node).copied().unwrap_or(0);
        if open >= free {
            return Err(Full::Node { node: node.clone(), open, free: free - 1, limit });
        }
        counts.nodes.insert(node.clone(), open + 1);
        self.node = Some(node.clone());
        Ok(())
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut counts = self.shares.counts.lock();
        counts.total -= 1;
        decrement(&mut counts.sources, &self.source);
        if let Some(node) = &self.node {
            decrement(&mut counts.nodes, node);
        }
    }
}

/// Decrements a count, and removes it at zero.
pub(crate) fn decrement<K: Eq + Hash>(counts: &mut HashMap<K, u32>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn source(number: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, number])
    }

    fn node(number: u8) -> NodeName {
        format!("edge-{number}").parse().unwrap()
    }

    fn open(shares: &Shares, from: IpAddr, to: &NodeName) -> Result<Share, Full> {
        let mut share = shares.admit(from)?;
        share.reaches(to)?;
        Ok(share)
    }

    #[test]
    fn a_greedy_source_gets_a_third_and_a_second_one_leaves_room_too() {
        let shares = Shares::new(100);
        let first: Vec<_> = (0..200).filter_map(|n| open(&shares, source(1), &node(n)).ok()).collect();
        assert_eq!(first.len(), 34);
        let second: Vec<_> = (0..200).filter_map(|n| open(&shares, source(2), &node(n)).ok()).collect();
        assert_eq!(second.len(), 22);
        assert!(open(&shares, source(3), &node(1)).is_ok());
        drop((first, second));
        let counts = shares.counts.lock();
        assert!(counts.total == 0 && counts.sources.is_empty() && counts.nodes.is_empty());
    }

    #[test]
    fn a_greedy_node_gets_half_whoever_asks() {
        let shares = Shares::new(100);
        let held: Vec<_> = (0..200).filter_map(|n| open(&shares, source(n), &node(1)).ok()).collect();
        assert_eq!(held.len(), 50);
        assert_eq!(open(&shares, source(201), &node(1)).unwrap_err().label(), "node");
        assert!(open(&shares, source(201), &node(2)).is_ok());
    }

    #[test]
    fn local_clients_have_only_their_nodes_shares() {
        let (shares, local) = (Shares::new(100), IpAddr::from([127, 0, 0, 1]));
        let first: Vec<_> = (0..200).filter_map(|_| open(&shares, local, &node(1)).ok()).collect();
        assert_eq!(first.len(), 50);
        assert!(open(&shares, local, &node(2)).is_ok());
        let waiting: Vec<_> = (0..200).filter_map(|_| shares.admit(local).ok()).collect();
        assert_eq!(waiting.len(), 50);
        assert_eq!(shares.admit(local).unwrap_err(), Full::Listener { limit: 100 });
    }

    #[test]
    fn loopback_is_loopback_in_both_families() {
        for local in ["127.0.0.1", "127.80.84.1", "::1", "::ffff:127.0.0.1"] {
            let shares = Shares::new(100);
            let held: Vec<_> = (0..200).filter_map(|_| shares.admit(local.parse().unwrap()).ok()).collect();
            assert_eq!(held.len(), 100, "{local}");
        }
    }

    #[test]
    fn this_host_is_one_source_at_each_node() {
        let shares = Shares::new(100);
        let tokens = ["fd00:706f::5", "fd00:706f::6"].map(|token| token.parse::<IpAddr>().unwrap());
        let held =
            tokens.map(|token| (0..200).filter_map(|_| shares.admit_as(token).ok()).collect::<Vec<_>>());
        assert_eq!(held.map(|held| held.len()), [34, 22]);
    }

    #[test]
    fn a_greedy_source_gets_a_third_of_what_an_agent_accepts_through_all_listeners() {
        let (listeners, places) = ([1000, 1000].map(Shares::new), Shares::new(0).within(60));
        let reach = |listener: &Shares, source| {
            let mut share = listener.admit(source)?;
            share.reaches_agent(&places).map(|()| share)
        };
        for local in [source(1), IpAddr::from([127, 0, 0, 1])] {
            let held: Vec<_> = (0..200).filter_map(|n| reach(&listeners[n % 2], local).ok()).collect();
            assert_eq!(held.len(), 20, "{local}");
            let full = reach(&listeners[0], local).unwrap_err();
            assert_eq!(full, Full::Agent { source_key: local, open: 20, free: 40, limit: 60 });
            assert!(reach(&listeners[0], source(2)).is_ok());
            // The agent accepts less than before.
            assert!(places.within(10).admit_at_agent(source(3)).is_err());
        }
        assert!(places.counts.lock().total == 0 && listeners[0].counts.lock().total == 0);
    }

    #[test]
    fn unauthenticated_have_a_bound_of_their_own_until_they_are_known() {
        let unauthenticated = Arc::new(Shares::new(10));
        let listeners = [1000, 1000].map(|limit| Shares::new(limit).with_unauthenticated(&unauthenticated));
        let mut held: Vec<_> =
            (0..20).filter_map(|_| listeners[0].admit_unauthenticated(source(1)).ok()).collect();
        assert_eq!(held.len(), 4);
        let full = listeners[1].admit_unauthenticated(source(1)).unwrap_err();
        assert_eq!(full, Full::Unauthenticated { source_key: source(1), limit: 10 });
        assert_eq!(listeners[1].counts.lock().total, 0, "who is refused keeps no place");
        assert!(
            listeners[1].unauthenticated(source(1)).is_err()
                && listeners[1].unauthenticated(source(2)).unwrap().is_some()
        );
        // A known source keeps its place at the listener, and others can come.
        held.iter_mut().for_each(Share::known);
        assert_eq!((unauthenticated.counts.lock().total, listeners[0].counts.lock().total), (0, 4));
        assert!(listeners[0].admit_unauthenticated(source(1)).is_ok());
        assert!(Shares::new(1).unauthenticated(source(1)).unwrap().is_none());
    }

    #[test]
    fn a_mapped_address_and_a_network_count_as_one_source() {
        let shares = Shares::new(6);
        let _other = shares.admit(source(9)).unwrap();
        let _one = shares.admit("::ffff:10.0.0.1".parse().unwrap()).unwrap();
        let _two = shares.admit("10.0.0.1".parse().unwrap()).unwrap();
        assert_eq!(shares.admit("10.0.0.1".parse().unwrap()).unwrap_err().label(), "source");
        let _three = shares.admit("2001:db8::1".parse().unwrap()).unwrap();
        assert_eq!(shares.admit("2001:db8::2".parse().unwrap()).unwrap_err().label(), "source");
    }

    /// Compares the counts with the places of these sources, and with the nodes of these connections.
    fn counts_are(
        shares: &Shares,
        sources: impl Iterator<Item = IpAddr>,
        nodes: impl Iterator<Item = NodeName>,
    ) -> bool {
        fn count<K: Eq + Hash>(keys: impl Iterator<Item = K>) -> HashMap<K, u32> {
            keys.fold(HashMap::new(), |mut counts, key| {
                *counts.entry(key).or_default() += 1;
                counts
            })
        }
        let (sources, counts) = (count(sources), shares.counts.lock());
        counts.total == sources.values().sum::<u32>()
            && counts.sources == sources
            && counts.nodes == count(nodes)
    }

    proptest! {
        /// Whatever comes and goes, the limit holds, and no greedy source can take the last place.
        #[test]
        fn shares_are_bounded(limit in 0u32..50, steps in prop::collection::vec((0u8..5, 0u8..6, 0u8..6), 0..300)) {
            let shares = Shares::new(limit);
            let mut held = Vec::new();
            for (action, from, to) in steps {
                if action == 0 && !held.is_empty() {
                    let index = usize::from(from) % held.len();
                    held.swap_remove(index);
                } else {
                    held.extend(open(&shares, source(from), &node(to)).ok());
                }
                prop_assert!(held.len() <= limit as usize);
                let counts = shares.counts.lock();
                prop_assert_eq!(counts.total as usize, held.len());
                prop_assert_eq!(counts.sources.values().sum::<u32>(), counts.total);
                prop_assert_eq!(counts.nodes.values().sum::<u32>(), counts.total);
            }
            drop(held);
            let greedy: Vec<_> = std::iter::from_fn(|| open(&shares, source(9), &node(9)).ok()).collect();
            prop_assert!(greedy.len() as u32 <= limit / 3 + 1, "{} of {limit}", greedy.len());
        }

        /// Whatever a connection goes through, and wherever it is refused, it keeps what it has until it ends, and nothing
        /// after that: at its listener, among the unauthenticated, at its node and at the agent.
        #[test]
        fn every_place_is_given_back(
            limits in prop::array::uniform3(0u32..30),
            steps in prop::collection::vec((0u8..10, 0u8..5, any::<prop::sample::Index>(), 0u32..20), 0..200),
        ) {
            let unauthenticated = Arc::new(Shares::new(limits[0]));
            let listeners = [limits[1], limits[2]].map(|limit| Shares::new(limit).with_unauthenticated(&unauthenticated));
            let agents = [(); 2].map(|()| Shares::new(0));
            let (mut held, mut requests): (Vec<Share>, Vec<Share>) = Default::default();
            for (action, from, index, most) in steps {
                let from = if from == 0 { IpAddr::from([127, 0, 0, 1]) } else { source(from) };
                let listener = &listeners[most as usize % 2];
                match action {
                    0 => held.extend(listener.admit(from).ok()),
                    1 => held.extend(listener.admit_forwarded(from).ok()),
                    2 | 3 => held.extend(listener.admit_unauthenticated(from).ok()),
                    4 => requests.extend(listener.unauthenticated(from).ok().flatten()),
                    5 if !requests.is_empty() => drop(requests.swap_remove(index.index(requests.len()))),
                    6 if !held.is_empty() => drop(held.swap_remove(index.index(held.len()))),
                    7 if !held.is_empty() => index.get_mut(&mut held).known(),
                    8 | 9 if !held.is_empty() => {
                        let share = index.get_mut(&mut held);
                        // A connection is to one node.
                        if share.node.is_none() && share.agent.is_none() {
                            let to = most as usize % 2;
                            // An agent may say at any time that it accepts more or less.
                            let agent = agents[to].within(most);
                            let before = agents[to].counts.lock().total;
                            if share.reaches(&node(to as u8)).is_ok() && action == 8 {
                                let _ = share.reaches_agent(&agent);
                            }
                            let after = agents[to].counts.lock().total;
                            prop_assert!(after == before || after <= most);
                        }
                    }
                    _ => {}
                }
                let bound = |share: &&Share| share.unauthenticated.is_some();
                let inner = |share: &Share| share.unauthenticated.as_ref().map(|share| share.source);
                let expected = held.iter().filter_map(inner).chain(requests.iter().map(|share| share.source));
                prop_assert!(counts_are(&unauthenticated, expected, std::iter::empty()));
                prop_assert!(held.iter().filter(bound).count() + requests.len() <= limits[0] as usize);
                for (listener, limit) in listeners.iter().zip([limits[1], limits[2]]) {
                    let own: Vec<&Share> =
                        held.iter().filter(|share| Arc::ptr_eq(&share.shares.counts, &listener.counts)).collect();
                    let nodes = own.iter().filter_map(|share| share.node.clone());
                    prop_assert!(counts_are(listener, own.iter().map(|share| share.source), nodes));
                    prop_assert!(own.len() <= limit as usize);
                }
                for agent in &agents {
                    let of = |share: &&Share| Arc::ptr_eq(&share.shares.counts, &agent.counts);
                    let own = held.iter().filter_map(|share| share.agent.as_deref()).filter(of);
                    prop_assert!(counts_are(agent, own.map(|share| share.source), std::iter::empty()));
                }
            }
            drop((held, requests));
            for shares in listeners.iter().chain(&agents).chain([&*unauthenticated]) {
                prop_assert!(counts_are(shares, std::iter::empty(), std::iter::empty()));
            }
        }
    }
}
