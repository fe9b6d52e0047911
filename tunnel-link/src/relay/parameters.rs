//! Parameters of a relay. Apart from its directions, which all use them.

use std::sync::Arc;

use super::error::Side;
use super::stall::{Abort, StallBound};
use super::traffic::Traffic;
use crate::link::Flow;

/// Parameters for relaying a connection, besides its client and its stream.
#[derive(Debug)]
pub struct Relay<'a> {
    /// The end of the tunnel that this is.
    pub side: Side,
    /// Path estimates of the link.
    pub flow: &'a Flow,
    /// The link's limit on receivers that do not read.
    pub stalls: &'a StallBound,
    /// Ends this connection from outside.
    pub abort: &'a Arc<Abort>,
    /// Counts the bytes.
    pub traffic: &'a Traffic,
}
