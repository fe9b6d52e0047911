//! Judges open connections again, and ends those whose right is gone.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{Notify, Semaphore};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tunnel_runtime::backoff::jittered;

use crate::metrics::{Connection, HeldPermit, Judgement, Metrics, Permit};

/// Interval. With the 30 s for which an answer of the API server is remembered, and as it has to say no twice, a withdrawn
/// right ends a connection within a minute.
const EVERY: Duration = Duration::from_secs(15);
/// Maximum number of callers for which the API server is asked at a time.
const AT_A_TIME: usize = 16;
/// Maximum time for one judgement.
const LONGEST: Duration = Duration::from_secs(10);
/// Longest interval for a permit that is judged apart from the others, as there may be one for each node.
const APART: Duration = Duration::from_secs(180);

/// Judges all until `stop`, every 15 s and whenever `changed` is notified.
pub(crate) async fn judge_open(metrics: Metrics, changed: Arc<Notify>, stop: CancellationToken) {
    let (mut judging, mut tick) = (Judging::new(metrics), interval(EVERY));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        // Neither of these waits for an API server that does not answer.
        let changed = tokio::select! {
            () = stop.cancelled() => return,
            () = changed.notified() => true,
            _ = tick.tick() => false,
            Some(()) = judging.one_asked() => continue,
        };
        judging.begin(now(), changed).await;
    }
}

/// Judges one permit every three minutes at most, when it has one of the `turns`, and returns why it no longer holds.
pub(crate) async fn until_withdrawn(permit: Arc<dyn Permit>, turns: &Semaphore) -> String {
    let held = HeldPermit::new(permit);
    loop {
        sleep(jittered(APART, 0.25)).await;
        // It is never closed.
        let _turn = turns.acquire().await;
        let judgement = judge(&held).await;
        if let Some(reason) = held.weigh(judgement, now()) {
            return reason;
        }
    }
}

type Asker = [u8; 32];

/// The judgements that are under way.
struct Judging {
    metrics: Metrics,
    /// One for each caller about whom the API server is asked: others do not wait for its answer.
    asked: FuturesUnordered<BoxFuture<'static, Asker>>,
    /// Their callers, and true for one about whom it has to be asked again, because something has changed since.
    under_way: HashMap<Asker, bool>,
    turns: Arc<Semaphore>,
}

impl Judging {
    fn new(metrics: Metrics) -> Self {
        let (asked, under_way) = Default::default();
        Self { metrics, asked, under_way, turns: Arc::new(Semaphore::new(AT_A_TIME)) }
    }

    /// Judges those about whom nobody is asked, and begins to ask about the others, unless that is under way.
    async fn begin(&mut self, now: Instant, changed: bool) {
        let (mut here, mut asked) = (Vec::new(), HashMap::<_, Vec<_>>::new());
        for connection in self.metrics.judged_connections() {
            match asker_of(&connection) {
                None => here.push(connection),
                Some(asker) => asked.entry(asker).or_default().push(connection),
            }
        }
        for (asker, connections) in asked {
            match self.under_way.get_mut(&asker) {
                Some(again) => *again |= changed,
                None => self.ask(asker, connections, now),
            }
        }
        judge_each(here, since(now), None).await;
    }

    /// Those of one caller are judged one after another: the first answers, which are remembered, serve all of them.
    fn ask(&mut self, asker: Asker, mut connections: Vec<Arc<Connection>>, now: Instant) {
        // One about which nobody answers keeps the others from being judged, so it is not always the first.
        let first = rand::random_range(0..connections.len().max(1));
        connections.rotate_left(first);
        self.under_way.insert(asker, false);
        let turns = self.turns.clone();
        self.asked.push(Box::pin(async move {
            judge_each(connections, since(now), Some(&turns)).await;
            asker
        }));
    }

    /// Goes on until one caller has been asked about; `None` if none is.
    async fn one_asked(&mut self) -> Option<()> {
        let asker = self.asked.next().await?;
        if self.under_way.remove(&asker) == Some(true) {
            let all = self.metrics.judged_connections().into_iter();
            let connections = all.filter(|connection| asker_of(connection) == Some(asker)).collect();
            self.ask(asker, connections, now());
        }
        Some(())
    }
}

/// The caller about whom the API server has to be asked, if it has to.
fn asker_of(connection: &Connection) -> Option<Asker> {
    connection.permit.get()?.permit.asker()
}

/// A judgement counts from when it is made, which may be much later than `now`.
fn since(now: Instant) -> impl Fn() -> Instant {
    let begun = Instant::now();
    move || now + begun.elapsed()
}

async fn judge(held: &HeldPermit) -> Judgement {
    let unanswered = |_| Judgement::Unanswered(format!("no answer within {} s", LONGEST.as_secs()));
    timeout(LONGEST, held.permit.judge()).await.unwrap_or_else(unanswered)
}

/// Each judgement waits for one of the `turns`, so that a caller with many connections does not keep one.
async fn judge_each(
    connections: Vec<Arc<Connection>>,
    clock: impl Fn() -> Instant,
    turns: Option<&Semaphore>,
) {
    let mut unanswered = None;
    for connection in connections {
        let Some(held) = connection.permit.get() else { continue };
        let judgement = match &unanswered {
            Some(judgement) => Judgement::clone(judgement),
            None => {
                let _turn = match turns {
                    // It is never closed.
                    Some(turns) => turns.acquire().await.ok(),
                    None => None,
                };
                judge(held).await
            }
        };
        if matches!(judgement, Judgement::Unanswered(_)) {
            unanswered = Some(judgement.clone());
        }
        if let Some(reason) = held.weigh(judgement, clock()) {
            connection.withdraw(reason);
        }
        // The accepting thread has other work.
        tokio::task::yield_now().await;
    }
}

/// Of the clock that tests can pause.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Judges all once.
#[cfg(test)]
pub(super) async fn judge_all(metrics: &Metrics, now: Instant) {
    let mut judging = Judging::new(metrics.clone());
    judging.begin(now, false).await;
    while judging.one_asked().await.is_some() {}
}

#[cfg(test)]
mod tests;
