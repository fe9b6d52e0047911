//! Ends the connections that outlast a drain.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::stall::Abort;
use super::traffic::Traffic;
use crate::live::Live;
use crate::outcome::Outcome;

/// Time without traffic after which a connection is quiet; on a slow link, twice its round-trip time.
const QUIET: Duration = Duration::from_millis(100);
/// Maximum time that a connection which is never quiet is waited for.
const LONGEST: Duration = Duration::from_secs(1);
/// Interval between two checks.
const CHECK: Duration = Duration::from_millis(20);

/// A snapshot of a connection.
pub struct Carrying<'a> {
    pub traffic: &'a Traffic,
    pub abort: &'a Abort,
    /// Round-trip time of the link.
    pub rtt: Option<Duration>,
}

/// Ends each connection once it is quiet, and returns after a second. Clients such as kube-apiserver keep connections
/// open for their next request: requests under way are answered, and the next ones go elsewhere.
pub async fn end_quiet<T>(live: &Live<T>, carrying: impl Fn(&T) -> Option<Carrying<'_>>) {
    let start = Instant::now();
    let mut seen = HashMap::new();
    while start.elapsed() < LONGEST {
        for connection in live.all() {
            let Some(now) = carrying(&connection) else { continue };
            let bytes = (now.traffic.from_socket(), now.traffic.to_socket());
            // A new connection may reuse the address of one that ended; it has no traffic yet and then ends a little
            // early.
            let (before, since) = seen.entry(Arc::as_ptr(&connection)).or_insert((bytes, Instant::now()));
            if *before != bytes {
                (*before, *since) = (bytes, Instant::now());
            } else if since.elapsed() >= QUIET.max(now.rtt.unwrap_or_default() * 2) {
                now.abort.trigger(Outcome::Shutdown);
            }
        }
        sleep(CHECK).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Connection {
        traffic: Traffic,
        abort: Abort,
    }

    #[tokio::test(start_paused = true)]
    async fn each_ends_when_it_is_quiet_and_none_waits_for_another() {
        let live = Arc::<Live<Connection>>::default();
        let [idle, answered, busy] = [(); 3].map(|()| live.enter(Connection::default()));
        let start = Instant::now();
        let talk = async |connection: &Connection, times: u32| {
            for _ in 0..times {
                sleep(Duration::from_millis(50)).await;
                connection.traffic.count_to_socket(1);
            }
        };
        let ended = async |connection: &Connection| {
            let (outcome, _) = connection.abort.triggered().await;
            (outcome, start.elapsed())
        };
        fn carrying(of: &Connection) -> Option<Carrying<'_>> {
            Some(Carrying { traffic: &of.traffic, abort: &of.abort, rtt: None })
        }
        let all = async {
            end_quiet(&live, carrying).await;
            start.elapsed()
        };
        let (all, (), (), idle, answered) =
            tokio::join!(all, talk(&answered, 8), talk(&busy, 100), ended(&idle), ended(&answered));
        assert!(all < LONGEST + CHECK * 2, "{all:?}");
        for ((outcome, after), since) in [(idle, 0), (answered, 400)] {
            let quiet = after.saturating_sub(Duration::from_millis(since));
            assert_eq!(outcome, Outcome::Shutdown);
            assert!((QUIET..QUIET + CHECK * 3).contains(&quiet), "ended after {after:?}");
        }
        assert!(tokio::time::timeout(Duration::ZERO, busy.abort.triggered()).await.is_err());
    }
}
