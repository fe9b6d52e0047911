//! An ordered map whose copies share what they have in common.
//!
//! With 100,000 entries a copy costs nothing, a change of a copy some microseconds, and the differences between a map and
//! its changed copy as much as there are differences. So a state can be handed on as a whole, and each reader finds what
//! is new to it.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

/// Entries of one part. A change copies one part and the list of the parts: around the square root of the entries.
const MOST: usize = 256;
/// Parts with fewer are joined with a small one beside them.
const FEWEST: usize = MOST / 4;

/// Sorted, never empty.
type Part<K, V> = Arc<Vec<(K, V)>>;

/// See the module.
#[derive(Clone)]
pub struct SharedMap<K, V> {
    /// In order.
    parts: Arc<Vec<Part<K, V>>>,
    len: usize,
}

/// A key whose value differs.
#[derive(Debug, PartialEq, Eq)]
pub struct Difference<'a, K, V> {
    pub key: &'a K,
    pub before: Option<&'a V>,
    pub now: Option<&'a V>,
}

impl<K, V> SharedMap<K, V> {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// In the order of the keys.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (&K, &V)> {
        self.parts.iter().flat_map(|part| part.iter().map(|(key, value)| (key, value)))
    }

    pub fn keys(&self) -> impl DoubleEndedIterator<Item = &K> {
        self.iter().map(|(key, _)| key)
    }

    pub fn values(&self) -> impl DoubleEndedIterator<Item = &V> {
        self.iter().map(|(_, value)| value)
    }

    /// Whether both are copies of one map without a change since.
    fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.parts, &other.parts)
    }
}

impl<K: Ord, V> SharedMap<K, V> {
    /// The first part that has no smaller keys only: the key is there or nowhere.
    fn part_of<Q: Ord + ?Sized>(&self, key: &Q) -> usize
    where
        K: Borrow<Q>,
    {
        self.parts.partition_point(|part| part.last().is_some_and(|(last, _)| last.borrow() < key))
    }

    pub fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        let part = self.parts.get(self.part_of(key))?;
        let place = find(part, key).ok()?;
        Some(&part[place].1)
    }

    pub fn contains_key<Q: Ord + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.get(key).is_some()
    }

    /// The entry with the greatest key that is not greater than this.
    pub fn floor<Q: Ord + ?Sized>(&self, key: &Q) -> Option<(&K, &V)>
    where
        K: Borrow<Q>,
    {
        let index = self.part_of(key);
        let here = self.parts.get(index).and_then(|part| match find(part, key) {
            Ok(place) => part.get(place),
            Err(place) => part.get(place.checked_sub(1)?),
        });
        let (key, value) = here.or_else(|| self.parts.get(index.checked_sub(1)?)?.last())?;
        Some((key, value))
    }

    /// What turned `before` into this map, in the order of the keys.
    pub fn changes_since<'a>(&'a self, before: &'a Self) -> Vec<Difference<'a, K, V>>
    where
        V: PartialEq,
    {
        if self.is_same(before) {
            return Vec::new();
        }
        let (old, new) = (&before.parts[..], &self.parts[..]);
        let same = |(one, other): &(&Part<K, V>, &Part<K, V>)| Arc::ptr_eq(one, other);
        let first = old.iter().zip(new).take_while(same).count();
        let (old, new) = (&old[first..], &new[first..]);
        let last = old.iter().rev().zip(new.iter().rev()).take_while(same).count();
        let (old, new) = (&old[..old.len() - last], &new[..new.len() - last]);
        // A key of a part that both have is in no other part of either.
        let (mut before, mut now) = (without(old, new).peekable(), without(new, old).peekable());
        let mut found = Vec::new();
        loop {
            let order = match (before.peek(), now.peek()) {
                (Some((old, _)), Some((new, _))) => old.cmp(new),
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (None, None) => return found,
            };
            let old = if order.is_le() { before.next() } else { None };
            let new = if order.is_ge() { now.next() } else { None };
            let (had, has) = (old.map(|(_, value)| value), new.map(|(_, value)| value));
            if let Some((key, _)) = old.or(new)
                && had != has
            {
                found.push(Difference { key, before: had, now: has });
            }
        }
    }
}

/// The entries of those parts that are not among `others`.
fn without<'a, K, V>(
    parts: &'a [Part<K, V>],
    others: &[Part<K, V>],
) -> impl Iterator<Item = &'a (K, V)> + use<'a, K, V> {
    let others: HashSet<*const Vec<(K, V)>> = others.iter().map(Arc::as_ptr).collect();
    parts.iter().filter(move |part| !others.contains(&Arc::as_ptr(part))).flat_map(|part| part.iter())
}

