//! Memory that the code under test holds, and its tasks.

use std::alloc::System;
use std::time::Duration;

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use tokio::runtime::{Builder, Handle};
use tokio::time::sleep;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Returns the bytes that are allocated now.
pub fn held() -> usize {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated.saturating_sub(stats.bytes_deallocated)
}

/// Runs it on a paused clock, with the bytes that are allocated before. Fails if `end` after it there are tasks, or memory that it
/// has allocated. What is initialised once counts in the first run only, so a run that seems to leave memory is repeated.
pub fn leaves_nothing(end: Duration, run: impl AsyncFn(usize)) {
    let mut left = 0;
    for _ in 0..3 {
        let before = held();
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.expect("without sockets").block_on(async {
            run(held()).await;
            sleep(end).await;
            assert_eq!(Handle::current().metrics().num_alive_tasks(), 0, "tasks are left");
        });
        left = held().saturating_sub(before);
        if left == 0 {
            return;
        }
    }
    panic!("{left} bytes are still allocated");
}
