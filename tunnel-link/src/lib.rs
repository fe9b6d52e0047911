//! The link between agent and server: the protocol, the HTTP/2 streams of one TCP connection, and the relay of
//! connections' bytes through them. Also konnectivity's packets, which are relayed to the same streams.
#![forbid(unsafe_code)]

pub mod bench;
pub mod connections;
pub mod grpc;
pub mod konnectivity;
pub mod link;
pub mod outcome;
pub mod proto;
pub mod relay;
mod tcp_info;
