//! Limits on the bytes of a link that are in flight or queued in front of it; both follow the path.
//!
//! A stream's window limits its bytes in flight. It must hold the path's bandwidth times its round-trip time, or the
//! stream waits for the window instead of the line: 1 MiB is 84 Mbit/s at 100 ms. So a receiver whose stream uses more
//! than a quarter of its window in a round trip enlarges that of all streams, as the kernel does for TCP. The window
//! never shrinks; the bytes held for receivers that do not read are limited elsewhere.
//!
//! Data queued in front of the link delays everything behind it: 256 KiB are 0.4 s at 5 Mbit/s. But large pieces are
//! what makes a fast link fast. So a piece is as large as what the link delivers in a few milliseconds.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::task::Waker;
use std::time::Duration;

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tunnel_runtime::memory::link_queue;

use super::limits::{Limits, Sending};
use super::rtt::Rtt;
use super::settings::{LARGEST_PIECE, SEND_BUFFER, SMALLEST_PIECE, first_window, largest_window};
use crate::tcp_info::{Delivery, Silence};

/// Transmission time of one piece, in milliseconds.
const PIECE_MS: u64 = 15;
/// Transmission time of one piece of each stream that sends much, in milliseconds, unless these have the minimum size.
/// HTTP/2 lets streams send in turn, so this is what a keystroke waits behind many downloads.
const ROUND_MS: u64 = 120;
/// Size of a piece before the link's rate is known, in bytes.
const FIRST_PIECE: usize = 16 << 10;
/// Round trips over which a stream's rate is measured. A receiver that pauses, and then takes all that one window held
/// for it at once, is no reason for a larger window.
const ROUNDS: u32 = FACTOR;
/// A stream's window is at least this multiple of the data that it takes in a round trip. Lost segments hold back the
/// data behind them for a round trip or more, and a stream that its window holds back meanwhile does not show what the
/// path could carry.
const FACTOR: u32 = 4;
/// Minimum time for the measurement.
const SHORTEST_SPAN: Duration = Duration::from_millis(20);

/// Maximum time for the link's task to answer.
const ANSWER: Duration = Duration::from_secs(1);

/// State shared by a link's streams.
#[derive(Debug)]
pub struct Flow {
    /// The round-trip time of the link.
    pub rtt: Rtt,
    /// Stream window to announce, in bytes.
    window: AtomicU32,
    /// Stream window that is announced, in bytes.
    announced: AtomicU32,
    /// Size of a piece, in bytes.
    piece: AtomicUsize,
    /// Bytes that the link has received.
    received: AtomicU64,
    /// Bytes that the link has sent.
    sent: AtomicU64,
    /// Bytes per second that the path delivered when something was last sent.
    rate: AtomicU64,
    /// Number of retransmitted segments.
    retransmits: AtomicU32,
    /// Written by the connection's owner, read for the status and the metrics.
    sending: Mutex<Sending>,
    /// Round-trip time of the path in microseconds; 0 until known.
    path_rtt: AtomicU32,
    /// Task that owns the HTTP/2 connection.
    owner: AtomicWaker,
    /// Number of streams that send more than small messages.
    bulk: AtomicUsize,
    /// Set if a task waits to know for how long the peer has been silent.
    asked: AtomicBool,
    silence: watch::Sender<Option<Silence>>,
    /// Set if the link is given up: see [`Self::give_up`].
    given_up: AtomicBool,
    /// Milliseconds since something had arrived at the last such answer.
    heard: AtomicU32,
    /// Set if a task wants to know when the link sends something.
    awaited: AtomicBool,
    more_sent: Notify,
}

