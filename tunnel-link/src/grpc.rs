//! Tonic's generated clients and services on a bare HTTP/2 connection.
//!
//! The link uses `h2` directly, because relaying a connection needs what higher layers hide: resetting a stream while
//! its peer does not read, returning flow control byte by byte, and the PING's round-trip time. Control calls are few
//! and small, and use tonic.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use h2::client::SendRequest;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderValue, Request, Response, Uri, header};
use http_body::{Body, Frame};
use http_body_util::BodyExt;
use tonic::client::Grpc;
use tonic::codec::{BufferSettings, Codec};
use tonic::{Status, Streaming};
use tonic_prost::{ProstCodec, ProstDecoder, ProstEncoder};
use tower::{Service, ServiceExt};

use crate::proto::{AgentEvent, Welcome};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Path of the Attach method.
const ATTACH_PATH: &str = "/postern.tunnel.v1.Agent/Attach";
/// Size of the buffer kept between two events of an agent, in bytes.
const EVENT_BUFFER: usize = 512;

/// Calls Attach and returns the agent's events, of at most `largest` bytes each. The generated client would keep 8 KiB
/// for each attached agent.
///
/// # Errors
/// Fails if the link is lost, or if the agent answered with an error.
pub async fn attach(
    channel: Channel,
    welcome: Welcome,
    largest: usize,
) -> Result<Streaming<AgentEvent>, Status> {
    let mut client = Grpc::with_origin(channel, origin()).max_decoding_message_size(largest);
    client.ready().await.map_err(Status::from_error)?;
    let path = http::uri::PathAndQuery::from_static(ATTACH_PATH);
    let events = client.server_streaming(tonic::Request::new(welcome), path, AttachCodec).await?;
    Ok(events.into_inner())
}

struct AttachCodec;

impl Codec for AttachCodec {
    type Encode = Welcome;
    type Decode = AgentEvent;
    type Encoder = ProstEncoder<Welcome>;
    type Decoder = ProstDecoder<AgentEvent>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<Welcome, AgentEvent>::raw_encoder(BufferSettings::default())
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<Welcome, AgentEvent>::raw_decoder(BufferSettings::new(EVENT_BUFFER, EVENT_BUFFER))
    }
}

/// Receiving half of a stream, as a body for tonic.
#[derive(Debug)]
pub struct RecvBody {
    stream: RecvStream,
    data_done: bool,
}

impl RecvBody {
    pub const fn new(stream: RecvStream) -> Self {
        Self { stream, data_done: false }
    }
}

impl Body for RecvBody {
    type Data = Bytes;
    type Error = h2::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        if !self.data_done {
            match ready!(self.stream.poll_data(cx)) {
                Some(Ok(data)) => {
                    let _ = self.stream.flow_control().release_capacity(data.len());
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => self.data_done = true,
            }
        }
        ready!(self.stream.poll_trailers(cx)).map_or_else(
            |error| Poll::Ready(Some(Err(error))),
            |trailers| Poll::Ready(trailers.map(|trailers| Ok(Frame::trailers(trailers)))),
        )
    }

    fn is_end_stream(&self) -> bool {
        self.stream.is_end_stream()
    }
}

/// A tonic channel over one HTTP/2 connection: `AgentClient::with_origin(Channel::new(..), origin())`.
#[derive(Clone, Debug)]
pub struct Channel {
    send: SendRequest<Bytes>,
}

impl Channel {
    pub const fn new(send: SendRequest<Bytes>) -> Self {
        Self { send }
    }
}

/// Scheme and authority of requests on a link, which has no host name.
pub fn origin() -> Uri {
    Uri::from_static("https://agent")
}

impl Service<Request<tonic::body::Body>> for Channel {
    type Response = Response<RecvBody>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.send.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: Request<tonic::body::Body>) -> Self::Future {
        let mut send = self.send.clone();
        Box::pin(async move {
            let (parts, body) = request.into_parts();
            poll_fn(|cx| send.poll_ready(cx)).await?;
            let (response, stream) =
                send.send_request(Request::from_parts(parts, ()), body.is_end_stream())?;
            if !body.is_end_stream() {
                tokio::spawn(send_body(body, stream));
            }
            Ok(response.await?.map(RecvBody::new))
        })
    }
}

