//! Schedules scenarios: at most one with a cluster, as two would compete for the processor and time out; beside it
//! others, which mostly wait; and one of those that hardly use the machine at all.
use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// A scenario's load on the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Load {
    /// Runs a cluster.
    Cluster,
    /// Uses some processor time.
    Other,
    /// Hardly uses any.
    Waits,
}

/// Slots of the running scenarios.
pub(crate) struct Slots {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// Maximum number of concurrent scenarios.
    places: usize,
    /// True while a scenario with a cluster runs.
    cluster: bool,
    /// Number of other scenarios that run.
    others: usize,
    /// True while one that mostly waits runs beside them.
    idler: bool,
    /// Scenarios that wait for a slot, by their place in the list.
    waiting_clusters: BTreeSet<usize>,
    waiting_others: BTreeSet<usize>,
    waiting_idlers: BTreeSet<usize>,
}

/// Slot of a running scenario, released when dropped.
pub(crate) struct Slot<'a> {
    slots: &'a Slots,
    load: Load,
}

impl Slots {
    pub(crate) fn new(places: usize) -> Self {
        let state = State {
            places: places.max(1),
            cluster: false,
            others: 0,
            idler: false,
            waiting_clusters: BTreeSet::new(),
            waiting_others: BTreeSet::new(),
            waiting_idlers: BTreeSet::new(),
        };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Waits for a slot for the scenario at this place of the list.
    pub(crate) fn enter(&self, place: usize, load: Load) -> Slot<'_> {
        let mut state = self.lock();
        let load = state.counted(load);
        state.wait(place, load);
        while !state.admits(place, load) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.admit(place, load);
        // The next one may fit as well.
        self.changed.notify_all();
        Slot { slots: self, load }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// With a single slot, scenarios run strictly one after the other.
    fn counted(&self, load: Load) -> Load {
        if load == Load::Waits && self.places == 1 { Load::Other } else { load }
    }

    fn waiting(&mut self, load: Load) -> &mut BTreeSet<usize> {
        match load {
            Load::Cluster => &mut self.waiting_clusters,
            Load::Other => &mut self.waiting_others,
            Load::Waits => &mut self.waiting_idlers,
        }
    }

    fn wait(&mut self, place: usize, load: Load) {
        self.waiting(load).insert(place);
    }

    /// One slot is reserved for clusters while there are any: they follow one another without a gap.
    fn admits(&self, place: usize, load: Load) -> bool {
        match load {
            Load::Cluster => {
                !self.cluster && self.others < self.places && self.waiting_clusters.first() == Some(&place)
            }
            Load::Other => {
                let kept = usize::from(self.cluster || !self.waiting_clusters.is_empty());
                self.others + kept < self.places && self.waiting_others.first() == Some(&place)
            }
            Load::Waits => !self.idler && self.waiting_idlers.first() == Some(&place),
        }
    }

    fn admit(&mut self, place: usize, load: Load) {
        self.waiting(load).remove(&place);
        match load {
            Load::Cluster => self.cluster = true,
            Load::Other => self.others += 1,
            Load::Waits => self.idler = true,
        }
    }

    fn leave(&mut self, load: Load) {
        match load {
            Load::Cluster => self.cluster = false,
            Load::Other => self.others -= 1,
            Load::Waits => self.idler = false,
        }
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        self.slots.lock().leave(self.load);
        self.slots.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::Load::{Cluster, Other, Waits};
    use super::*;

    fn state(places: usize, clusters: &[usize], others: &[usize]) -> State {
        let mut state = Slots::new(places).state.into_inner().unwrap();
        clusters.iter().for_each(|place| state.wait(*place, Cluster));
        others.iter().for_each(|place| state.wait(*place, Other));
        state
    }

    #[test]
    fn clusters_follow_one_another_beside_others() {
        let mut state = state(2, &[2, 4], &[0, 1, 3]);
        assert!(!state.admits(4, Cluster), "2 is before it");
        assert!(!state.admits(1, Other), "0 is before it");
        state.admit(0, Other);
        assert!(!state.admits(1, Other), "a place is kept for a cluster");
        state.admit(2, Cluster);
        assert!(!state.admits(4, Cluster) && !state.admits(1, Other), "both places are taken");
        state.leave(Cluster);
        assert!(state.admits(4, Cluster) && !state.admits(1, Other), "the place is the next cluster's");
        state.admit(4, Cluster);
        state.leave(Other);
        assert!(state.admits(1, Other));
        state.admit(1, Other);
        state.leave(Cluster);
        assert!(state.admits(3, Other), "no cluster is left");
    }

    #[test]
    fn one_that_waits_runs_beside_them() {
        let mut state = state(2, &[1], &[0]);
        state.admit(0, Other);
        state.admit(1, Cluster);
        state.wait(2, Waits);
        state.wait(3, Waits);
        assert!(state.admits(2, Waits) && !state.admits(3, Waits));
        state.admit(2, Waits);
        assert!(!state.admits(3, Waits), "one at a time");
        state.leave(Waits);
        assert!(state.admits(3, Waits));
    }

    #[test]
    fn one_place_is_enough_for_all() {
        let mut state = state(1, &[1], &[0]);
        assert!(!state.admits(0, Other));
        state.admit(1, Cluster);
        state.leave(Cluster);
        assert!(state.admits(0, Other));
        assert_eq!(state.counted(Waits), Other, "no place is beside the only one");
    }

    #[test]
    fn a_place_is_free_again_when_its_slot_is_dropped() {
        let slots = Slots::new(1);
        drop(slots.enter(0, Cluster));
        drop(slots.enter(1, Waits));
        drop(slots.enter(2, Other));
        let _held = slots.enter(3, Cluster);
        assert!(slots.lock().cluster);
    }
}
