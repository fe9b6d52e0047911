//! Shared by the targets that drive a state machine instead of a parser.

pub mod memory;
pub mod stranger;
