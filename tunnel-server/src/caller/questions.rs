//! Turns at the API server: so many questions are open at a time, and whoever has many waits for its own, nobody else does.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::identity::{Caller, Refusal};
use crate::admission::source_key;

/// Questions of strangers, and as many of those who are known, that may be open at a time.
const AT_A_TIME: usize = 32;
/// The same of one of them.
const OF_ONE: usize = 8;
/// Questions of one that are open or wait. Each holds its request's memory.
const MOST_OF_ONE: usize = 1024;
/// How long one waits for its turn.
const PATIENCE: Duration = Duration::from_secs(4);
/// With so many askers those who have no question any more are forgotten.
const MANY: usize = 1024;

/// For whom a question is asked.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Asker {
    /// Somebody at this address: who it is, is not known yet or not asked.
    Stranger(IpAddr),
    /// A caller, by its name.
    Known(String),
}

impl Asker {
    pub(crate) fn new(caller: Option<&Caller>, address: IpAddr) -> Self {
        match caller {
            Some(caller) => Self::Known(caller.name.clone()),
            None => Self::Stranger(source_key(address)),
        }
    }
}

/// Who may ask the API server now.
#[derive(Debug)]
pub(crate) struct Questions {
    of_strangers: Arc<Semaphore>,
    of_known: Arc<Semaphore>,
    /// Each asker's own. Whoever asks or waits holds it.
    of_one: Mutex<HashMap<Asker, Weak<Semaphore>>>,
}

/// Leave to ask one question; dropping it gives the turn back.
#[derive(Debug)]
pub(crate) struct Turn {
    _of_one: OwnedSemaphorePermit,
    _of_all: OwnedSemaphorePermit,
}

impl Default for Questions {
    fn default() -> Self {
        Self {
            of_strangers: Arc::new(Semaphore::new(AT_A_TIME)),
            of_known: Arc::new(Semaphore::new(AT_A_TIME)),
            of_one: Mutex::default(),
        }
    }
}

impl Questions {
    /// Waits for a turn.
    ///
    /// # Errors
    /// It does not come, because the API server is slow or too much is asked.
    pub(crate) async fn turn(&self, asker: Asker) -> Result<Turn, Refusal> {
        let of_all = match &asker {
            Asker::Stranger(_) => self.of_strangers.clone(),
            Asker::Known(_) => self.of_known.clone(),
        };
        let of_one = self.of_one(asker);
        if Arc::strong_count(&of_one) > MOST_OF_ONE {
            let reason = "too many questions to the API server wait already";
            return Err(Refusal::Unavailable(reason.to_owned()));
        }
        let turn = async {
            let of_one = of_one.acquire_owned().await?;
            let of_all = of_all.acquire_owned().await?;
            Ok::<_, AcquireError>(Turn { _of_one: of_one, _of_all: of_all })
        };
        match timeout(PATIENCE, turn).await {
            Ok(Ok(turn)) => Ok(turn),
            // The semaphores are never closed.
            Ok(Err(_)) | Err(_) => {
                let seconds = PATIENCE.as_secs();
                let reason = format!("the API server could not be asked within {seconds} s: others wait too");
                Err(Refusal::Unavailable(reason))
            }
        }
    }

    fn of_one(&self, asker: Asker) -> Arc<Semaphore> {
        let mut all = self.of_one.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = all.get(&asker).and_then(Weak::upgrade) {
            return known;
        }
        if all.len() >= MANY {
            all.retain(|_, one| one.strong_count() > 0);
        }
        let made = Arc::new(Semaphore::new(OF_ONE));
        all.insert(asker, Arc::downgrade(&made));
        made
    }
}

#[cfg(test)]
mod tests {
    use futures_util::future::join_all;

    use super::*;

    fn stranger(number: u8) -> Asker {
        Asker::new(None, IpAddr::from([10, 0, 0, number]))
    }

    async fn turns(questions: &Questions, asker: &Asker, count: usize) -> Vec<Result<Turn, Refusal>> {
        join_all((0..count).map(|_| questions.turn(asker.clone()))).await
    }

    fn refused(turn: &Result<Turn, Refusal>, why: &str) -> bool {
        matches!(turn, Err(Refusal::Unavailable(reason)) if reason.contains(why))
    }

    // The clock is paused: waiting takes no time, and what has to wait for nobody is there at once.

    #[tokio::test(start_paused = true)]
    async fn who_has_many_waits_for_its_own() {
        let questions = Questions::default();
        let greedy = turns(&questions, &stranger(1), OF_ONE).await;
        assert!(greedy.iter().all(Result::is_ok));
        assert!(refused(&questions.turn(stranger(1)).await, "within 4 s"));
        let start = tokio::time::Instant::now();
        let _another = questions.turn(stranger(2)).await.unwrap();
        assert_eq!(start.elapsed(), Duration::ZERO);
        drop(greedy);
        assert!(questions.turn(stranger(1)).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn strangers_do_not_take_the_turns_of_the_known() {
        let questions = Questions::default();
        let mut held = Vec::new();
        for number in 0..4 {
            held.extend(turns(&questions, &stranger(number), OF_ONE).await);
        }
        assert!(held.len() == AT_A_TIME && held.iter().all(Result::is_ok));
        assert!(refused(&questions.turn(stranger(9)).await, "within 4 s"));
        let caller = Caller::new("prometheus".to_owned(), Vec::new());
        let known = Asker::new(Some(&caller), IpAddr::from([10, 0, 0, 9]));
        assert!(questions.turn(known).await.is_ok());
        held.pop();
        assert!(questions.turn(stranger(9)).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn what_waits_is_bounded_and_askers_are_forgotten() {
        let questions = Questions::default();
        let _held = turns(&questions, &stranger(1), OF_ONE).await;
        let waited = turns(&questions, &stranger(1), MOST_OF_ONE).await;
        let count = |why| waited.iter().filter(|turn| refused(turn, why)).count();
        assert_eq!(
            (count("too many"), count("within 4 s"), waited.len()),
            (OF_ONE, MOST_OF_ONE - OF_ONE, MOST_OF_ONE)
        );
        for number in 0..3 * MANY {
            assert!(questions.turn(Asker::Known(number.to_string())).await.is_ok());
        }
        assert!(questions.of_one.lock().unwrap().len() <= MANY);
    }
}
