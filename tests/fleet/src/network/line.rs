//! One connection, and its two ends.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};
use tunnel_link::link::{Delivery, Line, SendTimes, Silence, Unacknowledged};
use tunnel_runtime::takeover::Stream;

use super::{Net, RETRANSMISSION, State, path};

/// Bytes on their way, as in a socket's buffers.
const MOST: usize = 256 << 10;
/// The first retransmission of a kernel on a short path.
const FIRST_RETRANSMISSION: Duration = Duration::from_millis(200);

/// Data from one end to the other.
#[derive(Default)]
struct Direction {
    /// With the time of arrival. Empty bytes are the end.
    sent: VecDeque<(Instant, Vec<u8>)>,
    bytes: usize,
    ended: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
    /// The first bytes that were sent since the path is silent.
    unanswered: Option<Instant>,
}

pub(super) struct Connection {
    ends: (SocketAddr, SocketAddr),
    /// After so long without a byte the kernel of the end that dialled asks whether the other one is there.
    keepalive: Duration,
    /// From the end that dialled, and to it.
    directions: [Direction; 2],
    dropped: [bool; 2],
    /// When each end last heard of the other.
    heard: [Instant; 2],
    reset: bool,
    forgotten: Option<Instant>,
    /// Nothing arrives before.
    resumes: Instant,
}

impl Connection {
    pub(super) fn new(from: SocketAddr, to: SocketAddr, keepalive: Duration) -> Self {
        let now = Instant::now();
        Self {
            ends: (from, to),
            keepalive,
            directions: Default::default(),
            dropped: [false; 2],
            heard: [now; 2],
            reset: false,
            forgotten: None,
            resumes: now,
        }
    }

    pub(super) fn is_on(&self, a: IpAddr, b: IpAddr) -> bool {
        path(self.ends.0.ip(), self.ends.1.ip()) == path(a, b)
    }

    pub(super) fn ends(&self) -> (SocketAddr, SocketAddr) {
        self.ends
    }

    pub(super) fn is_open(&self) -> bool {
        self.dropped == [false; 2]
    }

    /// True once the end of what `side` sent is next.
    fn has_ended(&self, side: usize) -> bool {
        let next = self.directions[side].sent.front();
        next.is_some_and(|(at, bytes)| bytes.is_empty() && (*at).max(self.resumes) <= Instant::now())
    }

    pub(super) fn forget(&mut self) {
        self.forgotten.get_or_insert_with(Instant::now);
    }

    pub(super) fn resume(&mut self, at: Instant, wakers: &mut Vec<Waker>) {
        self.resumes = at;
        for direction in &mut self.directions {
            direction.unanswered = None;
            wakers.extend(direction.reader.take());
            if self.dropped != [false; 2] {
                wakers.extend(direction.writer.take());
            }
        }
    }

    pub(super) fn reset(&mut self, wakers: &mut Vec<Waker>) {
        self.reset = true;
        for direction in &mut self.directions {
            wakers.extend(direction.reader.take());
            wakers.extend(direction.writer.take());
        }
    }
}

/// One end of a connection.
pub(super) struct End {
    net: Net,
    number: u64,
    /// 0: the one that dialled.
    side: usize,
    local: SocketAddr,
    peer: SocketAddr,
    arrival: Pin<Box<Sleep>>,
}

impl std::fmt::Debug for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} -> {}", self.local, self.peer)
    }
}

/// Result of the next read.
enum Next {
    Arrived,
    At(Instant),
    /// Until the path changes, or something is sent.
    Waits,
    Reset,
}

impl End {
    pub(super) fn new(net: &Net, number: u64, side: usize, local: SocketAddr, peer: SocketAddr) -> Self {
        let arrival = Box::pin(sleep_until(Instant::now()));
        Self { net: net.clone(), number, side, local, peer, arrival }
    }

    /// This end's connection, and the time since when its path is silent.
    fn with<T>(&self, act: impl FnOnce(&mut Connection, Option<Instant>, Duration) -> T) -> Option<T> {
        let mut state = self.net.0.lock();
        let delay = state.delay(self.local.ip(), self.peer.ip());
        let State { silent, connections, .. } = &mut *state;
        let way = path(self.local.ip(), self.peer.ip());
        let connection = connections.get_mut(&self.number)?;
        let silent = connection.forgotten.or(silent.get(&way).copied());
        Some(act(connection, silent, delay))
    }

    fn next(&self, waker: &Waker) -> Next {
        let side = self.side;
        let mut before = None;
        let next = self.with(|connection, silent, _| {
            if connection.reset {
                return Next::Reset;
            }
            let resumes = connection.resumes;
            let direction = &mut connection.directions[1 - side];
            let next = match direction.sent.front() {
                Some((at, _)) if silent.is_none() => match (*at).max(resumes) {
                    at if at <= Instant::now() => return Next::Arrived,
                    at => Next::At(at),
                },
                _ => Next::Waits,
            };
            // Dropped outside the lock: it may be the last of a task that has an end.
            before = direction.reader.replace(waker.clone());
            next
        });
        drop(before);
        next.unwrap_or(Next::Reset)
    }

