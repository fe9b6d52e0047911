//! Which of the servers writes.

pub mod writer;
