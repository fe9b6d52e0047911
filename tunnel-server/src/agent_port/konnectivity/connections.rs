//! The dials and connections of one agent's stream, and the handling of its packets.
//!
//! This protocol has no flow control for a single connection. Data that waits for a client is bounded: beyond that the
//! stream is not read for a while. A client that takes nothing in that time loses its connection, as the others must
//! not wait longer, unless it has the only one and no other is being dialled.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tonic::Status;
use tunnel_link::konnectivity::packet::Payload;
use tunnel_link::konnectivity::{CloseResponse, Data, DialResponse, Packet, Packets, cost};

/// Maximum number of bytes of one connection that wait for its client.
const WAITING: u32 = 4 << 20;
/// Maximum time that one client keeps the stream from being read, if others use it or want to.
const STALL: Duration = Duration::from_secs(2);
/// Maximum number of connection ends that wait for the agent to read. An agent with more is not told of them.
const MOST_CUTS: usize = 1024;
const STALLED: &str =
    "its client took nothing of the 4 MiB that waited for it, and others use the same agent";

/// Received from an agent for a connection.
#[derive(Debug)]
pub(super) enum Arrived {
    /// Dropping the permit makes room for more.
    Data(Bytes, OwnedSemaphorePermit),
    /// The target has ended, or failed with this error.
    Closed(String),
}

/// A connection that the agent has opened.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) connect_id: i64,
    pub(super) arrived: mpsc::UnboundedReceiver<Arrived>,
    pub(super) room: Room,
}

/// Space for the data of one connection that waits for its client.
#[derive(Clone, Debug)]
pub(super) struct Room(Arc<Semaphore>);

impl Room {
    fn new() -> Self {
        Self(Arc::new(Semaphore::new(WAITING as usize)))
    }

    /// True if the client has taken everything that has arrived.
    pub(super) fn is_empty(&self) -> bool {
        self.0.available_permits() == WAITING as usize
    }
}

#[derive(Clone, Debug)]
struct Inlet {
    sender: mpsc::UnboundedSender<Arrived>,
    room: Room,
}

#[derive(Debug, Default)]
struct Tables {
    dials: HashMap<i64, oneshot::Sender<Result<Opened, String>>>,
    open: HashMap<i64, Inlet>,
}

/// Dials and connections of one stream.
#[derive(Debug)]
pub(super) struct AgentConnections {
    tables: Mutex<Tables>,
    last_dial: AtomicI64,
    packets: Packets,
    cuts: Arc<Semaphore>,
}

impl AgentConnections {
    pub(super) fn new(packets: Packets) -> Self {
        let cuts = Arc::new(Semaphore::new(MOST_CUTS));
        Self { tables: Mutex::default(), last_dial: AtomicI64::new(0), packets, cuts }
    }

    /// Sends a packet to the agent.
    ///
    /// # Errors
    /// The agent's stream has ended.
    pub(super) async fn send(&self, packet: Packet) -> Result<(), Status> {
        self.packets.send(Ok(packet)).await.map_err(|_| Status::unavailable("the agent is gone"))
    }

    /// Returns once the agent's stream has ended.
    pub(super) async fn ended(&self) {
        self.packets.closed().await;
    }

    /// Registers a new dial; returns its number and the receiver of its answer.
    pub(super) fn dial(&self) -> (i64, oneshot::Receiver<Result<Opened, String>>) {
        let (sender, answer) = oneshot::channel();
        let random = self.last_dial.fetch_add(1, Ordering::Relaxed) + 1;
        self.tables.lock().dials.insert(random, sender);
        (random, answer)
    }

    /// Gives up a dial whose answer nobody waits for. The agent is told if it can take a packet now; otherwise its
    /// answer ends the connection.
    pub(super) fn give_up(&self, random: i64) {
        self.tables.lock().dials.remove(&random);
        let _ = self.packets.try_send(Ok(Packet::close_dial(random)));
    }