fn find<K: Ord + Borrow<Q>, V, Q: Ord + ?Sized>(part: &[(K, V)], key: &Q) -> Result<usize, usize> {
    part.binary_search_by(|(other, _)| other.borrow().cmp(key))
}

impl<K: Ord + Clone, V: Clone> SharedMap<K, V> {
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        let index = self.part_of(&key).min(self.parts.len().saturating_sub(1));
        let parts = Arc::make_mut(&mut self.parts);
        let is_last = index + 1 == parts.len();
        let Some(part) = parts.get_mut(index) else {
            parts.push(Arc::new(vec![(key, value)]));
            self.len = 1;
            return None;
        };
        let part = Arc::make_mut(part);
        match find(part, &key) {
            Ok(place) => Some(std::mem::replace(&mut part[place].1, value)),
            Err(place) => {
                self.len += 1;
                part.insert(place, (key, value));
                if part.len() > MOST {
                    // What comes in order fills its parts.
                    let at = if is_last && place + 1 == part.len() { MOST } else { part.len() / 2 };
                    let rest = part.split_off(at);
                    parts.insert(index + 1, Arc::new(rest));
                }
                None
            }
        }
    }

    pub fn remove<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        let index = self.part_of(key);
        let place = find(self.parts.get(index)?, key).ok()?;
        let parts = Arc::make_mut(&mut self.parts);
        let part = Arc::make_mut(&mut parts[index]);
        let (_, value) = part.remove(place);
        self.len -= 1;
        if part.is_empty() {
            parts.remove(index);
        } else if part.len() < FEWEST {
            let small = |at: usize| parts.get(at).is_some_and(|part| part.len() <= MOST / 2);
            let joined =
                if small(index + 1) { Some(index) } else { index.checked_sub(1).filter(|at| small(*at)) };
            if let Some(first) = joined {
                let next = parts.remove(first + 1);
                Arc::make_mut(&mut parts[first]).extend(next.iter().cloned());
            }
        }
        Some(value)
    }

    /// The value, to be changed in place: call it only to change it.
    pub fn get_mut<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        let index = self.part_of(key);
        let place = find(self.parts.get(index)?, key).ok()?;
        let part = Arc::make_mut(&mut Arc::make_mut(&mut self.parts)[index]);
        Some(&mut part[place].1)
    }
}

impl<K, V> Default for SharedMap<K, V> {
    fn default() -> Self {
        Self { parts: Arc::default(), len: 0 }
    }
}

impl<K: Ord, V: PartialEq> PartialEq for SharedMap<K, V> {
    fn eq(&self, other: &Self) -> bool {
        self.is_same(other) || self.len == other.len && self.iter().eq(other.iter())
    }
}

impl<K: Ord, V: Eq> Eq for SharedMap<K, V> {}

impl<K: fmt::Debug, V: fmt::Debug> fmt::Debug for SharedMap<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl<'a, K, V> IntoIterator for &'a SharedMap<K, V> {
    type Item = (&'a K, &'a V);
    type IntoIter = Box<dyn DoubleEndedIterator<Item = Self::Item> + 'a>;

    fn into_iter(self) -> Self::IntoIter {
        Box::new(self.iter())
    }
}

impl<K: Ord + Clone, V: Clone> FromIterator<(K, V)> for SharedMap<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        let mut map = Self::default();
        for (key, value) in entries {
            map.insert(key, value);
        }
        map
    }
}

/// A set, see [`SharedMap`].
#[derive(Clone, PartialEq, Eq)]
pub struct SharedSet<T: Ord>(SharedMap<T, ()>);

impl<T: Ord> SharedSet<T> {
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &T> {
        self.0.keys()
    }

    pub fn contains<Q: Ord + ?Sized>(&self, item: &Q) -> bool
    where
        T: Borrow<Q>,
    {
        self.0.contains_key(item)
    }

    /// What turned `before` into this set, in order; true: it is new.
    pub fn changes_since<'a>(&'a self, before: &'a Self) -> Vec<(&'a T, bool)> {
        let found = self.0.changes_since(&before.0).into_iter();
        found.map(|difference| (difference.key, difference.now.is_some())).collect()
    }
}

impl<T: Ord + Clone> SharedSet<T> {
    /// Whether it is new.
    pub fn insert(&mut self, item: T) -> bool {
        // Nothing is copied for what is there.
        !self.0.contains_key(&item) && self.0.insert(item, ()).is_none()
    }

    /// Whether it was there.
    pub fn remove<Q: Ord + ?Sized>(&mut self, item: &Q) -> bool
    where
        T: Borrow<Q>,
    {
        self.0.remove(item).is_some()
    }
}

impl<T: Ord> Default for SharedSet<T> {
    fn default() -> Self {
        Self(SharedMap::default())
    }
}

impl<T: Ord + fmt::Debug> fmt::Debug for SharedSet<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

