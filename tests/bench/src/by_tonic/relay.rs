//! Relays one connection as two streams of segments.
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use anyhow::Result;
use bytes::BytesMut;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio_stream::Stream;
use tokio_util::io::poll_read_buf;
use tonic::{Status, Streaming};
use tunnel_link::link;
use tunnel_link::proto::Segment;
use tunnel_link::relay::{SMALL_READ, end_on_drop, next_size};

/// TLS with Postern's one suite.
pub(super) fn provider() -> CryptoProvider {
    let cipher_suites = vec![aws_lc_rs::cipher_suite::TLS13_AES_256_GCM_SHA384];
    CryptoProvider { cipher_suites, ..aws_lc_rs::default_provider() }
}

/// Splits a socket that is tuned, and armed to close with a reset, into its two directions.
pub(super) fn directions(socket: TcpStream) -> (Outward, OwnedWriteHalf) {
    let (socket, write) = socket.into_split();
    (Outward { socket, size: SMALL_READ }, write)
}

/// Socket to stream; ends with the socket's end of file.
pub(super) struct Outward {
    socket: OwnedReadHalf,
    size: usize,
}

impl Stream for Outward {
    type Item = Result<Segment, Status>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        let failed = |error: std::io::Error| Some(Err(Status::aborted(error.to_string())));
        if let Err(error) = ready!(this.socket.as_ref().poll_read_ready(cx)) {
            return Poll::Ready(failed(error));
        }
        // As with Postern: an idle connection holds no buffer of ours.
        let mut data = BytesMut::with_capacity(this.size);
        Poll::Ready(match ready!(poll_read_buf(Pin::new(&mut this.socket), cx, &mut data)) {
            Ok(0) => None,
            Ok(read) => {
                this.size = next_size(this.size, read, link::LARGEST_PIECE);
                Some(Ok(Segment { data: data.freeze() }))
            }
            Err(error) => failed(error),
        })
    }
}

/// Stream to socket, until the stream's end has been forwarded as a half-close.
pub(super) async fn inward(segments: &mut Streaming<Segment>, socket: &mut OwnedWriteHalf) -> Result<()> {
    while let Some(segment) = segments.message().await? {
        socket.write_all(&segment.data).await?;
    }
    socket.shutdown().await?;
    end_on_drop(socket.as_ref());
    Ok(())
}
