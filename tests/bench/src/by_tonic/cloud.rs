//! The cloud's end: accepts connections and relays each as one call.
use std::ffi::OsString;
use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::{Context as _, Result};
use http::Uri;
use hyper_util::rt::TokioIo;
use postern_testbed::load_target::RELAYED;
use postern_testbed::wait::wait_until;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore, version};
use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_stream::Stream;
use tonic::Request;
use tonic::codegen::{BoxFuture, Service};
use tonic::transport::{Channel, Endpoint};
use tunnel_link::link::{self, Wire};
use tunnel_link::proto::Segment;
use tunnel_link::proto::agent_client::AgentClient;
use tunnel_link::relay::{TARGET_HEADER, prepare_socket};

use super::relay::{Outward, directions, inward, provider};
use crate::accept;

/// Maximum wait until the other end listens.
const START: Duration = Duration::from_secs(20);
/// Postern's own deadline of a dial at the edge.
const DIAL_DEADLINE: Duration = Duration::from_secs(5);

/// The process `--tonic-cloud EDGE CA`: serves until killed.
pub(crate) fn run(args: &[OsString]) -> Result<()> {
    let [edge, ca] = args else { anyhow::bail!("--tonic-cloud EDGE CA") };
    let edge: SocketAddr = edge.to_str().and_then(|edge| edge.parse().ok()).context("EDGE")?;
    let connector = Connector { edge, tls: tls(Path::new(ca))? };
    tunnel_runtime::lifecycle::raise_open_files();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("runtime")?;
    runtime.block_on(async {
        let connected =
            async || endpoint(edge)?.connect_with_connector(connector.clone()).await.context("connecting");
        let client = AgentClient::new(wait_until("a link to the edge", START, connected, |_| true).await?);
        let mut listeners = JoinSet::new();
        for port in RELAYED {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await.context("listening")?;
            // Accepted sockets inherit this.
            prepare_socket(&listener);
            let (client, target) = (client.clone(), SocketAddr::new(edge.ip(), port));
            listeners.spawn(accept::each(listener, move |socket| relay(client.clone(), socket, target)));
        }
        listeners.join_next().await;
        anyhow::bail!("a listener ended")
    })
}

fn tls(ca: &Path) -> Result<TlsConnector> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(ca).context("the CA's certificate")?).context("the CA")?;
    let mut config = ClientConfig::builder_with_provider(Arc::new(provider()))
        .with_protocol_versions(&[&version::TLS13])
        .context("TLS 1.3")?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(TlsConnector::from(Arc::new(config)))
}

/// HTTP/2 as `tunnel_link::link` sets it, as far as tonic has settings for it.
fn endpoint(edge: SocketAddr) -> Result<Endpoint> {
    // The connector does TLS, which tonic is built without.
    Ok(Endpoint::from_shared(format!("http://{edge}"))
        .context("the edge's address")?
        .initial_stream_window_size(link::STREAM_WINDOW)
        .initial_connection_window_size(link::CONNECTION_WINDOW)
        .max_frame_size(link::MAX_FRAME)
        .http2_max_header_list_size(link::MAX_HEADERS)
        .http2_max_concurrent_reset_streams(link::MAX_RESETS)
        .http2_max_local_error_reset_streams(None)
        .http2_reset_stream_duration(link::RESET_MEMORY)
        .http2_keep_alive_interval(link::PING_INTERVAL)
        .keep_alive_timeout(link::PING_TIMEOUT)
        .keep_alive_while_idle(true))
}

#[derive(Clone)]
struct Connector {
    edge: SocketAddr,
    tls: TlsConnector,
}

impl Service<Uri> for Connector {
    type Response = TokioIo<TlsStream<Wire>>;
    type Error = io::Error;
    type Future = BoxFuture<Self::Response, io::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let Self { edge, tls } = self.clone();
        Box::pin(async move {
            let socket = TcpStream::connect(edge).await?;
            socket2::SockRef::from(&socket).set_tcp_notsent_lowat(128 << 10)?;
            let wire = Wire::from(socket);
            link::tune_link(&wire);
            let mut stream = tls.connect(ServerName::from(edge.ip()), wire).await?;
            link::tune_tls(stream.get_mut().1, link::LARGEST_PIECE);
            Ok(TokioIo::new(stream))
        })
    }
}

async fn relay(mut client: AgentClient<Channel>, socket: TcpStream, target: SocketAddr) -> Result<()> {
    let (outward, mut write) = directions(socket);
    let mut request = Request::new(Asked(outward));
    request.metadata_mut().insert(TARGET_HEADER, target.to_string().parse().context("the target")?);
    // Bounds the answer's headers, not its body.
    request.set_timeout(DIAL_DEADLINE);
    let relayed = async {
        let mut answer = client.relay(request).await?.into_inner();
        inward(&mut answer, &mut write).await
    };
    let relayed = relayed.await;
    if relayed.is_err() {
        // Tonic holds the other half until that ends: a silent client would never be notified.
        SockRef::from(write.as_ref()).shutdown(Shutdown::Read).ok();
        // Dropping it would send an end of file before the reset.
        write.forget();
    }
    relayed
}

/// A request body of tonic cannot fail: a client's reset looks like its end, until the answer shows the error.
struct Asked(Outward);

impl Stream for Asked {
    type Item = Segment;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Segment>> {
        Pin::new(&mut self.0).poll_next(cx).map(|segment| segment.and_then(Result::ok))
    }
}