    fn poll_arrived(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            match self.next(cx.waker()) {
                Next::Arrived => return Poll::Ready(Ok(())),
                Next::Reset => return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
                Next::Waits => return Poll::Pending,
                Next::At(at) => {
                    if self.arrival.deadline() != at {
                        self.arrival.as_mut().reset(at);
                    }
                    ready!(self.arrival.as_mut().poll(cx));
                }
            }
        }
    }

    /// Sends bytes, or the end.
    fn send(&self, bytes: &[u8]) -> Option<Waker> {
        let side = self.side;
        self.with(|connection, silent, delay| {
            let now = Instant::now();
            let direction = &mut connection.directions[side];
            // Not before what was sent when the path was longer.
            let at = direction.sent.back().map_or(now + delay, |(last, _)| (now + delay).max(*last));
            direction.sent.push_back((at, bytes.to_vec()));
            direction.bytes += bytes.len();
            match silent {
                Some(_) => {
                    direction.unanswered.get_or_insert(now);
                }
                None => connection.heard[side] = now,
            }
            connection.directions[side].reader.take()
        })
        .flatten()
    }

    fn end(&self) -> Option<Waker> {
        let ended = self
            .with(|connection, _, _| std::mem::replace(&mut connection.directions[self.side].ended, true));
        if ended == Some(false) { self.send(&[]) } else { None }
    }
}

impl AsyncRead for End {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.poll_arrived(cx))?;
        let side = self.side;
        let writer = self.with(|connection, _, _| {
            connection.heard[side] = Instant::now();
            let direction = &mut connection.directions[1 - side];
            while let Some((at, bytes)) = direction.sent.front_mut() {
                // The end stays.
                if bytes.is_empty() || *at > Instant::now() || buffer.remaining() == 0 {
                    break;
                }
                let taken = bytes.len().min(buffer.remaining());
                buffer.put_slice(&bytes[..taken]);
                direction.bytes -= taken;
                if taken == bytes.len() {
                    direction.sent.pop_front();
                } else {
                    bytes.drain(..taken);
                }
            }
            direction.writer.take()
        });
        if let Some(writer) = writer.flatten() {
            writer.wake();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for End {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let side = self.side;
        let mut before = None;
        let room = self.with(|connection, silent, _| {
            // The other kernel has answered by a reset.
            let gone = connection.dropped[1 - side] && silent.is_none();
            let room = MOST.saturating_sub(connection.directions[side].bytes);
            // Also to what waits in this one's buffer, whatever this end has not read.
            if connection.reset || (gone && (room == 0 || connection.has_ended(1 - side))) {
                return Err(io::ErrorKind::BrokenPipe);
            }
            let direction = &mut connection.directions[side];
            if room == 0 {
                before = direction.writer.replace(cx.waker().clone());
            }
            Ok(room)
        });
        drop(before);
        match room {
            None => Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
            Some(Err(kind)) => Poll::Ready(Err(kind.into())),
            Some(Ok(0)) => Poll::Pending,
            Some(Ok(room)) => {
                let sent = bytes.len().min(room);
                if let Some(reader) = self.send(&bytes[..sent]).filter(|_| sent > 0) {
                    reader.wake();
                }
                Poll::Ready(Ok(sent))
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(reader) = self.end() {
            reader.wake();
        }
        Poll::Ready(Ok(()))
    }
}

impl Line for End {
    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.local)
    }

    fn peer_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.peer)
    }

    fn poll_readable(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_arrived(cx).map(|_| Ok(()))
    }

    fn delivery(&self) -> Option<Delivery> {
        let rtt = self.with(|_, _, delay| delay * 2).unwrap_or_default();
        Some(Delivery {
            rate: 0,
            app_limited: true,
            rtt,
            shortest_rtt: Some(rtt),
            retransmits: 0,
            heard: self.heard(),
            silence: self.silence(),
            sending: SendTimes::default(),
        })
    }
}

impl Stream for End {}

impl End {
    /// While the path is not silent, the kernel's questions are answered.
    fn heard(&self) -> Duration {
        let heard = self.with(|connection, _, _| {
            let idle = connection.heard[self.side].elapsed().as_millis();
            u64::try_from(idle % connection.keepalive.as_millis()).unwrap_or_default()
        });
        Duration::from_millis(heard.unwrap_or_default())
    }

    /// Set if the peer has something to answer.
    fn silence(&self) -> Option<Silence> {
        let side = self.side;
        self.with(|connection, silent, delay| {
            let (since, keepalive) = (silent?, connection.keepalive);
            let idle = since.saturating_duration_since(connection.heard[side]);
            // Until the path fell silent, the kernel's questions were answered.
            let answered = u32::try_from(idle.as_millis() / keepalive.as_millis()).unwrap_or_default();
            let lasts = (connection.heard[side] + keepalive * answered).elapsed();
            let unacknowledged = connection.directions[side].unanswered.map(|since| Unacknowledged {
                resent: since.elapsed() > FIRST_RETRANSMISSION + delay * 2,
                pause: since.elapsed().clamp(FIRST_RETRANSMISSION, RETRANSMISSION),
            });
            let probed = side == 0 && lasts > keepalive;
            (unacknowledged.is_some() || probed).then_some(Silence { lasts, unacknowledged })
        })
        .flatten()
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let reader = self.end();
        let gone = self.with(|connection, _, _| {
            connection.dropped[self.side] = true;
            connection.directions[1 - self.side].sent.clear();
            (connection.dropped == [true; 2], connection.directions[1 - self.side].writer.take())
        });
        if gone.as_ref().is_some_and(|(both, _)| *both) {
            self.net.0.lock().connections.remove(&self.number);
        }
        reader.into_iter().chain(gone.and_then(|(_, writer)| writer)).for_each(Waker::wake);
    }
}