impl<'a, T: Ord> IntoIterator for &'a SharedSet<T> {
    type Item = &'a T;
    type IntoIter = Box<dyn DoubleEndedIterator<Item = Self::Item> + 'a>;

    fn into_iter(self) -> Self::IntoIter {
        Box::new(self.iter())
    }
}

impl<T: Ord + Clone> FromIterator<T> for SharedSet<T> {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Self {
        Self(items.into_iter().map(|item| (item, ())).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Insert(u16, u8),
        /// So many from there on, in order.
        Fill(u16, u16),
        Clear(u16, u16),
        Change(u16),
        Keep,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let key = || 0_u16..4000;
        let step = prop_oneof![
            4 => (key(), any::<u8>()).prop_map(|(key, value)| Step::Insert(key, value)),
            2 => (key(), 0_u16..1500).prop_map(|(first, count)| Step::Fill(first, count)),
            2 => (key(), 0_u16..1500).prop_map(|(first, count)| Step::Clear(first, count)),
            2 => key().prop_map(Step::Change),
            1 => Just(Step::Keep),
        ];
        prop::collection::vec(step, 1..40)
    }

    proptest! {
        #[test]
        fn it_is_a_map_and_knows_what_differs_from_its_copies(steps in steps()) {
            let (mut map, mut model) = (SharedMap::default(), BTreeMap::new());
            let mut kept = (map.clone(), model.clone());
            for step in steps {
                match step {
                    Step::Insert(key, value) => prop_assert_eq!(map.insert(key, value), model.insert(key, value)),
                    Step::Fill(first, count) => for key in first..first + count {
                        map.insert(key, 1);
                        model.insert(key, 1);
                    },
                    Step::Clear(first, count) => for key in first..first + count {
                        prop_assert_eq!(map.remove(&key), model.remove(&key));
                    },
                    Step::Change(key) => match (map.get_mut(&key), model.get_mut(&key)) {
                        (Some(one), Some(other)) => (*one, *other) = (77, 77),
                        (one, other) => prop_assert_eq!(one, other),
                    },
                    Step::Keep => kept = (map.clone(), model.clone()),
                }
                prop_assert_eq!(map.len(), model.len());
                prop_assert!(map.iter().eq(&model));
                prop_assert!(map.iter().rev().eq(model.iter().rev()));
                for key in (0..5500).step_by(97) {
                    prop_assert_eq!(map.get(&key), model.get(&key));
                    prop_assert_eq!(map.floor(&key), model.range(..=key).next_back());
                }
                prop_assert!(kept.0.iter().eq(&kept.1), "a copy has changed");
                let mut brought = kept.1.clone();
                for Difference { key, before, now } in map.changes_since(&kept.0) {
                    prop_assert_eq!(kept.1.get(key), before);
                    prop_assert_ne!(before, now);
                    match now {
                        Some(now) => brought.insert(*key, *now),
                        None => brought.remove(key),
                    };
                }
                prop_assert_eq!(&brought, &model);
                prop_assert_eq!(kept.0 == map, kept.1 == model);
            }
        }
    }

    #[test]
    fn a_change_copies_one_part() {
        let map: SharedMap<u32, u32> = (0..100_000).map(|key| (key, key)).collect();
        assert_eq!(map.parts.len(), 100_000_usize.div_ceil(MOST), "filled in order, the parts are full");
        let mut changed = map.clone();
        changed.insert(50_000, 0);
        changed.remove(&70_000);
        let shared =
            map.parts.iter().zip(changed.parts.iter()).filter(|(one, other)| Arc::ptr_eq(one, other));
        assert_eq!(shared.count(), map.parts.len() - 2);
        let found: Vec<_> = changed.changes_since(&map).iter().map(|found| *found.key).collect();
        assert_eq!(found, [50_000, 70_000]);
    }

    #[test]
    fn a_map_that_shrinks_has_few_parts() {
        let mut map: SharedMap<u32, ()> = (0..10_000).map(|key| (key, ())).collect();
        (0..10_000).filter(|key| key % 100 != 0).for_each(|key| assert_eq!(map.remove(&key), Some(())));
        assert!(map.parts.len() <= 4, "{} parts", map.parts.len());
        (0..100).for_each(|key| assert_eq!(map.remove(&(100 * key)), Some(())));
        assert!(map.is_empty() && map.parts.is_empty());
    }

    #[test]
    fn a_set_knows_what_is_new() {
        let before: SharedSet<&str> = ["a", "b"].into_iter().collect();
        let mut after = before.clone();
        assert!(!after.insert("b") && after.insert("c") && after.remove("a") && !after.remove("x"));
        assert_eq!(after.changes_since(&before), [(&"a", false), (&"c", true)]);
        assert!(before.contains("a") && !after.contains("a") && after.len() == 2);
    }
}
