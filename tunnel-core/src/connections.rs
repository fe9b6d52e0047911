//! Which of the connections that are carried now both programs show, and what waits in them.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use crate::carry::{Traffic, Waiting};
use crate::text::age;

/// Rows of one answer: a server may carry a hundred thousand.
pub const MAX_ROWS: usize = 1000;
/// A receiver that has taken nothing for so long stands out; shorter waits are how bytes flow.
const STALLED: Duration = Duration::from_secs(1);

/// The first [`MAX_ROWS`] and how many there are besides: first those whose receiver has taken nothing for longest, then those
/// that have carried most. `traffic`: None before bytes may pass.
pub fn first<T>(
    mut connections: Vec<Arc<T>>,
    traffic: impl Fn(&T) -> Option<&Traffic>,
) -> (Vec<Arc<T>>, usize) {
    connections.sort_by_cached_key(|connection| {
        let traffic = traffic(connection);
        let blocked = traffic.and_then(Traffic::blocked).filter(|time| *time >= STALLED);
        let carried = traffic.map_or(0, |traffic| traffic.to_socket().saturating_add(traffic.from_socket()));
        (Reverse(blocked), Reverse(carried))
    });
    let more = connections.len().saturating_sub(MAX_ROWS);
    connections.truncate(MAX_ROWS);
    (connections, more)
}

/// For how many milliseconds a receiver has taken nothing, None: it takes what comes; and the bytes that are held for it.
pub fn blocked(waiting: Option<&Waiting>) -> (Option<u64>, usize) {
    match waiting.and_then(Waiting::now) {
        Some((time, held)) => (Some(u64::try_from(time.as_millis()).unwrap_or(u64::MAX)), held),
        None => (None, 0),
    }
}

/// For how long a receiver has taken nothing, if that is long.
pub fn stalled(blocked_ms: Option<u64>) -> Option<String> {
    blocked_ms.map(Duration::from_millis).filter(|time| *time >= STALLED).map(|time| age(time.as_secs()))
}
