//! One stream of packets with a caller: the connections that it dials, and what becomes of each packet.
//!
//! What waits for a target that does not take it is bounded. A stream with one connection, which is all that kube-apiserver
//! has, is then not read any further, so that its caller waits as it would at a socket. Of a stream with several the
//! connection is closed, since the others are not to wait for it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::{Stream, StreamExt as _};
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::Status;
use tunnel_core::konnectivity::packet::Payload;
use tunnel_core::konnectivity::{CloseDial, CloseRequest, Data, DialRequest, Packet, PacketType};
use tunnel_core::text::printable;

use super::dial::{Caller, Dialler};
use super::halves::LINGER;
use super::queue::{Inbox, Inlet, Outbox, Packets, ends};

/// Bytes of one connection that may wait for its target.
pub(super) const WAITING: usize = 1 << 20;
const STALLED: &str = "its target took nothing of 1 MiB that waited for it, and other connections of this stream were not to wait too";

/// A connection of the stream, from its dial on.
struct Open {
    /// The dial's number.
    random: i64,
    inlet: Inlet,
    /// Ends it at once.
    cut: CancellationToken,
    /// Once the caller has closed it.
    closed: CancellationToken,
    stalled: Arc<AtomicBool>,
}

/// One stream's connections by their numbers.
pub(super) struct Connections {
    dialler: Arc<Dialler>,
    caller: Caller,
    packets: Packets,
    open: HashMap<i64, Open>,
    /// The connections by the numbers of their dials.
    dials: HashMap<i64, i64>,
    /// The last number that was given.
    last: i64,
    ended: (mpsc::UnboundedSender<i64>, mpsc::UnboundedReceiver<i64>),
    /// Cancelled when the stream ends.
    over: CancellationToken,
    _over: DropGuard,
}

/// The stream has ended.
struct Over;

impl Connections {
    pub(super) fn new(dialler: Arc<Dialler>, caller: Caller, packets: Packets) -> Self {
        let over = CancellationToken::new();
        Self {
            dialler,
            caller,
            packets,
            open: HashMap::new(),
            dials: HashMap::new(),
            last: 0,
            ended: mpsc::unbounded_channel(),
            _over: over.clone().drop_guard(),
            over,
        }
    }

    /// Serves the stream to its end, which ends its connections, except those that the caller has closed itself.
    pub(super) async fn serve(mut self, mut stream: impl Stream<Item = Result<Packet, Status>> + Unpin) {
        loop {
            let packet = tokio::select! {
                biased;
                ended = self.ended.1.recv() => {
                    self.forget(ended);
                    continue;
                }
                () = self.packets.closed() => return,
                packet = stream.next() => packet,
            };
            let Some(Ok(packet)) = packet else { return };
            if self.take(packet).await.is_err() {
                return;
            }
        }
    }

    fn forget(&mut self, ended: Option<i64>) {
        if let Some(open) = ended.and_then(|connect_id| self.open.remove(&connect_id)) {
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
                    open.cut.cancel();
                }
                Ok(())
            }
            (PacketType::Data, Some(Payload::Data(data))) => self.data(data).await,
            (PacketType::CloseReq, Some(Payload::CloseRequest(CloseRequest { connect_id }))) => {
                let error = match self.open.remove(&connect_id) {
                    // Its task sends what waits, and ends with its target, or after a while.
                    Some(open) => {
                        self.dials.remove(&open.random);
                        open.closed.cancel();
                        ""
                    }
                    None => "Unknown connectID",
                };
                self.send(Packet::close_response(connect_id, error.to_owned())).await
            }
            _ => {
                tracing::debug!(?kind, "a packet that callers do not send was ignored");
                Ok(())
            }
        }
    }

    async fn send(&self, packet: Packet) -> Result<(), Over> {
        self.packets.send(Ok(packet)).await.map_err(|_| Over)
    }

    async fn dial(&mut self, request: DialRequest) -> Result<(), Over> {
        let DialRequest { protocol, address, random } = request;
        let refused = if protocol != "tcp" {
            Some(format!("protocol {:?} is not served here: only tcp is", printable(&protocol, 20)))
        } else if self.dials.contains_key(&random) {
            Some(format!("dial {random} is under way already"))
        } else {
            None
        };
        if let Some(reason) = refused {
            return self.send(Packet::dial_response(random, Err(reason))).await;
        }
        self.last += 1;
        let connect_id = self.last;
        let (cut, closed) = (self.over.child_token(), CancellationToken::new());
        let (inlet, inbox, outbox) = ends(connect_id, self.packets.clone(), closed.clone());
        let stalled = Arc::new(AtomicBool::new(false));
        let task = Connection {
            dialler: self.dialler.clone(),
            caller: self.caller.clone(),
            packets: self.packets.clone(),
            random,
            connect_id,
            cut: cut.clone(),
            closed: closed.clone(),
            stalled: stalled.clone(),
            _ended: Ended(self.ended.0.clone(), connect_id),
        };
        self.open.insert(connect_id, Open { random, inlet, cut, closed, stalled });
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
            let error = if self.last == 0 { "backend not initialized" } else { "unrecognized connectID" };
            return self.send(Packet::close_response(connect_id, error.to_owned())).await;
        };
        open.inlet.push(data);
        if open.inlet.waiting.bytes() <= WAITING {
            return Ok(());
        }
        if self.open.len() > 1 {
            open.stalled.store(true, Ordering::Release);
            open.cut.cancel();
            return Ok(());
        }
        let waiting = open.inlet.waiting.clone();
        loop {
            tokio::select! {
                biased;
                ended = self.ended.1.recv() => {
                    self.forget(ended);
                    if self.open.is_empty() {
                        return Ok(());
                    }
                }
                () = self.packets.closed() => return Err(Over),
                () = waiting.at_most(WAITING) => return Ok(()),
            }
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
struct Connection {
    dialler: Arc<Dialler>,
    caller: Caller,
    packets: Packets,
    random: i64,
    connect_id: i64,
    cut: CancellationToken,
    closed: CancellationToken,
    stalled: Arc<AtomicBool>,
    _ended: Ended,
}

impl Connection {
    async fn run(self, address: String, mut inbox: Inbox, mut outbox: Outbox) {
        let connected = match self.dialler.dial(&address, &self.caller, self.cut.cancelled()).await {
            Ok(connected) => connected,
            Err(failed) => {
                // Who has closed the dial does not wait for an answer.
                if !self.cut.is_cancelled() {
                    self.send(Packet::dial_response(self.random, Err(failed.in_words_of_go()))).await;
                }
                return;
            }
        };
        // Through the same channel as the data, and so before them.
        self.send(Packet::dial_response(self.random, Ok(self.connect_id))).await;
        let gone = async {
            tokio::select! {
                biased;
                () = self.closed.cancelled() => tokio::time::sleep(LINGER).await,
                () = self.cut.cancelled() => {}
            }
        };
        let ended = connected.run(&mut inbox, &mut outbox, gone).await;
        if self.closed.is_cancelled() {
            // The stream has answered that.
            return;
        }
        let error = match ended {
            Ok(()) => String::new(),
            Err(_) if self.stalled.load(Ordering::Acquire) => STALLED.to_owned(),
            Err(failed) => failed.in_words_of_go(),
        };
        self.send(Packet::close_response(self.connect_id, error)).await;
    }

    async fn send(&self, packet: Packet) {
        tokio::select! {
            biased;
            sent = self.packets.send(Ok(packet)) => drop(sent),
            // Its caller reads nothing, and has closed it.
            () = self.closed.cancelled() => {}
        }
    }
}
