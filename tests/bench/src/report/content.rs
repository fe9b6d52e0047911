//! Content of a report.
use crate::line::{Group, Line, Peer};
use crate::machine::Machine;
use crate::options::Options;
use crate::record::Record;

/// Peers that Postern is compared with on every line; of several the one that is better on that line.
pub(super) const COMPARED: [(&[Peer], &str); 6] = [
    (&Peer::KONNECTIVITY, "konnectivity"),
    (&[Peer::Rathole], "rathole"),
    (&[Peer::Tonic], "tonic"),
    (&[Peer::Haproxy, Peer::HaproxyTuned], "HAProxy"),
    (&[Peer::Direct], "direct"),
    (&[Peer::PosternForwarded], "forwarded"),
];

pub(super) struct Table {
    pub(super) group: Group,
    pub(super) lines: Vec<Line>,
    pub(super) peers: Vec<Peer>,
}

impl Table {
    /// The lines by section.
    pub(super) fn sections(&self) -> Vec<(Option<&'static str>, Vec<&Line>)> {
        let mut sections: Vec<(Option<&'static str>, Vec<&Line>)> = Vec::new();
        for line in &self.lines {
            match sections.last_mut() {
                Some((section, lines)) if *section == line.section => lines.push(line),
                _ => sections.push((line.section, vec![line])),
            }
        }
        sections
    }
}

/// Everything in a report.
pub(super) struct Report<'a> {
    /// Name of its files.
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    pub(super) options: &'a Options,
    pub(super) machine: &'a Machine,
    pub(super) record: &'a Record,
    pub(super) tables: Vec<Table>,
}
