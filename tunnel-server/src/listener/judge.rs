//! Judges open connections again, and ends those whose right is gone.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream};
use tokio::sync::Notify;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::metrics::{Connection, Judgement, Metrics};

/// Interval. With the 30 s for which an answer of the API server is remembered, and as it has to say no twice, a withdrawn
/// right ends a connection within a minute.
const EVERY: Duration = Duration::from_secs(15);
/// Time for which a connection goes on although its right cannot be judged: longer than an upgrade of the API server.
const UNKNOWN: Duration = Duration::from_secs(15 * 60);
/// Maximum number of callers for which the API server is asked at a time.
const AT_A_TIME: usize = 8;

/// Judges all until `stop`, every 15 s and whenever `changed` is notified.
pub(crate) async fn judge_open(metrics: Metrics, changed: Arc<Notify>, stop: CancellationToken) {
    loop {
        let judged = async {
            judge_all(&metrics, Instant::now()).await;
            sleep(EVERY).await;
        };
        tokio::select! {
            () = stop.cancelled() => return,
            // Begins anew, because it must not wait for an API server that does not answer.
            () = changed.notified() => {}
            () = judged => {}
        }
    }
}

/// Those of one caller are judged one after another: the first answers, which are remembered, serve all of them.
pub(super) async fn judge_all(metrics: &Metrics, now: Instant) {
    let (mut here, mut asked) = (Vec::new(), HashMap::<_, Vec<_>>::new());
    for connection in metrics.judged_connections() {
        match connection.admitted.get().and_then(|admitted| admitted.permit.asker()) {
            None => here.push(connection),
            Some(asker) => asked.entry(asker).or_default().push(connection),
        }
    }
    judge_each(here, now).await;
    stream::iter(asked.into_values()).for_each_concurrent(AT_A_TIME, |of_one| judge_each(of_one, now)).await;
}

async fn judge_each(connections: Vec<Arc<Connection>>, now: Instant) {
    let mut unanswered = None;
    for connection in connections {
        let Some(admitted) = connection.admitted.get() else { continue };
        let judgement = match &unanswered {
            Some(reason) => Judgement::Unanswered(String::clone(reason)),
            None => admitted.permit.judge().await,
        };
        match judgement {
            Judgement::Holds => admitted.holds(now),
            Judgement::Refused(_) if admitted.permit.asker().is_some() && !admitted.refused_again() => {}
            Judgement::Withdrawn(reason) | Judgement::Refused(reason) => connection.withdraw(reason),
            Judgement::Unknown(ref reason) | Judgement::Unanswered(ref reason) => {
                if admitted.unknown_for(now) >= UNKNOWN {
                    let minutes = UNKNOWN.as_secs() / 60;
                    connection.withdraw(format!("its right could not be judged for {minutes} min: {reason}"));
                }
                if let Judgement::Unanswered(reason) = judgement {
                    unanswered = Some(reason);
                }
            }
        }
        // The accepting thread has other work.
        tokio::task::yield_now().await;
    }
}

#[cfg(test)]
mod tests;
