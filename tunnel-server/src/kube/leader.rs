//! Which of the servers writes.
