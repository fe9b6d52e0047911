//! One TCP connection with an agent or with another server.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use h2::client::SendRequest;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tunnel_link::link::Flow;

use super::unanswered::Unanswered;

/// Streams that a link opens before it is replaced. A client can open 2^30 streams on one HTTP/2 connection; the next
/// one would fail and end the link with everything on it, so it is replaced a little earlier.
pub const MOST_STREAMS: u32 = (1 << 30) - (1 << 20);

/// Number of streams that a link opens before it is replaced.
#[derive(Clone, Debug)]
pub(crate) struct Streams {
    pub(crate) most: u32,
    /// Cancelled when that number is reached.
    pub(crate) spent: CancellationToken,
}

impl Streams {
    pub(crate) fn new(most: u32) -> Self {
        Self { most, spent: CancellationToken::new() }
    }
}

/// One TCP connection with an agent.
#[derive(Debug)]
pub struct Link {
    /// 0 for the link with which the session begins and ends.
    pub number: u32,
    /// Measurements of its path.
    pub flow: Arc<Flow>,
    /// Cancelled when its connections have to end: with the link, with the session, or when the server's drain time is
    /// over. A token of its own, because every poll of a connection's task locks it.
    pub(crate) over: CancellationToken,
    pub(crate) send: SendRequest<Bytes>,
    /// Runtime of the thread that owns the link. Its streams and their sockets stay on that thread.
    pub(crate) worker: Handle,
    streams: Streams,
    connections: AtomicU32,
    unanswered: Unanswered,
}

impl Link {
    pub(crate) fn new(
        number: u32,
        flow: Arc<Flow>,
        over: CancellationToken,
        send: SendRequest<Bytes>,
        worker: Handle,
        streams: Streams,
    ) -> Arc<Self> {
        Arc::new(Self {
            number,
            flow,
            over,
            send,
            worker,
            streams,
            connections: AtomicU32::new(0),
            unanswered: Unanswered::default(),
        })
    }

    /// Number of connections on it now.
    pub fn connections(&self) -> u32 {
        self.connections.load(Ordering::Relaxed)
    }

    /// Records that the stream with this number was opened. A client's stream numbers are odd.
    pub(super) fn opened(&self, stream: u32) {
        if stream / 2 >= self.streams.most {
            self.streams.spent.cancel();
        }
    }

    /// Has it replaced.
    pub(super) fn spend(&self) {
        self.streams.spent.cancel();
    }

    /// True if it has opened as many streams as it may, or its certificate is over: it has to be replaced.
    pub(super) fn is_spent(&self) -> bool {
        self.streams.spent.is_cancelled()
    }

    /// Records that a request was left unanswered: the line may be down, or the other end frozen.
    pub(crate) fn note_unanswered(&self) {
        self.unanswered.add(self.flow.received());
    }

    /// True if it left a request unanswered and has received nothing since.
    pub(crate) fn is_silent(&self) -> bool {
        self.unanswered.lasts(self.flow.received())
    }
}

/// A link with one more connection on it until this is dropped.
#[derive(Debug)]
pub struct Taken {
    link: Arc<Link>,
    /// Connections on all links of the session, including links that take no more.
    total: Arc<AtomicU32>,
}

impl Taken {
    pub(super) fn new(link: &Arc<Link>, total: &Arc<AtomicU32>) -> Self {
        link.connections.fetch_add(1, Ordering::Relaxed);
        total.fetch_add(1, Ordering::Relaxed);
        Self { link: link.clone(), total: total.clone() }
    }
}

impl std::ops::Deref for Taken {
    type Target = Link;

    fn deref(&self) -> &Link {
        &self.link
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.link.connections.fetch_sub(1, Ordering::Relaxed);
        self.total.fetch_sub(1, Ordering::Relaxed);
    }
}
