//! konnectivity's ProxyService, over gRPC.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::Stream;
use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use tunnel_link::konnectivity::proxy_service_server::{ProxyService, ProxyServiceServer};
use tunnel_link::konnectivity::{Connections, LARGEST_MESSAGE, Packet, Room};

use super::dial::{Dialler, EgressClient};
use super::halves::Over;
use super::stream::{BOUNDS, CallerDialler};

/// Maximum number of packets, of at most 32 KiB each, that wait for a caller to read.
const PACKETS: usize = 16;
/// Maximum number of bytes that a caller may send on one stream before it has to wait for them to be taken.
const STREAM_WINDOW: u32 = 1 << 20;
/// The same for a connection: the maximum of HTTP/2 (RFC 9113, 6.9.1). Its streams may use no more together, so that none
/// waits for another.
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;
/// Streams of one connection beyond the listener's places: a dial without a place gets an error, and does not wait for a stream.
const WITHOUT_PLACE: u32 = 100;
/// Maximum number of bytes of a stream that wait to be sent.
const SEND_BUFFER: usize = 256 << 10;
/// Interval of PINGs, and the time after which a caller that has not answered one is gone.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(20));

#[tonic::async_trait]
impl ProxyService for CallerDialler {
    type ProxyStream = Pin<Box<dyn Stream<Item = Result<Packet, Status>> + Send>>;

    async fn proxy(
        &self,
        request: Request<Streaming<Packet>>,
    ) -> Result<Response<Self::ProxyStream>, Status> {
        let (packets, answer) = mpsc::channel(PACKETS);
        // The listener's shares bound the number of connections, and each connection is bounded.
        let room = Arc::new(Room::new(usize::MAX));
        let connections = Connections::new(Arc::new(self.clone()), BOUNDS, room, Arc::default(), packets);
        tokio::spawn(connections.serve(request.into_inner()));
        Ok(Response::new(Box::pin(ReceiverStream::new(answer))))
    }
}

/// Serves one HTTP/2 connection until it ends. A drain lets its streams finish, and so does the end of the caller's
/// certificate, with which these end themselves.
pub(super) async fn serve(
    dialler: Arc<Dialler>,
    caller: EgressClient,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> Over {
    let shutdown = dialler.context.drain.shutdown().clone();
    let (address, shown) = (caller.address, caller.clone());
    let streams = dialler.shares.limit.saturating_add(WITHOUT_PLACE);
    let service =
        ProxyServiceServer::new(CallerDialler { dialler, caller }).max_decoding_message_size(LARGEST_MESSAGE);
    let connection = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .initial_stream_window_size(STREAM_WINDOW.min(CONNECTION_WINDOW / streams))
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_concurrent_streams(streams)
        .max_send_buf_size(SEND_BUFFER)
        .keep_alive_interval(KEEPALIVE.0)
        .keep_alive_timeout(KEEPALIVE.1)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(service));
    let mut connection = std::pin::pin!(connection);
    let over = async {
        tokio::select! {
            () = shutdown.draining() => {}
            () = shown.lapsed() => {}
        }
    };
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = over => {
            connection.as_mut().graceful_shutdown();
            tokio::select! {
                ended = connection => ended,
                () = shutdown.forced() => return Over::Lost,
            }
        }
    };
    match ended {
        Ok(()) => Over::Ended,
        Err(error) => {
            tracing::debug!(client = %address, %error, "client connection failed");
            Over::Lost
        }
    }
}