impl Default for Flow {
    fn default() -> Self {
        Self {
            rtt: Rtt::default(),
            window: AtomicU32::new(first_window()),
            announced: AtomicU32::new(first_window()),
            piece: AtomicUsize::new(FIRST_PIECE),
            received: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            rate: AtomicU64::new(0),
            retransmits: AtomicU32::new(0),
            sending: Mutex::default(),
            path_rtt: AtomicU32::new(0),
            owner: AtomicWaker::new(),
            bulk: AtomicUsize::new(0),
            asked: AtomicBool::new(false),
            silence: watch::Sender::default(),
            given_up: AtomicBool::new(false),
            heard: AtomicU32::new(0),
            awaited: AtomicBool::new(false),
            more_sent: Notify::new(),
        }
    }
}

impl Flow {
    /// Returns the limit on one stream's bytes in flight.
    pub fn window(&self) -> u32 {
        self.window.load(Ordering::Relaxed)
    }

    /// Returns how many bytes the link takes at a time, so that others need not wait long behind them.
    pub(super) fn piece(&self) -> usize {
        self.piece.load(Ordering::Relaxed)
    }

    /// Returns how many bytes a stream hands to the link at a time: a piece, or less when many send.
    pub(crate) fn turn(&self) -> usize {
        turn(self.piece(), self.rate(), self.bulk.load(Ordering::Relaxed))
    }

    /// Returns the bytes that the link has received.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Returns the bytes that the link has received and sent.
    pub fn moved(&self) -> u64 {
        self.received() + self.sent.load(Ordering::Relaxed)
    }

    /// Returns the bytes per second that the path delivered when this end last sent something; 0 before that.
    pub fn rate(&self) -> u64 {
        self.rate.load(Ordering::Relaxed)
    }

    /// Returns the number of TCP segments that this end has retransmitted.
    pub fn retransmits(&self) -> u32 {
        self.retransmits.load(Ordering::Relaxed)
    }

    /// Returns what recently limited this end's sending; `None` before it sent anything, or before Linux 4.10.
    pub fn limits(&self) -> Option<Limits> {
        self.sending.lock().limits()
    }

    /// Returns the limit on one stream's bytes queued in front of the link: its share when many send at once.
    pub(crate) fn share(&self) -> usize {
        share(link_queue(), self.bulk.load(Ordering::Relaxed))
    }

    /// Returns the number of streams that send much.
    #[cfg(test)]
    pub(crate) fn bulk(&self) -> usize {
        self.bulk.load(Ordering::Relaxed)
    }

    /// Returns for how long the peer has not answered at TCP level, if there is anything to answer. A link may be dead
    /// although it looks alive otherwise: a NAT has forgotten it, or the line is down.
    pub async fn silence(&self) -> Option<Silence> {
        let mut silence = self.silence.subscribe();
        self.asked.store(true, Ordering::Release);
        self.owner.wake();
        // Without an answer, the link is being closed.
        tokio::time::timeout(ANSWER, silence.changed()).await.ok()?.ok()?;
        *silence.borrow()
    }

    /// Makes the link's close a TCP reset: nothing arrives at the other end, and a FIN would wait in the kernel behind bytes
    /// that are not acknowledged. If only this direction still works, the other end learns of the close.
    pub(super) fn give_up(&self) {
        self.given_up.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }

    /// True if [`Self::silence`] is waiting for an answer.
    pub(super) fn is_asked(&self) -> bool {
        self.asked.load(Ordering::Relaxed) && self.asked.swap(false, Ordering::Acquire)
    }

    /// `delivery` is what the kernel says now, if it says anything.
    pub(super) fn answer(&self, delivery: Option<Delivery>) {
        let heard = delivery.map_or(0, |delivery| delivery.heard.as_millis());
        self.heard.store(u32::try_from(heard).unwrap_or(u32::MAX), Ordering::Relaxed);
        self.silence.send_replace(delivery.and_then(|delivery| delivery.silence));
    }

    /// Returns how long ago something had arrived at TCP level when [`Self::silence`] was last answered; zero if unknown.
    pub fn heard(&self) -> Duration {
        Duration::from_millis(self.heard.load(Ordering::Relaxed).into())
    }

