//! The other servers: which nodes they have, and a link with each, over which connections are passed to them.
//!
//! Every server dials every other one. What they tell each other may be late or lost: a server that is asked for a node
//! that it does not have any more says so, and another one is asked.

mod dial;
mod held;
mod metrics;
mod peer;
mod refusals;

pub use dial::{PeerContext, RedirectorLinks, follow};
pub use held::Peers;
pub use metrics::register_peers;
pub(crate) use peer::OnPeer;
pub use peer::Peer;
pub use refusals::Refusals;
