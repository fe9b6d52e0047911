//! Judges open connections again, and ends those whose right is gone.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{Notify, Semaphore};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::metrics::{Admitted, Connection, Judgement, Metrics, Permit};

/// Interval. With the 30 s for which an answer of the API server is remembered, and as it has to say no twice, a withdrawn
/// right ends a connection within a minute.
const EVERY: Duration = Duration::from_secs(15);
/// Maximum number of callers for which the API server is asked at a time.
const AT_A_TIME: usize = 16;
/// Maximum time for one judgement: less than the interval, so that a slow one never meets the next.
const LONGEST: Duration = Duration::from_secs(10);

/// Judges all until `stop`, every 15 s and whenever `changed` is notified.
pub(crate) async fn judge_open(metrics: Metrics, changed: Arc<Notify>, stop: CancellationToken) {
    let (mut judging, mut tick) = (Judging::new(metrics), interval(EVERY));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            // Neither waits for an API server that does not answer.
            () = changed.notified() => {}
            _ = tick.tick() => {}
            Some(()) = judging.one_asked() => continue,
        }
        judging.begin(now()).await;
    }
}

/// Judges one permit every 15 s, and returns why it no longer holds.
pub(crate) async fn until_withdrawn(permit: Arc<dyn Permit>) -> String {
    let admitted = Admitted::new(permit);
    loop {
        sleep(EVERY).await;
        let judgement = judge(&admitted).await;
        if let Some(reason) = admitted.weigh(judgement, now()) {
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
    under_way: HashSet<Asker>,
    turns: Arc<Semaphore>,
}

impl Judging {
    fn new(metrics: Metrics) -> Self {
        let (asked, under_way) = Default::default();
        Self { metrics, asked, under_way, turns: Arc::new(Semaphore::new(AT_A_TIME)) }
    }

    /// Judges those about whom nobody is asked, and begins to ask about the others, unless that is under way. Those of one
    /// caller are judged one after another: the first answers, which are remembered, serve all of them.
    async fn begin(&mut self, now: Instant) {
        let (mut here, mut asked) = (Vec::new(), HashMap::<_, Vec<_>>::new());
        for connection in self.metrics.judged_connections() {
            match connection.admitted.get().and_then(|admitted| admitted.permit.asker()) {
                None => here.push(connection),
                Some(asker) => asked.entry(asker).or_default().push(connection),
            }
        }
        // A judgement counts from when it is made, which may be much later.
        let begun = Instant::now();
        let clock = move || now + begun.elapsed();
        for (asker, connections) in asked {
            if self.under_way.insert(asker) {
                let turns = self.turns.clone();
                self.asked.push(Box::pin(async move {
                    // It is never closed.
                    let _turn = turns.acquire().await;
                    judge_each(connections, clock).await;
                    asker
                }));
            }
        }
        judge_each(here, clock).await;
    }

    /// Goes on until one caller has been asked about; `None` if none is.
    async fn one_asked(&mut self) -> Option<()> {
        let asker = self.asked.next().await?;
        self.under_way.remove(&asker);
        Some(())
    }
}

async fn judge(admitted: &Admitted) -> Judgement {
    let unanswered = |_| Judgement::Unanswered(format!("no answer within {} s", LONGEST.as_secs()));
    timeout(LONGEST, admitted.permit.judge()).await.unwrap_or_else(unanswered)
}

async fn judge_each(connections: Vec<Arc<Connection>>, clock: impl Fn() -> Instant) {
    let mut unanswered = None;
    for connection in connections {
        let Some(admitted) = connection.admitted.get() else { continue };
        let judgement = match &unanswered {
            Some(judgement) => Judgement::clone(judgement),
            None => judge(admitted).await,
        };
        if matches!(judgement, Judgement::Unanswered(_)) {
            unanswered = Some(judgement.clone());
        }
        if let Some(reason) = admitted.weigh(judgement, clock()) {
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
    judging.begin(now).await;
    while judging.one_asked().await.is_some() {}
}

#[cfg(test)]
mod tests;
