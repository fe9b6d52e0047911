//! Measurements of a peer over a path.
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use postern_testbed::Testbed;
use postern_testbed::load_target::{ECHO, Target};
use postern_testbed::percentiles::Times;
use postern_testbed::wan::Wan;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::{Place, USABLE, What, id, loss_based};
use crate::dial::Dialer;
use crate::disturbance::Disturbance;
use crate::line::Peer;
use crate::load::{self, Way, as_f64};
use crate::peers::{self, BEHIND_NAT, Running};
use crate::record::Record;
use crate::usage;

/// Maximum time of a message or a visit: through some peers seconds, beside a download on a slow line.
const PATIENCE: Duration = Duration::from_secs(30);
/// A transfer is cut when it takes so many times as long as a full line would.
const SLOWEST: u32 = 2;
/// Added to that: round trips until the line is full.
const STARTING: u32 = 10;
/// Maximum time for transfers to close.
const SETTLE: Duration = Duration::from_secs(30);
/// Maximum wait for a recovery.
const RECOVERS: Duration = Duration::from_secs(60);

/// Durations and counts of the measurements.
#[derive(Clone, Copy)]
struct Span {
    /// Duration of a transfer if the line is full.
    bulk: Duration,
    /// Messages of 64 bytes, one each 50 ms.
    keys: usize,
    visits: usize,
    /// Fraction of an outage's length.
    outage: f64,
    /// Maximum wait for the recovery of a peer other than Postern.
    recovers: Duration,
}

impl Span {
    const FULL: Self =
        Self { bulk: Duration::from_secs(3), keys: 40, visits: 5, outage: 1.0, recovers: RECOVERS };
    const SMOKE: Self = Self {
        bulk: Duration::from_millis(100),
        keys: 3,
        visits: 1,
        outage: 0.02,
        recovers: Duration::from_secs(1),
    };
}

/// The testbed with a path in place of the cables of both edges.
pub(crate) struct Paths<'a> {
    testbed: &'a Testbed,
    place: &'a Place,
    lines: [Wan; 2],
    span: Span,
}

impl<'a> Paths<'a> {
    /// Replaces the cables; they are not put back.
    pub(crate) fn install(testbed: &'a Testbed, place: &'a Place, smoke: bool) -> Result<Self> {
        if place.loss_based {
            let congestion = loss_based().context("namespaces may choose neither CUBIC nor Reno here")?;
            let hosts = testbed.edges().iter().map(|edge| &edge.ns).chain([&testbed.cloud]);
            for host in hosts {
                host.write("/proc/sys/net/ipv4/tcp_congestion_control", congestion)
                    .with_context(|| format!("congestion control {congestion}"))?;
            }
        }
        let lines = [testbed.wan(BEHIND_NAT, place.path)?, testbed.wan(peers::OPEN, place.path)?];
        Ok(Self { testbed, place, lines, span: if smoke { Span::SMOKE } else { Span::FULL } })
    }

    /// Measures a peer that runs.
    pub(crate) async fn measure(
        &self,
        peer: Peer,
        on: &mut Running<'_>,
        target: &Target<'_>,
        record: &mut Record,
    ) -> Result<()> {
        match self.place.what {
            What::Load => self.load(peer, on, target, record).await,
            What::Forwarder => self.transfers(peer, on, target, record).await,
            What::Outage(length) => {
                let users = Users::start(&on.dialer).await?;
                self.lines.iter().for_each(|line| line.set_out(true));
                sleep(length.mul_f64(self.span.outage)).await;
                self.lines.iter().for_each(|line| line.set_out(false));
                self.recovery(peer, users, record).await
            }
            What::NewMapping if on.edge == BEHIND_NAT => {
                let users = Users::start(&on.dialer).await?;
                self.testbed.forget_mappings()?;
                self.recovery(peer, users, record).await
            }
            What::Start => {
                let took = on.restart_agent().await?;
                record.value(&id(self.place, USABLE), peer, took.div_duration_f64(self.place.rtt()));
                Ok(())
            }
            What::NewMapping => {
                record.missing(&id(self.place, USABLE), peer, "no NAT is in its way");
                Ok(())
            }
        }
    }

