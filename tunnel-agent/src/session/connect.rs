//! Connects to a server: TCP, TLS and the first HTTP/2 frames.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use h2::server::Connection;
use rustls_pki_types::CertificateDer;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsConnector, rustls};
use tunnel_link::link::{self, Flow, HANDSHAKE_TIMEOUT, LinkIo, Wire};
use tunnel_pki::server_name;

use super::session_end::{SessionEnd, TCP};
use crate::reach::{Reached, Server};
use crate::runtime::Runtime;

const TLS: &str = "TLS handshake";
/// Maximum wait for a TLS handshake: for its turn at a server that all its agents come back to at once, which lasts 10 s at
/// most, and for the handshake itself.
const TURN: Duration = Duration::from_secs(20);

/// The agent dials, but the server opens the streams, so this end is the HTTP/2 server.
pub(super) type LinkConnection = Connection<LinkIo, bytes::Bytes>;

/// The certificates that a server presents, leaf first.
pub(super) type Chain = Arc<[CertificateDer<'static>]>;

/// A connected link.
pub(super) struct Connected {
    pub(super) link: LinkConnection,
    pub(super) path: Path,
    /// Address of the proxy in use.
    pub(super) proxy: Option<String>,
}

/// Where a link leads, and how.
pub(super) struct Path {
    pub(super) chain: Chain,
    pub(super) flow: Arc<Flow>,
    /// Leads to the same server again; the name may lead to several.
    pub(super) again: Server,
    /// This node's address on the link; None: it may have several.
    pub(super) local: Option<IpAddr>,
}

/// Connects up to HTTP/2's first frames.
pub(super) async fn connect(
    runtime: &Runtime,
    server: &Server,
    tls: Arc<rustls::ClientConfig>,
) -> Result<Connected, SessionEnd> {
    let (stream, again, proxy) = handshake(runtime, server, tls).await?;
    let wire = stream.get_ref().0;
    let local = wire.local_addr().map_err(SessionEnd::Connect)?.ip();
    let local = (!wire.is_multipath()).then_some(local);
    let chain = presented(&stream);
    let io = LinkIo::new(stream);
    let flow = io.flow();
    let mut http2 = link::server_builder();
    http2.max_concurrent_streams(runtime.places.streams());
    let link = within("HTTP/2 preface", http2.handshake(io)).await?.map_err(SessionEnd::Link)?;
    Ok(Connected { link, path: Path { chain, flow, again, local }, proxy })
}

async fn handshake(
    runtime: &Runtime,
    server: &Server,
    tls: Arc<rustls::ClientConfig>,
) -> Result<(TlsStream<Wire>, Server, Option<String>), SessionEnd> {
    let reached = within(TCP, runtime.config.reach.connect(server)).await?.map_err(SessionEnd::Connect)?;
    let Reached { stream, server, proxy } = reached;
    link::tune_probing_link(&stream, runtime.config.given.links.keepalive);
    // Every server proves this name, whatever address or load balancer leads to it.
    let handshake = TlsConnector::from(tls).connect(server_name(), stream);
    match within(TLS, handshake).await? {
        Ok(stream) => Ok((stream, server, proxy)),
        Err(source) => Err(SessionEnd::Tls { source, proxy }),
    }
}

fn presented(stream: &TlsStream<Wire>) -> Chain {
    stream.get_ref().1.peer_certificates().unwrap_or_default().into()
}

/// Limits the time of a step of the start.
pub(super) async fn within<T>(step: &'static str, work: impl Future<Output = T>) -> Result<T, SessionEnd> {
    let within = if step == TLS { TURN } else { HANDSHAKE_TIMEOUT };
    tokio::time::timeout(within, work).await.map_err(|_| SessionEnd::Slow { step, within })
}
