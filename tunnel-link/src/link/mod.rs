//! The link between an agent and a server: its settings, how it follows its path, and whether it is alive. The agent
//! dials; the server is the HTTP/2 client.

mod ahead;
mod congestion;
mod error;
mod flow;
mod http2;
mod io;
mod limits;
mod liveness;
mod multipath;
mod retransmission;
mod rtt;
mod settings;
mod wire;

pub use congestion::Congestion;
pub use error::{LinkDead, reason};
pub use flow::Flow;
pub(crate) use flow::{Bulk, Taken};
pub use http2::{Accepted, accept, drive};
pub use io::LinkIo;
pub use limits::{Limits, limited_by};
pub use liveness::{keep_alive, keep_alive_of_server};
pub use multipath::multipath_socket;
pub use rtt::Rtt;
pub(crate) use settings::SEND_BUFFER;
pub use settings::*;
pub use wire::{Line, Wire};

pub use crate::tcp_info::{Delivery, SendTimes, Silence, Unacknowledged};
