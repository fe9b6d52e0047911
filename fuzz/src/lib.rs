//! Shared by the targets that drive a state machine instead of a parser.

pub mod adversary;
mod direction;
pub mod ends;
pub mod frames;
pub mod memory;
