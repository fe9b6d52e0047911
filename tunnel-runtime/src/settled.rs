//! The stages between an event and those who observe it: `GET /debug/settled` waits until each has caught up.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;
use tokio::runtime::Handle;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout_at};

use crate::logging;

/// Turns of a runtime: what its sockets have received wakes tasks, these wake others, and so on.
const TURNS: usize = 4;

type Wait = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The stages of a program, in the order in which an event passes them. Clones share them.
#[derive(Clone, Default)]
pub struct Settling(Arc<Mutex<Vec<Stage>>>);

#[derive(Clone)]
struct Stage {
    name: &'static str,
    wait: Arc<dyn Fn() -> Wait + Send + Sync>,
}

/// Answer of `/debug/settled`.
#[derive(Debug, Serialize)]
pub(crate) struct Settled {
    settled: Vec<&'static str>,
    /// The stage that had not caught up in time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) pending: Option<&'static str>,
}

impl Settling {
    /// Adds a stage after those before. `wait` is called when the stages before have caught up, and its future ends
    /// once all that had come to this stage by then has passed it.
    pub fn stage<F>(&self, name: &'static str, wait: impl Fn() -> F + Send + Sync + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let wait = Arc::new(move || -> Wait { Box::pin(wait()) });
        self.0.lock().push(Stage { name, wait });
    }

    /// Adds the stage `threads`: the tasks of these runtimes have handled what their sockets had received.
    pub fn threads(&self, runtimes: Vec<Handle>) {
        let runtimes: Arc<[Handle]> = runtimes.into();
        self.stage("threads", move || {
            let turns: Vec<_> = runtimes.iter().map(|runtime| runtime.spawn(take_turns())).collect();
            async move {
                for turn in turns {
                    // A runtime that has ended handles nothing any more.
                    let _ = turn.await;
                }
            }
        });
    }

    /// Waits for one stage after the other and for the log, for `limit` in total.
    pub(crate) async fn settled(&self, limit: Duration, log: logging::Handle) -> Settled {
        let (deadline, mut stages) = (Instant::now() + limit, self.0.lock().clone());
        // All stages may log.
        let written: Arc<dyn Fn() -> Wait + Send + Sync> = Arc::new(move || Box::pin(log.clone().written()));
        stages.push(Stage { name: "log", wait: written });
        let mut settled = Vec::new();
        for Stage { name, wait } in stages {
            if timeout_at(deadline, wait()).await.is_err() {
                return Settled { settled, pending: Some(name) };
            }
            settled.push(name);
        }
        Settled { settled, pending: None }
    }
}

async fn take_turns() {
    for _ in 0..TURNS {
        yield_now().await;
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::watch;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn stages_are_waited_for_in_order_and_the_one_that_is_late_is_named() {
        let settling = Settling::default();
        settling.threads(vec![Handle::current()]);
        let (done, doing) = watch::channel(1);
        settling.stage("number", move || {
            let mut doing = doing.clone();
            async move { drop(doing.wait_for(|done| *done == 2).await) }
        });
        let late = settling.settled(Duration::from_secs(3), logging::Handle::detached()).await;
        assert_eq!((late.settled, late.pending), (vec!["threads"], Some("number")));
        done.send_replace(2);
        settling.stage("last", std::future::pending);
        let late = settling.settled(Duration::from_secs(3), logging::Handle::detached()).await;
        assert_eq!((late.settled, late.pending), (vec!["threads", "number"], Some("last")));
    }

    #[test]
    fn what_sockets_have_received_is_handled() {
        use tokio::io::AsyncReadExt as _;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let settling = Settling::default();
        settling.threads(vec![runtime.handle().clone()]);
        let (client, server) = std::os::unix::net::UnixStream::pair().unwrap();
        server.set_nonblocking(true).unwrap();
        let (seen, sees) = watch::channel(0);
        runtime.spawn(async move {
            let mut server = tokio::net::UnixStream::from_std(server).unwrap();
            let (first, mut second) = tokio::sync::mpsc::channel(1);
            tokio::spawn(async move {
                while let Some(byte) = second.recv().await {
                    seen.send_replace(byte);
                }
            });
            while let Ok(byte) = server.read_u8().await {
                first.send(byte).await.unwrap();
            }
        });
        std::thread::spawn(move || runtime.block_on(std::future::pending::<()>()));
        let asking = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        for byte in 1..=100 {
            std::io::Write::write_all(&mut &client, &[byte]).unwrap();
            let settled =
                asking.block_on(settling.settled(Duration::from_secs(20), logging::Handle::detached()));
            assert_eq!((settled.pending, *sees.borrow()), (None, byte));
        }
    }
}