    /// Closes a connection, unless the agent already has.
    pub(super) async fn close(&self, connect_id: i64) {
        let open = self.tables.lock().open.remove(&connect_id);
        if open.is_some() {
            let _ = self.send(Packet::close_request(connect_id)).await;
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        let tables = self.tables.lock();
        tables.open.is_empty() && tables.dials.is_empty()
    }

    /// Handles a packet from the agent.
    pub(super) async fn take(&self, packet: Packet) {
        match packet.payload {
            Some(Payload::DialResponse(answer)) => self.dialled(answer),
            Some(Payload::Data(data)) => self.data(data).await,
            Some(Payload::CloseResponse(CloseResponse { error, connect_id })) => {
                if let Some(inlet) = self.tables.lock().open.remove(&connect_id) {
                    let _ = inlet.sender.send(Arrived::Closed(error));
                }
            }
            other => tracing::debug!(packet = ?other, "ignoring a packet of an unexpected kind"),
        }
    }

    fn dialled(&self, DialResponse { error, connect_id, random }: DialResponse) {
        let asker = self.tables.lock().dials.remove(&random);
        if !error.is_empty() {
            if let Some(asker) = asker {
                let _ = asker.send(Err(error));
            }
            return;
        }
        // Registered before anyone is told, as the target's first bytes follow immediately.
        let (sender, arrived) = mpsc::unbounded_channel();
        let room = Room::new();
        self.tables.lock().open.insert(connect_id, Inlet { sender, room: room.clone() });
        let told = asker.map(|asker| asker.send(Ok(Opened { connect_id, arrived, room })));
        if !matches!(told, Some(Ok(()))) {
            self.cut(connect_id);
        }
    }

    async fn data(&self, Data { connect_id, data, .. }: Data) {
        let inlet = self.tables.lock().open.get(&connect_id).cloned();
        // Data may still arrive for a closed connection.
        let Some(inlet) = inlet.filter(|_| !data.is_empty()) else { return };
        let cost = u32::try_from(cost(&data)).unwrap_or(WAITING).min(WAITING);
        match self.room(&inlet, cost).await {
            Some(permit) => {
                let _ = inlet.sender.send(Arrived::Data(data, permit));
            }
            None => {
                let _ = inlet.sender.send(Arrived::Closed(STALLED.to_owned()));
                self.cut(connect_id);
            }
        }
    }

    /// Waits for room. Returns None if the client takes too long or is gone.
    async fn room(&self, inlet: &Inlet, cost: u32) -> Option<OwnedSemaphorePermit> {
        loop {
            let room = inlet.room.0.clone().acquire_many_owned(cost);
            tokio::select! {
                biased;
                room = tokio::time::timeout(STALL, room) => match room {
                    Ok(permit) => return permit.ok(),
                    Err(_) if self.is_shared() => return None,
                    Err(_) => {}
                },
                () = inlet.sender.closed() => return None,
            }
        }
    }

    /// Reports whether more than one connection is open or being dialled: the answer to a dial is behind the unread
    /// data.
    fn is_shared(&self) -> bool {
        let tables = self.tables.lock();
        tables.open.len() + tables.dials.len() > 1
    }

    /// Ends a connection without waiting for the agent to take the packet.
    fn cut(&self, connect_id: i64) {
        let open = self.tables.lock().open.remove(&connect_id);
        // An agent can answer dials that nobody made at any rate, and read nothing.
        if open.is_some()
            && let Ok(cut) = self.cuts.clone().try_acquire_owned()
        {
            let packets = self.packets.clone();
            tokio::spawn(async move {
                let _ = packets.send(Ok(Packet::close_request(connect_id))).await;
                drop(cut);
            });
        }
    }
}

#[cfg(test)]
mod model_tests;

#[cfg(test)]
mod tests {
    use tokio::time::{Instant, timeout};

    use super::*;

    type Sent = mpsc::Receiver<Result<Packet, Status>>;

    fn connections() -> (AgentConnections, Sent) {
        let (packets, sent) = mpsc::channel(8);
        (AgentConnections::new(packets), sent)
    }

    async fn open(connections: &AgentConnections, connect_id: i64) -> Opened {
        let (random, answer) = connections.dial();
        connections.take(Packet::dial_response(random, Ok(connect_id))).await;
        answer.await.unwrap().unwrap()
    }

    async fn closed(sent: &mut Sent) -> i64 {
        match sent.recv().await.unwrap().unwrap().payload {
            Some(Payload::CloseRequest(request)) => request.connect_id,
            other => panic!("{other:?} instead of CLOSE_REQ"),
        }
    }

