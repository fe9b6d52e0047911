//! Wide-area paths, and the measurements over each.
mod jobs;
mod measure;

use std::fs;
use std::time::Duration;

use postern_testbed::wan::{Loss, Path};

use crate::line::{Group, Line, Peer};

pub(crate) use jobs::run_all;
pub(crate) use measure::Paths;

/// The measurement on a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// Transfers, connections and keystrokes: [`MEASURES`].
    Load,
    /// Time until it works again after the line was out for so long.
    Outage(Duration),
    /// The same after the NAT has forgotten its mappings and gives new ones.
    NewMapping,
    /// Time from the start of Postern's agent, which has its certificate, to the first connection through it.
    Start,
    /// Capacity of the forwarder itself, by a plain connection: the first [`TRANSFERS`] of [`MEASURES`].
    Forwarder,
}

/// A path, and the measurement on it.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) id: &'static str,
    pub(crate) title: &'static str,
    path: Path,
    what: What,
    /// All hosts have [`loss_based`] congestion control, not the machine's own.
    loss_based: bool,
}

const fn place(id: &'static str, title: &'static str, path: Path) -> Place {
    Place { id, title, path, what: What::Load, loss_based: false }
}

impl Place {
    const fn loss_based(mut self) -> Self {
        self.loss_based = true;
        self
    }

    const fn measures(mut self, what: What) -> Self {
        self.what = what;
        self
    }

    /// Cost of measuring it in bits a second, which the forwarder, both ends and the load move.
    fn load(&self) -> u64 {
        match self.what {
            What::Load | What::Forwarder => self.path.down.max(self.path.up),
            What::Outage(_) | What::NewMapping | What::Start => 0,
        }
    }

    pub(crate) fn rtt(&self) -> Duration {
        self.path.rtt
    }

    pub(crate) fn lines(&self) -> Vec<Line> {
        let line = |measure: &str, title: &str, unit| Line::new(Group::Wan, &id(self, measure), title, unit);
        let measures = match self.what {
            What::Load => MEASURES.len(),
            What::Forwarder => TRANSFERS,
            What::Outage(_) | What::NewMapping => {
                return vec![line(USABLE, self.title, "s").in_section(RECOVERY_TITLE)];
            }
            What::Start => return vec![line(USABLE, self.title, "round trips").in_section(START_TITLE)],
        };
        MEASURES
            .iter()
            .take(measures)
            .map(|(measure, title, unit)| line(measure, title, unit).in_section(self.title))
            .collect()
    }

    /// Reason why this peer is not measured here; None if it is.
    pub(crate) fn leaves_out(&self, peer: Peer, smoke: bool) -> Option<&'static str> {
        if self.what == What::Forwarder && peer != Peer::Direct {
            return Some("the line is about the forwarder alone");
        }
        if self.what == What::Start && peer != Peer::Postern {
            return Some("the line is about Postern's agent");
        }
        (smoke && !self.in_smoke(peer)).then_some("in a smoke run it is measured over another path")
    }

    /// True if a smoke run has this peer here: Postern over every path, and each other peer over one of each kind: all
    /// of them over each would take too long. Transfers are over fast lines without loss, where every peer works and none is slow.
    fn in_smoke(&self, peer: Peer) -> bool {
        let places: &[&str] = match self.what {
            What::Load => &["50ms-100m", "50ms-100m-loss-based", "100ms-200m"],
            What::Outage(_) => &["outage-5", "outage-20", "outage-60"],
            What::NewMapping => &["new-mapping"],
            What::Forwarder => &["forwarder"],
            What::Start => &["start"],
        };
        let number = Peer::FAR.iter().position(|other| *other == peer).unwrap_or_default();
        peer == Peer::Postern || places[number % places.len()] == self.id
    }
}

const fn lossy(share: f64) -> Path {
    Path::new(50, 100).lossy(Loss::Random(share))
}

/// The congestion control that takes each loss for a full line, as most hosts' does: the first that namespaces may choose
/// here.
pub(crate) fn loss_based() -> Option<&'static str> {
    let allowed = fs::read_to_string("/proc/sys/net/ipv4/tcp_allowed_congestion_control").ok()?;
    ["cubic", "reno"].into_iter().find(|name| allowed.split_whitespace().any(|allowed| allowed == *name))
}

/// Path on which recovery is measured.
const RECOVERY: Path = Path::new(50, 100);
const START_TITLE: &str = "100 ms, 200 Mbit/s: the agent starts";
const RECOVERY_TITLE: &str = "50 ms, 100 Mbit/s: until a new connection works again";

const fn outage(seconds: u64) -> What {
    What::Outage(Duration::from_secs(seconds))
}

