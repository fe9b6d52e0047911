//! Limits concurrent requests to the API server: those for unauthenticated and those for known callers, each shared
//! fairly.

use std::net::IpAddr;
use std::time::Duration;

use tokio::time::timeout;
use tunnel_runtime::fair::{FairShare, Turn};

use super::identity::{Caller, Refusal};
use crate::admission::source_key;

/// Maximum number of concurrent requests for unauthenticated callers, and the same number for known ones.
const AT_A_TIME: usize = 32;
/// Maximum number of waiting requests of either kind. Each holds its client request's memory.
const MOST_WAITING: usize = 2048;
/// Maximum wait for a turn.
const PATIENCE: Duration = Duration::from_secs(4);

/// The caller for which a question is asked.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Asker {
    /// A client at this address whose identity is not known yet, or not needed.
    Unauthenticated(IpAddr),
    /// A caller, by name.
    Known(String),
}

impl Asker {
    pub(crate) fn new(caller: Option<&Caller>, address: IpAddr) -> Self {
        match caller {
            Some(caller) => Self::Known(caller.name.clone()),
            None => Self::Unauthenticated(source_key(address)),
        }
    }
}

/// Turns to ask the API server.
#[derive(Debug)]
pub(crate) struct Questions {
    of_unauthenticated: FairShare<Asker>,
    of_known: FairShare<Asker>,
}

impl Default for Questions {
    fn default() -> Self {
        let share = || FairShare::new(AT_A_TIME, MOST_WAITING);
        Self { of_unauthenticated: share(), of_known: share() }
    }
}

impl Questions {
    /// Waits for a turn to ask one question; dropping it returns the turn.
    ///
    /// # Errors
    /// No turn comes in time, because the API server is slow or there are too many questions.
    pub(crate) async fn turn(&self, asker: Asker) -> Result<Turn<Asker>, Refusal> {
        let share = match &asker {
            Asker::Unauthenticated(_) => &self.of_unauthenticated,
            Asker::Known(_) => &self.of_known,
        };
        let reason = match timeout(PATIENCE, share.take(asker)).await {
            Ok(Some(turn)) => return Ok(turn),
            Ok(None) => "too many questions to the API server wait already".to_owned(),
            Err(_) => {
                let seconds = PATIENCE.as_secs();
                format!("the API server was not asked within {seconds} s: too many requests are pending")
            }
        };
        Err(Refusal::Unavailable(reason))
    }
}

#[cfg(test)]
mod tests {
    use futures_util::future::join_all;

    use super::*;

    fn unauthenticated(number: u8) -> Asker {
        Asker::new(None, IpAddr::from([10, 0, 0, number]))
    }

    type TurnResult = Result<Turn<Asker>, Refusal>;

    async fn turns(questions: &Questions, asker: &Asker, count: usize) -> Vec<TurnResult> {
        join_all((0..count).map(|_| questions.turn(asker.clone()))).await
    }

    fn refused(turn: &TurnResult, why: &str) -> bool {
        matches!(turn, Err(Refusal::Unavailable(reason)) if reason.contains(why))
    }

    // The clock is paused: waiting takes no time, and a turn that need not wait comes at once.

    #[tokio::test(start_paused = true)]
    async fn who_has_many_waits_for_its_own() {
        let questions = Questions::default();
        let greedy = turns(&questions, &unauthenticated(1), AT_A_TIME / 2).await;
        assert!(greedy.iter().all(Result::is_ok));
        assert!(refused(&questions.turn(unauthenticated(1)).await, "within 4 s"));
        let start = tokio::time::Instant::now();
        let _another = questions.turn(unauthenticated(2)).await.unwrap();
        assert_eq!(start.elapsed(), Duration::ZERO);
        drop(greedy);
        assert!(questions.turn(unauthenticated(1)).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn unauthenticated_do_not_take_the_turns_of_the_known() {
        let questions = Questions::default();
        let mut held = Vec::new();
        for number in 0..AT_A_TIME {
            held.push(questions.turn(unauthenticated(number as u8)).await.unwrap());
        }
        assert!(refused(&questions.turn(unauthenticated(99)).await, "within 4 s"));
        let caller = Caller::new("prometheus".to_owned(), Vec::new());
        let known = Asker::new(Some(&caller), IpAddr::from([10, 0, 0, 9]));
        assert!(questions.turn(known).await.is_ok());
        held.pop();
        assert!(questions.turn(unauthenticated(99)).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn what_waits_is_bounded() {
        let questions = Questions::default();
        let _held = turns(&questions, &unauthenticated(1), AT_A_TIME / 2).await;
        let waited = turns(&questions, &unauthenticated(1), MOST_WAITING).await;
        let count = |why| waited.iter().filter(|turn| refused(turn, why)).count();
        assert_eq!((count("too many questions"), count("within 4 s")), (MOST_WAITING / 2, MOST_WAITING / 2));
    }
}
