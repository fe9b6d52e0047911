//! Registry of short-lived objects, for observers that list them occasionally.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};

/// Number of independently locked parts, so that listing everything blocks only a part of the changes at a time.
const PARTS: usize = 16;

/// All objects that exist now.
#[derive(Debug)]
pub struct Live<T> {
    ids: AtomicU64,
    parts: [Mutex<BTreeMap<u64, Arc<T>>>; PARTS],
}

impl<T> Default for Live<T> {
    fn default() -> Self {
        Self { ids: AtomicU64::new(0), parts: std::array::from_fn(|_| Mutex::default()) }
    }
}

impl<T> Live<T> {
    /// Registers an object until the returned value is dropped.
    pub fn enter(self: &Arc<Self>, item: T) -> Present<T> {
        let id = self.ids.fetch_add(1, Ordering::Relaxed);
        let item = Arc::new(item);
        self.part(id).insert(id, item.clone());
        Present { id, item, live: self.clone() }
    }

    /// Returns all objects, in no particular order.
    pub fn all(&self) -> Vec<Arc<T>> {
        self.all_that(|_| true)
    }

    /// Returns the objects that `wanted` accepts, which must be quick: the others change meanwhile.
    pub fn all_that(&self, wanted: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        let of = |part: &Mutex<BTreeMap<u64, Arc<T>>>| {
            part.lock().values().filter(|item| wanted(item)).cloned().collect::<Vec<_>>()
        };
        self.parts.iter().flat_map(of).collect()
    }

    fn part(&self, id: u64) -> MutexGuard<'_, BTreeMap<u64, Arc<T>>> {
        // The remainder is less than PARTS.
        self.parts[(id % PARTS as u64) as usize].lock()
    }
}

/// A registered object; dropping this removes it.
#[derive(Debug)]
pub struct Present<T> {
    id: u64,
    item: Arc<T>,
    live: Arc<Live<T>>,
}

impl<T> Present<T> {
    /// Returns the object for holders that may need it longer.
    pub fn item(&self) -> Arc<T> {
        self.item.clone()
    }
}

impl<T> Deref for Present<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.item
    }
}

impl<T> Drop for Present<T> {
    fn drop(&mut self) {
        self.live.part(self.id).remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_have_gone_are_not_there() {
        let live = Arc::<Live<usize>>::default();
        let mut present: Vec<_> = (0..3 * PARTS).map(|number| live.enter(number)).collect();
        let all = || {
            let mut all: Vec<usize> = live.all().iter().map(|item| **item).collect();
            all.sort_unstable();
            all
        };
        assert_eq!(all(), (0..3 * PARTS).collect::<Vec<_>>());
        let kept = present[7].item();
        present.retain(|item| **item % 7 != 0);
        assert_eq!(all(), (0..3 * PARTS).filter(|number| number % 7 != 0).collect::<Vec<_>>());
        assert_eq!(*kept, 7);
        present.clear();
        assert!(live.all().is_empty() && live.parts.iter().all(|part| part.lock().is_empty()));
    }
}
