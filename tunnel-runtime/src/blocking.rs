//! Work that waits for a disk.

use std::cell::RefCell;
use std::io;
use std::time::Duration;

thread_local! {
    static DISK: RefCell<Option<Box<dyn FnMut() -> Duration>>> = RefCell::default();
}

/// Lets the disk take this long for what the tasks of this thread wait for. They must run on one thread: in a simulation
/// on a paused clock, which a thread that waits would stop.
pub fn set_disk(takes: impl FnMut() -> Duration + 'static) {
    DISK.with_borrow_mut(|disk| *disk = Some(Box::new(takes)));
}

/// Does the work on a thread for that. It is done even if nobody waits for it any more.
///
/// # Errors
/// It has panicked, or the runtime ends.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    let done = match DISK.with_borrow_mut(|disk| disk.as_mut().map(|takes| takes())) {
        None => tokio::task::spawn_blocking(work),
        Some(takes) => tokio::spawn(async move {
            tokio::time::sleep(takes).await;
            work()
        }),
    };
    done.await.map_err(io::Error::other)
}
