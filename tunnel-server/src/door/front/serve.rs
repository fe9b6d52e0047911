//! Serves a client's connection, with TLS where the door ends that.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use super::kinds::{Front, MAX_HEAD, Peer};
use super::request::{self, Served};
use super::socket::{Faults, PrefixedSocket};
use crate::admission::{Share, Shares};
use crate::caller::caller_of_certificate;
use crate::door::context::{DoorContext, OpenError};
use crate::door::first_request::FirstRequest;

/// How long a client may take for a handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long a connection may wait for a whole head, also for the first line of the next request.
const IDLE: Duration = Duration::from_secs(30);
/// More requests at a time wait on their connection.
const MAX_STREAMS: u32 = 128;

impl Front {
    /// Serves a connection until it ends. `prefix` was already read from it; `place` is its own.
    ///
    /// # Errors
    /// Why it was given up before a request came.
    pub(crate) async fn serve(
        self: &Arc<Self>,
        socket: TcpStream,
        prefix: Bytes,
        client: SocketAddr,
        context: &DoorContext,
        shares: &Shares,
        place: Option<Share>,
    ) -> Result<(), OpenError> {
        let faults = Faults::default();
        let socket = PrefixedSocket::new(socket, prefix, faults.clone());
        let Some(tls) = &self.tls else {
            let peer = Peer::new(client, None, place);
            return self.http(socket, false, peer, faults, context, shares).await;
        };
        let accepted = tokio::time::timeout(HANDSHAKE, tls.acceptor().accept(socket)).await;
        let stream = match accepted {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return Err(OpenError::Client(format!("TLS: {error}"))),
            Err(_) => {
                let reason = format!("no TLS handshake within {} s", HANDSHAKE.as_secs());
                return Err(OpenError::Client(reason));
            }
        };
        let (_, session) = stream.get_ref();
        let h2 = session.alpn_protocol() == Some(b"h2");
        let caller = match session.peer_certificates().and_then(<[_]>::first) {
            Some(certificate) => Some(caller_of_certificate(certificate).map_err(OpenError::Client)?),
            None => None,
        };
        self.http(stream, h2, Peer::new(client, caller, place), faults, context, shares).await
    }

    async fn http<S>(
        self: &Arc<Self>,
        stream: S,
        h2: bool,
        peer: Peer,
        faults: Faults,
        context: &DoorContext,
        shares: &Shares,
    ) -> Result<(), OpenError>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let served = Arc::new(Served {
            front: self.clone(),
            peer,
            faults,
            context: context.clone(),
            shares: shares.clone(),
        });
        let first = FirstRequest::default();
        let asked = first.clone();
        let service = service_fn(move |request| {
            asked.came();
            let served = served.clone();
            async move { Ok::<_, std::convert::Infallible>(request::answer(&served, request).await) }
        });
        let io = TokioIo::new(stream);
        let over = async {
            context.drain.shutdown().draining().await;
            first.wait().await;
        };
        let ended = if h2 {
            let mut builder = http2::Builder::new(TokioExecutor::new());
            builder
                .timer(TokioTimer::new())
                .max_concurrent_streams(MAX_STREAMS)
                .max_header_list_size(u32::try_from(MAX_HEAD).unwrap_or(u32::MAX))
                .keep_alive_interval(IDLE);
            let mut connection = std::pin::pin!(builder.serve_connection(io, service));
            tokio::select! {
                ended = connection.as_mut() => ended,
                () = over => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            }
        } else {
            let mut builder = http1::Builder::new();
            builder.timer(TokioTimer::new()).header_read_timeout(IDLE).max_buf_size(MAX_HEAD);
            let connection = builder.serve_connection(io, service).with_upgrades();
            let mut connection = std::pin::pin!(connection);
            tokio::select! {
                ended = connection.as_mut() => ended,
                () = over => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            }
        };
        match ended {
            // What clients do all the time: they leave, or leave idle connections open.
            Err(error) if error.is_parse() => Err(OpenError::Client(format!("not an HTTP request: {error}"))),
            Err(error) => {
                let error = tunnel_core::error::chain(&error);
                tracing::debug!(door = self.door, error, "a client's connection ended");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }
}
