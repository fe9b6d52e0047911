//! The other servers: their nodes, and a link with each of them over which connections are forwarded.
//!
//! Every server dials every other one. Their information may be late or lost: a server asked for a node that it no
//! longer has reports that, and another one is asked.

mod dial;
mod nodes;
mod peer;
mod trust;

pub use dial::{PeerContext, RedirectorLinks, follow};
pub use nodes::Peers;
pub(crate) use peer::OnPeer;
pub use peer::Peer;
pub use trust::Trust;
