//! One direction of a path: decides for each packet whether and when it is delivered.

use std::collections::VecDeque;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::{Counts, Loss, Path};

/// The smallest buffer, that of a cheap modem.
const SMALLEST_BUFFER: f64 = 20.0 * 1500.0;

/// One direction. Times are relative to any fixed moment.
#[derive(Debug)]
pub(super) struct Line {
    delay: Duration,
    /// Bit/s.
    rate: u64,
    /// Maximum number of bytes queued for the line.
    buffer: f64,
    loss: Loss,
    reordered: f64,
    out: bool,
    random: StdRng,
    /// True if Gilbert's model is in its bad state.
    burst: bool,
    /// Time at which the line has sent all packets that it has accepted.
    free_at: Duration,
    /// As `free_at`, if each had been offered when it was sent: decides whether there is room for the next one.
    on_time: Duration,
    /// Packets in flight, sorted by time of arrival.
    under_way: VecDeque<(Duration, Vec<u8>)>,
    counts: Counts,
}

impl Line {
    pub(super) fn new(path: &Path, rate: u64, seed: u64) -> Self {
        let mut line = Self {
            delay: Duration::ZERO,
            rate: 0,
            buffer: 0.0,
            loss: Loss::None,
            reordered: 0.0,
            out: false,
            random: StdRng::seed_from_u64(seed),
            burst: false,
            free_at: Duration::ZERO,
            on_time: Duration::ZERO,
            under_way: VecDeque::new(),
            counts: Counts::default(),
        };
        line.set(path, rate);
        line
    }

    pub(super) fn set(&mut self, path: &Path, rate: u64) {
        // A rate of zero would divide by zero; an outage is set with `set_out`.
        self.rate = rate.max(1);
        self.delay = path.rtt / 2;
        self.buffer = (path.buffer * path.rtt.as_secs_f64() * self.rate as f64 / 8.0).max(SMALLEST_BUFFER);
        self.loss = path.loss;
        self.reordered = path.reordered;
    }

    /// Begins or ends an outage: every packet is lost, including those in flight.
    pub(super) fn set_out(&mut self, out: bool) {
        self.out = out;
        if out {
            self.counts.lost += self.under_way.len() as u64;
            self.under_way.clear();
        }
    }

    pub(super) fn counts(&self) -> Counts {
        self.counts
    }

    /// Accepts or drops a packet that was sent at `sent` and enters at `now`. It finds the room that it would have found at
    /// `sent`: a machine that is late delays packets, but loses none.
    pub(super) fn offer(&mut self, sent: Duration, now: Duration, packet: Vec<u8>) {
        // Drawn for every packet, so that the fate of one does not depend on the arrival times of others.
        let lost = self.loses();
        let late = self.reordered > 0.0 && self.random.random_bool(self.reordered);
        if self.out || lost {
            self.counts.lost += 1;
            return;
        }
        let begins = self.on_time.max(sent);
        let waiting = (begins - sent).as_secs_f64() * self.rate as f64 / 8.0;
        if waiting + packet.len() as f64 > self.buffer {
            self.counts.overflowed += 1;
            return;
        }
        let takes = Duration::from_secs_f64(packet.len() as f64 * 8.0 / self.rate as f64);
        self.on_time = begins + takes;
        self.free_at = self.free_at.max(now) + takes;
        let mut arrives = self.free_at + self.delay;
        if late {
            arrives += self.delay / 2;
        }
        let place = self.under_way.iter().rposition(|(at, _)| *at <= arrives).map_or(0, |before| before + 1);
        self.under_way.insert(place, (arrives, packet));
    }

    /// Takes the next packet that has arrived by `now`.
    pub(super) fn take(&mut self, now: Duration) -> Option<Vec<u8>> {
        let (_, packet) = self.under_way.pop_front_if(|(at, _)| *at <= now)?;
        self.counts.delivered += 1;
        Some(packet)
    }

    /// Returns the arrival time of the next packet.
    pub(super) fn next(&self) -> Option<Duration> {
        self.under_way.front().map(|(at, _)| *at)
    }

