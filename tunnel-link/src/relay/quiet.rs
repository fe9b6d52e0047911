//! Ends the connections that outlast a drain.

use std::collections::HashMap;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::stall::Abort;
use super::traffic::Traffic;
use crate::outcome::Outcome;

/// Silence of a client after which it hardly waits for an answer, if data has come from the target meanwhile.
const ASKED: Duration = Duration::from_millis(500);
/// The same if none has come: the answer takes its time, or the client has sent what needs none.
const UNANSWERED: Duration = Duration::from_millis(1500);
/// Silence of both ends behind an answer. An answer itself may take so long, and a round trip of the link.
const QUIET: Duration = Duration::from_millis(100);
/// Time for which the target must be quiet too, so that a short download ends by itself.
const BOTH_WAYS: Duration = Duration::from_secs(1);
/// Time after which a connection whose client is never silent for [`ASKED`] ends behind an answer.
const ANSWERED: Duration = Duration::from_secs(2);
/// Maximum time that a connection is waited for.
pub const ENDING: Duration = Duration::from_secs(3);
/// Interval between two checks.
const CHECK: Duration = Duration::from_millis(20);

/// A snapshot of a connection, at the end that has the client's socket, or is nearer to it: the agent would see a request half
/// a round trip later, and end connections while one is on its way.
pub struct Relaying<'a> {
    pub traffic: &'a Traffic,
    pub abort: &'a Abort,
    /// Round-trip time of the link.
    pub rtt: Option<Duration>,
}

impl Relaying<'_> {
    /// Bytes from the client and from the target.
    fn bytes(&self) -> (u64, u64) {
        (self.traffic.from_socket(), self.traffic.to_socket())
    }

    /// The last bytes were the target's.
    fn is_answered(&self) -> bool {
        !self.traffic.is_from_socket_last()
    }
}

/// Bytes of a connection, and when a check found new ones: of either end, and of the client.
struct Seen {
    bytes: (u64, u64),
    since: Instant,
    client_since: Instant,
}

impl Seen {
    fn new(bytes: (u64, u64)) -> Self {
        let now = Instant::now();
        Self { bytes, since: now, client_since: now }
    }

    fn update(&mut self, bytes: (u64, u64)) {
        let before = mem::replace(&mut self.bytes, bytes);
        if before != bytes {
            self.since = Instant::now();
        }
        if before.0 != bytes.0 {
            self.client_since = self.since;
        }
    }

    /// Reports whether this is the moment to end the connection, `waited` after the first check.
    ///
    /// Data that follows a request need not be its answer: kube-apiserver asks on the connection that carries a `logs -f`
    /// (HTTP/2). So the client's silence decides, and an answer only in the end.
    fn is_quiet(&self, waited: Duration, now: &Relaying<'_>) -> bool {
        if now.traffic.blocked().is_some() {
            // A receiver that takes nothing for a moment has silenced the other end.
            return false;
        }
        let answer = now.rtt.unwrap_or_default() + QUIET;
        let quiet = |since: Instant, least: Duration| since.elapsed() >= least.max(answer);
        if !now.is_answered() {
            return quiet(self.client_since, UNANSWERED);
        }
        let asks_nothing = quiet(self.client_since, ASKED);
        asks_nothing && (waited >= BOTH_WAYS || quiet(self.since, QUIET))
            || waited >= ANSWERED && quiet(self.client_since, QUIET)
    }
}