    /// Returns the distance of the other end, as a round-trip time without queueing on the path; `None` before it is
    /// known. Behind a proxy the kernel knows only the path to the proxy, while a PING takes all of it.
    pub fn distance(&self) -> Option<Duration> {
        let kernels = match self.path_rtt.load(Ordering::Relaxed) {
            0 => None,
            micros => Some(Duration::from_micros(micros.into())),
        };
        kernels.max(self.rtt.shortest())
    }

    /// Sets the round-trip time between the two kernels, without queueing on the path or in the programs.
    pub fn set_path_rtt(&self, rtt: Duration) {
        let micros = u32::try_from(rtt.as_micros()).unwrap_or(u32::MAX).max(1);
        self.path_rtt.store(micros, Ordering::Relaxed);
    }

    /// Counts bytes that the link has sent.
    pub fn add_sent(&self, bytes: usize) {
        self.sent.fetch_add(bytes as u64, Ordering::Relaxed);
        if self.awaited.load(Ordering::Relaxed) && self.awaited.swap(false, Ordering::AcqRel) {
            self.more_sent.notify_one();
        }
    }

    /// Has [`Self::more_sent`] return for what the link sends from now on.
    pub fn await_sending(&self) {
        self.awaited.store(true, Ordering::Release);
    }

    /// Returns once the link has sent something since [`Self::await_sending`], or earlier.
    pub async fn more_sent(&self) {
        self.more_sent.notified().await;
    }

    /// Counts bytes that the link has received.
    pub fn add_received(&self, bytes: usize) {
        self.received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Announces a larger window if there is one. Call it in each poll of the task that owns the connection;
    /// `announce` fails while the peer has not acknowledged the previous window.
    pub(crate) fn poll_window(&self, waker: &Waker, announce: impl FnOnce(u32) -> Result<(), h2::Error>) {
        self.owner.register(waker);
        let window = self.window();
        if window != self.announced.load(Ordering::Relaxed) && announce(window).is_ok() {
            self.announced.store(window, Ordering::Relaxed);
        }
    }

    /// Follows the link's rate. Returns the new size of a piece if it changed.
    pub(super) fn delivered(&self, delivery: Delivery) -> Option<usize> {
        self.rate.store(delivery.rate, Ordering::Relaxed);
        self.retransmits.store(delivery.retransmits, Ordering::Relaxed);
        self.sending.lock().add(delivery.sending);
        if let Some(rtt) = delivery.shortest_rtt {
            self.set_path_rtt(rtt);
        }
        let now = self.piece();
        let piece = usize::try_from(delivery.rate * PIECE_MS / 1000).unwrap_or(LARGEST_PIECE);
        let piece = piece.clamp(SMALLEST_PIECE, LARGEST_PIECE);
        // An idle link's rate tells nothing, and a small change is not worth a system call.
        let smaller = piece < now / 4 * 3 && !delivery.app_limited && delivery.rate > 0;
        let larger = piece > now / 4 * 5;
        (smaller || larger).then(|| {
            self.piece.store(piece, Ordering::Relaxed);
            piece
        })
    }

    fn enlarge(&self, window: u32) {
        if self.window.fetch_max(window, Ordering::Relaxed) < window {
            self.owner.wake();
        }
    }
}

fn turn(piece: usize, rate: u64, bulk: usize) -> usize {
    // The rate of a fast link, whose piece has the maximum size, or of one that has not been busy yet.
    let rate = rate.max(piece as u64 * 1000 / PIECE_MS);
    let round = usize::try_from(rate * ROUND_MS / 1000).unwrap_or(usize::MAX);
    (round / bulk.max(1)).clamp(SMALLEST_PIECE, piece.max(SMALLEST_PIECE))
}

fn share(queue: usize, bulk: usize) -> usize {
    (queue / bulk.max(1)).clamp(SMALLEST_PIECE, SEND_BUFFER)
}

/// Counts a stream while it sends more than small messages.
#[derive(Debug)]
pub(crate) struct Bulk<'a> {
    flow: &'a Flow,
    counted: bool,
}