    fn loses(&mut self) -> bool {
        match self.loss {
            Loss::None => false,
            Loss::Random(rate) => self.random.random_bool(rate),
            Loss::Bursts { rate, length } => {
                // In the bad state every packet is lost. Its leave probability is 1/length; its entry probability is
                // chosen so that `rate` of all packets meet the bad state in the long run.
                let leave = 1.0 / length.max(1.0);
                let change = if self.burst { leave } else { (leave * rate / (1.0 - rate)).min(1.0) };
                self.burst ^= self.random.random_bool(change);
                self.burst
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACKET: [u8; 1250] = [0; 1250];

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn line(path: &Path) -> Line {
        Line::new(path, path.up, 7)
    }

    /// Offers a packet when it is sent.
    fn offer(line: &mut Line, now: Duration, packet: &[u8]) {
        line.offer(now, now, packet.to_vec());
    }

    #[test]
    fn a_packet_takes_its_time_on_the_line_and_half_a_round_trip() {
        // 10,000 bits at 1 Mbit/s: 10 ms each.
        let mut line = line(&Path::new(100, 1));
        offer(&mut line, ms(0), &PACKET);
        offer(&mut line, ms(0), &PACKET);
        assert_eq!(line.next(), Some(ms(60)));
        assert_eq!(line.take(ms(59)), None);
        assert!(line.take(ms(60)).is_some());
        assert_eq!(line.next(), Some(ms(70)));
        assert!(line.take(ms(70)).is_some());
        assert_eq!(line.counts(), Counts { delivered: 2, lost: 0, overflowed: 0 });
    }

    #[test]
    fn what_finds_the_buffer_full_is_dropped() {
        // A buffer of one round trip: 1,000,000 bytes at 80 Mbit/s and 100 ms.
        let mut line = line(&Path::new(100, 80));
        for _ in 0..1000 {
            offer(&mut line, ms(0), &PACKET);
        }
        assert_eq!(line.counts().overflowed, 200);
        offer(&mut line, ms(1), &PACKET);
        assert_eq!(line.counts().overflowed, 200, "8 have been sent meanwhile");
    }

    #[test]
    fn packets_that_are_offered_late_find_the_room_of_when_they_were_sent() {
        // A buffer of 24 packets, each of which takes 10 ms on the line.
        let mut late = line(&Path::new(10, 1));
        for number in 1..=40 {
            late.offer(ms(10 * number), ms(400), PACKET.to_vec());
        }
        assert_eq!(late.counts().overflowed, 0);
        // Not before their time on the line and half a round trip.
        assert_eq!(late.next(), Some(ms(415)));
        let arrived = std::iter::from_fn(|| late.take(ms(804))).count();
        assert_eq!(arrived, 39);

        let mut together = line(&Path::new(10, 1));
        for _ in 0..40 {
            offer(&mut together, ms(400), &PACKET);
        }
        assert!(together.counts().overflowed > 10, "{:?}", together.counts());
    }

    fn lost(path: &Path) -> Vec<bool> {
        let mut line = line(path);
        let fate = (0..100_000).map(|at| {
            let before = line.counts().lost;
            offer(&mut line, Duration::from_secs(at), &PACKET);
            line.take(Duration::from_secs(at + 1));
            line.counts().lost > before
        });
        fate.collect()
    }

    #[test]
    fn losses_have_their_rate_and_repeat_with_the_seed() {
        let random = Path::new(10, 100).lossy(Loss::Random(0.01));
        let bursts = Path::new(10, 100).lossy(Loss::Bursts { rate: 0.01, length: 5.0 });
        for path in [random, bursts] {
            let fate = lost(&path);
            let count = fate.iter().filter(|lost| **lost).count();
            assert!((800..1200).contains(&count), "{count} of 100,000 with {:?}", path.loss);
            assert_eq!(fate, lost(&path));
        }
        let runs = |fate: &[bool]| fate.windows(2).filter(|pair| !pair[0] && pair[1]).count();
        let (single, together) = (lost(&random), lost(&bursts));
        assert!(runs(&together) * 3 < runs(&single), "{} and {}", runs(&together), runs(&single));
    }

    #[test]
    fn late_packets_are_overtaken() {
        let mut path = Path::new(100, 1000);
        path.reordered = 0.5;
        let mut line = line(&path);
        for number in 0..100u8 {
            offer(&mut line, ms(u64::from(number)), &[number; 100]);
        }
        let order: Vec<u8> = std::iter::from_fn(|| line.take(ms(1000))).map(|packet| packet[0]).collect();
        assert_eq!(order.len(), 100);
        assert!(!order.is_sorted());
    }

    #[test]
    fn an_outage_loses_everything() {
        let mut line = line(&Path::new(100, 1000));
        offer(&mut line, ms(0), &PACKET);
        line.set_out(true);
        offer(&mut line, ms(1), &PACKET);
        assert_eq!((line.next(), line.counts().lost), (None, 2));
        line.set_out(false);
        offer(&mut line, ms(2), &PACKET);
        assert!(line.take(ms(100)).is_some());
    }
}
