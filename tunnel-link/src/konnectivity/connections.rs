//! One stream of packets: the connections dialled for it, and the handling of each packet.
//!
//! The protocol has no flow control for single connections. Data that waits for a target is limited: above the limit
//! the stream is not read for a while, so that its sender waits as it would at a socket. A target that makes no room
//! in that time loses its connection, unless nobody else uses the stream: others must not wait for it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use futures_util::{Stream, StreamExt as _};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::Status;
use tunnel_runtime::text::printable;

use super::packet::Payload;
use super::queue::{Inbox, Inlet, Outbox, Packets, Waiting, ends};
use super::room::{Part, Room};
use super::{CloseDial, CloseRequest, Data, DialRequest, Packet, PacketType};

/// Creates the connections of a stream.
#[tonic::async_trait]
pub trait Dial: Send + Sync + 'static {
    type Connected: Send + 'static;

    /// Connects to `HOST:PORT`, or returns the reason in Go's words. Ends early when `gone` does, because nobody waits
    /// for the answer then.
    async fn dial(&self, address: &str, gone: &Gone) -> Result<Self::Connected, String>;

    /// Relays a connection until both directions have ended, or until `gone` ends, which resets it.
    async fn relay(
        &self,
        connected: Self::Connected,
        inbox: &mut Inbox,
        outbox: &mut Outbox,
        gone: &Gone,
    ) -> Result<(), String>;
}

/// Limits of one stream, and the messages for exceeding them.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Maximum connections, including dials.
    pub connections: usize,
    /// Maximum bytes of one connection that wait for its target.
    pub one: usize,
    /// Maximum time for which the stream is not read because of one connection, if others use it.
    pub patience: Duration,
    /// True if several callers share the stream. It then counts as shared even with one connection, since dials queue
    /// behind unread packets.
    pub callers_share: bool,
    /// Explanation for the end of a connection that exceeded its limit.
    pub stalled: &'static str,
    /// Maximum time for which a target may continue after its connection was closed.
    pub linger: Duration,
    /// Answer to DATA before the stream's first dial.
    pub early: &'static str,
}

/// Tells when a connection is over for the caller.
#[derive(Clone, Debug)]
pub struct Gone {
    /// End at once.
    cut: CancellationToken,
    /// The connection was closed.
    closed: CancellationToken,
    /// A closed connection must not continue.
    evicted: CancellationToken,
    linger: Duration,
}

impl Gone {
    /// Returns when the connection must end: at once, or some time after it was closed.
    pub async fn wait(&self) {
        tokio::select! {
            biased;
            () = self.closed.cancelled() => tokio::select! {
                () = tokio::time::sleep(self.linger) => {}
                () = self.evicted.cancelled() => {}
            },
            () = self.cut.cancelled() => {}
        }
    }

    /// Returns when nobody waits for a dial.
    pub async fn cut(&self) {
        self.cut.cancelled().await;
    }
}

/// A connection of the stream, starting with its dial.
#[derive(Debug)]
struct Open {
    /// Number of the dial.
    random: i64,
    inlet: Inlet,
    gone: Gone,
    stalled: Arc<AtomicBool>,
}

/// Connections of one stream, by number.
#[derive(Debug)]
pub struct Connections<D> {
    dialler: Arc<D>,
    bounds: Bounds,
    packets: Packets,
    open: HashMap<i64, Open>,
    /// Closed connections that still send waiting data.
    closing: HashMap<i64, (Arc<Waiting>, Gone)>,
    /// Connection numbers by dial number.
    dials: HashMap<i64, i64>,
    /// Last number assigned.
    numbers: Arc<AtomicI64>,
    /// True after the first dial.
    dialled: bool,
    /// Limit on the data waiting for all targets, closed connections included.
    part: Part,
    ended: (mpsc::UnboundedSender<i64>, mpsc::UnboundedReceiver<i64>),
    /// Cancelled when the stream ends.
    over: CancellationToken,
    _over: DropGuard,
}

/// The stream has ended.
struct Over;

impl<D: Dial> Connections<D> {
    /// Numbers connections from `numbers` + 1 on; streams share `numbers` if their other end does not tell them apart.
    /// `room`: limit on the data waiting for the targets of all streams that share it.
    pub fn new(
        dialler: Arc<D>,
        bounds: Bounds,
        room: Arc<Room>,
        numbers: Arc<AtomicI64>,
        packets: Packets,
    ) -> Self {
        let over = CancellationToken::new();
        Self {
            dialler,
            bounds,
            packets,
            open: HashMap::new(),
            closing: HashMap::new(),
            dials: HashMap::new(),
            numbers,
            dialled: false,
            part: Part::new(room),
            ended: mpsc::unbounded_channel(),
            _over: over.clone().drop_guard(),
            over,
        }
    }

