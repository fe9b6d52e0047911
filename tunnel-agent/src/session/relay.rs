//! Serves one connection: accepts the server's Relay stream, dials the target, and relays between the two.

use std::future::{poll_fn, ready};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use http::Request;
use tokio_util::either::Either;
use tonic::Status;
use tunnel_link::grpc::{refuse, response};
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{Abort, Side, Traffic};

use super::state::SessionState;
use crate::connections::Connection;
use crate::dial::{DialError, DialRequest, Dialled, Socket};

/// Serves one Relay stream, from the request to the end of both directions.
pub(super) fn relay(
    session: Arc<SessionState>,
    request: Request<RecvStream>,
    respond: SendResponse<Bytes>,
) -> impl Future<Output = ()> + Send {
    // Parsed outside the future, which would keep room for the request's headers until the end.
    let dial_request = DialRequest::from_headers(request.headers());
    dial_and_relay(session, dial_request, request.into_body(), respond)
}

async fn dial_and_relay(
    session: Arc<SessionState>,
    dial_request: Result<DialRequest, DialError>,
    inbound: RecvStream,
    mut respond: SendResponse<Bytes>,
) {
    let started = Instant::now();
    let connection = session.connection();
    let dialled = tokio::select! {
        // Boxed, so that its memory is freed once the target is connected.
        dialled = Box::pin(dial(&session, dial_request)) => dialled,
        // The client gave up, so the dial is cancelled.
        _ = poll_fn(|cx| respond.poll_reset(cx)) => {
            session.shared.runtime.metrics.dialled("cancelled", started.elapsed());
            return;
        }
    };
    let (target, Dialled { mut socket, address, place: _place }) = match dialled {
        Ok(dialled) => dialled,
        Err(error) => {
            let took = started.elapsed();
            session.shared.runtime.metrics.dial_failed(error.label(), took, &session.server, &error);
            refuse(&mut respond, &Status::new(error.code(), error.to_string()));
            return;
        }
    };
    session.shared.runtime.metrics.dialled("ok", started.elapsed());
    let mut send = match respond.send_response(response(), false) {
        Ok(send) => send,
        Err(error) => {
            tracing::debug!(%error, "failed to answer the server");
            return;
        }
    };
    let abort = Arc::new(Abort::default());
    let metrics = &session.shared.runtime.metrics;
    let relayed = metrics.live.enter(Connection {
        server: session.server.clone(),
        link: (session.link, session.path.flow.clone()),
        target,
        dialled: address,
        started,
        traffic: Traffic::part_of(vec![metrics.relayed.clone()]),
        abort: abort.clone(),
    });
    let relay = session.relay(&abort, &relayed.traffic);
    let ended = {
        let send = &mut send;
        let mut run = std::pin::pin!(match &mut socket {
            Socket::Kernel(socket) => {
                Either::Left(relay.run(socket, Bytes::new(), send, ready(Ok(inbound))))
            }
            // Boxed: otherwise other connections would hold its memory too.
            Socket::Simulated(line) => Either::Right(Box::pin(async move {
                let (mut read, mut write) = tokio::io::split(line);
                relay.pump(&mut read, &mut write, send, inbound).await
            })),
        });
        tokio::select! {
            ended = &mut run => ended,
            () = session.stop.cancelled() => {
                abort.trigger(Outcome::Shutdown);
                run.await
            }
        }
    };
    let outcome = ended.as_ref().map_or_else(|error| error.outcome(Side::Agent), |()| Outcome::Ok);
    session.shared.runtime.metrics.ended(outcome);
    tracing::debug!(
        server = %session.server,
        destination = %target,
        to_target = relayed.traffic.to_socket(),
        from_target = relayed.traffic.from_socket(),
        duration_ms = started.elapsed().as_millis() as u64,
        %outcome,
        error = ended.err().map(tracing::field::display),
        "connection"
    );
    drop(connection);
}

async fn dial(
    session: &SessionState,
    request: Result<DialRequest, DialError>,
) -> Result<(SocketAddr, Dialled), DialError> {
    let request = request?;
    let dialled = session.common.dialler.dial(request, &session.common.loopback_ports.load_full()).await?;
    Ok((request.target, dialled))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An agent holds one per connection. Measured on x86-64: 2400 bytes.
    #[test]
    fn the_future_of_a_connection_stays_small() {
        fn size_of_future<F>(
            _: impl FnOnce(Arc<SessionState>, Request<RecvStream>, SendResponse<Bytes>) -> F,
        ) -> usize {
            size_of::<F>()
        }
        let size = size_of_future(relay);
        assert!(size <= 2512, "{size} bytes");
    }
}
