//! The values of a run, and their medians and spread.
use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::catalogue;
use crate::line::{Group, Line, Peer};

/// The values of one line for one peer.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Cell {
    /// One value of each round.
    pub(crate) values: Vec<f64>,
    /// The values are lower bounds, because waiting ended there.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) bounded: bool,
    /// Why values are missing, or what limits their meaning.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) reasons: BTreeSet<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Summary {
    /// The median; of an even number of values the mean of the two in the middle.
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Cell {
    /// Median and spread; None without values.
    pub(crate) fn summary(&self) -> Option<Summary> {
        let mut sorted = self.values.clone();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median = if sorted.len().is_multiple_of(2) {
            f64::midpoint(sorted[middle - 1], sorted[middle])
        } else {
            sorted[middle]
        };
        Some(Summary { median, min, max })
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Record {
    cells: BTreeMap<(String, Peer), Cell>,
}

impl Record {
    pub(crate) fn value(&mut self, line: &str, peer: Peer, value: f64) {
        self.cell_mut(line, peer).values.push(value);
    }

    pub(crate) fn at_least(&mut self, line: &str, peer: Peer, bound: f64, reason: String) {
        let cell = self.cell_mut(line, peer);
        cell.values.push(bound);
        cell.bounded = true;
        cell.reasons.insert(reason);
    }

    /// Records why a value is missing or limited.
    pub(crate) fn missing(&mut self, line: &str, peer: Peer, reason: &str) {
        self.cell_mut(line, peer).reasons.insert(reason.to_owned());
    }

    /// The same reason for every line of a group that has nothing yet.
    pub(crate) fn group_missing(&mut self, group: Group, peer: Peer, reason: &str) {
        for line in catalogue::lines(group) {
            if !self.cells.contains_key(&(line.id.clone(), peer)) {
                self.missing(&line.id, peer, reason);
            }
        }
    }

    pub(crate) fn cell(&self, line: &str, peer: Peer) -> Option<&Cell> {
        self.cells.get(&(line.to_owned(), peer))
    }

    pub(crate) fn median(&self, line: &str, peer: Peer) -> Option<f64> {
        Some(self.cell(line, peer)?.summary()?.median)
    }

    /// The first peer's median over the second's; None when one is missing, zero or only a bound.
    pub(crate) fn ratio(&self, line: &str, peer: Peer, to: Peer) -> Option<f64> {
        let exact = |peer| self.cell(line, peer).filter(|cell| !cell.bounded)?.summary();
        let (one, other) = (exact(peer)?.median, exact(to)?.median);
        (other > 0.0).then_some(one / other)
    }

    /// Lines and peers with neither a value nor a reason: there must be none.
    pub(crate) fn gaps(&self, lines: &[Line], peers: &[Peer]) -> Vec<String> {
        let cells = lines.iter().flat_map(|line| peers.iter().map(move |peer| (line, *peer)));
        let empty = cells.filter(|(line, peer)| {
            self.cell(&line.id, *peer).is_none_or(|cell| cell.values.is_empty() && cell.reasons.is_empty())
        });
        empty.map(|(line, peer)| format!("{} of {peer}", line.id)).collect()
    }

    fn cell_mut(&mut self, line: &str, peer: Peer) -> &mut Cell {
        self.cells.entry((line.to_owned(), peer)).or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_spread() {
        let cell = |values: &[f64]| Cell { values: values.to_vec(), ..Cell::default() }.summary();
        assert_eq!(cell(&[3.0, 1.0, 2.0]), Some(Summary { median: 2.0, min: 1.0, max: 3.0 }));
        assert_eq!(cell(&[4.0, 1.0]), Some(Summary { median: 2.5, min: 1.0, max: 4.0 }));
        assert_eq!(cell(&[]), None);
    }

    #[test]
    fn a_ratio_needs_two_exact_values() {
        let mut record = Record::default();
        record.value("a", Peer::Postern, 6.0);
        record.value("a", Peer::Direct, 3.0);
        record.at_least("a", Peer::Haproxy, 9.0, "slow".to_owned());
        record.missing("a", Peer::Rathole, "not installed");
        assert_eq!(record.ratio("a", Peer::Postern, Peer::Direct), Some(2.0));
        assert_eq!(record.ratio("a", Peer::Postern, Peer::Haproxy), None);
        assert_eq!(record.ratio("a", Peer::Postern, Peer::Rathole), None);
        assert_eq!(record.ratio("b", Peer::Postern, Peer::Direct), None);
    }

    #[test]
    fn gaps_are_cells_without_value_or_reason() {
        let mut record = Record::default();
        let lines = catalogue::lines(Group::Held);
        record.value("held", Peer::Postern, 1.0);
        assert_eq!(record.gaps(&lines, &[Peer::Postern]).len(), lines.len() - 1);
        record.group_missing(Group::Held, Peer::Postern, "why");
        assert!(record.gaps(&lines, &[Peer::Postern]).is_empty());
        assert!(
            record.cell("held", Peer::Postern).unwrap().reasons.is_empty(),
            "a cell with a value is unchanged"
        );
    }
}
