//! Shared by the targets that drive a state machine instead of a parser.

mod direction;
pub mod ends;
pub mod frames;
pub mod memory;
pub mod stranger;
