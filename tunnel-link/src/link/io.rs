//! Byte stream of a link: TLS, with buffers that follow the path and byte counters.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};
use tokio_rustls::TlsStream;
use tunnel_runtime::net::refine;

use super::ahead::Ahead;
use super::flow::Flow;
use super::retransmission::{rto_max, set_rto_max};
use super::settings::{not_sent_limit, tune_tls};
use super::wire::Wire;
use crate::tcp_info::Delivery;

/// Minimum time between two queries of the link's rate.
const RATE_INTERVAL: Duration = Duration::from_millis(10);
/// Maximum time for the other end to read the last bytes and to close, once they are written. The owner of the link bounds
/// the writing.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// The byte stream under a link's HTTP/2.
#[derive(Debug)]
pub struct LinkIo {
    // Boxed, because futures that hold them are moved.
    below: Box<Below>,
    flow: Arc<Flow>,
    rate_read: Instant,
    /// Set if the kernel does not report the path in use.
    multipath: bool,
    /// Maximum pause between two retransmissions, as set in the kernel.
    rto_max: Duration,
    /// Set once everything is written and the other end has been told.
    closing: Option<Pin<Box<Sleep>>>,
}

/// The TLS stream, and the bytes read from it that h2 has not taken.
#[derive(Debug)]
struct Below {
    stream: TlsStream<Wire>,
    ahead: Ahead,
}

impl LinkIo {
    /// Wraps a stream after its handshake, on a socket tuned by [`super::tune_link`].
    pub fn new(stream: impl Into<TlsStream<Wire>>) -> Self {
        let stream = stream.into();
        let mut io = Self {
            multipath: stream.get_ref().0.is_multipath(),
            below: Box::new(Below { stream, ahead: Ahead::default() }),
            flow: Arc::default(),
            rate_read: Instant::now(),
            rto_max: Duration::ZERO,
            closing: None,
        };
        io.resize(io.flow.piece());
        let rtt = io.delivery().and_then(|delivery| delivery.shortest_rtt);
        if let Some(rtt) = rtt {
            // Measured in the handshake; used until a PING is answered.
            io.flow.rtt.assume(rtt);
            io.flow.set_path_rtt(rtt);
        }
        io.pause_at_most(rto_max(rtt.unwrap_or_default()));
        io
    }

    fn wire(&self) -> &Wire {
        self.below.stream.get_ref().0
    }

    fn delivery(&self) -> Option<Delivery> {
        if self.multipath { None } else { self.wire().delivery() }
    }

    /// Returns the state shared by the link's streams.
    pub fn flow(&self) -> Arc<Flow> {
        self.flow.clone()
    }

    /// Limits the bytes queued in TLS and in the kernel by the size of a piece, in bytes.
    fn resize(&mut self, piece: usize) {
        match &mut self.below.stream {
            TlsStream::Client(stream) => tune_tls(stream.get_mut().1, piece),
            TlsStream::Server(stream) => tune_tls(stream.get_mut().1, piece),
        }
        let Some(socket) = self.wire().socket() else { return };
        // Without it, small messages wait longer.
        refine("TCP_NOTSENT_LOWAT", SockRef::from(socket).set_tcp_notsent_lowat(not_sent_limit(piece)));
    }

    /// Limits the pause between two retransmissions.
    fn pause_at_most(&mut self, pause: Duration) {
        self.rto_max = pause;
        // Without it the link works, but recovers later after an outage.
        if let Some(Err(error)) = self.wire().socket().map(|socket| set_rto_max(socket, pause)) {
            tracing::debug!(%error, "failed to set the maximum retransmission timeout");
        }
    }

    /// Answers [`Flow::silence`]. Call it wherever the link is polled: while the link cannot be written to, h2 does
    /// not read until a due PING has been written.
    fn answer_if_asked(&self) {
        if self.flow.is_asked() {
            self.flow.answer(self.delivery());
        }
    }

    fn count(&self, written: &Poll<io::Result<usize>>) {
        if let Poll::Ready(Ok(bytes)) = written {
            self.flow.add_sent(*bytes);
        }
    }

    /// Call it when nothing can be written.
    fn read_ahead(&mut self, cx: &mut Context<'_>) {
        let Below { stream, ahead } = &mut *self.below;
        let read = ahead.fill(Pin::new(stream), cx);
        self.flow.add_received(read);
    }

