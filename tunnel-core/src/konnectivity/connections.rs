//! One stream of packets: the connections that are dialled for it, and what becomes of each packet.
//!
//! The protocol has no flow control for one connection. What waits for a target that does not take it is bounded: beyond that the
//! stream is not read any further, for a while, so that its sender waits as it would at a socket. A target that makes no room
//! meanwhile loses its connection, unless nobody else uses the stream: the others are not to wait for it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use futures_util::{Stream, StreamExt as _};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::Status;

use super::packet::Payload;
use super::queue::{Inbox, Inlet, Outbox, Packets, Waiting, ends};
use super::room::{Part, Room};
use super::{CloseDial, CloseRequest, Data, DialRequest, Packet, PacketType};
use crate::text::printable;

/// Makes the connections of a stream.
#[tonic::async_trait]
pub trait Dial: Send + Sync + 'static {
    type Connected: Send + 'static;

    /// Connects to `HOST:PORT`, or says in Go's words why not. Ends early when `gone` does: nobody waits for the answer then.
    async fn dial(&self, address: &str, gone: &Gone) -> Result<Self::Connected, String>;

    /// Carries a connection until both directions have ended, or `gone` ends: then it is reset.
    async fn carry(
        &self,
        connected: Self::Connected,
        inbox: &mut Inbox,
        outbox: &mut Outbox,
        gone: &Gone,
    ) -> Result<(), String>;
}

/// How much one stream may have at a time, and the words for what goes beyond that.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Connections, dials included.
    pub connections: usize,
    /// Bytes of one connection that wait for its target.
    pub one: usize,
    /// How long the stream is not read for one connection's sake, if others use it.
    pub patience: Duration,
    /// Whether several callers share the stream: also while it has one connection, since dials come behind what is not read.
    pub callers_share: bool,
    /// What the end of a connection that has gone beyond that is explained by.
    pub stalled: &'static str,
    /// How long a target may go on after its connection was closed.
    pub linger: Duration,
    /// What DATA is answered before the stream's first dial.
    pub early: &'static str,
}

/// When a connection is over for whoever has asked for it.
#[derive(Clone, Debug)]
pub struct Gone {
    /// At once.
    cut: CancellationToken,
    /// It was closed.
    closed: CancellationToken,
    /// Although it was closed it may not go on.
    evicted: CancellationToken,
    linger: Duration,
}

impl Gone {
    /// Ends when the connection has to: at once, or a while after it was closed.
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

    /// Ends once nobody waits for a dial.
    pub async fn cut(&self) {
        self.cut.cancelled().await;
    }
}

/// A connection of the stream, from its dial on.
#[derive(Debug)]
struct Open {
    /// The dial's number.
    random: i64,
    inlet: Inlet,
    gone: Gone,
    stalled: Arc<AtomicBool>,
}

/// One stream's connections by their numbers.
#[derive(Debug)]
pub struct Connections<D> {
    dialler: Arc<D>,
    bounds: Bounds,
    packets: Packets,
    open: HashMap<i64, Open>,
    /// Those that were closed, while they send what waits.
    closing: HashMap<i64, (Arc<Waiting>, Gone)>,
    /// The connections by the numbers of their dials.
    dials: HashMap<i64, i64>,
    /// The last number that was given.
    numbers: Arc<AtomicI64>,
    /// Whether there was a dial.
    dialled: bool,
    /// What may wait for all targets, those of closed connections included.
    part: Part,
    ended: (mpsc::UnboundedSender<i64>, mpsc::UnboundedReceiver<i64>),
    /// Cancelled when the stream ends.
    over: CancellationToken,
    _over: DropGuard,
}

/// The stream has ended.
struct Over;

impl<D: Dial> Connections<D> {
    /// Connections are numbered from after `numbers` on, which streams share whose other end does not tell them apart. `room`:
    /// what may wait for the targets of all streams that share it.
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

    /// Serves the stream to its end, which ends its connections, except those that were closed before.
    ///
    /// # Errors
    /// What the stream failed with.
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
                // Also one that is up: the answer may have crossed this packet, and nobody knows its number then.
                if let Some(open) = self.dials.get(&random).and_then(|connect_id| self.open.get(connect_id)) {
                    open.gone.cut.cancel();
                }
                Ok(())
            }
            (PacketType::Data, Some(Payload::Data(data))) => self.data(data).await,
            (PacketType::CloseReq, Some(Payload::CloseRequest(CloseRequest { connect_id }))) => {
                let error = match self.open.remove(&connect_id) {
                    // Its task sends what waits, and ends with its target, or after a while.
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
                tracing::debug!(?kind, "a packet of a kind that is not sent here was ignored");
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
        let carried = self.open.len() + self.closing.len();
        let refused = if protocol != "tcp" {
            Some(format!("protocol {:?} is not served here: only tcp is", printable(&protocol, 20)))
        } else if self.dials.contains_key(&random) {
            Some(format!("dial {random} is under way already"))
        } else if carried >= self.bounds.connections {
            // Go's words for it, which have proxy-server answer 503.
            Some(format!("too many open files: this stream has {carried} connections"))
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
            tracing::debug!("data without a connection's number was ignored");
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

    /// The connection with the most pays.
    fn keep_to_the_bound_of_all(&self) {
        if !self.part.is_exceeded() {
            return;
        }
        let open = self.open.iter().map(|(id, open)| (*id, &open.inlet.waiting, &open.gone.cut));
        let closing = self.closing.iter().map(|(id, (waiting, gone))| (*id, waiting, &gone.evicted));
        // One that is not to go on is not counted again: its end is under way.
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
    /// Nobody could have those that were closed pay later.
    fn drop(&mut self) {
        if self.part.is_scarce() {
            self.closing.values().for_each(|(_, gone)| gone.evicted.cancel());
        }
    }
}

/// Tells the stream that a connection has ended, however it did.
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
    /// Whether its target did, and what is said then.
    stalled: (Arc<AtomicBool>, &'static str),
    _ended: Ended,
}

impl<D: Dial> Connection<D> {
    async fn run(self, address: String, mut inbox: Inbox, mut outbox: Outbox) {
        let connected = match self.dialler.dial(&address, &self.gone).await {
            Ok(connected) => connected,
            Err(reason) => {
                // Who has closed the dial does not wait for an answer.
                if !self.gone.cut.is_cancelled() {
                    self.send(Packet::dial_response(self.random, Err(reason))).await;
                }
                return;
            }
        };
        // Through the same channel as the data, and so before them.
        self.send(Packet::dial_response(self.random, Ok(self.connect_id))).await;
        let ended = self.dialler.carry(connected, &mut inbox, &mut outbox, &self.gone).await;
        if self.gone.closed.is_cancelled() {
            // The stream has answered that.
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
            // Its caller reads nothing, and has closed it.
            () = self.gone.closed.cancelled() => {}
        }
    }
}

#[cfg(test)]
mod tests;