    async fn load(
        &self,
        peer: Peer,
        on: &Running<'_>,
        target: &Target<'_>,
        record: &mut Record,
    ) -> Result<()> {
        let line = |measure: &str| id(self.place, measure);
        let busy = Busy::now()?;
        let mut visits = Times::default();
        for _ in 0..self.span.visits {
            visits.add(load::visit_within(&on.dialer, PATIENCE).await?);
        }
        record.value(&line("connect"), peer, millis(&mut visits, 0.5)?);
        let at_once = (0..16)
            .map(|_| on.dialer.clone())
            .map(async |dialer| load::visit_within(&dialer, PATIENCE).await);
        let mut visits = Times(load::concurrently(at_once).await?);
        record.value(&line("connect-16"), peer, millis(&mut visits, 0.5)?);
        let mut alone = keystrokes(&on.dialer, self.span.keys).await?;
        record.value(&line("key-p50"), peer, millis(&mut alone, 0.5)?);
        self.transfers(peer, on, target, record).await?;
        for what in ["down-1", "down-4", "up-1", "up-4"] {
            // Only stalled readers have buffers to fill.
            let beside = Disturbance::start(&on.dialer, what, Duration::ZERO).await?;
            // The first ones see the line fill.
            keystrokes(&on.dialer, self.span.keys / 2).await?;
            let mut times = keystrokes(&on.dialer, self.span.keys).await?;
            if what == "down-4" {
                if on.parts.is_empty() {
                    record.missing(&line("memory"), peer, "it has no programs");
                } else {
                    let (cloud, edge) = usage::resident(&on.parts)?;
                    record.value(&line("memory"), peer, cloud + edge);
                }
            }
            beside.stop()?;
            for (part, share) in [("p50", 0.5), ("p99", 0.99)] {
                record.value(&line(&format!("key-{what}-{part}")), peer, millis(&mut times, share)?);
            }
            target.settle(SETTLE).await?;
        }
        let (used, stolen) = busy.shares_since()?;
        record.value(&line("busy"), peer, used);
        record.value(&line("stolen"), peer, stolen);
        Ok(())
    }

    /// Measures one and eight streams each way.
    async fn transfers(
        &self,
        peer: Peer,
        on: &Running<'_>,
        target: &Target<'_>,
        record: &mut Record,
    ) -> Result<()> {
        // Downloads come from the edge.
        for (way, name, rate) in
            [(Way::Down, "down", self.place.path.up), (Way::Up, "up", self.place.path.down)]
        {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "positive and bounded"
            )]
            let bytes = (as_f64(rate) / 8.0 * self.span.bulk.as_secs_f64()) as u64;
            for streams in [1, 8] {
                let limit = self.span.bulk * SLOWEST + self.place.path.rtt * STARTING;
                let moved = load::bulk_within(&on.dialer, way, streams, bytes, limit, target).await?;
                let line = id(self.place, &format!("{name}-{streams}"));
                record.value(&line, peer, moved.rate() * 8.0);
                target.settle(SETTLE).await?;
            }
        }
        Ok(())
    }

    async fn recovery(&self, peer: Peer, users: Users, record: &mut Record) -> Result<()> {
        let line = id(self.place, USABLE);
        let within = if peer == Peer::Postern { RECOVERS } else { self.span.recovers };
        match users.recover(within).await {
            Some(time) => record.value(&line, peer, time.as_secs_f64()),
            None => {
                let reason = format!("no new connection works within {within:?}");
                record.at_least(&line, peer, within.as_secs_f64(), reason);
            }
        }
        Ok(())
    }
}

