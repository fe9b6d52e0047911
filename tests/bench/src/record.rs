//! The values of a run, and their medians and spread.
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use crate::catalogue;
use crate::line::{Better, Group, Line, Peer};

/// The values of one line for one peer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Cell {
    /// One value of each round.
    pub(crate) values: Vec<f64>,
    /// Some values are lower bounds, because waiting ended there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) bounded: bool,
    /// Reasons why values are missing, or limits of their meaning.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) reasons: BTreeSet<String>,
    /// The errors of the rounds that gave no value.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) failures: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Summary {
    /// The median; of an even number of values the mean of the two in the middle.
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Cell {
    /// Rounds that are accounted for.
    pub(crate) fn rounds(&self) -> usize {
        self.values.len() + self.failures.len()
    }

    /// True if there is neither a value nor a failure nor a reason: a gap.
    fn is_empty(&self) -> bool {
        self.rounds() == 0 && self.reasons.is_empty()
    }

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

/// The values of a round, or of several that were added.
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

    /// Records the reason why there is no value, or a limit of its meaning.
    pub(crate) fn missing(&mut self, line: &str, peer: Peer, reason: &str) {
        self.cell_mut(line, peer).reasons.insert(reason.to_owned());
    }

    /// Records that the round has no value because measuring failed.
    pub(crate) fn failed(&mut self, line: &str, peer: Peer, error: &str) {
        self.cell_mut(line, peer).failures.push(error.to_owned());
    }

    /// Records the same reason for every line of a group that has nothing yet.
    pub(crate) fn group_missing(&mut self, group: Group, peer: Peer, reason: &str) {
        for line in catalogue::lines(group) {
            if self.cell(&line.id, peer).is_none_or(Cell::is_empty) {
                self.missing(&line.id, peer, reason);
            }
        }
    }

    /// Records the same error for each of these lines that has nothing in this round yet.
    pub(crate) fn lines_failed<'a>(
        &mut self,
        lines: impl IntoIterator<Item = &'a Line>,
        peer: Peer,
        error: &anyhow::Error,
    ) {
        for line in lines {
            if self.cell(&line.id, peer).is_none_or(|cell| cell.rounds() == 0) {
                self.failed(&line.id, peer, &format!("{error:#}"));
            }
        }
    }

    /// Adds the rounds of another record.
    pub(crate) fn add(&mut self, other: Self) {
        for ((line, peer), cell) in other.cells {
            let own = self.cell_mut(&line, peer);
            own.values.extend(cell.values);
            own.bounded |= cell.bounded;
            own.reasons.extend(cell.reasons);
            own.failures.extend(cell.failures);
        }
    }

    pub(crate) fn cell(&self, line: &str, peer: Peer) -> Option<&Cell> {
        self.cells.get(&(line.to_owned(), peer))
    }

    pub(crate) fn median(&self, line: &str, peer: Peer) -> Option<f64> {
        Some(self.cell(line, peer)?.summary()?.median)
    }

    /// The first peer's median over the best of the others', without those that are missing, zero or only a bound. None
    /// when the first is missing or only a bound, or no other is left.
    pub(crate) fn ratio(&self, line: &str, peer: Peer, to: &[Peer], better: Better) -> Option<f64> {
        let (_, best) = self.best(line, to, better)?;
        Some(self.exact(line, peer)? / best)
    }

    /// The best of these peers and its median, without those that are missing, zero or only a bound.
    pub(crate) fn best(&self, line: &str, of: &[Peer], better: Better) -> Option<(Peer, f64)> {
        let exact = of.iter().filter_map(|peer| Some((*peer, self.exact(line, *peer)?)));
        let exact = exact.filter(|(_, median)| *median > 0.0);
        match better {
            Better::Higher => exact.max_by(|one, other| one.1.total_cmp(&other.1)),
            Better::Lower => exact.min_by(|one, other| one.1.total_cmp(&other.1)),
            Better::Neither => None,
        }
    }

    /// The median, unless it is only a bound.
    fn exact(&self, line: &str, peer: Peer) -> Option<f64> {
        let cell = self.cell(line, peer).filter(|cell| !cell.bounded)?;
        Some(cell.summary()?.median)
    }

    /// Lines and peers with neither a value nor a reason: there must be none.
    pub(crate) fn gaps(&self, lines: &[Line], peers: &[Peer]) -> Vec<String> {
        let cells = lines.iter().flat_map(|line| peers.iter().map(move |peer| (line, *peer)));
        let empty = cells.filter(|(line, peer)| self.cell(&line.id, *peer).is_none_or(Cell::is_empty));
        empty.map(|(line, peer)| format!("{} of {peer}", line.id)).collect()
    }

    fn cell_mut(&mut self, line: &str, peer: Peer) -> &mut Cell {
        self.cells.entry((line.to_owned(), peer)).or_default()
    }

    /// Reads what [`Record::save`] wrote.
    pub(crate) fn load(path: &Path) -> Result<Self> {
        let text = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
        let cells: Vec<(String, Peer, Cell)> =
            serde_json::from_slice(&text).with_context(|| format!("parsing {}", path.display()))?;
        let cells = cells.into_iter().map(|(line, peer, cell)| ((line, peer), cell)).collect();
        Ok(Self { cells })
    }

    pub(crate) fn save(&self, path: &Path) -> Result<()> {
        let cells: Vec<_> = self.cells.iter().map(|((line, peer), cell)| (line, peer, cell)).collect();
        fs::write(path, serde_json::to_vec(&cells)?).with_context(|| format!("writing {}", path.display()))
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
        let ratio = |line: &str, to| record.ratio(line, Peer::Postern, &[to], Better::Lower);
        assert_eq!(ratio("a", Peer::Direct), Some(2.0));
        assert_eq!(ratio("a", Peer::Haproxy), None);
        assert_eq!(ratio("a", Peer::Rathole), None);
        assert_eq!(ratio("b", Peer::Direct), None);
    }

    #[test]
    fn a_ratio_is_to_the_best_of_several() {
        let mut record = Record::default();
        record.value("a", Peer::Postern, 6.0);
        record.value("a", Peer::KonnectivityGrpc, 2.0);
        record.value("a", Peer::KonnectivityHttp, 3.0);
        let ratio = |better| record.ratio("a", Peer::Postern, &Peer::KONNECTIVITY, better);
        assert_eq!(ratio(Better::Higher), Some(2.0));
        assert_eq!(ratio(Better::Lower), Some(3.0));
        assert_eq!(ratio(Better::Neither), None);
    }

    #[test]
    fn a_failure_shows_in_every_round() {
        let mut record = Record::default();
        let lines = catalogue::lines(Group::Held);
        let failures = |record: &Record| record.cell("held", Peer::Postern).unwrap().failures.len();
        record.value("held", Peer::Postern, 1.0);
        record.lines_failed(&lines, Peer::Postern, &anyhow::anyhow!("gone"));
        assert_eq!(failures(&record), 0, "this round has a value");
        assert!(record.gaps(&lines, &[Peer::Postern]).is_empty(), "and the other lines have an error");
        let mut second = Record::default();
        second.lines_failed(&lines, Peer::Postern, &anyhow::anyhow!("gone"));
        record.add(second);
        assert_eq!(failures(&record), 1);
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

    #[test]
    fn records_are_added_after_saving() {
        let mut one = Record::default();
        one.value("a", Peer::Postern, 1.0);
        let mut two = Record::default();
        two.failed("a", Peer::Postern, "gone");
        two.at_least("a", Peer::Direct, 9.0, "slow".to_owned());
        let path = std::env::temp_dir().join(format!("postern-bench-record-{}", std::process::id()));
        two.save(&path).unwrap();
        one.add(Record::load(&path).unwrap());
        fs::remove_file(&path).unwrap();
        let cell = one.cell("a", Peer::Postern).unwrap();
        assert_eq!((cell.values.as_slice(), cell.failures.len()), (&[1.0][..], 1));
        assert!(one.cell("a", Peer::Direct).unwrap().bounded);
    }
}
