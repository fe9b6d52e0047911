//! Waits for a condition with a deadline: polls, and never sleeps longer than the condition needs.
use std::cell::Cell;
use std::fmt::Debug;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::snapshot;

/// Interval between two checks of a condition.
const PERIOD: Duration = Duration::from_millis(20);

/// Waits until `condition` returns a value. An error ends the wait immediately.
pub async fn wait_for<T>(
    what: &str,
    limit: Duration,
    mut condition: impl AsyncFnMut() -> Result<Option<T>>,
) -> Result<T> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(value) = condition().await? {
            return Ok(value);
        }
        if Instant::now() >= deadline {
            snapshot::take_here();
            bail!("waited {limit:?} for {what}, in vain");
        }
        tokio::time::sleep(PERIOD).await;
    }
}

/// Waits until `observe` returns a value that `accept` accepts. Errors are retried; the final error shows the last
/// observation.
pub async fn wait_until<T: Debug>(
    what: &str,
    limit: Duration,
    mut observe: impl AsyncFnMut() -> Result<T>,
    accept: impl Fn(&T) -> bool,
) -> Result<T> {
    let mut last = None;
    let accepted = wait_for(what, limit, async || {
        last = match observe().await {
            Ok(value) if accept(&value) => return Ok(Some(value)),
            seen => Some(seen),
        };
        Ok(None)
    })
    .await;
    accepted.with_context(|| format!("last seen: {last:?}"))
}

/// Runs `work` and `other` concurrently; `other` is told when `work` has ended, and then ends too.
///
/// # Errors
/// The error of the one that fails first; the other one is dropped.
pub async fn while_running<T, U>(
    work: impl Future<Output = Result<T>>,
    other: impl AsyncFnOnce(&Cell<bool>) -> Result<U>,
) -> Result<(T, U)> {
    let done = Cell::new(false);
    let work = async {
        let result = work.await;
        done.set(true);
        result
    };
    tokio::try_join!(work, other(&done))
}
