//! Accepts connections on the agents' ports and does their handshakes, before the client is known.

use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::poll;
use rustls::HandshakeKind;
use tokio::io::Interest;
use tokio::runtime::Handle;
use tokio_rustls::server::TlsStream;
use tokio_util::task::TaskTracker;
use tunnel_link::link::{HANDSHAKE_TIMEOUT, Wire, tune_link};
use tunnel_pki::{ALPN_EDGE, ALPN_TUNNEL, ServerTls};

use super::limits::{ConnectionLimits, Queue};
use super::link::LinkContext;
use crate::admission::{Accept, Place};
use crate::session::Workers;

/// Maximum wait for a client's first byte. An agent sends it at once.
const SILENCE: Duration = Duration::from_secs(3);

/// A connection after its handshake, on the worker that serves it.
pub(super) struct Connection {
    pub(super) stream: TlsStream<Wire>,
    pub(super) peer: SocketAddr,
    pub(super) place: Place<IpAddr>,
    pub(super) worker: Handle,
}

/// Accepts connections, and does their handshakes.
#[derive(Clone)]
pub(super) struct Handshakes {
    /// Read at each handshake.
    pub(super) tls: Arc<ServerTls>,
    pub(super) workers: Arc<Workers>,
    pub(super) context: Arc<LinkContext>,
    pub(super) limits: Arc<ConnectionLimits>,
    /// Tasks of accepted connections.
    pub(super) links: TaskTracker,
}

impl Handshakes {
    /// Accepts connections of `port` until the drain starts, does their handshakes on threads for that, and serves each on a
    /// worker. Counts and logs failures.
    pub(super) async fn accept<F>(
        &self,
        port: &'static str,
        mut listener: impl Accept,
        serve: impl Fn(Connection) -> F + Clone + Send + 'static,
    ) where
        F: Future<Output = Result<(), Error>> + Send + 'static,
    {
        loop {
            let (wire, peer) = tokio::select! {
                accepted = listener.accept(port) => accepted,
                () = self.context.draining.cancelled() => return,
            };
            let Some((place, queue)) = self.limits.handshake(peer.ip()) else {
                self.context.metrics.handshake("turned_away");
                continue;
            };
            let (handshakes, serve) = (self.clone(), serve.clone());
            self.workers.next_handshake().spawn(self.links.track_future(async move {
                let shaken =
                    handshakes.until_stop((peer, port), handshakes.shake(wire, &place, &queue)).await;
                let Some(mut stream) = shaken else { return };
                let worker = handshakes.workers.next().clone();
                let (links, on_worker) = (handshakes.links.clone(), worker.clone());
                on_worker.spawn(links.track_future(async move {
                    let served = async move {
                        stream.get_mut().0.move_here()?;
                        serve(Connection { stream, peer, place, worker }).await
                    };
                    handshakes.until_stop((peer, port), served).await;
                }));
            }));
        }
    }

