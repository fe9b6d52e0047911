//! Places for connections that nobody has authenticated. When all are taken, the source with the most gives one up.
//!
//! A limit that only refuses locks others out: clients that connect and stay silent would hold every place until a
//! timeout, and then take it again. Here a new connection gets in at the expense of the source with the most places, so
//! each source keeps its fair share whatever the others do. A source is refused only if it has its fair share already,
//! with all of it in use.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};

/// A silent connection older than this makes room for another one of its own source. A younger one may have sent
/// something that has not been read yet, as when all agents of a site come back at once.
const SILENT: Duration = Duration::from_secs(1);
/// The same for a connection that has sent something: a handshake takes a few round trips.
const STUCK: Duration = Duration::from_secs(3);
const OVERDUE: [Duration; 2] = [SILENT, STUCK];

/// A fixed number of places, shared by sources of type `K`.
#[derive(Debug)]
pub struct Places<K: Ord> {
    limit: u32,
    /// Maximum number of evicted connections that may still hold their sockets.
    limit_leaving: u32,
    per_source: u32,
    /// Age from which a silent connection, and one that has sent something, makes room for another source with as many.
    overdue: [Duration; 2],
    state: Arc<Mutex<State<K>>>,
}

#[derive(Debug)]
struct State<K: Ord> {
    next: u64,
    taken: u32,
    leaving: u32,
    sources: HashMap<K, Source>,
    /// The last entry is the source that gives up a place: the one with the most places; among equals, the oldest.
    ranking: BTreeSet<(u32, Reverse<u64>, K)>,
}

/// Places of one source, in the order in which they came.
#[derive(Debug, Default)]
struct Source {
    since: u64,
    silent: BTreeMap<u64, Placed>,
    /// They have sent something, and wait until this server gets to it: their age says nothing of them.
    waiting: BTreeMap<u64, Placed>,
    speaking: BTreeMap<u64, Placed>,
}

/// A connection that has a place.
#[derive(Debug)]
struct Placed {
    /// Since when it is silent, or speaks.
    at: Instant,
    evicted: CancellationToken,
}

impl<K: Ord + Hash + Clone> Places<K> {
    /// Creates places for at most `sockets` connections, including evicted ones that are not closed yet, and at most
    /// `per_source` of one source.
    pub fn new(sockets: u32, per_source: u32) -> Self {
        let limit_leaving = (sockets / 4).max(1);
        let state =
            State { next: 0, taken: 0, leaving: 0, sources: HashMap::new(), ranking: BTreeSet::new() };
        Self {
            limit: sockets.saturating_sub(limit_leaving).max(1),
            limit_leaving,
            per_source,
            overdue: OVERDUE,
            state: Arc::new(Mutex::new(state)),
        }
    }

    /// For sources that cannot have many connections each: a connection ends by itself within `time`, and does not make
    /// room before that for a source with as many. Otherwise many that arrive at once would keep replacing each other.
    pub fn undisturbed_for(self, time: Duration) -> Self {
        Self { overdue: [time; 2], ..self }
    }

    /// True if all places are taken.
    pub fn is_full(&self) -> bool {
        self.state.lock().taken >= self.limit
    }

    /// True if a source without a place gets one: a free one, or that of a source with several.
    pub fn admits_new_source(&self) -> bool {
        let state = self.state.lock();
        state.taken < self.limit || state.ranking.last().is_some_and(|(most, ..)| *most > 1)
    }

    /// Takes a place for a connection from `source`. Returns `None` if this source may not have one.
    pub fn admit(&self, source: K, now: Instant) -> Option<Place<K>> {
        let mut state = self.state.lock();
        let own = state.count(&source);
        if (own >= self.per_source || state.taken >= self.limit)
            && (state.leaving >= self.limit_leaving
                || !state.make_room(&source, self.per_source, self.overdue, now))
        {
            return None;
        }
        let number = state.next;
        state.next += 1;
        state.taken += 1;
        let evicted = CancellationToken::new();
        let placed = Placed { at: now, evicted: evicted.clone() };
        state.change(&source, |places| places.silent.insert(number, placed));
        Some(Place { state: self.state.clone(), source, number, evicted })
    }
}

