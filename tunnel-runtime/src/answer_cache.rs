//! A cache of answers that stay valid for a limited time.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Maximum number of entries, because callers choose the keys.
pub const MOST: usize = 4096;

/// Answers by key, each with its time of expiry.
#[derive(Debug)]
pub struct AnswerCache<K, V>(Mutex<HashMap<K, (V, Instant)>>);

impl<K, V> Default for AnswerCache<K, V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash, V: Clone> AnswerCache<K, V> {
    pub fn get(&self, key: &K) -> Option<V> {
        let entries = self.0.lock();
        entries.get(key).filter(|(_, until)| Instant::now() < *until).map(|(value, _)| value.clone())
    }

    pub fn put(&self, key: K, value: V, lasts: Duration) {
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
}