    /// Counts and logs a failure.
    async fn until_stop<T>(
        &self,
        (peer, port): (SocketAddr, &'static str),
        work: impl Future<Output = Result<T, Error>>,
    ) -> Option<T> {
        match self.context.stop.run_until_cancelled(work).await? {
            Ok(done) => Some(done),
            Err(error) => {
                self.context.metrics.handshake(error.label());
                match error {
                    Error::Failed(_) | Error::Denied(_) => {
                        tracing::info!(%peer, port, %error, "handshake failed on the agent port");
                    }
                    // Unauthenticated clients can cause any number of these.
                    _ => tracing::debug!(%peer, port, %error, "connection to the agent port closed"),
                }
                None
            }
        }
    }

    /// Does the handshake of a connection, unless its place is needed for another.
    ///
    /// The first answer is what costs: an agreement on keys and a signature. Clients of one address get it in the order in which they
    /// came, and whoever has one is served before the next gets it. Otherwise each of ten thousand agents that come back at once would
    /// wait for the first answers to all others, until most have given up.
    async fn shake(
        &self,
        mut wire: Wire,
        place: &Place<IpAddr>,
        queue: &Queue,
    ) -> Result<TlsStream<Wire>, Error> {
        let shaken = async {
            wire.move_here()?;
            tune_link(&wire);
            self.context.congestion.set(&wire);
            let readable = poll_fn(|cx| wire.poll_readable(cx));
            tokio::time::timeout(SILENCE, readable).await.map_err(|_| Error::Silent)??;
            place.waits();
            let accepted = begun_in_turn(queue.turn(), || self.limits.room(), async {
                place.spoke();
                if has_left(&wire).await? {
                    return Err(Error::Left);
                }
                Ok(tokio::time::timeout(HANDSHAKE_TIMEOUT, self.tls.acceptor().accept(wire)).await)
            });
            let accepted = accepted.await.ok_or(Error::NoTurn)??;
            let slow = |_| io::Error::new(io::ErrorKind::TimedOut, "TLS handshake took too long");
            let stream = accepted.map_err(slow)??;
            let connection = stream.get_ref().1;
            let resumed = connection.handshake_kind() == Some(HandshakeKind::Resumed);
            self.context.metrics.tls_handshake(resumed);
            // Any other proves that it has its key: a new certificate is good for longer than a session.
            if resumed && !matches!(connection.alpn_protocol(), Some(ALPN_TUNNEL | ALPN_EDGE)) {
                return Err(Error::denied("only an agent's links resume a session"));
            }
            Ok(stream)
        };
        tokio::select! {
            shaken = shaken => shaken,
            () = place.evicted() => Err(Error::Evicted),
        }
    }
}

/// Polls `work` for the first time when its turn has come and there is room. The next one's comes after everything that was
/// ready meanwhile. `None`: its turn did not come in time.
async fn begun_in_turn<F: Future, R: Future<Output = ()>, T>(
    turn: impl Future<Output = Option<T>>,
    room: impl FnOnce() -> R,
    work: F,
) -> Option<F::Output> {
    let mut work = pin!(work);
    let turn = tokio::time::timeout(HANDSHAKE_TIMEOUT, turn).await.ok()??;
    room().await;
    let begun = poll!(work.as_mut());
    tokio::task::yield_now().await;
    drop(turn);
    match begun {
        Poll::Ready(done) => Some(done),
        Poll::Pending => Some(work.await),
    }
}

/// True if the client has closed the connection: an agent does so that has waited for too long.
async fn has_left(wire: &Wire) -> io::Result<bool> {
    let Some(socket) = wire.socket() else { return Ok(false) };
    Ok(socket.ready(Interest::READABLE).await?.is_read_closed())
}

/// Reason that a connection got no further than its handshake.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("nothing was sent within {} s", SILENCE.as_secs())]
    Silent,
    #[error("the client closed the connection before this server got to it")]
    Left,
    #[error("its turn did not come within {} s", HANDSHAKE_TIMEOUT.as_secs())]
    NoTurn,
    #[error("evicted: too many unauthenticated connections")]
    Evicted,
    #[error("too many unattached connections, of this node or in total")]
    Busy,
    #[error("too many links from this client, or from all servers and redirectors together")]
    Links,
    #[error("{0}")]
    Denied(String),
    #[error(transparent)]
    Failed(#[from] io::Error),
}

impl Error {
    /// Of a client whose certificate or protocol does not fit.
    pub(super) fn denied(why: impl std::fmt::Display) -> Self {
        Self::Denied(why.to_string())
    }

    pub(super) const fn label(&self) -> &'static str {
        match self {
            Self::Silent => "silent",
            Self::Left => "left",
            Self::Evicted => "evicted",
            Self::NoTurn | Self::Busy | Self::Links => "turned_away",
            Self::Failed(_) | Self::Denied(_) => "failed",
        }
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;
    use tunnel_runtime::fair::FairShare;

    use super::*;

    #[tokio::test]
    async fn whoever_has_an_answer_is_served_before_the_next_gets_one() {
        const CLIENTS: usize = 50;
        let (turns, said) = (FairShare::new(2, CLIENTS * 4), Arc::new(Mutex::new(Vec::new())));
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                let (turns, said) = (turns.clone(), said.clone());
                tokio::spawn(async move {
                    let handshake = async {
                        said.lock().push((client, "first answer"));
                        tokio::task::yield_now().await;
                        said.lock().push((client, "done"));
                    };
                    begun_in_turn(turns.take(0), || async {}, handshake).await.unwrap();
                })
            })
            .collect();
        for client in clients {
            client.await.unwrap();
        }
        let said = said.lock();
        let at = |client, what| said.iter().position(|seen| *seen == (client, what)).unwrap();
        for client in 0..CLIENTS - 2 {
            assert!(at(client, "first answer") < at(client + 1, "first answer"), "{said:?}");
            assert!(at(client, "done") < at(client + 2, "first answer"), "{said:?}");
        }
    }
}