impl<K: Ord + Hash + Clone> State<K> {
    fn count(&self, source: &K) -> u32 {
        self.sources.get(source).map_or(0, Source::count)
    }

    /// Changes a source's places and updates the ranking.
    fn change<T>(&mut self, source: &K, change: impl FnOnce(&mut Source) -> T) -> T {
        let since = self.next;
        let places =
            self.sources.entry(source.clone()).or_insert_with(|| Source { since, ..Source::default() });
        let before = (places.count(), Reverse(places.since), source.clone());
        let changed = change(places);
        let after = (places.count(), Reverse(places.since), source.clone());
        if after.0 == 0 {
            self.sources.remove(source);
        }
        if before.0 != after.0 {
            self.ranking.remove(&before);
            if after.0 > 0 {
                self.ranking.insert(after);
            }
        }
        changed
    }

    /// Takes a place from the source with the most for one of `source`. Returns false if that would not be fairer.
    fn make_room(&mut self, source: &K, per_source: u32, overdue: [Duration; 2], now: Instant) -> bool {
        let own = self.count(source);
        let Some((most, _, top)) = self.ranking.last().cloned() else { return false };
        // A source with more always gives way; otherwise it could keep its places by renewing its connections all the
        // time.
        let fairer = own < per_source && most > own + 1;
        let from = if fairer || own == 0 { top } else { source.clone() };
        let overdue = match (fairer, from == *source) {
            (true, _) => [Duration::ZERO; 2],
            (false, true) => OVERDUE,
            (false, false) => overdue,
        };
        let victim = self.change(&from, |places| places.take_overdue(now, overdue));
        let Some(victim) = victim else { return false };
        victim.cancel();
        self.taken -= 1;
        self.leaving += 1;
        true
    }
}

impl Source {
    fn count(&self) -> u32 {
        let count = self.silent.len() + self.waiting.len() + self.speaking.len();
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    /// Takes the oldest silent one that is overdue, else the newest that waits, which has waited least, else the oldest that
    /// speaks. `overdue`: minimum age of a silent connection, and of one that has sent something.
    fn take_overdue(&mut self, now: Instant, [silent, speaking]: [Duration; 2]) -> Option<CancellationToken> {
        let over =
            |placed: &Placed, age: Duration| age.is_zero() || now.saturating_duration_since(placed.at) > age;
        let first = self.silent.first_entry().filter(|oldest| over(oldest.get(), silent));
        first
            .or_else(|| self.waiting.last_entry().filter(|_| speaking.is_zero()))
            .or_else(|| self.speaking.first_entry().filter(|oldest| over(oldest.get(), speaking)))
            .map(|taken| taken.remove().evicted)
    }
}

/// Place of a connection; dropping it frees the place.
#[derive(Debug)]
pub struct Place<K: Ord + Hash + Clone> {
    state: Arc<Mutex<State<K>>>,
    source: K,
    number: u64,
    evicted: CancellationToken,
}

impl<K: Ord + Hash + Clone> Place<K> {
    /// Called when the connection waits for this server: silent ones are evicted before it, and it is not overdue until
    /// [`Place::spoke`].
    pub fn waits(&self) {
        self.state.lock().change(&self.source, |places| {
            let placed = places.silent.remove(&self.number).or_else(|| places.speaking.remove(&self.number));
            if let Some(placed) = placed {
                places.waiting.insert(self.number, placed);
            }
        });
    }

    /// Called when the connection has sent something that this server begins to answer: silent and waiting ones are evicted
    /// before it.
    pub fn spoke(&self) {
        self.state.lock().change(&self.source, |places| {
            let placed = places.silent.remove(&self.number).or_else(|| places.waiting.remove(&self.number));
            if let Some(placed) = placed {
                places.speaking.insert(self.number, Placed { at: Instant::now(), ..placed });
            }
        });
    }

    /// Completes when the place has been given to another connection; this one has to be closed then.
    pub fn evicted(&self) -> WaitForCancellationFuture<'_> {
        self.evicted.cancelled()
    }

