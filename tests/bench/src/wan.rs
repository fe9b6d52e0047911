//! What carriers do over wide-area paths.
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use postern_testbed::Testbed;
use postern_testbed::load_target::{ECHO, Target};
use postern_testbed::percentiles::Times;
use postern_testbed::wan::{Loss, Path, Wan};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::dial::Dialer;
use crate::disturbance::Disturbance;
use crate::line::Peer;
use crate::load::{self, Way, as_f64};
use crate::peers::{self, Running};
use crate::record::Record;

/// A path of the report: id and title.
pub(crate) struct Place {
    pub(crate) id: &'static str,
    pub(crate) title: &'static str,
    path: Path,
}

const fn place(id: &'static str, title: &'static str, path: Path) -> Place {
    Place { id, title, path }
}

/// The paths, the buffers of each one bandwidth × delay.
pub(crate) const PLACES: [Place; 10] = [
    place("20ms-1g", "20 ms, 1 Gbit/s", Path::new(20, 1000)),
    place("50ms-100m", "50 ms, 100 Mbit/s", Path::new(50, 100)),
    place("50ms-100m-0.1", "50 ms, 100 Mbit/s, 0.1 % loss", Path::new(50, 100).lossy(Loss::Random(0.001))),
    place("50ms-100m-1", "50 ms, 100 Mbit/s, 1 % loss", Path::new(50, 100).lossy(Loss::Random(0.01))),
    place("50ms-100m-3", "50 ms, 100 Mbit/s, 3 % loss", Path::new(50, 100).lossy(Loss::Random(0.03))),
    place("100ms-200m", "100 ms, 200 Mbit/s", Path::new(100, 200)),
    place("250ms-100m", "250 ms, 100 Mbit/s", Path::new(250, 100)),
    place("lte", "LTE: 50 ms, 50/20 Mbit/s", Path::asymmetric(50, 50_000_000, 20_000_000)),
    place("60ms-10-5m", "60 ms, 10/5 Mbit/s", Path::asymmetric(60, 10_000_000, 5_000_000)),
    place("60ms-2-1m", "60 ms, 2/1 Mbit/s", Path::asymmetric(60, 2_000_000, 1_000_000)),
];

/// What is measured on each: id, title and unit.
pub(crate) const MEASURES: [(&str, &str, &str); 9] = [
    ("down-1", "download, one stream", "Mbit/s"),
    ("down-8", "download, 8 streams", "Mbit/s"),
    ("up-1", "upload, one stream", "Mbit/s"),
    ("up-8", "upload, 8 streams", "Mbit/s"),
    ("connect", "connect, 16 B, close, p50", "ms"),
    ("key-p50", "keystroke alone, p50", "ms"),
    ("key-bulk-p50", "keystroke beside one download, p50", "ms"),
    ("key-bulk-p99", "keystroke beside one download, p99", "ms"),
    ("key-bulk-4-p50", "keystroke beside four downloads, p50", "ms"),
];

/// How long and how much.
#[derive(Clone, Copy)]
struct Span {
    /// Of a transfer, were the line full.
    bulk: Duration,
    /// Messages of 64 bytes, one each 50 ms.
    keys: usize,
    visits: usize,
}

impl Span {
    const FULL: Self = Self { bulk: Duration::from_secs(6), keys: 100, visits: 5 };
    const SMOKE: Self = Self { bulk: Duration::from_millis(200), keys: 4, visits: 1 };
}

/// The testbed with paths in place of the cables of both edges.
pub(crate) struct Paths {
    behind_nat: Wan,
    open: Wan,
    span: Span,
}

impl Paths {
    /// Replaces the cables; they are not put back.
    pub(crate) fn install(testbed: &Testbed, smoke: bool) -> Result<Self> {
        let first = PLACES[0].path;
        let behind_nat = testbed.wan(peers::BEHIND_NAT, first)?;
        let open = testbed.wan(peers::OPEN, first)?;
        Ok(Self { behind_nat, open, span: if smoke { Span::SMOKE } else { Span::FULL } })
    }

    pub(crate) fn set(&self, place: &Place) {
        self.behind_nat.set(place.path);
        self.open.set(place.path);
    }

    /// Measures a peer that runs.
    pub(crate) async fn measure(
        &self,
        place: &Place,
        peer: Peer,
        on: &Running<'_>,
        target: &Target<'_>,
        record: &mut Record,
    ) -> Result<()> {
        let mut note = |measure: &str, value: f64| record.value(&id(place, measure), peer, value);
        let settle = async || target.settle(SETTLE).await;
        let mut visits = Times::default();
        for _ in 0..self.span.visits {
            visits.add(load::visit(&on.dialer).await?);
        }
        note("connect", millis(&mut visits, 0.5)?);
        note("key-p50", millis(&mut self.keystrokes(&on.dialer).await?, 0.5)?);
        for (way, name, rate) in [(Way::Down, "down", place.path.down), (Way::Up, "up", place.path.up)] {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "positive and bounded"
            )]
            let bytes = (as_f64(rate) / 8.0 * self.span.bulk.as_secs_f64()) as u64;
            for streams in [1, 8] {
                let moved = load::bulk(&on.dialer, way, streams, bytes).await?;
                note(&format!("{name}-{streams}"), moved.rate() * 8.0);
                settle().await?;
            }
        }
        for (downloads, name) in [("bulk-1", "key-bulk"), ("bulk-4", "key-bulk-4")] {
            let beside = Disturbance::start(&on.dialer, downloads).await?;
            // The first ones see the line fill.
            self.keystrokes(&on.dialer).await?;
            let mut times = self.keystrokes(&on.dialer).await?;
            beside.stop()?;
            note(&format!("{name}-p50"), millis(&mut times, 0.5)?);
            if downloads == "bulk-1" {
                note(&format!("{name}-p99"), millis(&mut times, 0.99)?);
            }
            settle().await?;
        }
        Ok(())
    }

    async fn keystrokes(&self, dialer: &Dialer) -> Result<Times> {
        let mut stream = dialer.dial_patiently(ECHO).await?;
        let mut clock = interval(Duration::from_millis(50));
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut times = Times::default();
        for _ in 0..self.span.keys {
            clock.tick().await;
            let start = Instant::now();
            let mut message = [1; 64];
            let trip = async {
                stream.write_all(&message).await?;
                stream.read_exact(&mut message).await
            };
            timeout(PATIENCE, trip).await.context("a keystroke was not answered")??;
            times.add(start.elapsed());
        }
        stream.close().await?;
        Ok(times)
    }
}

/// How long a message may take: through some peers seconds, beside a download on a slow line.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long transfers may take to close.
const SETTLE: Duration = Duration::from_secs(20);

/// The id of a line.
pub(crate) fn id(place: &Place, measure: &str) -> String {
    format!("wan-{}-{measure}", place.id)
}

fn millis(times: &mut Times, share: f64) -> Result<f64> {
    Ok(times.percentile(share).context("nothing was measured")?.as_secs_f64() * 1e3)
}
