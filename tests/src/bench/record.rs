//! The values of a run as they come in, and what is made of them: medians with the spread.
use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::line::{self, Group, Line, Peer};

/// Everything that one line says of one peer.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Cell {
    /// One value of each round.
    pub values: Vec<f64>,
    /// The values are bounds: it took at least that long, and nobody waited longer.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub bounded: bool,
    /// Why there are no values, or fewer than rounds, or what they do not tell.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub reasons: BTreeSet<String>,
}

/// A cell in short.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// The median; of an even number of values the mean of the two in the middle.
    pub median: f64,
    /// The least.
    pub min: f64,
    /// The greatest.
    pub max: f64,
}

impl Cell {
    /// Median and spread; None without values.
    pub fn summary(&self) -> Option<Summary> {
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

/// All values of a run.
#[derive(Clone, Debug, Default)]
pub struct Record {
    cells: BTreeMap<(String, Peer), Cell>,
}

impl Record {
    /// Notes a value.
    pub fn value(&mut self, line: &str, peer: Peer, value: f64) {
        self.cell_mut(line, peer).values.push(value);
    }

    /// Notes that the value is this or worse.
    pub fn at_least(&mut self, line: &str, peer: Peer, bound: f64, reason: String) {
        let cell = self.cell_mut(line, peer);
        cell.values.push(bound);
        cell.bounded = true;
        cell.reasons.insert(reason);
    }

    /// Notes why a value is missing, or what one does not tell.
    pub fn missing(&mut self, line: &str, peer: Peer, reason: &str) {
        self.cell_mut(line, peer).reasons.insert(reason.to_owned());
    }

    /// The same reason for every line of a group that has nothing yet.
    pub fn group_missing(&mut self, group: Group, peer: Peer, reason: &str) {
        for line in line::lines(group) {
            if !self.cells.contains_key(&(line.id.clone(), peer)) {
                self.missing(&line.id, peer, reason);
            }
        }
    }

    /// What a line says of a peer.
    pub fn cell(&self, line: &str, peer: Peer) -> Option<&Cell> {
        self.cells.get(&(line.to_owned(), peer))
    }

    /// The median.
    pub fn median(&self, line: &str, peer: Peer) -> Option<f64> {
        Some(self.cell(line, peer)?.summary()?.median)
    }

    /// The first peer's median over the second's; None when one is missing, zero or only a bound.
    pub fn ratio(&self, line: &str, peer: Peer, to: Peer) -> Option<f64> {
        let exact = |peer| self.cell(line, peer).filter(|cell| !cell.bounded)?.summary();
        let (one, other) = (exact(peer)?.median, exact(to)?.median);
        (other > 0.0).then_some(one / other)
    }

    /// Lines and peers of which nothing is known, not even why: there must be none.
    pub fn gaps(&self, lines: &[Line], peers: &[Peer]) -> Vec<String> {
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
    fn a_median_is_in_the_middle() {
        let cell = |values: &[f64]| Cell { values: values.to_vec(), ..Cell::default() }.summary();
        assert_eq!(cell(&[3.0, 1.0, 2.0]), Some(Summary { median: 2.0, min: 1.0, max: 3.0 }));
        assert_eq!(cell(&[4.0, 1.0]), Some(Summary { median: 2.5, min: 1.0, max: 4.0 }));
        assert_eq!(cell(&[]), None);
    }

    #[test]
    fn a_ratio_needs_two_real_values() {
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
    fn nothing_is_left_out_silently() {
        let mut record = Record::default();
        let lines = line::lines(Group::Held);
        record.value("held", Peer::Postern, 1.0);
        assert_eq!(record.gaps(&lines, &[Peer::Postern]).len(), lines.len() - 1);
        record.group_missing(Group::Held, Peer::Postern, "why");
        assert!(record.gaps(&lines, &[Peer::Postern]).is_empty());
        assert!(record.cell("held", Peer::Postern).unwrap().reasons.is_empty(), "what is there stays");
    }
}
