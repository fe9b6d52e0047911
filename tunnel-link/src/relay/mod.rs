//! Relaying of TCP connections: segments, the relay between a socket and an HTTP/2 stream, and the limit on the bytes
//! held for receivers that do not read.

mod copy;
mod error;
mod forward;
mod frame;
mod inward;
mod metrics;
mod outward;
mod parameters;
mod pipe;
mod pump;
mod quiet;
mod socket;
mod stall;
mod tcp;
mod traffic;

pub use copy::{Copying, copy, copy_halves};
pub use error::{RelayError, Side};
pub use forward::{Ended, Forward};
pub use frame::{Deframer, FrameError, HEADER_LEN, MAX_DATA, header};
pub use metrics::register_stalled;
pub use outward::{SMALL_READ, next_size, status};
pub use parameters::Relay;
pub use pipe::{Pipe, PipeEnd, PipeStatus, TunnelStream, pipe, pipe_of_client};
pub use quiet::{ENDING, Relaying, end_quiet};
pub use socket::{
    connect_target, end_on_drop, flushed, listen, listen_on, lost, prepare_socket, reset_on_drop, tune_socket,
};
pub use stall::{Abort, StallBound, StallBudget, StallTicket};
pub use traffic::{Totals, Traffic, Waiting};

/// The path of the Relay method (gRPC over HTTP/2: `/package.Service/Method`).
pub const RELAY_PATH: &str = "/postern.tunnel.v1.Agent/Relay";
/// Path of Relay on a server whose policy allows a workload on an edge node to reach a target.
pub const EDGE_RELAY_PATH: &str = "/postern.tunnel.v1.Edge/Relay";
/// Path of Relay on a server that forwards to a node.
pub const PEER_RELAY_PATH: &str = "/postern.tunnel.v1.Peer/Relay";
/// Request metadata to a forwarding server: the node.
pub const NODE_HEADER: &str = "postern-node";
/// Request metadata to a forwarding server: the client's `IP:port`, for the log.
pub const CLIENT_HEADER: &str = "postern-client";
/// Request metadata to a forwarding server: refuse with `UNAVAILABLE` while its own link to the node is silent.
/// Without this it asks the agent even then.
pub const UNLESS_SILENT_HEADER: &str = "postern-unless-silent";
/// Request metadata: the target, `IP:port`, IPv6 in brackets.
pub const TARGET_HEADER: &str = "postern-target";
/// Request metadata to an agent, with any value: the Node object names the target's address. An agent that has the
/// address on no interface connects to its own host instead of another machine.
pub const OF_NODE_HEADER: &str = "postern-of-node";

/// gRPC's status, in the trailers of a stream.
const GRPC_STATUS: http::HeaderName = http::HeaderName::from_static("grpc-status");
/// Status of a stream whose target reset the connection: ABORTED. It follows everything that the target had sent,
/// which RST_STREAM would discard.
pub const TARGET_RESET: &str = "10";
