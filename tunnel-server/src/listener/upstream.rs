//! Opens a connection: takes its place, finds the way to its node, lets the agent dial, and relays. Each step notes its
//! result in the access log's record.
//!
//! The redirected path takes these steps one by one, in `serve.rs`: its sockets are relayed while the agent still dials.

use std::future::ready;
use std::net::SocketAddr;
use std::pin::pin;

use bytes::Bytes;
use h2::{RecvStream, SendStream};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{Pipe, Relay, RelayError, Side, Totals, TunnelStream, pipe};

use super::access_log::AccessLogGuard;
use super::context::{Failed, ListenerContext, OpenRequest, Reached};
use super::direct;
use super::way::Way;
use crate::admission::{Full, Share};

/// A connection to a target that is up.
pub(super) enum Upstream {
    /// Boxed: it is much larger than a socket.
    Edge(Box<Stream>),
    /// A connection that this server has dialled.
    Direct(TcpStream),
}

/// A stream to a target that an agent has dialled.
pub(super) struct Stream {
    way: Way,
    send: SendStream<Bytes>,
    stream: RecvStream,
}

impl Stream {
    /// Lets the node's agent dial the target.
    async fn open(
        context: &ListenerContext,
        request: &OpenRequest,
        client: SocketAddr,
        place: Result<Share, Full>,
        record: &mut AccessLogGuard,
    ) -> Result<Self, Failed> {
        let mut way = Way::find(context, request, client, place, record).await?;
        let (over, aborted) = (way.link().over.clone(), record.aborted());
        let asked = async {
            let pending = way.ask(request.target).await?;
            let (send, answer) = pending.answer(way.on(), request.target, |took| record.dialled(took));
            Ok((send, answer.await?))
        };
        let answered: Result<_, RelayError> = tokio::select! {
            biased;
            failed = aborted => return Err(failed),
            answered = asked => answered,
            () = over.cancelled() => Err(RelayError::Aborted(record.why_over(), "the tunnel was lost")),
        };
        let (send, stream) = answered.map_err(|error| Failed::of(&error))?;
        Ok(Self { way, send, stream })
    }

    /// Turns the stream into one that can be read and written here. The bytes are relayed on the thread that owns the
    /// link.
    fn into_pipe(self, record: &AccessLogGuard) -> TunnelStream {
        let Self { way, mut send, stream } = self;
        let (_, traffic) = record.relaying(Some(way.link()), way.relayed());
        let over = record.over(Some(way.link()));
        let (near, far) = pipe();
        let worker = way.link().worker.clone();
        worker.spawn(async move {
            let on = way.on();
            let pipe = Pipe { flow: &on.link.flow, stalls: on.stalls, traffic: &traffic };
            far.run(pipe, &mut send, stream, over).await;
        });
        near
    }

    async fn pump(
        self,
        record: &AccessLogGuard,
        read: &mut (impl AsyncRead + Unpin),
        write: &mut (impl AsyncWrite + Unpin),
        gone: impl Future<Output = ()>,
    ) -> Result<(), Failed> {
        let Self { way, mut send, stream } = self;
        let (abort, traffic) = record.relaying(Some(way.link()), way.relayed());
        let on = way.on();
        let (side, flow, stalls) = (Side::Server, &*on.link.flow, on.stalls);
        let relay = Relay { side, flow, stalls, abort: &abort, traffic: &traffic };
        let mut relaying = pin!(relay.pump(read, write, &mut send, stream));
        let ended = tokio::select! {
            biased;
            ended = record.until_over(&on.link.over, relaying.as_mut()) => ended,
            () = gone => {
                abort.trigger(Outcome::ClientReset);
                relaying.await
            }
        };
        ended.map_err(|error| match error {
            RelayError::Aborted(outcome, "") => {
                let reason = match outcome {
                    Outcome::ClientReset => "the caller has gone",
                    Outcome::Shutdown => "this server or the agent stops",
                    _ => "the tunnel was lost",
                };
                Failed { outcome, reason: reason.to_owned() }
            }
            error => Failed::of(&error),
        })
    }
}

/// Relays a client's socket on the thread that owns the link. `prefix` was already read from it.
#[expect(clippy::manual_async_fn, reason = "an async fn's future has room for each argument twice")]
fn relay(
    Stream { way, mut send, stream }: Stream,
    socket: std::net::TcpStream,
    prefix: Bytes,
    record: AccessLogGuard,
) -> impl Future<Output = ()> + Send {
    async move {
        let mut socket = match TcpStream::from_std(socket) {
            Ok(socket) => socket,
            Err(error) => return record.end(Outcome::ClientReset, &error),
        };
        let (abort, traffic) = record.relaying(Some(way.link()), way.relayed());
        let ended = {
            let on = way.on();
            let mut relaying = pin!(async {
                on.relay(&abort, &traffic).run(&mut socket, prefix, &mut send, ready(Ok(stream))).await
            });
            record.until_over(&on.link.over, relaying.as_mut()).await
        };
        record.finish(&ended.map_err(|error| Failed::of(&error)));
    }
}

impl Upstream {
    /// Connects to the target, on either side.
    pub(super) async fn open(
        context: &ListenerContext,
        reached: &Reached,
        client: SocketAddr,
        place: Result<Share, Full>,
        record: &mut AccessLogGuard,
    ) -> Result<Self, Failed> {
        match reached {
            Reached::Edge(request) => {
                let stream = Stream::open(context, request, client, place, record).await?;
                Ok(Self::Edge(Box::new(stream)))
            }
            Reached::Cloud(target) => {
                let place = place.map_err(|full| record.refused(&full))?;
                record.hold(place);
                direct::connect(*target).await.map(Self::Direct)
            }
        }
    }

    /// Relays until both directions have ended. Resets the connection when `gone` completes.
    pub(super) async fn pump(
        self,
        record: &AccessLogGuard,
        read: &mut (impl AsyncRead + Unpin),
        write: &mut (impl AsyncWrite + Unpin),
        gone: impl Future<Output = ()>,
    ) -> Result<(), Failed> {
        match self {
            Self::Edge(stream) => stream.pump(record, read, write, gone).await,
            Self::Direct(socket) => direct::pump(socket, record, read, write, gone).await,
        }
    }

    /// Relays a client's socket, after bytes that were already read from it.
    pub(super) async fn relay(self, socket: TcpStream, prefix: Bytes, record: AccessLogGuard) {
        match self {
            Self::Edge(stream) => match socket.into_std() {
                Ok(socket) => {
                    let worker = stream.way.link().worker.clone();
                    worker.spawn(relay(*stream, socket, prefix, record));
                }
                Err(error) => record.end(Outcome::ClientReset, &error),
            },
            Self::Direct(target) => {
                let ended = direct::relay(socket, target, prefix, &record).await;
                record.finish(&ended);
            }
        }
    }

    /// Turns the connection into a stream that can be read and written here.
    pub(super) fn into_pipe(self, record: &AccessLogGuard) -> TunnelStream {
        let mut target = match self {
            Self::Edge(stream) => return stream.into_pipe(record),
            Self::Direct(target) => target,
        };
        let (_, traffic) = record.relaying(None, &Totals::default());
        let over = record.over(None);
        let (near, far) = pipe();
        tokio::spawn(async move { far.run_to_socket(&mut target, &traffic, over).await });
        near
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listener::tests::size_of_future;

    /// Every connection through a proxy holds this much memory until it ends. Moving a future into another one
    /// doubles it.
    #[test]
    fn the_future_of_a_relayed_connection_stays_small() {
        let size = size_of_future(relay);
        assert!(size <= 3112, "{size}");
    }
}
