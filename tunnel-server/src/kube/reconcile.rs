//! The loop of everything that is brought in line with the cluster whenever one of its inputs has changed.

use std::pin::pin;
use std::time::Duration;

use futures_util::{Stream, StreamExt as _, stream};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tunnel_kube::{Attempts, RequestError};

/// Something that is computed from inputs and written when it differs.
pub(super) trait Reconcile: Send {
    type Input;

    fn apply(&mut self, input: Self::Input);

    /// Not to be reconciled before, whatever has changed: what is large is written seldom.
    fn not_before(&self) -> Option<Instant> {
        None
    }

    /// Called again after a delay when it fails.
    fn reconcile(&mut self, attempts: &mut Attempts)
    -> impl Future<Output = Result<(), RequestError>> + Send;
}

/// Reconciles now and after each input, until `stop`. Inputs within `debounce` count as one.
pub(super) async fn run<R: Reconcile>(
    mut target: R,
    inputs: impl Stream<Item = R::Input> + Send,
    debounce: Duration,
    mut attempts: Attempts,
    stop: CancellationToken,
) {
    let mut inputs = pin!(inputs);
    let mut due = Some(Instant::now());
    let work = async {
        loop {
            tokio::select! {
                input = inputs.next() => match input {
                    Some(input) => {
                        target.apply(input);
                        let earliest = target.not_before();
                        due.get_or_insert_with(|| earliest.into_iter().fold(Instant::now() + debounce, Instant::max));
                    }
                    None => return,
                },
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    due = match target.reconcile(&mut attempts).await {
                        Ok(()) => None,
                        Err(error) => {
                            // A conflict: the watch will bring what another writer wrote.
                            if !error.is_conflict() {
                                attempts.report(&error);
                            }
                            Some(Instant::now() + attempts.next_delay())
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
