//! One TCP connection with an agent, or with another server.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use h2::client::SendRequest;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tunnel_core::link::Flow;

use super::unanswered::Unanswered;

/// A client can open 2^30 streams on one HTTP/2 connection; the next one would fail, and end the link with all that it carries. So
/// it is replaced a little earlier.
pub const MOST_STREAMS: u32 = (1 << 30) - (1 << 20);

/// How many streams a link opens before another one takes its place.
#[derive(Clone, Debug)]
pub(crate) struct Streams {
    pub(crate) most: u32,
    /// Cancelled once it has opened them.
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
    /// 0 is the one that the session began with, and ends with.
    pub number: u32,
    /// What is known about its path.
    pub flow: Arc<Flow>,
    /// Cancelled when its connections have to end: with the link, with the session, or when the time of the server's
    /// drain is up. A token of its own, because every poll of a connection's task locks it.
    pub(crate) over: CancellationToken,
    pub(crate) send: SendRequest<Bytes>,
    /// The thread that owns the link. Its streams and their sockets stay there.
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

    /// Connections that it carries now.
    pub fn connections(&self) -> u32 {
        self.connections.load(Ordering::Relaxed)
    }

    /// It has opened the stream with this number. Those of a client are odd.
    pub(super) fn opened(&self, stream: u32) {
        if stream / 2 >= self.streams.most {
            self.streams.spent.cancel();
        }
    }

    /// Whether it has opened as many streams as it may: another one is to take its place.
    pub(super) fn is_spent(&self) -> bool {
        self.streams.spent.is_cancelled()
    }

    /// It has left an ask unanswered: its line may be out, or the other end frozen.
    pub(crate) fn note_unanswered(&self) {
        self.unanswered.add(self.flow.received());
    }

    /// Whether it has left an ask unanswered and has received nothing since.
    pub(crate) fn is_silent(&self) -> bool {
        self.unanswered.lasts(self.flow.received())
    }
}

/// A link that carries one connection more, until this is dropped.
#[derive(Debug)]
pub struct Taken {
    link: Arc<Link>,
    /// Those of all links of the session, also of links that take no more.
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