/// All places; the buffers of each hold one bandwidth × delay.
pub(crate) const PLACES: [Place; 20] = [
    // A rate that no forwarder reaches.
    place("forwarder", "The forwarder itself: 2 ms, no limit", Path::new(2, 100_000))
        .measures(What::Forwarder),
    place("20ms-1g", "20 ms, 1 Gbit/s", Path::new(20, 1000)),
    place("50ms-100m", "50 ms, 100 Mbit/s", Path::new(50, 100)),
    place("50ms-100m-0.1", "50 ms, 100 Mbit/s, 0.1 % loss", lossy(0.001)),
    place("50ms-100m-1", "50 ms, 100 Mbit/s, 1 % loss", lossy(0.01)),
    place("50ms-100m-3", "50 ms, 100 Mbit/s, 3 % loss", lossy(0.03)),
    place("50ms-100m-loss-based", "50 ms, 100 Mbit/s, loss-based", Path::new(50, 100)).loss_based(),
    place("50ms-100m-0.1-loss-based", "50 ms, 100 Mbit/s, 0.1 % loss, loss-based", lossy(0.001)).loss_based(),
    place("100ms-200m", "100 ms, 200 Mbit/s", Path::new(100, 200)),
    place("250ms-100m", "250 ms, 100 Mbit/s", Path::new(250, 100)),
    place(
        "lte",
        "LTE: 50 ms, 50 Mbit/s to the edge, 20 from it",
        Path::asymmetric(50, 50_000_000, 20_000_000),
    ),
    place(
        "80ms-40-8m",
        "80 ms, 40 Mbit/s to the edge, 8 from it",
        Path::asymmetric(80, 40_000_000, 8_000_000),
    ),
    place(
        "60ms-10-5m",
        "60 ms, 10 Mbit/s to the edge, 5 from it",
        Path::asymmetric(60, 10_000_000, 5_000_000),
    ),
    place(
        "60ms-10-5m-loss-based",
        "60 ms, 10 Mbit/s to the edge, 5 from it, loss-based",
        Path::asymmetric(60, 10_000_000, 5_000_000),
    )
    .loss_based(),
    place("60ms-2-1m", "60 ms, 2 Mbit/s to the edge, 1 from it", Path::asymmetric(60, 2_000_000, 1_000_000)),
    place("outage-5", "the line was out for 5 s", RECOVERY).measures(outage(5)),
    place("outage-20", "the line was out for 20 s", RECOVERY).measures(outage(20)),
    place("outage-60", "the line was out for 60 s", RECOVERY).measures(outage(60)),
    place("new-mapping", "the NAT has forgotten the mapping and gives a new one", RECOVERY)
        .measures(What::NewMapping),
    place("start", "until a connection is carried, with the program's own start", Path::new(100, 200))
        .measures(What::Start),
];

/// Measurements under load: id, title and unit.
pub(crate) const MEASURES: [(&str, &str, &str); 18] = [
    ("down-1", "download, one stream", "Mbit/s"),
    ("down-8", "download, 8 streams", "Mbit/s"),
    ("up-1", "upload, one stream", "Mbit/s"),
    ("up-8", "upload, 8 streams", "Mbit/s"),
    ("connect", "connect, 16 B, close, one at once, p50", "ms"),
    ("connect-16", "connect, 16 B, close, 16 at once, p50", "ms"),
    ("key-p50", "keystroke alone, p50", "ms"),
    ("key-down-1-p50", "keystroke beside one download, p50", "ms"),
    ("key-down-1-p99", "keystroke beside one download, p99", "ms"),
    ("key-down-4-p50", "keystroke beside four downloads, p50", "ms"),
    ("key-down-4-p99", "keystroke beside four downloads, p99", "ms"),
    ("key-up-1-p50", "keystroke beside one upload, p50", "ms"),
    ("key-up-1-p99", "keystroke beside one upload, p99", "ms"),
    ("key-up-4-p50", "keystroke beside four uploads, p50", "ms"),
    ("key-up-4-p99", "keystroke beside four uploads, p99", "ms"),
    ("memory", "resident memory of both ends beside four downloads", "MB"),
    ("busy", "CPUs of the machine in use meanwhile", "%"),
    ("stolen", "CPUs that the machine's own host took from it meanwhile", "%"),
];
/// Number of transfers, which are the first measures.
const TRANSFERS: usize = 4;
/// The measure of recovery.
const USABLE: &str = "usable";

/// The id of a line.
pub(crate) fn id(place: &Place, measure: &str) -> String {
    format!("wan-{}-{measure}", place.id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_smoke_run_has_each_peer_over_one_path_of_each_kind() {
        for peer in Peer::FAR.into_iter().filter(|peer| *peer != Peer::Postern) {
            let mut measured: Vec<&str> = Vec::new();
            for place in PLACES.iter().filter(|place| place.leaves_out(peer, true).is_none()) {
                measured.push(match place.what {
                    What::Load => "load",
                    What::Outage(_) => "outage",
                    What::NewMapping => "mapping",
                    What::Forwarder => "forwarder",
                    What::Start => "start",
                });
            }
            measured.retain(|kind| *kind != "forwarder" && *kind != "start");
            assert_eq!(measured, ["load", "outage", "mapping"], "{peer}");
        }
        let left_out = PLACES.iter().filter(|place| place.leaves_out(Peer::Postern, true).is_some());
        assert_eq!(left_out.map(|place| place.id).collect::<Vec<_>>(), ["forwarder"]);
        let alone = PLACES.iter().filter(|place| place.leaves_out(Peer::Direct, false).is_some());
        assert_eq!(alone.map(|place| place.id).collect::<Vec<_>>(), ["start"]);
    }

    #[test]
    fn the_first_measures_are_transfers() {
        assert!(MEASURES.iter().enumerate().all(|(at, (.., unit))| (at < TRANSFERS) == (*unit == "Mbit/s")));
    }
}