    /// Serves the stream to its end, which ends its connections, except those closed before.
    ///
    /// # Errors
    /// Returns the error of the stream.
    pub async fn serve(
        mut self,
        mut stream: impl Stream<Item = Result<Packet, Status>> + Unpin,
    ) -> Result<(), Status> {
        loop {
            let packet = tokio::select! {
                biased;
                ended = self.ended.1.recv() => {
                    self.forget(ended);
                    continue;
                }
                () = self.packets.closed() => return Ok(()),
                packet = stream.next() => packet,
            };
            let Some(packet) = packet else { return Ok(()) };
            if self.take(packet?).await.is_err() {
                return Ok(());
            }
        }
    }

    fn forget(&mut self, ended: Option<i64>) {
        let Some(connect_id) = ended else { return };
        self.closing.remove(&connect_id);
        if let Some(open) = self.open.remove(&connect_id) {
            self.dials.remove(&open.random);
        }
    }

    async fn take(&mut self, packet: Packet) -> Result<(), Over> {
        let kind = packet.r#type();
        match (kind, packet.payload) {
            (PacketType::DialReq, Some(Payload::DialRequest(request))) => self.dial(request).await,
            (PacketType::DialCls, Some(Payload::CloseDial(CloseDial { random }))) => {
                // Also for an established connection: the answer may have crossed this packet, and the caller does not
                // know its number.
                if let Some(open) = self.dials.get(&random).and_then(|connect_id| self.open.get(connect_id)) {
                    open.gone.cut.cancel();
                }
                Ok(())
            }
            (PacketType::Data, Some(Payload::Data(data))) => self.data(data).await,
            (PacketType::CloseReq, Some(Payload::CloseRequest(CloseRequest { connect_id }))) => {
                let error = match self.open.remove(&connect_id) {
                    // Its task sends the waiting data, and ends with its target or after a while.
                    Some(Open { random, inlet, gone, .. }) => {
                        self.dials.remove(&random);
                        gone.closed.cancel();
                        self.closing.insert(connect_id, (inlet.waiting, gone));
                        ""
                    }
                    None => "Unknown connectID",
                };
                self.send(Packet::close_response(connect_id, error.to_owned())).await
            }
            _ => {
                tracing::debug!(?kind, "ignoring a packet of an unexpected kind");
                Ok(())
            }
        }
    }

    async fn send(&self, packet: Packet) -> Result<(), Over> {
        self.packets.send(Ok(packet)).await.map_err(|_| Over)
    }

    async fn dial(&mut self, request: DialRequest) -> Result<(), Over> {
        let DialRequest { protocol, address, random } = request;
        self.dialled = true;
        let relayed = self.open.len() + self.closing.len();
        let refused = if protocol != "tcp" {
            Some(format!("protocol {:?} is not served here: only tcp is", printable(&protocol, 20)))
        } else if self.dials.contains_key(&random) {
            Some(format!("dial {random} is under way already"))
        } else if relayed >= self.bounds.connections {
            // Go's words for this, which make proxy-server answer 503.
            Some(format!("too many open files: this stream has {relayed} connections"))
        } else {
            None
        };
        if let Some(reason) = refused {
            return self.send(Packet::dial_response(random, Err(reason))).await;
        }
        let connect_id = self.numbers.fetch_add(1, Ordering::Relaxed) + 1;
        let closed = CancellationToken::new();
        let (cut, evicted) = (self.over.child_token(), CancellationToken::new());
        let gone = Gone { cut, closed: closed.clone(), evicted, linger: self.bounds.linger };
        let (inlet, inbox, outbox) = ends(connect_id, self.packets.clone(), closed, self.part.total());
        let stalled = Arc::new(AtomicBool::new(false));
        let task = Connection {
            dialler: self.dialler.clone(),
            packets: self.packets.clone(),
            random,
            connect_id,
            gone: gone.clone(),
            stalled: (stalled.clone(), self.bounds.stalled),
            _ended: Ended(self.ended.0.clone(), connect_id),
        };
        self.open.insert(connect_id, Open { random, inlet, gone, stalled });
        self.dials.insert(random, connect_id);
        tokio::spawn(task.run(address, inbox, outbox));
        Ok(())
    }

