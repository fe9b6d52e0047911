//! The reconcile loop: brings something in line with the cluster whenever one of its inputs has changed, and retries
//! after an error.

use std::pin::pin;
use std::time::Duration;

use futures_util::stream::{self, BoxStream};
use futures_util::{Stream, StreamExt as _};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tunnel_kube::Attempts;

use super::error::ClusterError;

/// Something computed from inputs, and written when it differs.
pub(super) trait Reconcile: Send {
    /// Earliest time of the next reconciliation, whatever changes or fails; used to write large objects rarely.
    fn not_before(&self) -> Option<Instant> {
        None
    }

    /// Returns the time at which to call it again without any input. After an error it is called again after a delay.
    fn reconcile(
        &mut self,
        attempts: &mut Attempts,
    ) -> impl Future<Output = Result<Option<Instant>, ClusterError>> + Send;
}

/// A change of one of the target's inputs.
pub(super) type Input<R> = Box<dyn FnOnce(&mut R) + Send>;

/// Yields an input for each item; `apply` notes it in the target.
pub(super) fn inputs<R: 'static, T: Send + 'static>(
    items: impl Stream<Item = T> + Send + 'static,
    apply: fn(&mut R, T),
) -> BoxStream<'static, Input<R>> {
    items.map(move |item| -> Input<R> { Box::new(move |target: &mut R| apply(target, item)) }).boxed()
}

/// Reconciles now and after each input until `stop`. Inputs within `debounce` are handled together.
pub(super) async fn run<R: Reconcile>(
    mut target: R,
    inputs: impl Stream<Item = Input<R>> + Send,
    debounce: Duration,
    mut attempts: Attempts,
    stop: CancellationToken,
) {
    let mut inputs = pin!(inputs);
    let (mut due, mut retry_at) = (Some(Instant::now()), None);
    let work = async {
        loop {
            tokio::select! {
                input = inputs.next() => match input {
                    Some(input) => {
                        input(&mut target);
                        let earliest = [target.not_before(), retry_at].into_iter().flatten();
                        let at = earliest.fold(Instant::now() + debounce, Instant::max);
                        due = Some(due.map_or(at, |due| due.min(at)));
                    }
                    None => return,
                },
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    retry_at = None;
                    due = match target.reconcile(&mut attempts).await {
                        Ok(next) => next,
                        Err(error) => {
                            // After a conflict the watch delivers the other writer's version.
                            if !error.is_conflict() {
                                attempts.report(&error);
                            }
                            let at = Instant::now() + attempts.next_delay();
                            retry_at = Some(target.not_before().map_or(at, |earliest| earliest.max(at)));
                            retry_at
                        }
                    };
                }
            }
        }
    };
    let _ = stop.run_until_cancelled(work).await;
}

/// Yields whenever the value has changed.
pub(super) fn changes<T: Send + Sync>(
    receiver: &watch::Receiver<T>,
) -> impl Stream<Item = ()> + Send + use<T> {
    stream::unfold(receiver.clone(), |mut receiver| async move {
        receiver.changed().await.ok()?;
        Some(((), receiver))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;
    use tokio::time::timeout;

    use super::*;

    /// Longer than any delay of [`Attempts`].
    const PACE: Duration = Duration::from_secs(60);

    /// Fails, and remembers when.
    struct Paced(Arc<Mutex<Vec<Instant>>>);

    impl Reconcile for Paced {
        fn not_before(&self) -> Option<Instant> {
            self.0.lock().last().map(|last| *last + PACE)
        }

        async fn reconcile(&mut self, _: &mut Attempts) -> Result<Option<Instant>, ClusterError> {
            self.0.lock().push(Instant::now());
            Err(ClusterError::Missing("a/b".to_owned()))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_retry_keeps_to_the_pace() {
        let times = Arc::new(Mutex::new(Vec::new()));
        let (target, never) = (Paced(times.clone()), stream::pending::<Input<Paced>>());
        let running = run(target, never, Duration::ZERO, Attempts::new("a test"), CancellationToken::new());
        timeout(PACE * 10, running).await.unwrap_err();
        let times = times.lock();
        let pauses: Vec<_> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(pauses.len() >= 8 && pauses.iter().all(|pause| *pause >= PACE), "{pauses:?}");
    }
}
