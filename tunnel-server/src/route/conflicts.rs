//! What is wrong with the inventory, kept by what it concerns.

use std::collections::HashMap;
use std::net::IpAddr;

use ipnet::IpNet;
use tunnel_core::identity::NodeName;

use super::conflict::Conflict;
use super::key::Key;
use crate::shared_map::SharedSet;

/// What a conflict concerns; each is decided as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Subject {
    Node(NodeName),
    Address(IpAddr),
    Pods(IpNet),
    /// The route of an address, or of a range of pods: whether there is room and a token for it.
    Route(Key),
}

/// The conflicts at present.
#[derive(Debug, Default)]
pub(super) struct Conflicts {
    all: SharedSet<Conflict>,
    /// Subjects without any are not in it.
    of: HashMap<Subject, Vec<Conflict>>,
    /// How many subjects have the same one, if more than one.
    repeated: HashMap<Conflict, usize>,
}

impl Conflicts {
    pub(super) fn all(&self) -> &SharedSet<Conflict> {
        &self.all
    }

    /// Replaces those of one subject.
    pub(super) fn replace(&mut self, subject: Subject, conflicts: Vec<Conflict>) {
        let before = self.of.remove(&subject).unwrap_or_default();
        if before != conflicts {
            conflicts.iter().for_each(|conflict| self.add(conflict));
            before.iter().for_each(|conflict| self.remove(conflict));
        }
        if !conflicts.is_empty() {
            self.of.insert(subject, conflicts);
        }
    }

    fn add(&mut self, conflict: &Conflict) {
        if !self.all.insert(conflict.clone()) {
            *self.repeated.entry(conflict.clone()).or_insert(1) += 1;
        }
    }

    fn remove(&mut self, conflict: &Conflict) {
        match self.repeated.get_mut(conflict) {
            Some(count) => {
                *count -= 1;
                if *count == 1 {
                    self.repeated.remove(conflict);
                }
            }
            None => {
                self.all.remove(conflict);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::conflict::ConflictKind;
    use super::*;

    #[test]
    fn what_two_subjects_share_stays_until_neither_has_it() {
        let nodes = vec!["edge-1".parse().unwrap()];
        let conflict = Conflict { kind: ConflictKind::PodRange, address: None, nodes, holder: None };
        let (one, two) =
            (Subject::Pods("10.1.0.0/24".parse().unwrap()), Subject::Pods("10.1.0.0/25".parse().unwrap()));
        let mut conflicts = Conflicts::default();
        for subject in [&one, &two, &two] {
            conflicts.replace(subject.clone(), vec![conflict.clone()]);
        }
        conflicts.replace(one, Vec::new());
        assert_eq!(conflicts.all().len(), 1);
        conflicts.replace(two, Vec::new());
        assert!(conflicts.all().is_empty() && conflicts.of.is_empty() && conflicts.repeated.is_empty());
    }
}
