//! Callers of the egress listener: HTTP CONNECT, and konnectivity's packets over gRPC.
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, Ordering};

use anyhow::{Context as _, Result, bail, ensure};
use hyper_util::rt::TokioIo;
use postern_testbed::client::PATIENCE;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Response, Status, Streaming};
use tunnel_link::konnectivity::packet::Payload;
use tunnel_link::konnectivity::proxy_service_client::ProxyServiceClient;
use tunnel_link::konnectivity::{Packet, PacketType};

/// Answer to a successful CONNECT.
pub(super) const CONNECTED: &str = "HTTP/1.1 200 Connection Established\r\n\r\n";

/// Sends a CONNECT and returns the answer; a refusal has a body.
pub(crate) async fn ask<S: AsyncRead + AsyncWrite + Unpin>(
    mut stream: S,
    target: &str,
) -> Result<(S, String)> {
    let request = format!("CONNECT {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
    stream.write_all(request.as_bytes()).await.context("sending the CONNECT")?;
    let reading = async {
        let mut answer = Vec::new();
        // The bytes of a target that speaks first are not part of the answer.
        while !answer.ends_with(b"\r\n\r\n") {
            match stream.read_u8().await {
                Ok(byte) => answer.push(byte),
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(answer),
                Err(error) => return Err(error),
            }
        }
        if answer != CONNECTED.as_bytes() {
            stream.read_buf(&mut answer).await?;
        }
        Ok(answer)
    };
    let answer = timeout(PATIENCE, reading).await.context("no answer to the CONNECT")??;
    Ok((stream, String::from_utf8_lossy(&answer).into_owned()))
}

/// Opens a connection through the Unix socket.
pub(super) async fn connect(socket: &Path, target: &str) -> Result<UnixStream> {
    let stream = UnixStream::connect(socket).await.context("connecting to the socket")?;
    let (stream, answer) = ask(stream, target).await?;
    ensure!(answer == CONNECTED, "CONNECT {target} was answered {answer:?}");
    Ok(stream)
}

/// A stream of packets on its own connection.
pub(super) struct Caller {
    packets: mpsc::Sender<Packet>,
    /// The call until it is answered; konnectivity's server answers with its first packet.
    call: JoinSet<Result<Response<Streaming<Packet>>, Status>>,
    answers: Option<Streaming<Packet>>,
}

/// Dial numbers, which clients choose at random.
static RANDOM: AtomicI64 = AtomicI64::new(1000);

pub(super) fn random() -> i64 {
    RANDOM.fetch_add(1, Ordering::Relaxed)
}

pub(super) async fn channel(socket: &Path) -> Result<Channel> {
    let socket: PathBuf = socket.to_owned();
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://egress").connect_with_connector(connector).await;
    channel.context("connecting to the socket")
}

/// Returns a channel on an open connection.
pub(crate) async fn over(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Result<Channel> {
    let mut stream = Some(stream);
    let connector = tower::service_fn(move |_| {
        let stream = stream.take().map(TokioIo::new);
        async move { stream.ok_or_else(|| std::io::Error::other("it is used already")) }
    });
    let channel = Endpoint::from_static("http://egress").connect_with_connector(connector).await;
    channel.context("speaking HTTP/2")
}

impl Caller {
    pub(super) async fn open(socket: &Path) -> Result<Self> {
        Ok(Self::on(channel(socket).await?))
    }

    /// Opens a stream whose connection can be cut, as by the end of its program.
    pub(super) async fn to_be_killed(socket: &Path) -> Result<(Self, std::os::unix::net::UnixStream)> {
        let stream = std::os::unix::net::UnixStream::connect(socket).context("connecting to the socket")?;
        stream.set_nonblocking(true)?;
        let killed = stream.try_clone()?;
        Ok((Self::on(over(UnixStream::from_std(stream)?).await?), killed))
    }

    pub(super) fn on(channel: Channel) -> Self {
        let (packets, requests) = mpsc::channel(16);
        let mut call = JoinSet::new();
        call.spawn(
            async move { ProxyServiceClient::new(channel).proxy(ReceiverStream::new(requests)).await },
        );
        Self { packets, call, answers: None }
    }

    /// Returns a sender that works concurrently with reading the answers.
    pub(super) fn sender(&self) -> mpsc::Sender<Packet> {
        self.packets.clone()
    }

    pub(super) async fn send(&self, packet: Packet) -> Result<()> {
        let sent =
            timeout(PATIENCE, self.packets.send(packet)).await.context("the listener takes no packets")?;
        sent.context("the listener has ended the stream")
    }

    pub(super) async fn next(&mut self) -> Result<Packet> {
        let answers = match &mut self.answers {
            Some(answers) => answers,
            None => {
                let answer =
                    timeout(PATIENCE, self.call.join_next()).await.context("no answer to the call")?;
                let answer = answer.context("there is a call until it is answered")??;
                self.answers.insert(answer.context("calling Proxy")?.into_inner())
            }
        };
        let next = timeout(PATIENCE, answers.message()).await.context("no packet from the listener")?;
        next.context("the stream failed")?.context("the listener has ended the stream")
    }

    /// Dials; returns the connection's number, or the error in the answer.
    pub(super) async fn dial(&mut self, target: &str) -> Result<Result<i64, String>> {
        let random = random();
        self.send(Packet::dial_request(target.to_owned(), random)).await?;
        let packet = self.next().await?;
        let Some(Payload::DialResponse(answer)) = packet.payload else {
            bail!("a dial was answered {packet:?}")
        };
        ensure!(answer.random == random, "dial {random} was answered as {}", answer.random);
        Ok(if answer.error.is_empty() { Ok(answer.connect_id) } else { Err(answer.error) })
    }

    /// Dials a target that must be reachable.
    pub(super) async fn connected(&mut self, target: &str) -> Result<i64> {
        self.dial(target).await?.map_err(|error| anyhow::anyhow!("the dial of {target} failed: {error}"))
    }

    pub(super) async fn data(&self, connect_id: i64, data: &[u8]) -> Result<()> {
        self.send(Packet::data(connect_id, data.to_vec().into())).await
    }

    /// Returns the next piece of data of that connection.
    pub(super) async fn expect_data(&mut self, connect_id: i64) -> Result<Vec<u8>> {
        let packet = self.next().await?;
        match packet.payload {
            Some(Payload::Data(data)) if data.connect_id == connect_id => Ok(data.data.to_vec()),
            _ => bail!("instead of data of connection {connect_id} came {packet:?}"),
        }
    }

    pub(super) async fn echo(&mut self, connect_id: i64, text: &[u8]) -> Result<()> {
        self.data(connect_id, text).await?;
        let mut back = Vec::new();
        while back.len() < text.len() {
            back.extend(self.expect_data(connect_id).await?);
        }
        ensure!(back == text, "the echo came back changed");
        Ok(())
    }

    /// Returns the next CLOSE_RSP: the connection's number and the error.
    pub(super) async fn closed(&mut self) -> Result<(i64, String)> {
        let packet = self.next().await?;
        match (packet.r#type(), packet.payload) {
            (PacketType::CloseRsp, Some(Payload::CloseResponse(answer))) => {
                Ok((answer.connect_id, answer.error))
            }
            (_, other) => bail!("instead of CLOSE_RSP came {other:?}"),
        }
    }

    /// Closes a connection as clients do.
    pub(super) async fn close(&mut self, connect_id: i64) -> Result<()> {
        self.send(Packet::close_request(connect_id)).await?;
        loop {
            let packet = self.next().await?;
            match packet.payload {
                Some(Payload::CloseResponse(answer)) if answer.connect_id == connect_id => {
                    ensure!(answer.error.is_empty(), "closing was answered {:?}", answer.error);
                    return Ok(());
                }
                Some(Payload::Data(_)) => {}
                other => bail!("instead of CLOSE_RSP came {other:?}"),
            }
        }
    }
}
