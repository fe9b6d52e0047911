//! The places in the kernel's tables of routes. What does not fit waits for one; what is there stays.

use std::collections::BTreeSet;

use super::key::Key;

/// Who has a place, and who waits.
#[derive(Debug)]
pub(super) struct Capacity {
    /// Of each family.
    most: usize,
    v4: Table,
    v6: Table,
}

#[derive(Debug, Default)]
struct Table {
    inside: BTreeSet<Key>,
    waiting: BTreeSet<Key>,
}

impl Capacity {
    pub(super) fn new(most: usize) -> Self {
        Self { most, v4: Table::default(), v6: Table::default() }
    }

    pub(super) fn clear(&mut self) {
        *self = Self::new(self.most);
    }

    fn table(&mut self, key: Key) -> &mut Table {
        if key.is_ipv4() { &mut self.v4 } else { &mut self.v6 }
    }

    /// Whether it has a place already; otherwise it waits until the next [`Self::admit`].
    pub(super) fn enter(&mut self, key: Key) -> bool {
        let table = self.table(key);
        table.inside.contains(&key) || {
            table.waiting.insert(key);
            false
        }
    }

    pub(super) fn leave(&mut self, key: Key) {
        let table = self.table(key);
        table.inside.remove(&key);
        table.waiting.remove(&key);
    }

    /// Gives free places to those that wait: addresses first, in their order.
    pub(super) fn admit(&mut self) -> Vec<Key> {
        let mut admitted = Vec::new();
        for table in [&mut self.v4, &mut self.v6] {
            while table.inside.len() < self.most
                && let Some(key) = table.waiting.pop_first()
            {
                table.inside.insert(key);
                admitted.push(key);
            }
        }
        admitted
    }

    pub(super) fn waits(&self, key: Key) -> bool {
        let table = if key.is_ipv4() { &self.v4 } else { &self.v6 };
        table.waiting.contains(&key)
    }

    /// How many wait, of either family.
    pub(super) fn waiting(&self) -> [usize; 2] {
        [self.v4.waiting.len(), self.v6.waiting.len()]
    }
}

/// What there is too little of, IPv4 first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Shortage {
    /// Routes without a place in the kernel's table.
    pub(super) routes: [usize; 2],
    /// Addresses, and ranges of pods, for which the range has no token.
    pub(super) tokens: [[usize; 2]; 2],
}