    async fn data(&mut self, data: Data) -> Result<(), Over> {
        let Data { connect_id, data, .. } = data;
        if connect_id == 0 {
            tracing::debug!("ignoring data without a connect ID");
            return Ok(());
        }
        let Some(open) = self.open.get(&connect_id) else {
            let error = if self.dialled { "unrecognized connectID" } else { self.bounds.early };
            return self.send(Packet::close_response(connect_id, error.to_owned())).await;
        };
        if open.gone.cut.is_cancelled() {
            // Its end is under way.
            return Ok(());
        }
        open.inlet.push(data);
        let waiting = open.inlet.waiting.clone();
        let Bounds { one, patience, callers_share, .. } = self.bounds;
        let one = one.min(self.part.bytes());
        let deadline = Instant::now() + patience;
        while waiting.bytes() > one {
            let shared = callers_share || self.open.len() > 1;
            tokio::select! {
                biased;
                ended = self.ended.1.recv() => {
                    self.forget(ended);
                    if !self.open.contains_key(&connect_id) {
                        return Ok(());
                    }
                }
                () = self.packets.closed() => return Err(Over),
                () = waiting.at_most(one) => {}
                () = tokio::time::sleep_until(deadline), if shared => {
                    self.cut(connect_id);
                    return Ok(());
                }
            }
        }
        self.keep_to_the_bound_of_all();
        Ok(())
    }

    /// Cuts the connection with the most waiting data if the stream exceeds its part.
    fn keep_to_the_bound_of_all(&self) {
        if !self.part.is_exceeded() {
            return;
        }
        let open = self.open.iter().map(|(id, open)| (*id, &open.inlet.waiting, &open.gone.cut));
        let closing = self.closing.iter().map(|(id, (waiting, gone))| (*id, waiting, &gone.evicted));
        // A connection that must not continue no longer counts: its end is under way.
        let live: Vec<_> = open
            .chain(closing)
            .filter(|(_, _, end)| !end.is_cancelled())
            .map(|(connect_id, waiting, _)| (waiting.bytes(), connect_id))
            .collect();
        if live.iter().map(|(bytes, _)| bytes).sum::<usize>() > self.part.bytes()
            && let Some((_, connect_id)) = live.iter().max()
        {
            self.cut(*connect_id);
        }
    }

    fn cut(&self, connect_id: i64) {
        if let Some(open) = self.open.get(&connect_id) {
            open.stalled.store(true, Ordering::Release);
            open.gone.cut.cancel();
        } else if let Some((_, gone)) = self.closing.get(&connect_id) {
            gone.evicted.cancel();
        }
    }
}

impl<D> Drop for Connections<D> {
    /// Evicts the closed connections if room is scarce, because afterwards nothing could evict them.
    fn drop(&mut self) {
        if self.part.is_scarce() {
            self.closing.values().for_each(|(_, gone)| gone.evicted.cancel());
        }
    }
}

/// Tells the stream that a connection has ended, in any way.
struct Ended(mpsc::UnboundedSender<i64>, i64);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.send(self.1);
    }
}

/// The task of one connection.
struct Connection<D> {
    dialler: Arc<D>,
    packets: Packets,
    random: i64,
    connect_id: i64,
    gone: Gone,
    /// Set if its target stalled, and the message for that case.
    stalled: (Arc<AtomicBool>, &'static str),
    _ended: Ended,
}

impl<D: Dial> Connection<D> {
    async fn run(self, address: String, mut inbox: Inbox, mut outbox: Outbox) {
        let connected = match self.dialler.dial(&address, &self.gone).await {
            Ok(connected) => connected,
            Err(reason) => {
                // A caller that has closed the dial does not wait for an answer.
                if !self.gone.cut.is_cancelled() {
                    self.send(Packet::dial_response(self.random, Err(reason))).await;
                }
                return;
            }
        };
        // Uses the same channel as the data, so it arrives before them.
        self.send(Packet::dial_response(self.random, Ok(self.connect_id))).await;
        let ended = self.dialler.relay(connected, &mut inbox, &mut outbox, &self.gone).await;
        // If it waited for room in the channel, it would get that and not use it: with enough of them nothing could be sent.
        drop(outbox);
        if self.gone.closed.is_cancelled() {
            // The stream has answered the close.
            return;
        }
        let error = match ended {
            Ok(()) => String::new(),
            Err(_) if self.stalled.0.load(Ordering::Acquire) => self.stalled.1.to_owned(),
            Err(reason) => reason,
        };
        self.send(Packet::close_response(self.connect_id, error)).await;
    }

    async fn send(&self, packet: Packet) {
        tokio::select! {
            biased;
            sent = self.packets.send(Ok(packet)) => drop(sent),
            // The caller reads nothing, and has closed the connection.
            () = self.gone.closed.cancelled() => {}
        }
    }
}

#[cfg(test)]
mod tests;
