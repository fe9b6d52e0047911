//! A cache of answers that stay valid for a limited time.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::identity::Refusal;
use super::questions::{Asker, Questions};

/// Maximum number of entries, because callers choose the keys.
const MOST: usize = 4096;

/// Answers by key, each with its time of expiry.
#[derive(Debug)]
pub(crate) struct AnswerCache<K, V>(Mutex<HashMap<K, (V, Instant)>>);

impl<K, V> Default for AnswerCache<K, V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash, V: Clone> AnswerCache<K, V> {
    pub(crate) fn get(&self, key: &K) -> Option<V> {
        let entries = self.0.lock();
        entries.get(key).filter(|(_, until)| Instant::now() < *until).map(|(value, _)| value.clone())
    }

    pub(crate) fn put(&self, key: K, value: V, lasts: Duration) {
        let now = Instant::now();
        let mut entries = self.0.lock();
        if entries.len() >= MOST {
            entries.retain(|_, (_, until)| now < *until);
            if entries.len() >= MOST {
                entries.clear();
            }
        }
        entries.insert(key, (value, now + lasts));
    }
}

/// Caches positive and negative answers separately, so that a caller with many negative ones cannot evict positive
/// ones.
#[derive(Debug)]
pub(crate) struct VerdictCache<K, T, E> {
    yes: AnswerCache<K, T>,
    no: AnswerCache<K, E>,
    yes_lasts: Duration,
    no_lasts: Duration,
}

impl<K: Eq + Hash, T: Clone, E: Clone> VerdictCache<K, T, E> {
    pub(crate) fn new(yes_lasts: Duration, no_lasts: Duration) -> Self {
        Self { yes: AnswerCache::default(), no: AnswerCache::default(), yes_lasts, no_lasts }
    }

    pub(crate) fn get(&self, key: &K) -> Option<Result<T, E>> {
        self.yes.get(key).map(Ok).or_else(|| self.no.get(key).map(Err))
    }

    /// Returns the known verdict, or asks for it when the turn of `asker` has come.
    ///
    /// # Errors
    /// No turn comes in time, or there is no answer.
    pub(crate) async fn get_or_ask<R: From<Refusal>, F: Future<Output = Result<Result<T, E>, R>>>(
        &self,
        key: K,
        questions: &Questions,
        asker: Asker,
        ask: impl FnOnce() -> F,
    ) -> Result<Result<T, E>, R> {
        if let Some(known) = self.get(&key) {
            return Ok(known);
        }
        let _turn = questions.turn(asker).await?;
        // Another request may have asked while this one waited.
        if let Some(known) = self.get(&key) {
            return Ok(known);
        }
        let verdict = ask().await?;
        self.put(key, verdict.clone());
        Ok(verdict)
    }

    fn put(&self, key: K, verdict: Result<T, E>) {
        match verdict {
            Ok(yes) => self.yes.put(key, yes, self.yes_lasts),
            Err(no) => self.no.put(key, no, self.no_lasts),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_answer_expires() {
        let cache = AnswerCache::default();
        cache.put("a", 1, Duration::from_secs(5));
        tokio::time::advance(Duration::from_secs(4)).await;
        assert_eq!(cache.get(&"a"), Some(1));
        assert_eq!(cache.get(&"b"), None);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(cache.get(&"a"), None);
    }

    #[test]
    fn it_does_not_grow_beyond_its_bound() {
        let cache = AnswerCache::default();
        for n in 0..3 * MOST {
            cache.put(n, (), Duration::from_secs(3600));
            assert!(cache.0.lock().len() <= MOST);
        }
        assert_eq!(cache.get(&(3 * MOST - 1)), Some(()));
    }

    #[test]
    fn a_yes_outlasts_any_number_of_noes() {
        let cache = VerdictCache::new(Duration::from_secs(3600), Duration::from_secs(3600));
        cache.put(0, Ok("yes"));
        for n in 1..=MOST + 1000 {
            cache.put(n, Err("no"));
        }
        assert_eq!(cache.get(&0), Some(Ok("yes")));
        assert_eq!(cache.get(&(MOST + 1000)), Some(Err("no")));
        assert_eq!(cache.get(&(MOST + 1001)), None);
    }
}
