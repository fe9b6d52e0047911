//! The performance targets, and whether this run meets them. A missed target is reported and fails nothing.
mod wan;

use serde::Serialize;

use crate::catalogue::NODES;
use crate::line::{Better, Peer};
use crate::options::{HOST, Options};
use crate::record::Record;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Target {
    /// The requirement.
    pub(super) asks: String,
    /// The measured value; None when a value is missing.
    pub(super) measured: Option<f64>,
    /// The line of the measured value, where there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) line: Option<String>,
    pub(super) met: Option<bool>,
}

#[derive(Clone, Copy)]
enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

impl Bound {
    fn better(self) -> Better {
        match self {
            Self::AtLeast(_) => Better::Higher,
            Self::AtMost(_) => Better::Lower,
        }
    }
}

/// Targets of one part of the report.
pub(super) fn check(record: &Record, part: &str, options: &Options) -> Vec<Target> {
    if part == HOST { on_host(record) } else { wan::check(record, &options.places().collect::<Vec<_>>()) }
}

/// Every other tunnel, each as it is installed. tonic on the data path is no tunnel that anyone runs.
pub(super) const TUNNELS: [Peer; 5] =
    [Peer::Haproxy, Peer::HaproxyTuned, Peer::Rathole, Peer::KonnectivityGrpc, Peer::KonnectivityHttp];

fn on_host(record: &Record) -> Vec<Target> {
    use Bound::{AtLeast, AtMost};
    let ratio_to = |line: &str, to: &[Peer], better| record.ratio(line, Peer::Postern, to, better);
    let value = |line: &str| record.median(line, Peer::Postern);
    // The ratio of two lines of Postern; a bound does not count as a value.
    let over = |line: &str, base: &str| {
        let exact = |line| record.cell(line, Peer::Postern).filter(|cell| !cell.bounded).map(|_| ());
        exact(line).and(exact(base))?;
        Some(value(line)? / value(base).filter(|base| *base > 0.0)?)
    };
    // The better of two: of rates the higher.
    let (rates, times) = (Better::Higher, Better::Lower);
    let konnectivity = |line: &str, better| ratio_to(line, &Peer::KONNECTIVITY, better);
    let haproxy = |line: &str| ratio_to(line, &[Peer::Haproxy, Peer::HaproxyTuned], rates);
    let direct = |line: &str, better| ratio_to(line, &[Peer::Direct], better);
    let rathole = |line: &str, better| ratio_to(line, &[Peer::Rathole], better);
    let tunnels = |line: &str| ratio_to(line, &TUNNELS, times);
    let few = format!("connect-{}", NODES[0]);
    let many = format!("connect-{}", NODES[NODES.len() - 1]);
    let targets = [
        ("connect() p50 with the redirect, over an empty host", direct(&few, times), AtMost(1.2)),
        ("connect() p50 at 10,000 nodes, over one node", over(&many, &few), AtMost(1.2)),
        ("connect() p50 at 100,000 nodes, over the fewest", value("scale-connect-100000"), AtMost(1.2)),
        ("download, one stream, over HAProxy", haproxy("bulk-down-1"), AtLeast(1.0)),
        ("upload, one stream, over HAProxy", haproxy("bulk-up-1"), AtLeast(1.0)),
        ("download, one stream, over konnectivity", konnectivity("bulk-down-1", rates), AtLeast(3.0)),
        ("upload, one stream, over konnectivity", konnectivity("bulk-up-1", rates), AtLeast(3.0)),
        ("stretch: download, one stream, over direct", direct("bulk-down-1", rates), AtLeast(0.5)),
        ("stretch: upload, one stream, over direct", direct("bulk-up-1", rates), AtLeast(0.5)),
        ("page faults of both ends for 1 GB down", value("bulk-down-faults"), AtMost(1_000.0)),
        ("page faults of both ends for 1 GB up", value("bulk-up-faults"), AtMost(1_000.0)),
        ("download, 8 streams over one", over("bulk-down-8", "bulk-down-1"), AtLeast(1.0)),
        ("upload, 8 streams over one", over("bulk-up-8", "bulk-up-1"), AtLeast(1.0)),
        ("round trip p50, 64 B, over konnectivity", konnectivity("round-trip-64-1-p50", times), AtMost(0.6)),
        ("round trip p50, 64 B, over rathole", rathole("round-trip-64-1-p50", times), AtMost(1.0)),
        (
            "connect, echo, close, 16 at once, over konnectivity",
            konnectivity("connections-16", rates),
            AtLeast(1.5),
        ),
        (
            "the same by kube-apiserver's gRPC, over konnectivity's",
            ratio_to("egress-16-grpc", &[Peer::KonnectivityGrpc], rates),
            AtLeast(1.5),
        ),
        (
            "the same by its HTTP CONNECT, over konnectivity's",
            ratio_to("egress-16-http", &[Peer::KonnectivityHttp], rates),
            AtLeast(1.5),
        ),
        (
            "stretch: connect, echo, close, 16 at once, over direct",
            direct("connections-16", rates),
            AtLeast(0.6),
        ),
        ("memory at 2,000 connections, over konnectivity", konnectivity("held", times), AtMost(0.35)),
        (
            "round trip p99 beside four bulk downloads, over the best tunnel",
            tunnels("beside-bulk-4-trip"),
            AtMost(1.0),
        ),
        (
            "round trip p99 beside one bulk download, over the best tunnel",
            tunnels("beside-bulk-1-trip"),
            AtMost(1.0),
        ),
        (
            "new connection p99 beside one bulk download, over the best tunnel",
            tunnels("beside-bulk-1-visit"),
            AtMost(1.0),
        ),
    ];
    let fixed = targets.into_iter().map(|(asks, measured, bound)| target(asks, measured, bound));
    let beside = [
        ("stalled", "a stalled reader"),
        ("stalled-500", "500 stalled readers"),
        ("hole", "a black-holed dial"),
    ];
    let kinds = [("trip", "round trip"), ("visit", "new connection")];
    let beside = beside.into_iter().flat_map(|(id, what)| {
        kinds.map(|(kind, title)| {
            let measured = over(&format!("beside-{id}-{kind}"), &format!("beside-alone-{kind}"));
            target(&format!("{title} p99 beside {what}, over alone"), measured, AtMost(2.0))
        })
    });
    let alone = [
        ("memory of the server for an idle agent of 10,000, KiB", "scale-agents-memory-10000", 40.0),
        ("memory of both ends without a connection, MB", "held-idle", 30.0),
        ("killed server: 10,000 agents back, sessions resumed, s", "scale-agents-restart-10000", 8.0),
        ("killed server: 10,000 agents back, full handshakes, s", "scale-agents-restart-full-10000", 12.0),
        ("one of three servers killed: 10,000 agents have a session, s", "scale-lost-back", 4.0),
        ("a server with 10,000 nodes started until it is ready, s", "scale-start", 1.0),
        (
            "p99 of connections while a server of 10,000 agents is replaced, over before",
            "scale-upgrade-p99",
            2.0,
        ),
    ];
    let alone = alone.map(|(asks, line, limit)| target(asks, value(line), AtMost(limit)));
    fixed.chain(beside).chain(alone).collect()
}

