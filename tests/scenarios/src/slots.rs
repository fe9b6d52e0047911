//! Which scenarios run at the same time: one with a cluster at most, as two would take each other's processor time and time out,
//! and beside it others, whose time is mostly waiting.
use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The places of those that run.
pub(crate) struct Slots {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// How many run at the same time.
    places: usize,
    /// A scenario with a cluster runs.
    cluster: bool,
    /// Others that run.
    others: usize,
    /// Those that wait, by their place in the list.
    waiting_clusters: BTreeSet<usize>,
    waiting_others: BTreeSet<usize>,
}

/// A scenario that may run, until it is dropped.
pub(crate) struct Slot<'a> {
    slots: &'a Slots,
    cluster: bool,
}

impl Slots {
    pub(crate) fn new(places: usize) -> Self {
        let state = State {
            places: places.max(1),
            cluster: false,
            others: 0,
            waiting_clusters: BTreeSet::new(),
            waiting_others: BTreeSet::new(),
        };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Waits for the turn of the scenario at this place of the list.
    pub(crate) fn enter(&self, place: usize, cluster: bool) -> Slot<'_> {
        let mut state = self.lock();
        state.wait(place, cluster);
        while !state.admits(place, cluster) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.admit(place, cluster);
        // The next one may fit as well.
        self.changed.notify_all();
        Slot { slots: self, cluster }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn wait(&mut self, place: usize, cluster: bool) {
        let waiting = if cluster { &mut self.waiting_clusters } else { &mut self.waiting_others };
        waiting.insert(place);
    }

    /// One place is for clusters as long as there are any: they follow one another from beginning to end.
    fn admits(&self, place: usize, cluster: bool) -> bool {
        if cluster {
            return !self.cluster
                && self.others < self.places
                && self.waiting_clusters.first() == Some(&place);
        }
        let kept = usize::from(self.cluster || !self.waiting_clusters.is_empty());
        self.others + kept < self.places && self.waiting_others.first() == Some(&place)
    }

    fn admit(&mut self, place: usize, cluster: bool) {
        if cluster {
            self.waiting_clusters.remove(&place);
            self.cluster = true;
        } else {
            self.waiting_others.remove(&place);
            self.others += 1;
        }
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        let mut state = self.slots.lock();
        if self.cluster {
            state.cluster = false;
        } else {
            state.others -= 1;
        }
        drop(state);
        self.slots.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(places: usize, clusters: &[usize], others: &[usize]) -> State {
        let mut state = Slots::new(places).state.into_inner().unwrap();
        clusters.iter().for_each(|place| state.wait(*place, true));
        others.iter().for_each(|place| state.wait(*place, false));
        state
    }

    #[test]
    fn clusters_follow_one_another_beside_others() {
        let mut state = state(2, &[2, 4], &[0, 1, 3]);
        assert!(!state.admits(4, true), "2 is before it");
        assert!(!state.admits(1, false), "0 is before it");
        state.admit(0, false);
        assert!(!state.admits(1, false), "a place is kept for a cluster");
        state.admit(2, true);
        assert!(!state.admits(4, true) && !state.admits(1, false), "both places are taken");
        state.cluster = false;
        assert!(state.admits(4, true) && !state.admits(1, false), "the place is the next cluster's");
        state.admit(4, true);
        state.others -= 1;
        assert!(state.admits(1, false));
        state.admit(1, false);
        state.cluster = false;
        assert!(state.admits(3, false), "no cluster is left");
    }

    #[test]
    fn one_place_is_enough_for_all() {
        let mut state = state(1, &[1], &[0]);
        assert!(!state.admits(0, false));
        state.admit(1, true);
        state.cluster = false;
        assert!(state.admits(0, false));
    }

    #[test]
    fn a_place_is_free_again_when_its_slot_is_dropped() {
        let slots = Slots::new(1);
        drop(slots.enter(0, true));
        drop(slots.enter(1, false));
        let _held = slots.enter(2, true);
        assert!(slots.lock().cluster);
    }
}
