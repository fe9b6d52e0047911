//! Memory that the code under test holds.

use std::alloc::System;

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Returns the bytes that are allocated now.
pub fn held() -> usize {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated.saturating_sub(stats.bytes_deallocated)
}

/// Fails if `run` leaves memory allocated. What is initialised once counts in the first run only, so a run that seems to
/// leave something is repeated.
pub fn leaves_nothing(mut run: impl FnMut()) {
    let mut left = 0;
    for _ in 0..3 {
        let before = held();
        run();
        left = held().saturating_sub(before);
        if left == 0 {
            return;
        }
    }
    panic!("{left} bytes are still allocated");
}
