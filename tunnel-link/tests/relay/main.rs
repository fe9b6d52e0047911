//! Tests the relay between real sockets over a real HTTP/2 connection (in memory): the data that arrives, and how it
//! ends.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop where it is")]

mod clients;
mod ends;
mod pipes;
mod stalls;
mod support;
mod windows;
