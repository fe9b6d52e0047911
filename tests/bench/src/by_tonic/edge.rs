//! The edge's end: serves the calls, and dials for each.
use std::ffi::OsString;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use anyhow::{Context as _, Result};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, version};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_stream::{Empty, StreamExt as _};
use tonic::transport::Server;
use tonic::transport::server::Connected;
use tonic::{Request, Response, Status, Streaming};
use tunnel_link::link::{self, Wire};
use tunnel_link::proto::agent_server::{Agent, AgentServer};
use tunnel_link::proto::{AgentEvent, Notice, NoticeAck, Segment, Welcome};
use tunnel_link::relay::{TARGET_HEADER, prepare_socket};

use super::relay::{Outward, directions, inward, provider};

/// The process `--tonic-edge LISTEN CERTIFICATE KEY`: serves until killed.
pub(crate) fn run(args: &[OsString]) -> Result<()> {
    let [listen, certificate, key] = args else { anyhow::bail!("--tonic-edge LISTEN CERTIFICATE KEY") };
    let listen: SocketAddr = listen.to_str().and_then(|listen| listen.parse().ok()).context("LISTEN")?;
    let tls = tls(Path::new(certificate), Path::new(key))?;
    tunnel_runtime::lifecycle::raise_open_files();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("runtime")?;
    runtime.block_on(async {
        let listener = TcpListener::bind(listen).await.with_context(|| format!("listening on {listen}"))?;
        // There is one link: its handshake delays no other.
        let links = TcpListenerStream::new(listener).then(move |socket| {
            let tls = tls.clone();
            async move {
                let socket = socket?;
                socket2::SockRef::from(&socket).set_tcp_notsent_lowat(128 << 10)?;
                let wire = Wire::from(socket);
                link::tune_link(&wire);
                let mut stream = tls.accept(wire).await?;
                link::tune_tls(stream.get_mut().1, link::LARGEST_PIECE);
                io::Result::Ok(Link(stream))
            }
        });
        server().serve_with_incoming(AgentServer::new(Dialing), links).await.context("serving")
    })
}

fn tls(certificate: &Path, key: &Path) -> Result<TlsAcceptor> {
    let certificate = CertificateDer::from_pem_file(certificate).context("the certificate")?;
    let key = PrivateKeyDer::from_pem_file(key).context("the key")?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(provider()))
        .with_protocol_versions(&[&version::TLS13])
        .context("TLS 1.3")?
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .context("certificate and key")?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// HTTP/2 as `tunnel_link::link` sets it, as far as tonic has settings for it.
fn server() -> Server {
    Server::builder()
        .initial_stream_window_size(link::STREAM_WINDOW)
        .initial_connection_window_size(link::CONNECTION_WINDOW)
        .max_frame_size(link::MAX_FRAME)
        .http2_max_header_list_size(link::MAX_HEADERS)
        .max_concurrent_streams(link::MAX_STREAMS)
        .http2_max_pending_accept_reset_streams(Some(link::MAX_RESETS))
        .http2_max_local_error_reset_streams(None)
        .http2_keepalive_interval(Some(link::PING_INTERVAL))
        .http2_keepalive_timeout(Some(link::PING_TIMEOUT))
}

struct Dialing;

#[tonic::async_trait]
impl Agent for Dialing {
    type AttachStream = Empty<Result<AgentEvent, Status>>;
    type RelayStream = Outward;

    async fn attach(&self, _: Request<Welcome>) -> Result<Response<Self::AttachStream>, Status> {
        Err(Status::unimplemented("only Relay is"))
    }

    async fn relay(&self, request: Request<Streaming<Segment>>) -> Result<Response<Outward>, Status> {
        let target = request.metadata().get(TARGET_HEADER).and_then(|target| target.to_str().ok());
        let target: Option<SocketAddr> = target.and_then(|target| target.parse().ok());
        let target = target.ok_or_else(|| Status::invalid_argument(TARGET_HEADER))?;
        let unavailable = |error: io::Error| Status::unavailable(error.to_string());
        let socket = TcpStream::connect(target).await.map_err(unavailable)?;
        prepare_socket(&socket);
        let (outward, mut write) = directions(socket);
        let mut segments = request.into_inner();
        tokio::spawn(async move {
            if inward(&mut segments, &mut write).await.is_err() {
                // Dropping it would send an end of file before the reset.
                write.forget();
            }
        });
        Ok(Response::new(outward))
    }

    async fn notify(&self, _: Request<Notice>) -> Result<Response<NoticeAck>, Status> {
        Err(Status::unimplemented("only Relay is"))
    }
}

/// tonic requires `Connected` of the connections that it serves.
struct Link(TlsStream<Wire>);

impl Connected for Link {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Link {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for Link {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
