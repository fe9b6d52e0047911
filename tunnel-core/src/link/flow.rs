//! How much of a link's bytes may be under way, and how much may wait in front of it: both follow the path.
//!
//! A stream's window bounds what it has in flight. It has to hold the path's bandwidth times its round-trip time, or the
//! stream waits for the window instead of the line: 1 MiB is 84 Mbit/s at 100 ms. So a receiver whose stream comes near
//! its window enlarges that of all streams, as the kernel does for TCP. It never shrinks, and what is held for receivers
//! that do not read is bounded elsewhere.
//!
//! What waits in front of the link delays everything behind it: 256 KiB are 0.4 s at 5 Mbit/s. Large pieces are what makes
//! a fast link fast. So the size of a piece is what the link delivers in a few milliseconds.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::task::Waker;
use std::time::{Duration, Instant};

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::sync::watch;

use super::limits::{Limits, Sending};
use super::rtt::Rtt;
use super::settings::{LARGEST_PIECE, SEND_BUFFER, SMALLEST_PIECE, first_window, largest_window};
use crate::memory::link_queue;
use crate::tcp_info::{Delivery, Silence};

/// The time on the line of one piece.
const PIECE_MS: u64 = 15;
/// Before the link's rate is known.
const FIRST_PIECE: usize = 16 << 10;
/// Round trips over which a stream's rate is measured: what one window held for a receiver that has paused, and now takes
/// all at once, is no reason for a larger one.
const ROUNDS: u32 = FACTOR;
/// A stream's window is at least so many times what it takes in a round trip. Lost segments hold back what comes after them for a
/// round trip and more, and a stream that its window holds back in between does not show what the path could carry.
const FACTOR: u32 = 4;
/// The shortest time for it.
const SHORTEST_SPAN: Duration = Duration::from_millis(20);

/// How long the link's task may take to answer.
const ANSWER: Duration = Duration::from_secs(1);

/// What a link's streams share.
#[derive(Debug)]
pub struct Flow {
    /// The round-trip time of the link.
    pub rtt: Rtt,
    /// The stream window to announce, in bytes.
    window: AtomicU32,
    /// The one that is announced.
    announced: AtomicU32,
    /// Bytes of a piece.
    piece: AtomicUsize,
    /// Bytes that the link has received.
    received: AtomicU64,
    /// Bytes that the link has sent.
    sent: AtomicU64,
    /// Bytes that the path took each second when something was sent last.
    rate: AtomicU64,
    /// Segments that were sent again.
    retransmits: AtomicU32,
    /// Written by the connection's owner, read for the status and the metrics.
    sending: Mutex<Sending>,
    /// In microseconds; 0 until it is known.
    path_rtt: AtomicU32,
    /// The task that owns the HTTP/2 connection.
    owner: AtomicWaker,
    /// Streams that send more than small messages.
    bulk: AtomicUsize,
    /// Somebody wants to know for how long the peer has been silent.
    asked: AtomicBool,
    silence: watch::Sender<Option<Silence>>,
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
        }
    }
}

impl Flow {
    /// What one stream may have in flight, in bytes.
    pub fn window(&self) -> u32 {
        self.window.load(Ordering::Relaxed)
    }

    /// How much to hand to the link at a time, in bytes, so that others need not wait for long behind it.
    pub fn piece(&self) -> usize {
        self.piece.load(Ordering::Relaxed)
    }

    /// Bytes that the link has received.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Bytes that the link has received and sent.
    pub fn moved(&self) -> u64 {
        self.received() + self.sent.load(Ordering::Relaxed)
    }

    /// Bytes that the path took each second when this end sent something last; 0 before that.
    pub fn rate(&self) -> u64 {
        self.rate.load(Ordering::Relaxed)
    }

    /// TCP segments that this end has sent again.
    pub fn retransmits(&self) -> u32 {
        self.retransmits.load(Ordering::Relaxed)
    }