    fn follow_rate(&mut self) {
        let now = Instant::now();
        if now - self.rate_read < RATE_INTERVAL {
            return;
        }
        self.rate_read = now;
        let Some(delivery) = self.delivery() else { return };
        if let Some(piece) = self.flow.delivered(delivery) {
            self.resize(piece);
        }
        let pause = rto_max(delivery.rtt);
        if pause > self.rto_max || pause < self.rto_max / 2 {
            self.pause_at_most(pause * 5 / 4);
        }
    }
}

impl Drop for LinkIo {
    fn drop(&mut self) {
        if self.flow.is_given_up()
            && let Some(socket) = self.wire().socket()
        {
            refine("SO_LINGER", SockRef::from(socket).set_linger(Some(Duration::ZERO)));
        }
    }
}

impl AsyncRead for LinkIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.answer_if_asked();
        if let Some(read) = self.below.ahead.take(buffer) {
            return Poll::Ready(read);
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.below.stream).poll_read(cx, buffer);
        self.flow.add_received(buffer.filled().len() - before);
        read
    }
}

impl AsyncWrite for LinkIo {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.answer_if_asked();
        self.follow_rate();
        let written = Pin::new(&mut self.below.stream).poll_write(cx, bytes);
        self.count(&written);
        if written.is_pending() {
            self.read_ahead(cx);
        }
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.answer_if_asked();
        self.follow_rate();
        let written = Pin::new(&mut self.below.stream).poll_write_vectored(cx, slices);
        self.count(&written);
        if written.is_pending() {
            self.read_ahead(cx);
        }
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.below.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.below.stream).poll_flush(cx);
        if flushed.is_pending() {
            self.read_ahead(cx);
        }
        flushed
    }

    /// Completes once the other end has closed too. The kernel answers what arrives on a closed socket, a
    /// WINDOW_UPDATE for example, with a reset, upon which the other end loses what it has not received yet (RFC 9112,
    /// section 9.6, describes the same for HTTP/1.1).
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let io = &mut *self;
        if io.closing.is_none() {
            ready!(Pin::new(&mut io.below.stream).poll_shutdown(cx))?;
        }
        let closing = io.closing.get_or_insert_with(|| Box::pin(tokio::time::sleep(CLOSE_TIMEOUT)));
        let mut scratch = [0; 1024];
        while closing.as_mut().poll(cx).is_pending() {
            let mut unwanted = ReadBuf::new(&mut scratch);
            let read = ready!(Pin::new(&mut io.below.stream).poll_read(cx, &mut unwanted));
            if read.is_err() || unwanted.filled().is_empty() {
                break;
            }
        }
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use bytes::Bytes;
    use futures_util::FutureExt as _;
    use h2::Ping;
    use http::{Request, Response};
    use rustls::{ClientConfig, RootCertStore, ServerConfig};
    use rustls_pki_types::{PrivateKeyDer, ServerName};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};
    use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};

    use super::*;
    use crate::link::settings::{LARGEST_WINDOW, MAX_FRAME, client_builder, server_builder};

    /// Creates a link, and its other end.
    async fn link() -> (LinkIo, server::TlsStream<TcpStream>) {
        let (near, far) = connected().await;
        let (near, far) = secured(near, far).await;
        (LinkIo::new(near), far)
    }

    async fn connected() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (near, listener.accept().await.unwrap().0)
    }

    async fn secured<T: AsyncRead + AsyncWrite + Unpin>(
        near: TcpStream,
        far: T,
    ) -> (client::TlsStream<Wire>, server::TlsStream<T>) {
        let own = rcgen::generate_simple_self_signed(vec!["link".to_owned()]).unwrap();
        let key = PrivateKeyDer::try_from(own.signing_key.serialize_der()).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(own.cert.der().clone()).unwrap();
        let provider = || Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let connector = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let acceptor = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![own.cert.der().clone()], key)
            .unwrap();
        let name = ServerName::try_from("link").unwrap();
        tokio::try_join!(
            TlsConnector::from(Arc::new(connector)).connect(name, Wire::from(near)),
            TlsAcceptor::from(Arc::new(acceptor)).accept(far),
        )
        .unwrap()
    }

    #[tokio::test]
    async fn who_asks_for_the_silence_is_answered_however_the_link_is_polled() {
        let (mut link, _far) = link().await;
        let flow = link.flow();
        for way in ["read", "write", "write_vectored"] {
            let mut asked = std::pin::pin!(flow.silence());
            assert!(asked.as_mut().now_or_never().is_none(), "{way}: nobody has looked yet");
            poll_fn(|cx| {
                let link = Pin::new(&mut link);
                match way {
                    "read" => drop(link.poll_read(cx, &mut ReadBuf::new(&mut [0; 16]))),
                    "write" => drop(link.poll_write(cx, b"some")),
                    _ => drop(link.poll_write_vectored(cx, &[IoSlice::new(b"some")])),
                }
                Poll::Ready(())
            })
            .await;
            assert!(asked.now_or_never().is_some(), "{way}: no answer");
        }
    }

    #[tokio::test]
    async fn who_waits_for_what_is_sent_is_told_once() {
        let (mut link, _far) = link().await;
        let flow = link.flow();
        link.write_all(b"before").await.unwrap();
        flow.await_sending();
        let mut sent = std::pin::pin!(flow.more_sent());
        assert!(sent.as_mut().now_or_never().is_none(), "nothing has been sent since");
        link.write_all(b"some").await.unwrap();
        assert!(sent.now_or_never().is_some());
        link.write_all(b"more").await.unwrap();
        assert!(flow.more_sent().now_or_never().is_none(), "nobody has asked again");
    }

    #[tokio::test]
    async fn what_was_written_arrives_though_the_other_end_still_sends() {
        let (mut link, mut far) = link().await;
        // Most of it stays in this end's kernel until the other end reads.
        SockRef::from(far.get_ref().0).set_recv_buffer_size(4096).unwrap();
        let written = [7; 64 << 10];
        link.write_all(&written).await.unwrap();
        let mut shutdown = tokio::spawn(async move { link.shutdown().await });
        far.write_all(b"a WINDOW_UPDATE, say").await.unwrap();
        assert!((&mut shutdown).now_or_never().is_none(), "the other end has not closed");
        let mut read = Vec::new();
        far.read_to_end(&mut read).await.unwrap();
        assert_eq!(read, written);
        drop(far);
        shutdown.await.unwrap().unwrap();
    }

    /// Each end has a frame that no socket holds, and behind it the answer to a PING that came before the other's frame.
    #[tokio::test]
    async fn both_ends_write_a_frame_and_owe_an_answer() {
        const FRAME: usize = MAX_FRAME as usize;
        let (near, far) = connected().await;
        for (socket, size) in [(&near, FRAME / 16), (&far, FRAME / 4)] {
            SockRef::from(socket).set_recv_buffer_size(size).unwrap();
            SockRef::from(socket).set_send_buffer_size(size).unwrap();
        }
        let (near, far) = secured(near, Wire::from(far)).await;
        let (near, far) = (LinkIo::new(near), LinkIo::new(far));
        let (mut client, mut server) = (client_builder(), server_builder());
        // As on a fast path, after a while.
        client.initial_window_size(LARGEST_WINDOW);
        server.initial_window_size(LARGEST_WINDOW);
        let (client, server) =
            tokio::join!(client.handshake::<_, Bytes>(near), server.handshake::<_, Bytes>(far));
        let ((mut client, mut near), mut far) = (client.unwrap(), server.unwrap());
        for mut pings in [near.ping_pong().unwrap(), far.ping_pong().unwrap()] {
            tokio::spawn(async move { while pings.ping(Ping::opaque()).await.is_ok() {} });
        }
        tokio::spawn(near);
        let request = Request::get("http://link/").body(()).unwrap();
        let (response, up) = client.send_request(request, false).unwrap();
        let (request, mut respond) = far.accept().await.unwrap().unwrap();
        tokio::spawn(async move { while let Some(Ok(_)) = far.accept().await {} });
        let down = respond.send_response(Response::new(()), false).unwrap();
        let response = response.await.unwrap();
        for mut stream in [up, down] {
            stream.send_data(vec![7; 32 * FRAME].into(), true).unwrap();
        }
        let all = async |mut body: h2::RecvStream| {
            let mut received = 0;
            while let Some(data) = body.data().await {
                let data = data.unwrap().len();
                body.flow_control().release_capacity(data).unwrap();
                received += data;
            }
            received
        };
        let both = async { tokio::join!(all(request.into_body()), all(response.into_body())) };
        let received =
            tokio::time::timeout(Duration::from_secs(20), both).await.expect("no end waits for ever");
        assert_eq!(received, (32 * FRAME, 32 * FRAME));
    }

    #[tokio::test(start_paused = true)]
    async fn an_end_that_never_closes_is_not_waited_for_for_ever() {
        let (mut link, _far) = link().await;
        let start = tokio::time::Instant::now();
        link.shutdown().await.unwrap();
        assert!(start.elapsed() >= CLOSE_TIMEOUT);
    }
}
