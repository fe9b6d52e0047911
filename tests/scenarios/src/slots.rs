//! Schedules scenarios: as many at a time as the machine carries, some of them with a cluster; and beside them those that
//! hardly use the machine at all.
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

/// Numbers of scenarios that run at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Places {
    /// All but those that mostly wait, of which there may be as many again.
    all: usize,
    /// Those with a cluster among them.
    clusters: usize,
}

/// Memory that a cluster is counted with, in GiB; any other scenario with one.
const CLUSTER_GIB: usize = 4;
/// Each program takes inotify instances, of which a user has 128 in all.
const MOST: usize = 32;

impl Places {
    /// Half of them may have a cluster. With one place they run one after the other.
    pub(crate) fn new(all: usize) -> Self {
        Self { all: all.max(1), clusters: (all / 2).max(1) }
    }

    /// As many as this machine carries.
    pub(crate) fn here() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self::carried_by(processors, available_gib().unwrap_or(usize::MAX))
    }

    /// A scenario with a cluster keeps half a processor busy, and most others a tenth, but some bound how long anything stands still.
    fn carried_by(processors: usize, gib: usize) -> Self {
        let clusters = processors.min(gib / (CLUSTER_GIB + 1)).max(1);
        let left = gib.saturating_sub(clusters * (CLUSTER_GIB - 1));
        let all = (processors * 3 / 2).min(left).clamp(1, MOST);
        Self { all, clusters: clusters.min(all) }
    }
}

fn available_gib() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: usize = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib / (1024 * 1024))
}

/// Slots of the running scenarios.
pub(crate) struct Slots {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    places: Places,
    /// Numbers of scenarios that run.
    clusters: usize,
    others: usize,
    idlers: usize,
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
    pub(crate) fn new(places: Places) -> Self {
        let state = State {
            places,
            clusters: 0,
            others: 0,
            idlers: 0,
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
        state.waiting(load).insert(place);
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
        if load == Load::Waits && self.places.all == 1 { Load::Other } else { load }
    }

    fn waiting(&mut self, load: Load) -> &mut BTreeSet<usize> {
        match load {
            Load::Cluster => &mut self.waiting_clusters,
            Load::Other => &mut self.waiting_others,
            Load::Waits => &mut self.waiting_idlers,
        }
    }

    fn running(&mut self, load: Load) -> &mut usize {
        match load {
            Load::Cluster => &mut self.clusters,
            Load::Other => &mut self.others,
            Load::Waits => &mut self.idlers,
        }
    }

    /// Slots are reserved for clusters while there are any: they follow one another without a gap.
    fn admits(&self, place: usize, load: Load) -> bool {
        let Places { all, clusters } = self.places;
        match load {
            Load::Cluster => {
                self.clusters < clusters
                    && self.clusters + self.others < all
                    && self.waiting_clusters.first() == Some(&place)
            }
            Load::Other => {
                let kept = clusters.min(self.clusters + self.waiting_clusters.len());
                self.others + kept < all && self.waiting_others.first() == Some(&place)
            }
            Load::Waits => self.idlers < all && self.waiting_idlers.first() == Some(&place),
        }
    }

    fn admit(&mut self, place: usize, load: Load) {
        self.waiting(load).remove(&place);
        *self.running(load) += 1;
    }

    fn leave(&mut self, load: Load) {
        *self.running(load) -= 1;
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
        let mut state = Slots::new(Places::new(places)).state.into_inner().unwrap();
        state.waiting(Cluster).extend(clusters);
        state.waiting(Other).extend(others);
        state
    }

    #[test]
    fn processors_and_memory_limit_them() {
        let places = |all, clusters| Places { all, clusters };
        assert_eq!(Places::carried_by(1, 16), places(1, 1));
        assert_eq!(Places::carried_by(2, 16), places(3, 2));
        assert_eq!(Places::carried_by(2, 6), places(3, 1), "memory for one cluster");
        assert_eq!(Places::carried_by(2, 0), places(1, 1));
        assert_eq!(Places::carried_by(16, 32), places(14, 6));
        assert_eq!(Places::carried_by(64, 512), places(32, 32));
        assert!(available_gib().is_some());
    }

    #[test]
    fn clusters_run_beside_each_other_and_leave_places() {
        let mut state = state(4, &[0, 1, 2], &[3, 4, 5]);
        state.admit(0, Cluster);
        state.admit(1, Cluster);
        assert!(!state.admits(2, Cluster), "two are enough");
        state.admit(3, Other);
        state.admit(4, Other);
        assert!(!state.admits(5, Other));
        state.leave(Other);
        assert!(state.admits(5, Other));
        state.leave(Cluster);
        assert!(state.admits(2, Cluster));
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
        state.waiting(Waits).extend([2, 3, 4]);
        assert!(state.admits(2, Waits) && !state.admits(3, Waits));
        state.admit(2, Waits);
        state.admit(3, Waits);
        assert!(!state.admits(4, Waits), "two at a time");
        state.leave(Waits);
        assert!(state.admits(4, Waits));
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
        let slots = Slots::new(Places::new(1));
        drop(slots.enter(0, Cluster));
        drop(slots.enter(1, Waits));
        drop(slots.enter(2, Other));
        let _held = slots.enter(3, Cluster);
        assert_eq!(slots.lock().clusters, 1);
    }
}