    /// What held this end's sending back lately; `None` before it sent anything, or before Linux 4.10.
    pub fn limits(&self) -> Option<Limits> {
        self.sending.lock().limits()
    }

    /// What one stream may have waiting in front of the link, in bytes: its share when many send at once.
    pub(crate) fn share(&self) -> usize {
        share(link_queue(), self.bulk.load(Ordering::Relaxed))
    }

    /// For how long the peer has not answered on TCP's level, if there is anything to answer. A link that looks alive
    /// otherwise may be dead: a NAT has forgotten it, or the line is out.
    pub async fn silence(&self) -> Option<Silence> {
        let mut silence = self.silence.subscribe();
        self.asked.store(true, Ordering::Release);
        self.owner.wake();
        // Without an answer the link is being closed.
        tokio::time::timeout(ANSWER, silence.changed()).await.ok()?.ok()?;
        *silence.borrow()
    }

    /// Whether [`Self::silence`] waits for an answer.
    pub(super) fn is_asked(&self) -> bool {
        self.asked.load(Ordering::Relaxed) && self.asked.swap(false, Ordering::Acquire)
    }

    pub(super) fn answer(&self, silence: Option<Silence>) {
        self.silence.send_replace(silence);
    }

    /// How far the other end is, as a round-trip time without what waits on the path; `None` before it is known. Behind a
    /// proxy the kernel knows the way to the proxy only, and a PING all of it.
    pub fn distance(&self) -> Option<Duration> {
        let kernels = match self.path_rtt.load(Ordering::Relaxed) {
            0 => None,
            micros => Some(Duration::from_micros(micros.into())),
        };
        kernels.max(self.rtt.shortest())
    }

    /// Sets the round-trip time between the two kernels, without what waits on the path or in the programs.
    pub fn set_path_rtt(&self, rtt: Duration) {
        let micros = u32::try_from(rtt.as_micros()).unwrap_or(u32::MAX).max(1);
        self.path_rtt.store(micros, Ordering::Relaxed);
    }

    /// Counts bytes that the link has sent.
    pub fn add_sent(&self, bytes: usize) {
        self.sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn add_received(&self, bytes: usize) {
        self.received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Announces a larger window once there is one. To be called in each poll of the task that owns the connection;
    /// `announce` fails while the peer has not acknowledged the last one.
    pub(crate) fn poll_window(&self, waker: &Waker, announce: impl FnOnce(u32) -> Result<(), h2::Error>) {
        self.owner.register(waker);
        let window = self.window();
        if window != self.announced.load(Ordering::Relaxed) && announce(window).is_ok() {
            self.announced.store(window, Ordering::Relaxed);
        }
    }

    /// Follows the link's rate. Returns the new size of a piece when it is another one.
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
        // An idle link's rate says nothing, and small changes nothing worth a system call.
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

/// How fast one stream's receiver takes bytes.
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
    /// Counts bytes, and enlarges the window if they nearly fill it in one round trip.
    pub(crate) fn add(&mut self, bytes: usize, flow: &Flow) {
        self.add_at(bytes, flow, Instant::now());
    }

    fn add_at(&mut self, bytes: usize, flow: &Flow, now: Instant) {
        self.bytes += bytes as u64;
        let elapsed = now.saturating_duration_since(self.since);
        // Before the first PING is answered, a path is as short as any.
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

    /// A stream that takes so many bytes in each round trip, up to its window.
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
        // 200 Mbit/s and 100 ms: 2.5 MB in flight.
        assert_eq!(window_after(100, 2_500_000, 10), 16 << 20);
        assert_eq!(window_after(100, 2_500_000, 4), 4 << 20, "one step at a time");
        assert_eq!(window_after(250, 12_500_000, 20), LARGEST_WINDOW);
    }

    #[test]
    fn a_window_that_is_not_the_limit_stays() {
        assert_eq!(window_after(100, 250_000, 100), STREAM_WINDOW);
        // 250 MB/s at a millisecond.
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
}