/// Returns the head of a gRPC response.
pub fn response() -> Response<()> {
    let mut response = Response::new(());
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

/// Answers with only a status.
pub fn refuse(respond: &mut SendResponse<Bytes>, status: &Status) {
    let mut response = response();
    if status.add_header(response.headers_mut()).is_err() || respond.send_response(response, true).is_err() {
        respond.send_reset(Reason::CANCEL);
    }
}

/// Answers one stream with a tonic service such as `AgentServer`.
pub async fn serve<S>(service: S, request: Request<RecvStream>, mut respond: SendResponse<Bytes>)
where
    S: Service<Request<tonic::body::Body>, Response = Response<tonic::body::Body>>,
    S::Error: Into<BoxError>,
{
    let request = request.map(|stream| tonic::body::Body::new(RecvBody::new(stream)));
    let response = tokio::select! {
        response = service.oneshot(request) => response,
        _ = poll_fn(|cx| respond.poll_reset(cx)) => return,
    };
    let (parts, body) = match response {
        Ok(response) => response.into_parts(),
        Err(error) => {
            tracing::warn!(error = %error.into(), "failed to handle a control call");
            respond.send_reset(Reason::INTERNAL_ERROR);
            return;
        }
    };
    match respond.send_response(Response::from_parts(parts, ()), body.is_end_stream()) {
        Ok(stream) if !body.is_end_stream() => send_body(body, stream).await,
        Ok(_) => {}
        Err(error) => tracing::debug!(%error, "failed to answer a control call"),
    }
}

/// Sends a body until it ends or fails, or the peer resets the stream. The body is read only as fast as the peer reads, so
/// its writer notices a slow peer.
async fn send_body(body: tonic::body::Body, mut stream: SendStream<Bytes>) {
    let mut body = std::pin::pin!(body);
    loop {
        let frame = tokio::select! {
            frame = body.frame() => frame,
            _ = poll_fn(|cx| stream.poll_reset(cx)) => return,
        };
        match frame {
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) => {
                    if send_data(data, &mut stream).await.is_none() {
                        return;
                    }
                }
                Err(frame) => {
                    if let Ok(trailers) = frame.into_trailers() {
                        let _ = stream.send_trailers(trailers);
                        return;
                    }
                }
            },
            Some(Err(error)) => {
                tracing::debug!(%error, "failed to read the response to a control call");
                stream.send_reset(Reason::INTERNAL_ERROR);
                return;
            }
            None => {
                let _ = stream.send_data(Bytes::new(), true);
                return;
            }
        }
    }
}

/// Sends the data as the peer grants credit for it. Returns `None` if the stream has ended.
async fn send_data(mut data: Bytes, stream: &mut SendStream<Bytes>) -> Option<()> {
    stream.reserve_capacity(data.len());
    while !data.is_empty() {
        let capacity = stream.capacity();
        if capacity == 0 {
            // Also ends when the peer resets the stream.
            poll_fn(|cx| stream.poll_capacity(cx)).await?.ok()?;
            continue;
        }
        stream.send_data(data.split_to(capacity.min(data.len())), false).ok()?;
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::stream;
    use http_body_util::StreamBody;

    use super::*;

    /// A server that answers with 100 messages of 1000 bytes, and the number of those that it has made.
    async fn answering(io: tokio::io::DuplexStream, made: Arc<AtomicUsize>) {
        let mut link = h2::server::handshake(io).await.unwrap();
        let (_request, mut respond) = link.accept().await.unwrap().unwrap();
        let messages = stream::iter((0..100).map(move |_| {
            made.fetch_add(1, Ordering::Relaxed);
            Ok::<_, Status>(Frame::data(Bytes::from_static(&[0; 1000])))
        }));
        let stream = respond.send_response(response(), false).unwrap();
        tokio::spawn(send_body(tonic::body::Body::new(StreamBody::new(messages)), stream));
        while link.accept().await.is_some() {}
    }

    #[tokio::test]
    async fn a_body_is_read_as_fast_as_the_peer_reads() {
        let (near, far) = tokio::io::duplex(1 << 20);
        let made = Arc::new(AtomicUsize::new(0));
        tokio::spawn(answering(far, made.clone()));
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(10_500);
        let (send, connection) = builder.handshake::<_, Bytes>(near).await.unwrap();
        tokio::spawn(connection);
        let (response, _) = send.ready().await.unwrap().send_request(Request::new(()), true).unwrap();
        let mut body = response.await.unwrap().into_body();
        let mut got = 0;
        while got < 10_500 {
            got += body.data().await.unwrap().unwrap().len();
        }
        assert_eq!(made.load(Ordering::Relaxed), 11, "the last one waits for credit");
        body.flow_control().release_capacity(got).unwrap();
        while let Some(data) = body.data().await.transpose().unwrap() {
            got += data.len();
            body.flow_control().release_capacity(data.len()).unwrap();
        }
        assert_eq!((got, made.load(Ordering::Relaxed)), (100_000, 100));
    }
}