fn target(what: &str, measured: Option<f64>, bound: Bound) -> Target {
    let (sign, limit, met) = match bound {
        Bound::AtLeast(limit) => ("≥", limit, measured.map(|measured| measured >= limit)),
        Bound::AtMost(limit) => ("≤", limit, measured.map(|measured| measured <= limit)),
    };
    Target { asks: format!("{what} {sign} {limit}"), measured, line: None, met }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of<'a>(targets: &'a [Target], begin: &str) -> &'a Target {
        targets.iter().find(|target| target.asks.starts_with(begin)).unwrap()
    }

    #[test]
    fn targets_are_met_or_not_or_unknown() {
        let mut record = Record::default();
        record.value("bulk-down-1", Peer::Postern, 900.0);
        record.value("bulk-down-1", Peer::Haproxy, 800.0);
        record.value("bulk-down-1", Peer::HaproxyTuned, 850.0);
        record.value("bulk-down-1", Peer::KonnectivityHttp, 310.0);
        record.value("bulk-down-1", Peer::Direct, 1_500.0);
        record.value("bulk-down-8", Peer::Postern, 850.0);
        record.value("beside-bulk-4-trip", Peer::Postern, 11_000.0);
        record.value("beside-bulk-4-trip", Peer::Rathole, 22_000.0);
        record.value("beside-bulk-4-trip", Peer::KonnectivityHttp, 20_000.0);
        let targets = check(&record, HOST, &Options::parse([]).unwrap());
        assert_eq!(of(&targets, "download, one stream, over HAProxy").met, Some(true));
        assert_eq!(of(&targets, "download, one stream, over konnectivity").met, Some(false));
        assert_eq!(of(&targets, "stretch: download, one stream, over direct").met, Some(true));
        assert_eq!(of(&targets, "download, 8 streams").met, Some(false));
        assert_eq!(
            of(&targets, "round trip p99 beside four").measured,
            Some(0.55),
            "the best is konnectivity"
        );
        assert_eq!(of(&targets, "memory at 2,000").met, None, "not measured is neither met nor missed");
    }
}