/// Ends each of the connections once it is quiet, and returns after [`ENDING`]. Clients such as kube-apiserver keep
/// connections open for their next request: requests under way are answered, and the next ones go elsewhere.
pub async fn end_quiet<T>(
    connections: impl Fn() -> Vec<Arc<T>>,
    relaying: impl Fn(&T) -> Option<Relaying<'_>>,
) {
    let start = Instant::now();
    let mut seen = HashMap::new();
    let (mut last, mut skipped) = (start, false);
    while start.elapsed() < ENDING {
        // On a busy host checks may be far apart, and what the socket has received may wait to be read. The next check judges,
        // late or not: otherwise all would be reset in the end, with their requests.
        skipped = !skipped && last.elapsed() > CHECK * 2;
        last = Instant::now();
        for connection in connections() {
            let Some(now) = relaying(&connection) else { continue };
            let bytes = now.bytes();
            // A new connection may reuse the address of one that ended; it has no traffic yet and then ends a little
            // early.
            let seen = seen.entry(Arc::as_ptr(&connection).addr()).or_insert_with(|| Seen::new(bytes));
            seen.update(bytes);
            if !skipped && seen.is_quiet(start.elapsed(), &now) {
                now.abort.trigger(Outcome::Shutdown);
            }
        }
        sleep(CHECK).await;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::pending;

    use tunnel_runtime::live::Live;

    use super::*;

    #[derive(Default)]
    struct Connection {
        traffic: Traffic,
        abort: Abort,
    }

    fn relaying(of: &Connection) -> Option<Relaying<'_>> {
        Some(Relaying { traffic: &of.traffic, abort: &of.abort, rtt: None })
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_behind_an_answer_is_waited_for_though_a_check_was_late() {
        let live = Arc::<Live<Connection>>::default();
        let connection = live.enter(Connection::default());
        let host_is_busy = async {
            sleep(CHECK / 2).await;
            connection.traffic.count_to_socket(100);
            connection.traffic.count_from_socket(100);
            tokio::time::advance(QUIET).await;
            Instant::now()
        };
        let ended = async {
            connection.abort.triggered().await;
            Instant::now()
        };
        let ((), at, ended) = tokio::join!(end_quiet(|| live.all(), relaying), host_is_busy, ended);
        assert!(ended - at >= ASKED - CHECK, "ended after {:?}", ended - at);
    }

    #[tokio::test(start_paused = true)]
    async fn it_ends_though_every_check_is_late() {
        let live = Arc::<Live<Connection>>::default();
        let connection = live.enter(Connection::default());
        let host_is_busy = async {
            loop {
                tokio::time::advance(CHECK * 5).await;
            }
        };
        tokio::select! {
            (outcome, _) = connection.abort.triggered() => assert_eq!(outcome, Outcome::Shutdown),
            () = end_quiet(|| live.all(), relaying) => panic!("it would be reset with its request"),
            () = host_is_busy => {}
        }
    }

    #[tokio::test(start_paused = true)]
    async fn it_ends_between_two_requests() {
        // As kube-apiserver's one connection with a kubelet: `logs -f` prints, and other requests come and go.
        for line in [50, 120] {
            for (answer, pause) in [(301, 592), (51, 196)] {
                ends_between(&[(answer, pause)], Some(line)).await;
            }
        }
        // The client's longest silence is the wait for its slowest answer.
        ends_between(&[(10, 147), (441, 11)], None).await;
        // A slow answer, as of a large scrape.
        ends_between(&[(1100, 620)], None).await;
    }

    /// Expects the end while no request is under way. `requests`: time to the answer of each, and from there to the next one.
    /// `line`: time between two lines of a stream. In milliseconds.
    async fn ends_between(requests: &[(u64, u64)], line: Option<u64>) {
        let live = Arc::<Live<Connection>>::default();
        let connection = live.enter(Connection::default());
        let stream = async {
            while let Some(line) = line {
                sleep(Duration::from_millis(line)).await;
                connection.traffic.count_to_socket(1);
            }
            pending::<()>().await;
        };
        let asking = Cell::new(false);
        let asks = async {
            for (answer, pause) in requests.iter().cycle() {
                asking.set(true);
                connection.traffic.count_from_socket(1);
                sleep(Duration::from_millis(*answer)).await;
                connection.traffic.count_to_socket(1);
                asking.set(false);
                sleep(Duration::from_millis(*pause)).await;
            }
        };
        tokio::select! {
            biased;
            _ = connection.abort.triggered() => assert!(!asking.get(), "a request was under way"),
            () = end_quiet(|| live.all(), relaying) => panic!("no moment between {requests:?}"),
            () = stream => {}
            () = asks => {}
        }
    }

    #[tokio::test(start_paused = true)]
    async fn each_ends_when_it_is_quiet_and_none_waits_for_another() {
        let live = Arc::<Live<Connection>>::default();
        let [idle, answered, asked, busy] = [(); 4].map(|()| live.enter(Connection::default()));
        let start = Instant::now();
        let talk = async |connection: &Connection, times: u32| {
            for _ in 0..times {
                sleep(Duration::from_millis(50)).await;
                connection.traffic.count_to_socket(1);
            }
        };
        let ask = async {
            sleep(Duration::from_millis(50)).await;
            asked.traffic.count_from_socket(1);
        };
        let upload = async {
            loop {
                sleep(Duration::from_millis(50)).await;
                busy.traffic.count_from_socket(1);
            }
        };
        let ended = async |connection: &Connection| {
            let (outcome, _) = connection.abort.triggered().await;
            (outcome, start.elapsed())
        };
        let all = async {
            end_quiet(|| live.all(), relaying).await;
            start.elapsed()
        };
        let ends = async { tokio::join!(ended(&idle), ended(&answered), ended(&asked)) };
        let all = async { tokio::join!(all, talk(&answered, 8), ask, ends) };
        let (all, (), (), (idle, answered, asked)) = tokio::select! {
            all = all => all,
            () = upload => unreachable!("it never ends"),
        };
        assert!(all < ENDING + CHECK * 2, "{all:?}");
        for ((outcome, after), since, least) in
            [(idle, 0, ASKED), (answered, 400, QUIET), (asked, 50, UNANSWERED)]
        {
            let quiet = after.saturating_sub(Duration::from_millis(since));
            assert_eq!(outcome, Outcome::Shutdown);
            assert!((least..least + CHECK * 3).contains(&quiet), "ended after {after:?}");
        }
        assert!(tokio::time::timeout(Duration::ZERO, busy.abort.triggered()).await.is_err());
    }
}
