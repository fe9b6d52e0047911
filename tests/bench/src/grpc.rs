//! A client of konnectivity's ProxyService, as kube-apiserver is in `grpc` mode: one HTTP/2 connection and one
//! stream of packets for each relayed connection.
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use anyhow::{Context as _, Result, bail, ensure};
use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use h2::client::{self, SendRequest};
use h2::{RecvStream, SendStream};
use prost::Message as _;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::task::AbortHandle;

/// Maximum data of one packet: the buffer of Go's io.Copy, with which kube-apiserver writes.
const PACKET: usize = 32 * 1024;
/// Room for the other fields of a packet and gRPC's header.
const OVERHEAD: usize = 64;
/// Windows that never hold the peer back.
pub(crate) const STREAM_WINDOW: u32 = 16 << 20;
const CONNECTION_WINDOW: u32 = 64 << 20;

/// `Packet` of konnectivity-client, with the fields that a client needs.
#[derive(Clone, PartialEq, prost::Message)]
struct Packet {
    #[prost(enumeration = "PacketType", tag = "1")]
    kind: i32,
    #[prost(message, optional, tag = "2")]
    dial_request: Option<DialRequest>,
    #[prost(message, optional, tag = "3")]
    dial_response: Option<DialResponse>,
    #[prost(message, optional, tag = "4")]
    data: Option<Data>,
    #[prost(message, optional, tag = "5")]
    close_request: Option<CloseRequest>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
enum PacketType {
    DialReq = 0,
    DialRsp = 1,
    CloseReq = 2,
    CloseRsp = 3,
    Data = 4,
    DialCls = 5,
    Drain = 6,
}

#[derive(Clone, PartialEq, prost::Message)]
struct DialRequest {
    #[prost(string, tag = "1")]
    protocol: String,
    #[prost(string, tag = "2")]
    address: String,
    #[prost(int64, tag = "3")]
    random: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct DialResponse {
    #[prost(string, tag = "1")]
    error: String,
    #[prost(int64, tag = "2")]
    connect_id: i64,
    #[prost(int64, tag = "3")]
    random: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Data {
    #[prost(int64, tag = "1")]
    connect_id: i64,
    #[prost(string, tag = "2")]
    error: String,
    #[prost(bytes = "bytes", tag = "3")]
    data: Bytes,
}

#[derive(Clone, PartialEq, prost::Message)]
struct CloseRequest {
    #[prost(int64, tag = "1")]
    connect_id: i64,
}

#[derive(Debug)]
pub(crate) struct Tunnelled {
    send: SendStream<Bytes>,
    receive: RecvStream,
    connect_id: i64,
    /// Bytes of incomplete messages.
    partial: BytesMut,
    /// Bytes of the target that are not read yet.
    ready: Bytes,
    closed: bool,
    connection: AbortHandle,
}

impl Drop for Tunnelled {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl Tunnelled {
    /// Dials `target` through the proxy behind `stream`.
    pub(crate) async fn dial(stream: UnixStream, target: SocketAddr) -> Result<Self> {
        let handshake = client::Builder::new()
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .enable_push(false)
            .handshake(stream);
        let (requests, connection) = handshake.await.context("HTTP/2 with the proxy")?;
        let connection = tokio::spawn(async move {
            // The stream shows how it ended.
            connection.await.ok();
        })
        .abort_handle();
        let opened = open(requests).await;
        let (mut send, response) = opened.inspect_err(|_| connection.abort())?;
        let random: i64 = rand::random();
        let dial = DialRequest { protocol: "tcp".to_owned(), address: target.to_string(), random };
        let dial = Packet { kind: PacketType::DialReq.into(), dial_request: Some(dial), ..Packet::default() };
        send.send_data(framed(&dial), false).context("sending DIAL_REQ")?;
        let response = response.await.context("the proxy's response")?;
        ensure!(response.status() == 200, "ProxyService answered {}", response.status());
        let (partial, ready) = (BytesMut::new(), Bytes::new());
        let receive = response.into_body();
        let mut tunnelled = Self { send, receive, connect_id: 0, partial, ready, closed: false, connection };
        let answer = tunnelled.packet().await?.context("the stream ended instead of answering DIAL_REQ")?;
        let Some(answer) = answer.dial_response else { bail!("DIAL_REQ was answered with {answer:?}") };
        ensure!(answer.error.is_empty(), "the dial failed: {}", answer.error);
        ensure!(answer.random == random, "the answer is to another dial");
        tunnelled.connect_id = answer.connect_id;
        Ok(tunnelled)
    }

    /// Requests the close and waits for the answer, as konnectivity's own client does.
    pub(crate) async fn close(mut self: Box<Self>) -> Result<()> {
        let close = CloseRequest { connect_id: self.connect_id };
        let close =
            Packet { kind: PacketType::CloseReq.into(), close_request: Some(close), ..Packet::default() };
        self.send.send_data(framed(&close), false).context("sending CLOSE_REQ")?;
        while let Some(packet) = self.packet().await? {
            if packet.kind() == PacketType::CloseRsp {
                break;
            }
        }
        Ok(())
    }

    async fn packet(&mut self) -> io::Result<Option<Packet>> {
        std::future::poll_fn(|cx| self.poll_packet(cx)).await
    }

    fn poll_packet(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Packet>>> {
        loop {
            if let Some(packet) = whole(&mut self.partial)? {
                return Poll::Ready(Ok(Some(packet)));
            }
            let Some(chunk) = ready!(self.receive.poll_data(cx)) else { return Poll::Ready(Ok(None)) };
            let chunk = chunk.map_err(io::Error::other)?;
            self.receive.flow_control().release_capacity(chunk.len()).map_err(io::Error::other)?;
            self.partial.extend_from_slice(&chunk);
        }
    }
}

type Opened = (SendStream<Bytes>, client::ResponseFuture);

async fn open(requests: SendRequest<Bytes>) -> Result<Opened> {
    let mut requests = requests.ready().await.context("the proxy's HTTP/2")?;
    let request = http::Request::builder()
        .method("POST")
        .uri("http://localhost/ProxyService/Proxy")
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())
        .context("building the request")?;
    let (response, send) = requests.send_request(request, false).context("opening the stream")?;
    Ok((send, response))
}

/// gRPC's five bytes (not compressed, length) and the message.
fn framed(packet: &Packet) -> Bytes {
    let length = packet.encoded_len();
    let mut frame = BytesMut::with_capacity(5 + length);
    frame.put_u8(0);
    frame.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    frame.extend_from_slice(&packet.encode_to_vec());
    frame.freeze()
}

fn whole(partial: &mut BytesMut) -> io::Result<Option<Packet>> {
    let Some(header) = partial.first_chunk::<5>() else { return Ok(None) };
    let length = u32::from_be_bytes([header[1], header[2], header[3], header[4]]) as usize;
    if partial.len() < 5 + length {
        return Ok(None);
    }
    let mut frame = partial.split_to(5 + length).freeze();
    frame.advance(5);
    Packet::decode(frame).map(Some).map_err(io::Error::other)
}

impl AsyncRead for Tunnelled {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        while this.ready.is_empty() && !this.closed {
            match ready!(this.poll_packet(cx))? {
                Some(packet) if packet.kind() == PacketType::CloseRsp => this.closed = true,
                Some(packet) => this.ready = packet.data.map(|data| data.data).unwrap_or_default(),
                None => this.closed = true,
            }
        }
        let n = this.ready.len().min(buf.remaining());
        buf.put_slice(&this.ready.split_to(n));
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Tunnelled {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let n = buf.len().min(PACKET);
        this.send.reserve_capacity(n + OVERHEAD);
        // poll_capacity reports changes only.
        while this.send.capacity() < n + OVERHEAD {
            match ready!(this.send.poll_capacity(cx)) {
                Some(capacity) => capacity.map_err(io::Error::other)?,
                None => return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
            };
        }
        let data = Data {
            connect_id: this.connect_id,
            error: String::new(),
            data: Bytes::copy_from_slice(&buf[..n]),
        };
        let packet = Packet { kind: PacketType::Data.into(), data: Some(data), ..Packet::default() };
        this.send.send_data(framed(&packet), false).map_err(io::Error::other)?;
        Poll::Ready(Ok(n))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// There is no half-close in this protocol; the end is [`Tunnelled::close`].
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_round_trip() {
        let data = Data { connect_id: 7, error: String::new(), data: Bytes::from_static(b"abc") };
        let packet = Packet { kind: PacketType::Data.into(), data: Some(data), ..Packet::default() };
        let frame = framed(&packet);
        // Field numbers and wire types of konnectivity-client's proto, by hand.
        assert_eq!(&frame[..], b"\0\0\0\0\x0b\x08\x04\x22\x07\x08\x07\x1a\x03abc");
        let mut partial = BytesMut::new();
        for byte in frame {
            assert!(whole(&mut partial).unwrap().is_none());
            partial.put_u8(byte);
        }
        assert_eq!(whole(&mut partial).unwrap(), Some(packet));
        assert!(partial.is_empty());
    }
}
