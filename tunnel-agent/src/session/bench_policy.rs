//! Limits measurements by servers: they can be turned off, run one at a time, and may begin only so often.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;

/// Maximum measurements that may begin in a [`SPAN`]. A server's `bench` takes three.
const AT_MOST: usize = 12;
const SPAN: Duration = Duration::from_secs(60);
/// Maximum wait for the end of another measurement.
const PATIENCE: Duration = Duration::from_secs(3);

/// Limits measurements by servers.
#[derive(Debug)]
pub(super) struct BenchPolicy {
    allowed: bool,
    one: Arc<Semaphore>,
    /// Start times of the last measurements.
    begun: Mutex<VecDeque<Instant>>,
}

impl BenchPolicy {
    pub(super) fn new(allowed: bool) -> Self {
        Self { allowed, one: Arc::new(Semaphore::new(1)), begun: Mutex::default() }
    }

    pub(super) async fn admit(&self, now: Instant) -> Result<OwnedSemaphorePermit, Status> {
        if !self.allowed {
            return Err(Status::permission_denied("this agent takes part in no measurements (--bench=off)"));
        }
        // The server may begin its next one before this agent has seen the end of the last one.
        let permit = tokio::time::timeout(PATIENCE, self.one.clone().acquire_owned()).await;
        let Ok(Ok(permit)) = permit else {
            return Err(Status::resource_exhausted("another measurement is under way"));
        };
        let mut begun = self.begun.lock();
        while begun.front().is_some_and(|at| now.duration_since(*at) >= SPAN) {
            begun.pop_front();
        }
        if begun.len() >= AT_MOST {
            return Err(Status::resource_exhausted(format!(
                "{AT_MOST} measurements have begun within a minute"
            )));
        }
        begun.push_back(now);
        Ok(permit)
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_at_a_time_and_only_so_often() {
        let (policy, now) = (BenchPolicy::new(true), Instant::now());
        let first = policy.admit(now).await.unwrap();
        assert_eq!(policy.admit(now).await.unwrap_err().code(), Code::ResourceExhausted);
        // The next one arrives before the first has ended.
        let (second, ()) = tokio::join!(policy.admit(now), async {
            tokio::time::sleep(PATIENCE / 2).await;
            drop(first);
        });
        drop(second.unwrap());
        for _ in 2..AT_MOST {
            drop(policy.admit(now).await.unwrap());
        }
        let error = policy.admit(now + SPAN / 2).await.unwrap_err();
        assert!(error.message().contains("12 measurements"), "{error}");
        assert!(policy.admit(now + SPAN).await.is_ok());
    }

    #[tokio::test]
    async fn a_policy_that_says_no_is_obeyed() {
        let error = BenchPolicy::new(false).admit(Instant::now()).await.unwrap_err();
        assert_eq!(error.code(), Code::PermissionDenied);
        assert!(error.message().contains("--bench=off"), "{error}");
    }
}