async fn keystrokes(dialer: &Dialer, count: usize) -> Result<Times> {
    let mut stream = timeout(PATIENCE, dialer.dial_patiently(ECHO)).await.context("a dial")??;
    let mut clock = interval(Duration::from_millis(50));
    clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut times = Times::default();
    for _ in 0..count {
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

/// A user who types over an open connection, and one who opens a new connection each second.
struct Users {
    dialer: Dialer,
    tasks: JoinSet<()>,
}

impl Users {
    async fn start(dialer: &Dialer) -> Result<Self> {
        // Traffic before the outage.
        keystrokes(dialer, 2).await?;
        let mut tasks = JoinSet::new();
        let typing = dialer.clone();
        // They end with the connection.
        tasks.spawn(async move {
            keystrokes(&typing, usize::MAX).await.ok();
        });
        let opening = dialer.clone();
        tasks.spawn(async move {
            let mut clock = interval(Duration::from_secs(1));
            let mut visits = JoinSet::new();
            loop {
                clock.tick().await;
                let dialer = opening.clone();
                visits.spawn(async move { load::visit(&dialer).await });
            }
        });
        Ok(Self { dialer: dialer.clone(), tasks })
    }

    /// Waits until a new connection works, tried ten times a second; returns the time from now.
    async fn recover(mut self, within: Duration) -> Option<Duration> {
        let start = Instant::now();
        let mut clock = interval(Duration::from_millis(100));
        let mut visits = JoinSet::new();
        let works = async {
            loop {
                tokio::select! {
                    _ = clock.tick() => {
                        let dialer = self.dialer.clone();
                        visits.spawn(async move { load::visit(&dialer).await });
                    }
                    Some(visit) = visits.join_next() => if matches!(visit, Ok(Ok(_))) {
                        return start.elapsed();
                    },
                }
            }
        };
        let works = timeout(within, works).await.ok();
        self.tasks.shutdown().await;
        works
    }
}

/// Jiffies of all CPUs: in use, taken by the host that this machine is a guest of, and altogether.
struct Busy {
    used: u64,
    stolen: u64,
    all: u64,
}

impl Busy {
    fn now() -> Result<Self> {
        let text = fs::read_to_string("/proc/stat").context("reading /proc/stat")?;
        Self::parse(&text).context("/proc/stat has no line of all CPUs")
    }

    /// user, nice, system, idle, iowait, irq, softirq, steal: proc_stat(5).
    /// Nice processes only take CPUs that nothing else wants.
    fn parse(text: &str) -> Option<Self> {
        let fields = text.lines().next()?.strip_prefix("cpu ")?.split_whitespace();
        let fields: Vec<u64> = fields.take(8).map(str::parse).collect::<Result<_, _>>().ok()?;
        let all = fields.iter().sum::<u64>();
        let (nice, idle, iowait, stolen) = (fields.get(1)?, fields.get(3)?, fields.get(4)?, *fields.get(7)?);
        Some(Self { used: all - nice - idle - iowait - stolen, stolen, all })
    }

    /// Percentages of the CPUs in use and taken.
    fn shares_since(&self) -> Result<(f64, f64)> {
        let now = Self::now()?;
        let all = as_f64((now.all - self.all).max(1));
        let share = |jiffies: u64| 100.0 * as_f64(jiffies) / all;
        Ok((share(now.used - self.used), share(now.stolen - self.stolen)))
    }
}

fn millis(times: &mut Times, share: f64) -> Result<f64> {
    Ok(times.percentile(share).context("nothing was measured")?.as_secs_f64() * 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_stat_is_parsed() {
        let busy = Busy::parse("cpu  10 1 5 80 4 0 2 1 7 7\ncpu0 1 1 1 1\n").unwrap();
        assert_eq!((busy.used, busy.stolen, busy.all), (17, 1, 103));
        assert!(Busy::parse("intr 1").is_none());
        let (used, stolen) = Busy::now().unwrap().shares_since().unwrap();
        assert!((0.0..=100.0).contains(&used) && (0.0..=100.0).contains(&stolen), "{used}, {stolen}");
    }
}
