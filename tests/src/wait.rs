//! Waiting for a condition with a deadline; nothing here sleeps for its own sake.
use std::fmt::Debug;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// How often a condition is looked at.
const PERIOD: Duration = Duration::from_millis(20);

/// Waits until `condition` yields something. Errors end the wait at once.
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
            bail!("waited {limit:?} for {what}, in vain");
        }
        tokio::time::sleep(PERIOD).await;
    }
}

/// Waits until `observe` yields something that `accept` takes; the error shows what was seen last.
pub async fn wait_until<T: Debug>(
    what: &str,
    limit: Duration,
    mut observe: impl AsyncFnMut() -> Result<T>,
    accept: impl Fn(&T) -> bool,
) -> Result<T> {
    let deadline = Instant::now() + limit;
    loop {
        let seen = observe().await;
        match seen {
            Ok(value) if accept(&value) => return Ok(value),
            seen if Instant::now() >= deadline => bail!("waited {limit:?} for {what}; last seen: {seen:?}"),
            _ => tokio::time::sleep(PERIOD).await,
        }
    }
}
