//! The link between an agent and a server: its settings, and whether it is alive. The agent dials; the server is the
//! HTTP/2 client.

mod error;
mod liveness;
mod settings;

pub use error::{LinkDead, reason};
pub use liveness::{Rtt, keep_alive};
pub use settings::*;