    pub fn is_evicted(&self) -> bool {
        self.evicted.is_cancelled()
    }
}

impl<K: Ord + Hash + Clone> Drop for Place<K> {
    fn drop(&mut self) {
        let mut state = self.state.lock();
        // The lock is held, so it cannot be evicted meanwhile.
        if self.evicted.is_cancelled() {
            state.leaving -= 1;
            return;
        }
        state.change(&self.source, |places| {
            for connections in [&mut places.silent, &mut places.waiting, &mut places.speaking] {
                connections.remove(&self.number);
            }
        });
        state.taken -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LATER: Duration = Duration::from_secs(10);

    fn live<K: Ord + Hash + Clone>(held: &[Place<K>]) -> usize {
        held.iter().filter(|place| !place.is_evicted()).count()
    }

    #[test]
    fn sixteen_sources_with_all_the_places_give_one_to_a_new_source_immediately() {
        let (places, now) = (Places::new(1024, u32::MAX), Instant::now());
        let mut held = Vec::new();
        for round in 0..2_000u32 {
            // As fast as possible: no connection gets old enough to be overdue.
            held.extend(places.admit(round % 16, now));
            held.retain(|place| !place.is_evicted());
        }
        let new_source = places.admit(99, now).unwrap();
        for round in 0..2_000u32 {
            held.extend(places.admit(round % 16, now));
            held.retain(|place| !place.is_evicted());
        }
        assert!(!new_source.is_evicted());
    }

    #[test]
    fn a_site_of_a_thousand_agents_does_not_evict_itself() {
        let (places, now) = (Places::new(400, u32::MAX), Instant::now());
        let first: Vec<_> = (0..1_000).filter_map(|_| places.admit("site", now)).collect();
        assert_eq!((first.len(), live(&first)), (300, 300));
        first.iter().for_each(Place::spoke);
        assert!(places.admit("site", now + SILENT).is_none());
        // Stuck connections make room.
        assert!(places.admit("site", now + LATER).is_some());
        assert_eq!(live(&first), 299);
    }

    #[test]
    fn one_that_waits_for_its_turn_is_not_overdue_and_gives_way_to_other_sources_first() {
        let (places, now) = (Places::new(4, u32::MAX), Instant::now());
        let mut held: Vec<_> = (0..3).filter_map(|_| places.admit("site", now)).collect();
        held.iter().for_each(Place::waits);
        assert!(places.admit("site", now + LATER).is_none());
        held[0].spoke();
        let _other = places.admit("other", now).unwrap();
        // Of those that wait the newest has lost least.
        assert!(!held[0].is_evicted() && !held[1].is_evicted() && held[2].is_evicted());
        // The place of the one that left is still in use.
        drop(held.remove(2));
        assert!(places.admit("site", now + LATER).is_some(), "the one that spoke is stuck");
        assert!(held[0].is_evicted() && !held[1].is_evicted());
    }

    #[test]
    fn those_that_come_at_once_do_not_replace_each_other() {
        let (places, now) = (Places::new(400, 3).undisturbed_for(LATER), Instant::now());
        let first: Vec<_> = (0..1_000).filter_map(|node| places.admit(node, now)).collect();
        assert_eq!((first.len(), live(&first)), (300, 300));
        assert!(places.admit(1_000, now + 2 * STUCK).is_none(), "the others are about to end");
        assert_eq!(live(&first), 300);
        assert!(places.admit(1_000, now + LATER + SILENT).is_some());
        // A source with more gives way at once, and its silent connections give way to its own new ones.
        let places = Places::new(4, 3).undisturbed_for(LATER);
        let held: Vec<_> = (0..3).map(|_| places.admit(0, now).unwrap()).collect();
        let other = places.admit(1, now).unwrap();
        assert!(held[0].is_evicted() && !other.is_evicted());
        let places = Places::new(100, 1).undisturbed_for(LATER);
        let held = places.admit(0, now).unwrap();
        assert!(places.admit(0, now + 2 * SILENT).is_some() && held.is_evicted());
    }

    #[test]
    fn a_sources_silent_connection_goes_first_and_the_oldest_of_those() {
        let (places, now) = (Places::new(100, 3), Instant::now());
        let held: Vec<_> = (0..3).map(|_| places.admit("source", now).unwrap()).collect();
        held[0].spoke();
        assert!(places.admit("source", now).is_none(), "none is overdue");
        let next = places.admit("source", now + LATER).unwrap();
        assert!(!held[0].is_evicted() && held[1].is_evicted() && !held[2].is_evicted());
        drop((held, next));
        let state = places.state.lock();
        assert_eq!((state.taken, state.leaving, state.sources.len(), state.ranking.len()), (0, 0, 0, 0));
    }

    #[test]
    fn new_sources_find_a_place_where_another_one_has_several() {
        let (places, now) = (Places::new(4, u32::MAX).undisturbed_for(LATER), Instant::now());
        let several: Vec<_> = (0..3).map(|_| places.admit(0, now).unwrap()).collect();
        assert!(places.is_full() && places.admits_new_source());
        drop(several);
        let _one_each: Vec<_> = (0..3).map(|source| places.admit(source, now).unwrap()).collect();
        assert!(places.is_full() && !places.admits_new_source());
        assert!(places.admit(3, now).is_none());
    }

    #[test]
    fn evicted_connections_that_do_not_close_are_bounded() {
        let (places, now) = (Places::new(100, u32::MAX), Instant::now());
        let greedy: Vec<_> = (0..75).map(|_| places.admit(0, now).unwrap()).collect();
        let others: Vec<_> = (1..100).filter_map(|source| places.admit(source, now)).collect();
        assert_eq!((others.len(), live(&greedy)), (25, 50));
    }

    proptest! {
        /// After any sequence of steps, the counts match a naive model, the sockets stay within the bound, and no
        /// source loses its place to one that would then have more.
        #[test]
        fn places_are_fair(
            sockets in 1u32..40,
            per_source in 1u32..12,
            steps in prop::collection::vec((0u8..7, 0u8..8, 0usize..40, 0u64..2_000), 1..300),
        ) {
            let places = Places::new(sockets, per_source);
            let mut now = Instant::now();
            let mut held: Vec<Place<u8>> = Vec::new();
            let of = |held: &[Place<u8>], source: u8| {
                held.iter().filter(|place| place.source == source && !place.is_evicted()).count()
            };
            for (action, source, index, millis) in steps {
                match action {
                    0 if !held.is_empty() => drop(held.swap_remove(index % held.len())),
                    1 if !held.is_empty() => held[index % held.len()].spoke(),
                    2 => now += Duration::from_millis(millis),
                    3 if !held.is_empty() => held[index % held.len()].waits(),
                    _ => {
                        let evicted_before: Vec<bool> = held.iter().map(Place::is_evicted).collect();
                        let before: Vec<usize> = (0..8).map(|source| of(&held, source)).collect();
                        let admitted = places.admit(source, now);
                        let victims: Vec<u8> = held.iter().zip(&evicted_before)
                            .filter(|(place, before)| place.is_evicted() && !**before)
                            .map(|(place, _)| place.source).collect();
                        prop_assert!(victims.len() <= 1);
                        prop_assert!(admitted.is_some() || victims.is_empty());
                        for victim in victims {
                            prop_assert!(victim == source || before[usize::from(victim)] > before[usize::from(source)]);
                        }
                        held.extend(admitted);
                    }
                }
                let state = places.state.lock();
                let taken = u32::try_from(live(&held)).unwrap();
                prop_assert_eq!(state.taken, taken);
                prop_assert_eq!(state.taken + state.leaving, u32::try_from(held.len()).unwrap());
                prop_assert!(held.len() <= (sockets as usize).max(2));
                for source in 0..8 {
                    prop_assert_eq!(state.count(&source) as usize, of(&held, source));
                    prop_assert!(of(&held, source) <= per_source as usize);
                }
                prop_assert_eq!(state.ranking.len(), state.sources.len());
            }
        }
    }
}
