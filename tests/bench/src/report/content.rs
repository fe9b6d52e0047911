//! What a report contains.
use crate::line::{Group, Line, Peer};
use crate::machine::Machine;
use crate::options::Options;
use crate::record::Record;

/// What Postern is compared with on every line: the faster of konnectivity's two modes, itself on tonic, and the two
/// limits.
pub(super) const COMPARED: [(Peer, &str); 4] = [
    (Peer::KonnectivityHttp, "konnectivity"),
    (Peer::Tonic, "tonic"),
    (Peer::Haproxy, "HAProxy"),
    (Peer::Direct, "direct"),
];

pub(super) struct Table {
    pub(super) group: Group,
    pub(super) lines: Vec<Line>,
    pub(super) peers: Vec<Peer>,
}

/// Everything that a report says.
pub(super) struct Report<'a> {
    pub(super) options: &'a Options,
    pub(super) machine: Machine,
    pub(super) record: &'a Record,
    pub(super) tables: Vec<Table>,
}
