//! State shared by an agent's stream and its session's link.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{SetOnce, mpsc};
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};
use tunnel_link::konnectivity::{Packet, PacketType, Packets};
use tunnel_link::proto::{AgentEvent, Hello, agent_event};

use super::connections::AgentConnections;

/// Time without connections before an agent is sent to another server.
const QUIET: Duration = Duration::from_millis(100);
/// Time for the session to end after that, unless a connection was opened meanwhile.
const CLOSE: Duration = Duration::from_secs(5);

type Events = mpsc::Receiver<Result<AgentEvent, Status>>;

#[derive(Debug)]
pub(super) struct Agent {
    pub(super) connections: AgentConnections,
    /// None once the session should end.
    events: Mutex<Option<mpsc::Sender<Result<AgentEvent, Status>>>>,
    /// None once the session has taken it.
    pub(super) event_stream: Mutex<Option<Events>>,
    leaving: CancellationToken,
    pub(super) refused: SetOnce<Status>,
}

impl Agent {
    pub(super) fn new(hello: Hello, packets: Packets) -> Self {
        let (events, event_stream) = mpsc::channel(1);
        // The channel is new and has room.
        let _ = events.try_send(Ok(AgentEvent { event: Some(agent_event::Event::Hello(hello)) }));
        Self {
            connections: AgentConnections::new(packets),
            events: Mutex::new(Some(events)),
            event_stream: Mutex::new(Some(event_stream)),
            leaving: CancellationToken::new(),
            refused: SetOnce::new(),
        }
    }

    /// Ends the session once it has no connections.
    pub(super) fn leave(&self) {
        self.leaving.cancel();
    }

    /// Ends the agent's stream with this status.
    pub(super) fn refuse(&self, status: Status) {
        // Only the first reason is kept.
        let _ = self.refused.set(status);
    }

    /// Waits until the agent should leave and has no connections, then has the session end.
    pub(super) async fn left(&self) {
        self.leaving.cancelled().await;
        let mut tick = tokio::time::interval(QUIET / 4);
        let mut quiet = 0;
        while quiet < 4 {
            tick.tick().await;
            quiet = if self.connections.is_empty() { quiet + 1 } else { 0 };
        }
        self.events.lock().take();
        tokio::time::sleep(CLOSE).await;
        // Opened while the session ended.
        while !self.connections.is_empty() {
            tick.tick().await;
        }
    }

    /// Handles the agent's packets until its stream ends.
    pub(super) async fn read(&self, mut packets: Streaming<Packet>) -> Result<(), Status> {
        loop {
            let packet = tokio::select! {
                packet = packets.message() => packet?,
                () = self.connections.ended() => return Ok(()),
            };
            let Some(packet) = packet else { return Ok(()) };
            if packet.r#type() == PacketType::Drain {
                // The node has no other agent to prefer; the next one takes over.
                tracing::info!("konnectivity agent is draining");
            } else {
                self.connections.take(packet).await;
            }
        }
    }
}
