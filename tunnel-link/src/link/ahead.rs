//! Reads ahead while HTTP/2 waits to write.

use std::io::{self, IoSlice};
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::io::poll_read_buf;

use super::flow::Flow;
use super::settings::MAX_FRAME;

/// Maximum bytes read ahead: the frame that the other end is writing, and the small ones before it. Control frames come next.
const AHEAD: usize = MAX_FRAME as usize + (64 << 10);
/// Space for one read.
const PIECE: usize = 16 << 10;

/// A stream that h2 uses. h2 reads nothing while it has a PING, a PONG or SETTINGS to write; these wait for the frame that it
/// is writing. If both ends do so, and neither frame fits into the sockets, neither end goes on (rust-yamux#112 is the same in
/// another protocol). So the stream is read then, and has the bytes ready when h2 reads again.
#[derive(Debug)]
pub(super) struct ReadAhead<S> {
    stream: S,
    /// Counts bytes once they arrive: the other end is alive, whatever h2 does with them.
    flow: Arc<Flow>,
    ahead: BytesMut,
    /// Set by a write or a flush that had to wait, until the next read.
    waited: bool,
    /// Set once the stream has ended, with the error if that was the reason.
    ended: Option<io::Result<()>>,
}

impl<S: AsyncRead + AsyncWrite + Unpin> ReadAhead<S> {
    pub(super) fn new(stream: S, flow: Arc<Flow>) -> Self {
        Self { stream, flow, ahead: BytesMut::new(), waited: false, ended: None }
    }

    pub(super) fn get_ref(&self) -> &S {
        &self.stream
    }

    pub(super) fn get_mut(&mut self) -> &mut S {
        &mut self.stream
    }

    /// Call it for each write and flush that waits. Reads ahead, and returns true, if a control frame waits: h2 reads until
    /// nothing is left, then writes until it has to wait, and anything else does not wait twice without a read between.
    fn waits(&mut self, cx: &mut Context<'_>) -> bool {
        if !mem::replace(&mut self.waited, true) {
            return false;
        }
        while self.ahead.len() < AHEAD && self.ended.is_none() {
            self.ahead.reserve(PIECE);
            match poll_read_buf(Pin::new(&mut self.stream), cx, &mut self.ahead) {
                Poll::Ready(Ok(0)) => self.ended = Some(Ok(())),
                Poll::Ready(Ok(read)) => self.flow.add_received(read),
                // Reported once h2 has read everything before it.
                Poll::Ready(Err(error)) => self.ended = Some(Err(error)),
                Poll::Pending => break,
            }
        }
        true
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for ReadAhead<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.waited = false;
        if self.ahead.is_empty() {
            if let Some(ended) = self.ended.take() {
                return Poll::Ready(ended);
            }
            let before = buffer.filled().len();
            let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
            self.flow.add_received(buffer.filled().len() - before);
            return read;
        }
        let length = self.ahead.len().min(buffer.remaining());
        buffer.put_slice(&self.ahead.split_to(length));
        if self.ahead.is_empty() {
            // Not kept: most links never need it again.
            self.ahead = BytesMut::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for ReadAhead<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        if written.is_pending() {
            self.waits(cx);
        }
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        if written.is_pending() {
            self.waits(cx);
        }
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        // TLS may have taken the rest of a frame: h2 would not queue the control frame before TLS is flushed, but another data
        // frame. The task is woken, and h2 flushes again.
        if flushed.is_pending() && self.waits(cx) {
            return Poll::Ready(Ok(()));
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::time::Duration;

    use bytes::Bytes;
    use h2::RecvStream;
    use http::{Request, Response};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, BufStream};
    use tokio::time::timeout;

    use super::*;
    use crate::link::settings::{client_builder, server_builder};

    /// Less than a frame.
    const SOCKET: usize = 1 << 10;
    const FRAME: usize = 200 << 10;
    /// Number of frames that each end sends.
    const FRAMES: usize = 4;

    async fn received(mut body: RecvStream) -> usize {
        let mut received = 0;
        while let Some(data) = body.data().await {
            let length = data.unwrap().len();
            received += length;
            body.flow_control().release_capacity(length).unwrap();
        }
        received
    }

    #[tokio::test]
    async fn bytes_read_ahead_count_and_come_before_the_end() {
        let (near, mut far) = tokio::io::duplex(SOCKET);
        let flow = Arc::<Flow>::default();
        let mut stream = ReadAhead::new(near, flow.clone());
        far.write_all(b"pong").await.unwrap();
        let mut write = async || {
            poll_fn(|cx| {
                while Pin::new(&mut stream).poll_write(cx, &[0; 100]).is_ready() {}
                Poll::Ready(())
            })
            .await;
        };
        write().await;
        assert_eq!(flow.received(), 0, "h2 reads before it writes again");
        write().await;
        assert_eq!(flow.received(), 4);
        far.write_all(b"end").await.unwrap();
        far.shutdown().await.unwrap();
        write().await;
        let mut read = Vec::new();
        stream.read_to_end(&mut read).await.unwrap();
        assert_eq!((&read[..], flow.received()), (&b"pongend"[..], 7));
    }

    #[tokio::test(start_paused = true)]
    async fn both_ends_write_a_frame_and_owe_a_pong() {
        let (near, far) = tokio::io::duplex(SOCKET);
        go_on(near, far).await;
        // As TLS, which takes the end of a frame, or some frames, before the socket does.
        for buffer in [FRAME / 2, FRAME * 2] {
            let (near, far) = tokio::io::duplex(SOCKET);
            let buffered = |end| BufStream::with_capacity(SOCKET, buffer, end);
            go_on(buffered(near), buffered(far)).await;
        }
    }

    async fn go_on<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(near: S, far: S) {
        let (near, far) = tokio::join!(
            client_builder().handshake::<_, Bytes>(ReadAhead::new(near, Arc::default())),
            server_builder().handshake::<_, Bytes>(ReadAhead::new(far, Arc::default())),
        );
        let ((mut requests, mut near), mut far) = (near.unwrap(), far.unwrap());
        let (mut near_pings, mut far_pings) = (near.ping_pong().unwrap(), far.ping_pong().unwrap());
        let request = Request::post("http://edge/").body(()).unwrap();
        let (response, mut up) = requests.send_request(request, false).unwrap();
        let near = tokio::spawn(near);
        let (request, mut respond) = far.accept().await.unwrap().unwrap();
        let mut down = respond.send_response(Response::new(()), false).unwrap();
        let far = tokio::spawn(async move { poll_fn(|cx| far.poll_closed(cx)).await });
        let response = response.await.unwrap();

        for stream in [&mut up, &mut down] {
            for n in 1..=FRAMES {
                stream.send_data(vec![0; FRAME].into(), n == FRAMES).unwrap();
            }
        }
        // Both are in the middle of a frame when the pings come.
        tokio::task::yield_now().await;
        let all = async {
            let pings = async {
                tokio::try_join!(near_pings.ping(h2::Ping::opaque()), far_pings.ping(h2::Ping::opaque()))
            };
            tokio::join!(pings, received(response.into_body()), received(request.into_body()))
        };
        let (pongs, down, up) = timeout(Duration::from_secs(10), all).await.expect("neither end goes on");
        pongs.unwrap();
        assert_eq!((down, up), (FRAME * FRAMES, FRAME * FRAMES));
        drop(requests);
        near.await.unwrap().unwrap();
        far.await.unwrap().unwrap();
    }
}
