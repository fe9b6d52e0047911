//! The wall clock.

use std::cell::Cell;
use std::time::SystemTime;

use tokio::time::Instant;

thread_local! {
    static SET: Cell<Option<(SystemTime, Instant)>> = const { Cell::new(None) };
}

/// Sets the clock of this thread's tasks. From now on it follows tokio's clock, which a simulation pauses.
pub fn set_wall_clock(to: SystemTime) {
    SET.set(Some((to, Instant::now())));
}

/// Returns this host's time, which may jump.
pub fn wall_clock() -> SystemTime {
    SET.get().map_or_else(SystemTime::now, |(time, since)| time + since.elapsed())
}
