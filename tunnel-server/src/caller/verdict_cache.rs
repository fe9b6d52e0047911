//! A cache of verdicts that stay valid for a limited time.

use std::hash::Hash;
use std::time::Duration;

use tunnel_runtime::answer_cache::AnswerCache;

use super::identity::Refusal;
use super::questions::{Asker, Questions};

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
    use tunnel_runtime::answer_cache::MOST;

    use super::*;

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