    #[tokio::test]
    async fn what_comes_right_behind_an_answer_is_kept() {
        let (connections, mut sent) = connections();
        let (random, answer) = connections.dial();
        connections.take(Packet::dial_response(random, Ok(1))).await;
        connections.take(Packet::data(1, Bytes::from_static(b"banner"))).await;
        connections.take(Packet::close_response(1, String::new())).await;
        let mut opened = answer.await.unwrap().unwrap();
        assert!(matches!(opened.arrived.recv().await, Some(Arrived::Data(data, _)) if data == "banner"));
        assert!(matches!(opened.arrived.recv().await, Some(Arrived::Closed(error)) if error.is_empty()));
        assert!(connections.is_empty());
        // Given up meanwhile.
        let (random, answer) = connections.dial();
        drop(answer);
        connections.take(Packet::dial_response(random, Ok(2))).await;
        assert_eq!(closed(&mut sent).await, 2);
        let (random, answer) = connections.dial();
        connections.give_up(random);
        let told = sent.recv().await.unwrap().unwrap().payload;
        assert!(matches!(told, Some(Payload::CloseDial(dial)) if dial.random == random));
        connections.take(Packet::dial_response(random, Ok(3))).await;
        assert_eq!(closed(&mut sent).await, 3);
        assert!(answer.await.is_err() && connections.is_empty());
        let (random, answer) = connections.dial();
        connections.take(Packet::dial_response(random, Err("connection refused".to_owned()))).await;
        assert_eq!(answer.await.unwrap().unwrap_err(), "connection refused");
    }

    #[tokio::test]
    async fn an_agent_that_answers_what_nobody_asked_and_reads_nothing_holds_little() {
        let (connections, sent) = connections();
        for connect_id in 0..10 * MOST_CUTS as i64 {
            connections.take(Packet::dial_response(0, Ok(connect_id))).await;
        }
        assert!(connections.is_empty());
        assert_eq!(connections.cuts.available_permits(), 0);
        // Nothing waits once the agent is gone.
        drop(sent);
        let _all = connections.cuts.acquire_many(u32::try_from(MOST_CUTS).unwrap()).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_takes_nothing_is_cut_off_for_the_sake_of_others() {
        let (connections, mut sent) = connections();
        let mut stalled = open(&connections, 1).await;
        let piece = Bytes::from(vec![0; 1 << 20]);
        for _ in 0..4 {
            connections.take(Packet::data(1, piece.clone())).await;
        }
        let more = || connections.take(Packet::data(1, piece.clone()));
        // A single client makes the agent wait.
        assert!(timeout(STALL * 10, more()).await.is_err());
        let mut other = open(&connections, 2).await;
        // A client that takes a piece gets the next one.
        assert!(matches!(stalled.arrived.recv().await, Some(Arrived::Data(..))));
        more().await;
        let started = Instant::now();
        more().await;
        assert_eq!(started.elapsed(), STALL);
        assert_eq!(closed(&mut sent).await, 1);
        for _ in 0..4 {
            assert!(matches!(stalled.arrived.recv().await, Some(Arrived::Data(..))));
        }
        assert!(matches!(stalled.arrived.recv().await, Some(Arrived::Closed(error)) if error == STALLED));
        connections.take(Packet::data(2, Bytes::from_static(b"goes on"))).await;
        assert!(matches!(other.arrived.recv().await, Some(Arrived::Data(data, _)) if data == "goes on"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_takes_nothing_does_not_keep_others_from_connecting() {
        let (connections, mut sent) = connections();
        let _stalled = open(&connections, 1).await;
        let piece = Bytes::from(vec![0; 1 << 20]);
        for _ in 0..4 {
            connections.take(Packet::data(1, piece.clone())).await;
        }
        // The answer comes after this data.
        let (random, answer) = connections.dial();
        let started = Instant::now();
        connections.take(Packet::data(1, piece)).await;
        assert_eq!(started.elapsed(), STALL);
        assert_eq!(closed(&mut sent).await, 1);
        connections.take(Packet::dial_response(random, Ok(2))).await;
        assert_eq!(answer.await.unwrap().unwrap().connect_id, 2);
    }

    #[tokio::test(start_paused = true)]
    async fn short_pieces_count_as_the_memory_that_they_take() {
        let (connections, _sent) = connections();
        let _stalled = open(&connections, 1).await;
        let take = |data: &'static [u8]| connections.take(Packet::data(1, Bytes::from_static(data)));
        let least = u32::try_from(cost(&Bytes::new())).unwrap();
        for _ in 0..WAITING / least {
            take(b"").await;
            take(b"x").await;
        }
        // Empty data is not kept, and so needs no room.
        take(b"").await;
        assert!(timeout(STALL * 10, take(b"x")).await.is_err());
    }
}
