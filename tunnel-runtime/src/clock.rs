//! The wall clock.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::SystemTime;

use tokio::time::Instant;

thread_local! {
    static SET: RefCell<BTreeMap<usize, (SystemTime, Instant)>> = const { RefCell::new(BTreeMap::new()) };
}

/// The clock of a host, which may jump: by default the one of the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Clock(Option<usize>);

impl Clock {
    /// The clock of a simulated host, which this number tells from the others. It has to be set before it is read, and on
    /// one thread.
    pub const fn of(host: usize) -> Self {
        Self(Some(host))
    }

    /// Sets the clock of a simulated host. From now on it follows tokio's clock, which a simulation pauses.
    pub fn set(self, to: SystemTime) {
        if let Some(host) = self.0 {
            SET.with_borrow_mut(|set| set.insert(host, (to, Instant::now())));
        }
    }

    /// Returns the host's time.
    pub fn now(self) -> SystemTime {
        let Some(host) = self.0 else { return SystemTime::now() };
        let set = SET.with_borrow(|set| set.get(&host).copied());
        // Another time would follow from no seed.
        let (time, since) =
            set.expect("the clock of a simulated host is set, and read on the simulation's thread");
        time + since.elapsed()
    }
}