impl<'a> Bulk<'a> {
    pub(crate) fn new(flow: &'a Flow) -> Self {
        Self { flow, counted: false }
    }

    pub(crate) fn set(&mut self, bulk: bool) {
        if bulk != self.counted {
            self.counted = bulk;
            if bulk {
                self.flow.bulk.fetch_add(1, Ordering::Relaxed);
            } else {
                self.flow.bulk.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }
}

impl Drop for Bulk<'_> {
    fn drop(&mut self) {
        self.set(false);
    }
}

/// Rate at which one stream's receiver takes bytes.
#[derive(Debug)]
pub(crate) struct Taken {
    since: Instant,
    bytes: u64,
}

impl Default for Taken {
    fn default() -> Self {
        Self { since: Instant::now(), bytes: 0 }
    }
}

impl Taken {
    /// Counts bytes, and enlarges the window if it is less than [`FACTOR`] times what the stream takes in a round
    /// trip.
    pub(crate) fn add(&mut self, bytes: usize, flow: &Flow) {
        self.add_at(bytes, flow, Instant::now());
    }

    fn add_at(&mut self, bytes: usize, flow: &Flow, now: Instant) {
        self.bytes += bytes as u64;
        let elapsed = now.saturating_duration_since(self.since);
        // Before the first PING is answered, the path counts as short.
        let round = flow.rtt.shortest().unwrap_or_default();
        if elapsed < SHORTEST_SPAN.max(round * ROUNDS) {
            return;
        }
        let in_a_round = u128::from(self.bytes) * round.as_micros() / elapsed.as_micros();
        *self = Self { since: now, bytes: 0 };
        let largest = largest_window();
        let needed = u32::try_from(in_a_round * u128::from(FACTOR)).unwrap_or(largest).min(largest);
        if needed > flow.window() {
            flow.enlarge(needed.next_power_of_two().min(largest));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::{LARGEST_WINDOW, STREAM_WINDOW};
    use crate::tcp_info::SendTimes;

    fn flow(rtt_ms: u64) -> Flow {
        let flow = Flow::default();
        flow.rtt.add(Duration::from_millis(rtt_ms));
        flow
    }

    /// Returns the window after a stream has taken this many bytes in each round trip, up to its window.
    fn window_after(rtt_ms: u64, per_round: u64, rounds: u32) -> u32 {
        let flow = flow(rtt_ms);
        let mut taken = Taken::default();
        let start = taken.since;
        for round in 1..=rounds {
            let bytes = per_round.min(flow.window().into());
            taken.add_at(bytes.try_into().unwrap(), &flow, start + Duration::from_millis(rtt_ms) * round);
        }
        flow.window()
    }

    #[test]
    fn a_window_that_is_the_limit_grows_to_four_times_the_path() {
        // 200 Mbit/s at 100 ms: 2.5 MB in flight.
        assert_eq!(window_after(100, 2_500_000, 10), 16 << 20);
        assert_eq!(window_after(100, 2_500_000, 4), 4 << 20, "one step at a time");
        assert_eq!(window_after(250, 12_500_000, 20), LARGEST_WINDOW);
    }

    #[test]
    fn a_window_that_is_not_the_limit_stays() {
        assert_eq!(window_after(100, 250_000, 100), STREAM_WINDOW);
        // 250 MB/s at 1 ms.
        assert_eq!(window_after(1, 250_000, 100), STREAM_WINDOW);
    }

    #[test]
    fn a_receiver_that_takes_a_window_at_once_does_not_enlarge_it() {
        let flow = flow(100);
        let mut taken = Taken::default();
        let start = taken.since;
        for pause in 1..=10 {
            taken.add_at(STREAM_WINDOW as usize, &flow, start + Duration::from_secs(pause));
        }
        let mut taken = Taken { since: start, bytes: 0 };
        taken.add_at(STREAM_WINDOW as usize, &flow, start + Duration::from_millis(400));
        assert_eq!(flow.window(), STREAM_WINDOW);
    }

    #[test]
    fn streams_that_send_share_the_queue() {
        const QUEUE: usize = 8 << 20;
        assert_eq!(
            [0, 1, 32, 64, 400].map(|bulk| share(QUEUE, bulk)),
            [SEND_BUFFER, SEND_BUFFER, SEND_BUFFER, 128 << 10, 20971]
        );
        assert_eq!(share(QUEUE, 1_000_000), SMALLEST_PIECE);
        let flow = Flow::default();
        let mut one = Bulk::new(&flow);
        one.set(true);
        one.set(true);
        let count = || flow.bulk.load(Ordering::Relaxed);
        assert_eq!(count(), 1);
        drop((one, Bulk::new(&flow)));
        assert_eq!(count(), 0);
    }

    #[test]
    fn the_owner_announces_a_window_once_the_last_one_is_acknowledged() {
        let flow = flow(100);
        let announce = |answer: Result<(), h2::Error>| {
            let mut asked = None;
            flow.poll_window(Waker::noop(), |window| {
                asked = Some(window);
                answer
            });
            asked
        };
        assert_eq!(announce(Ok(())), None);
        flow.enlarge(2 << 20);
        let pending = || Err(h2::Error::from(h2::Reason::INTERNAL_ERROR));
        assert_eq!(announce(pending()), Some(2 << 20));
        assert_eq!(announce(Ok(())), Some(2 << 20));
        assert_eq!(announce(Ok(())), None);
        flow.enlarge(1 << 20);
        assert_eq!(announce(Ok(())), None, "it never shrinks");
    }

    #[test]
    fn pieces_take_a_few_milliseconds_on_the_line() {
        let flow = Flow::default();
        let delivered = |mbit: u64, app_limited| {
            let rate = mbit * 1_000_000 / 8;
            flow.delivered(Delivery {
                rate,
                app_limited,
                rtt: Duration::ZERO,
                shortest_rtt: None,
                retransmits: 3,
                heard: Duration::ZERO,
                silence: None,
                sending: SendTimes {
                    busy: Duration::from_secs(2),
                    receive_window: Duration::from_secs(1),
                    send_buffer: Duration::ZERO,
                },
            });
            flow.piece()
        };
        assert_eq!(delivered(40, false), 75_000);
        assert_eq!(delivered(41, false), 75_000, "not for every change");
        assert_eq!(delivered(1, true), 75_000, "an idle link says nothing about the path");
        assert_eq!(delivered(1, false), SMALLEST_PIECE);
        assert_eq!(delivered(10_000, true), LARGEST_PIECE);
        assert_eq!(delivered(0, false), LARGEST_PIECE, "nothing is known yet");
        assert_eq!((flow.rate(), flow.retransmits()), (0, 3));
        assert_eq!(flow.limits(), Some(Limits { receive_window: 0.5, send_buffer: 0.0 }));
    }
    #[test]
    fn a_keystroke_waits_a_round_of_downloads_at_most() {
        let piece_at =
            |rate: u64| usize::try_from(rate * PIECE_MS / 1000).unwrap().clamp(SMALLEST_PIECE, LARGEST_PIECE);
        for rate in [1_000_000, 12_500_000, 300_000_000] {
            let piece = piece_at(rate);
            assert_eq!(turn(piece, rate, 1), piece);
            assert_eq!(turn(piece, rate, 4), piece, "a few need no smaller pieces");
            for bulk in [30, 500] {
                let turn = turn(piece, rate, bulk);
                let round = turn * bulk;
                let most = usize::try_from(rate * ROUND_MS / 1000).unwrap().max(bulk * SMALLEST_PIECE);
                assert!(round <= most, "{bulk} pieces of {turn} bytes at {rate} B/s");
            }
        }
        assert_eq!(turn(piece_at(300_000_000), 300_000_000, 500), 72_000, "a fast link's are not small");
        assert_eq!(turn(FIRST_PIECE, 0, 1), FIRST_PIECE, "before the rate is known");
    }
}
