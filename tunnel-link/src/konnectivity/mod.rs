//! Protocol of Kubernetes' apiserver-network-proxy (konnectivity): its messages, generated from `proto/` and checked
//! in (a test compares), and code shared by the two ends that dial for others: the server's egress listener and the
//! agent.

#![expect(clippy::allow_attributes_without_reason, reason = "generated code")]

mod connections;
mod metadata;
mod queue;
mod room;
mod words;

use bytes::Bytes;

include!("../proto/konnectivity_generated.rs");

use packet::Payload;

pub use connections::{Bounds, Connections, Dial, Gone};
pub use metadata::single;
pub use queue::{Inbox, Outbox, Packets, cost};
pub use room::Room;
pub use words::in_words_of_go;

/// Maximum size of a message from clients written in Go, in bytes.
pub const LARGEST_MESSAGE: usize = 4 << 20;

impl Packet {
    fn new(r#type: PacketType, payload: Payload) -> Self {
        Self { r#type: r#type.into(), payload: Some(payload) }
    }

    pub fn dial_request(address: String, random: i64) -> Self {
        let request = DialRequest { protocol: "tcp".to_owned(), address, random };
        Self::new(PacketType::DialReq, Payload::DialRequest(request))
    }

    /// `connected`: the connection's number, or the reason for having none.
    pub fn dial_response(random: i64, connected: Result<i64, String>) -> Self {
        let (connect_id, error) = match connected {
            Ok(connect_id) => (connect_id, String::new()),
            Err(error) => (0, error),
        };
        Self::new(PacketType::DialRsp, Payload::DialResponse(DialResponse { error, connect_id, random }))
    }

    pub fn data(connect_id: i64, data: Bytes) -> Self {
        Self::new(PacketType::Data, Payload::Data(Data { connect_id, error: String::new(), data }))
    }

    pub fn close_request(connect_id: i64) -> Self {
        Self::new(PacketType::CloseReq, Payload::CloseRequest(CloseRequest { connect_id }))
    }

    pub fn close_response(connect_id: i64, error: String) -> Self {
        Self::new(PacketType::CloseRsp, Payload::CloseResponse(CloseResponse { error, connect_id }))
    }

    pub fn close_dial(random: i64) -> Self {
        Self::new(PacketType::DialCls, Payload::CloseDial(CloseDial { random }))
    }

    pub fn drain() -> Self {
        Self::new(PacketType::Drain, Payload::Drain(Drain {}))
    }
}
