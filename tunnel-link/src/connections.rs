//! Selects and describes the connections that both programs list.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use tunnel_runtime::text::age;

use crate::relay::{Traffic, Waiting};

/// Maximum rows in one answer: a server may have a hundred thousand connections.
pub const MAX_ROWS: usize = 1000;
/// A receiver blocked for this long is reported as stalled; shorter waits are normal.
const STALLED: Duration = Duration::from_secs(1);

/// Returns the first [`MAX_ROWS`] connections and the number of others. Connections whose receiver has been blocked
/// for longest come first, then those with most bytes. `traffic` returns `None` before bytes may pass.
pub fn first<T>(
    mut connections: Vec<Arc<T>>,
    traffic: impl Fn(&T) -> Option<&Traffic>,
) -> (Vec<Arc<T>>, usize) {
    connections.sort_by_cached_key(|connection| {
        let traffic = traffic(connection);
        let blocked = traffic.and_then(Traffic::blocked).filter(|time| *time >= STALLED);
        let relayed = traffic.map_or(0, |traffic| traffic.to_socket().saturating_add(traffic.from_socket()));
        (Reverse(blocked), Reverse(relayed))
    });
    let more = connections.len().saturating_sub(MAX_ROWS);
    connections.truncate(MAX_ROWS);
    (connections, more)
}

/// Returns for how many milliseconds a receiver has been blocked (`None` if it is not), and the bytes held for it.
pub fn blocked(waiting: Option<&Waiting>) -> (Option<u64>, usize) {
    match waiting.and_then(Waiting::now) {
        Some((time, held)) => (Some(u64::try_from(time.as_millis()).unwrap_or(u64::MAX)), held),
        None => (None, 0),
    }
}

/// Returns for how long a receiver has been blocked, if that is long.
pub fn stalled(blocked_ms: Option<u64>) -> Option<String> {
    blocked_ms.map(Duration::from_millis).filter(|time| *time >= STALLED).map(|time| age(time.as_secs()))
}
