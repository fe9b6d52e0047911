//! A second agent with the same state directory on the same node takes over from the first, without a gap.
//!
//! The second connects to the first one's Unix socket (`tunnel_core::takeover`) and gets the admin port and the listeners that
//! lead to the cloud, from which the first one goes on accepting. Then:
//!
//! 1. It attaches to the servers and says in its Hello that it succeeds: the servers give it the node's place, and leave the
//!    first one's sessions what they carry. It tells the first one where it is attached, which dials there no more.
//! 2. Once it is attached wherever the first one was, or no more servers come, it has taken over.
//! 3. The first one finishes what it carries, and accepts nothing more. Then it ends; as a pod it waits to be stopped, because
//!    the kubelet would start it again, and goes on as before should the second one die.

mod message;
mod predecessor;
mod successor;

pub(crate) use predecessor::{Predecessor, take_over};
pub(crate) use successor::Succession;
