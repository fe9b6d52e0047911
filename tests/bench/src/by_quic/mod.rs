//! Connections relayed by QUIC (quinn) instead of HTTP/2 over TCP: one connection that the edge dials, a stream for each
//! relayed one. Nothing else of Postern is in it: no redirect, policy, bound on stalled receivers or log.
pub(crate) mod cloud;
pub(crate) mod edge;
mod relay;

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use quinn::congestion::{BbrConfig, ControllerFactory, CubicConfig};
use quinn::{Endpoint, EndpointConfig, ServerConfig, TokioRuntime, TransportConfig, VarInt};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use socket2::SockRef;

/// Flow-control window of a stream: the largest that Postern's windows grow to.
const STREAM_WINDOW: u32 = 16 << 20;
/// Idle timeout of the link: the same as Postern's for a link that only looks alive.
const IDLE: Duration = Duration::from_secs(20);
const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// Size requested of the kernel, which grants no more than `net.core.rmem_max` and `wmem_max`.
const SOCKET_BUFFER: usize = 4 << 20;
const ALPN: &[u8] = b"bench";

/// TLS with Postern's one suite. QUIC's first packets need AES-128 (RFC 9001 section 5.2).
fn provider() -> Arc<CryptoProvider> {
    use aws_lc_rs::cipher_suite::{TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384};
    let cipher_suites = vec![TLS13_AES_256_GCM_SHA384, TLS13_AES_128_GCM_SHA256];
    Arc::new(CryptoProvider { cipher_suites, ..aws_lc_rs::default_provider() })
}

fn transport(congestion: &str) -> Result<Arc<TransportConfig>> {
    let congestion: Arc<dyn ControllerFactory + Send + Sync> = match congestion {
        "cubic" => Arc::new(CubicConfig::default()),
        "bbr" => Arc::new(BbrConfig::default()),
        _ => bail!("congestion control {congestion:?}: cubic or bbr"),
    };
    let mut transport = TransportConfig::default();
    transport
        .congestion_controller_factory(congestion)
        .stream_receive_window(STREAM_WINDOW.into())
        .receive_window(VarInt::MAX)
        .send_window(u64::from(STREAM_WINDOW) * 8)
        .max_concurrent_bidi_streams(VarInt::from_u32(65_536))
        .max_idle_timeout(Some(IDLE.try_into().context("the idle timeout")?))
        .keep_alive_interval(Some(KEEP_ALIVE));
    Ok(Arc::new(transport))
}

/// Opens an endpoint on a UDP socket; it listens if there is a configuration for that.
fn endpoint(address: SocketAddr, server: Option<ServerConfig>) -> Result<Endpoint> {
    let socket = UdpSocket::bind(address).with_context(|| format!("binding {address}"))?;
    let buffers = SockRef::from(&socket);
    buffers.set_recv_buffer_size(SOCKET_BUFFER).context("the receive buffer")?;
    buffers.set_send_buffer_size(SOCKET_BUFFER).context("the send buffer")?;
    Endpoint::new(EndpointConfig::default(), server, socket, Arc::new(TokioRuntime)).context("an endpoint")
}
