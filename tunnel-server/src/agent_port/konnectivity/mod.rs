//! The port of konnectivity's agents: its AgentService, over TLS.
//!
//! Each stream becomes the session of its node, as if a tunnel-agent had attached: an agent's end of a link runs in
//! this process ([`agent`]), and translates the session's requests to packets. So all listeners, the access log, the
//! limits and other servers treat these nodes like any other.

mod agent;
mod config;
mod connections;
mod control;
mod identity;
mod relay;
mod service;
mod state;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tunnel_link::konnectivity::LARGEST_MESSAGE;
use tunnel_link::konnectivity::agent_service_server::AgentServiceServer;
use tunnel_link::link::{PING_INTERVAL, PING_TIMEOUT};
use tunnel_pki::{Client, client_of_certificate};

use super::attach::Presented;
use super::handshakes::{Connection, Error};
use crate::admission::Accept;
use service::Service;

pub use config::KonnectivityConfig;
pub use identity::AgentTokens;
pub use service::KonnectivityPort;

/// Name of the listener in logs, and for a successor.
pub(crate) const NAME: &str = "konnectivity";
/// Maximum time for an agent from its handshake to its stream.
const ATTACH: Duration = Duration::from_secs(30);
/// Time that a connection stays open after its last stream has ended, for the last bytes to arrive.
const LINGER: Duration = Duration::from_secs(5);
/// An agent has one stream on a connection.
const MOST_STREAMS: u32 = 4;
/// Bytes that an agent may send before it must wait for them to be taken.
const STREAM_WINDOW: u32 = 1 << 20;
/// The same for one connection.
const CONNECTION_WINDOW: u32 = 4 << 20;

impl KonnectivityPort {
    /// Accepts connections until the drain starts.
    pub async fn serve(self: Arc<Self>, listener: impl Accept) {
        let handshakes = self.handshakes.clone();
        handshakes.accept(NAME, listener, move |connection| self.clone().serve_one(connection)).await;
    }

    async fn serve_one(
        self: Arc<Self>,
        Connection { stream, peer, place, worker }: Connection,
    ) -> Result<(), Error> {
        let certificate = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first()).cloned();
        let certified = match &certificate {
            Some(certificate) => match client_of_certificate(certificate).map_err(Error::denied)? {
                Client::Agent(node) => {
                    let credential =
                        self.handshakes.context.credential(certificate).map_err(Error::denied)?;
                    Some(Presented { node, credential })
                }
                _ => return Err(Error::denied("its certificate is not an agent's")),
            },
            None => None,
        };
        let (attached, streams) = (CancellationToken::new(), TaskTracker::new());
        let service = Service {
            port: self,
            peer,
            certified,
            worker,
            attached: attached.clone(),
            streams: streams.clone(),
        };
        let service = AgentServiceServer::new(service).max_decoding_message_size(LARGEST_MESSAGE);
        let served = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_concurrent_streams(MOST_STREAMS)
            .keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT)
            .serve_connection(TokioIo::new(stream), TowerToHyperService::new(service));
        let mut served = std::pin::pin!(served);
        let ended = tokio::select! {
            ended = &mut served => ended,
            () = attached.cancelled() => {
                drop(place);
                streams.close();
                tokio::select! {
                    ended = &mut served => ended,
                    // The connection no longer has a place: an agent must not keep one open for each earlier session.
                    () = streams.wait() => {
                        served.as_mut().graceful_shutdown();
                        tokio::time::timeout(LINGER, served).await.unwrap_or(Ok(()))
                    }
                }
            }
            () = place.evicted() => return Err(Error::Evicted),
            () = tokio::time::sleep(ATTACH) => {
                return Err(io::Error::other(format!("no call within {} s", ATTACH.as_secs())).into());
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%peer, %error, "konnectivity agent connection failed");
        }
        Ok(())
    }
}
