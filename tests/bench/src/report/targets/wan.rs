//! The targets over wide-area paths: each is about several lines, of which the worst counts.
use super::{Bound, TUNNELS, Target, target};
use crate::line::{Better, Peer};
use crate::record::Record;
use crate::wan::{Place, id};

/// Paths that lose nothing.
const CLEAN: [&str; 10] = [
    "20ms-1g",
    "50ms-100m",
    "50ms-100m-loss-based",
    "100ms-200m",
    "250ms-100m",
    "lte",
    "80ms-40-8m",
    "60ms-10-5m",
    "60ms-10-5m-loss-based",
    "60ms-2-1m",
];
const SLOW: [&str; 3] = ["lte", "60ms-10-5m", "60ms-2-1m"];
const LOSSY: [&str; 1] = ["50ms-100m-1"];
const ONE: [&str; 2] = ["down-1", "up-1"];
const STREAMS: [&str; 4] = ["down-1", "up-1", "down-8", "up-8"];
const BESIDE: [&str; 4] = ["key-down-1-p50", "key-down-1-p99", "key-down-4-p50", "key-down-4-p99"];
const DIRECT: &[Peer] = &[Peer::Direct];
const KONNECTIVITY: &[Peer] = &Peer::KONNECTIVITY;

/// `chosen`: the places that the run was to measure.
pub(super) fn check(record: &Record, chosen: &[&Place]) -> Vec<Target> {
    use Bound::{AtLeast, AtMost};
    let of = |places: &[&str]| chosen.iter().copied().filter(|place| places.contains(&place.id)).collect();
    let worst = |asks: &str, places: &[&str], measures: &[&str], to: &[Peer], bound: Bound| {
        let places: Vec<&Place> = of(places);
        worst(asks, &places, measures, bound, |_, line| record.ratio(line, Peer::Postern, to, bound.better()))
    };
    let mut targets = vec![
        worst("no loss: one stream, over direct", &CLEAN, &ONE, DIRECT, AtLeast(0.95)),
        worst("no loss: one stream, over konnectivity", &CLEAN, &ONE, KONNECTIVITY, AtLeast(1.0)),
        worst("no loss: eight streams, over konnectivity", &CLEAN, &STREAMS[2..], KONNECTIVITY, AtLeast(1.0)),
        worst("1 % loss: one and eight streams, over direct", &LOSSY, &STREAMS, DIRECT, AtLeast(0.95)),
        worst(
            "1 % loss: one and eight streams, over the best tunnel",
            &LOSSY,
            &STREAMS,
            &TUNNELS,
            AtLeast(1.0),
        ),
        worst("slow lines: keystroke beside downloads, over direct", &SLOW, &BESIDE, DIRECT, AtMost(1.25)),
        worst(
            "1 % loss: keystroke p50 beside a download, over direct",
            &LOSSY,
            &BESIDE[..1],
            DIRECT,
            AtMost(1.1),
        ),
    ];
    let above_rtt = |place: &Place, line: &str| {
        Some(record.median(line, Peer::Postern)? - place.rtt().as_secs_f64() * 1e3)
    };
    targets.push(self::worst(
        "connect and echo, above one round trip, ms",
        &of(&CLEAN),
        &["connect"],
        AtMost(3.0),
        above_rtt,
    ));
    let seconds = |_: &Place, line: &str| record.median(line, Peer::Postern);
    for (asks, places, limit) in [
        ("usable after an outage of 5 s, s", &["outage-5"][..], 1.0),
        ("usable after a longer outage, s", &["outage-20", "outage-60"], 2.0),
        ("usable after the NAT has forgotten the mapping, s", &["new-mapping"], 3.0),
        ("the agent's start until a connection is carried, round trips", &["start"], 4.0),
    ] {
        targets.push(self::worst(asks, &of(places), &["usable"], AtMost(limit), seconds));
    }
    targets.push(self::worst(
        "the forwarder of the paths itself, one stream, Mbit/s",
        &of(&["forwarder"]),
        &ONE,
        AtLeast(1000.0),
        |_, line| record.median(line, Peer::Direct),
    ));
    targets
}

/// The worst of these lines; not measured if one of them is missing.
fn worst(
    asks: &str,
    places: &[&Place],
    measures: &[&str],
    bound: Bound,
    value: impl Fn(&Place, &str) -> Option<f64>,
) -> Target {
    let mut worst: Option<(f64, String)> = None;
    for (place, measure) in
        places.iter().flat_map(|place| measures.iter().map(move |measure| (place, measure)))
    {
        let line = id(place, measure);
        let Some(value) = value(place, &line) else { return target(asks, None, bound) };
        let is_worse = worst.as_ref().is_none_or(|(known, _)| match bound.better() {
            Better::Higher => value < *known,
            _ => value > *known,
        });
        if is_worse {
            worst = Some((value, line));
        }
    }
    let (value, line) = worst.unzip();
    Target { line, ..target(asks, value, bound) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wan::PLACES;

    #[test]
    fn the_worst_line_counts() {
        let mut record = Record::default();
        for (measure, value) in STREAMS.into_iter().zip([100.0, 90.0, 96.0, 97.0]) {
            let line = format!("wan-50ms-100m-1-{measure}");
            record.value(&line, Peer::Postern, value);
            record.value(&line, Peer::Direct, 100.0);
        }
        let targets = check(&record, &PLACES.each_ref());
        let of = |begin: &str| targets.iter().find(|target| target.asks.starts_with(begin)).unwrap();
        let lossy = of("1 % loss: one and eight streams, over direct");
        assert_eq!((lossy.measured, lossy.met), (Some(0.9), Some(false)));
        assert_eq!(lossy.line.as_deref(), Some("wan-50ms-100m-1-up-1"));
        assert_eq!(of("no loss: one stream, over direct").met, None);
        // Places that the run was not to measure are not missing.
        record.value("wan-lte-down-1", Peer::Postern, 97.0);
        record.value("wan-lte-down-1", Peer::Direct, 100.0);
        record.value("wan-lte-up-1", Peer::Postern, 98.0);
        record.value("wan-lte-up-1", Peer::Direct, 100.0);
        let lte = PLACES.iter().find(|place| place.id == "lte").unwrap();
        let targets = check(&record, &[lte]);
        let clean = targets.iter().find(|target| target.asks.starts_with("no loss: one stream, over direct"));
        assert_eq!(clean.unwrap().measured, Some(0.97));
    }

    #[test]
    fn places_and_measures_exist() {
        let known = |name: &&str| PLACES.iter().any(|place| place.id == *name);
        assert!(CLEAN.iter().chain(&SLOW).chain(&LOSSY).all(known));
        let measured = |name: &&str| crate::wan::MEASURES.iter().any(|(id, ..)| id == name);
        assert!(ONE.iter().chain(&STREAMS).chain(&BESIDE).chain(&["connect"]).all(measured));
        for place in ["outage-5", "outage-20", "outage-60", "new-mapping", "forwarder"] {
            assert!(known(&place));
        }
    }
}
