//! One server's stream of packets.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use http::Uri;
use hyper_util::rt::TokioIo;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::metadata::{Ascii, MetadataMap, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, Streaming};
use tower::service_fn;
use tunnel_link::konnectivity::agent_service_client::AgentServiceClient;
use tunnel_link::konnectivity::{Bounds, Connections, LARGEST_MESSAGE, Packet, Packets, single};
use tunnel_runtime::error::chain;
use tunnel_runtime::text::printable;

use super::dial::ForServer;
use super::shared::Shared;
use super::tls::{client_config, connect};
use crate::busy::Busy;

/// Maximum time for the connection, TLS and the answer to the call together.
const ATTACH: Duration = Duration::from_secs(20);
/// Maximum packets waiting for the server to read. Each has at most 32 KiB.
const PACKETS: usize = 64;
/// HTTP/2 window of the stream: bytes that the server may send before this agent has taken them.
const STREAM_WINDOW: u32 = 1 << 20;
/// HTTP/2 window of the connection, which has one stream.
const CONNECTION_WINDOW: u32 = 2 << 20;
/// PING interval and timeout. The server takes PINGs more often than every 30 s for an attack.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(20));
/// Time without any dial or connection before a stream that is being left ends.
const QUIET: Duration = Duration::from_secs(1);

/// All callers of a server share this one stream.
const BOUNDS: Bounds = Bounds {
    connections: 1 << 16,
    one: 4 << 20,
    patience: Duration::from_secs(2),
    callers_share: true,
    stalled: "its target did not take what waited for it, and other connections of this agent were not to wait too",
    linger: Duration::from_secs(60),
    early: "unrecognized connectID",
};

/// A stream that a server has accepted.
pub(super) struct Stream {
    pub(super) server_id: String,
    /// Number of servers, as reported by this one.
    pub(super) server_count: usize,
    incoming: Streaming<Packet>,
    packets: Packets,
    /// Ends the connection when dropped.
    _client: AgentServiceClient<Channel>,
}

impl Stream {
    /// Attaches to one of the servers behind the address.
    ///
    /// # Errors
    /// A file cannot be used, nothing answers, TLS fails, or the server refuses.
    pub(super) async fn open(shared: &Shared) -> Result<Self, String> {
        let opened = tokio::time::timeout(ATTACH, Self::attach(shared)).await;
        opened.unwrap_or_else(|_| Err(format!("no answer within {} s", ATTACH.as_secs())))
    }

    async fn attach(shared: &Shared) -> Result<Self, String> {
        let (packets, outgoing) = mpsc::channel::<Result<Packet, Status>>(PACKETS);
        let outgoing = ReceiverStream::new(outgoing).filter_map(|packet| std::future::ready(packet.ok()));
        let mut request = Request::new(outgoing);
        fill(request.metadata_mut(), shared)?;
        let mut client =
            AgentServiceClient::new(channel(shared).await?).max_decoding_message_size(LARGEST_MESSAGE);
        let answer = client.connect(request).await.map_err(|status| {
            format!("the server refused the call: {:?}: {}", status.code(), printable(status.message(), 300))
        })?;
        let named = |key: &str| {
            let missing =
                || format!("the server's answer does not have one {key}: is it konnectivity's proxy-server?");
            single(answer.metadata(), key).map(str::to_owned).ok_or_else(missing)
        };
        let (server_id, count) = (named("serverid")?, named("servercount")?);
        let server_count = count.parse().map_err(|_| {
            format!("the server's answer has servercount {:?}: not a number", printable(&count, 20))
        })?;
        Ok(Self { server_id, server_count, incoming: answer.into_inner(), packets, _client: client })
    }

    /// Serves the stream until it ends. On `leave`, asks the server to send nothing new and goes on while dials or
    /// connections are left.
    ///
    /// # Errors
    /// The stream's error.
    pub(super) async fn run(
        self,
        shared: Arc<Shared>,
        busy: Arc<Busy>,
        leave: CancellationToken,
    ) -> Result<(), Status> {
        let Self { server_id, incoming, packets, _client, .. } = self;
        let (shutdown, numbers, room) =
            (shared.runtime.shutdown.clone(), shared.numbers.clone(), shared.room.clone());
        let dialler = Arc::new(ForServer { shared, busy: busy.clone(), server_id });
        let connections = Connections::new(dialler, BOUNDS, room, numbers, packets.clone());
        let mut serving = std::pin::pin!(connections.serve(incoming));
        tokio::select! {
            ended = &mut serving => return ended,
            () = leave.cancelled() => {}
            () = shutdown.forced() => return Ok(()),
        }
        let left = async {
            // A server that does not read is left too.
            if packets.send(Ok(Packet::drain())).await.is_ok() {
                busy.quiet(QUIET).await;
            }
        };
        tokio::select! {
            ended = &mut serving => ended,
            () = left => Ok(()),
            () = shutdown.forced() => Ok(()),
        }
    }
}

/// Does the TLS handshake outside tonic, so that an error says which step failed.
async fn channel(shared: &Shared) -> Result<Channel, String> {
    let server = &shared.config.server;
    let (stream, _) = connect(&shared.runtime.config.reach, server, client_config(&shared.config)?).await?;
    let mut stream = Some(TokioIo::new(stream));
    let connector = service_fn(move |_: Uri| {
        let stream = stream.take();
        async move { stream.ok_or_else(|| io::Error::other("the connection was closed")) }
    });
    let uri = |scheme: &str| {
        format!("{scheme}://{server}").parse::<Uri>().map_err(|error| format!("{server}: {error}"))
    };
    // The connector has done TLS already. Servers and proxies on the path should see the scheme `https`.
    Endpoint::from(uri("http")?)
        .origin(uri("https")?)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .http2_keep_alive_interval(KEEPALIVE.0)
        .keep_alive_timeout(KEEPALIVE.1)
        .keep_alive_while_idle(true)
        .connect_with_connector(connector)
        .await
        .map_err(|error| chain(&error))
}

/// Adds the headers that identify this agent.
fn fill(metadata: &mut MetadataMap, shared: &Shared) -> Result<(), String> {
    let value = |name: &str, text: &str| -> Result<MetadataValue<Ascii>, String> {
        MetadataValue::try_from(text).map_err(|_| format!("{name} cannot be sent: it has control characters"))
    };
    metadata.insert("agentid", value("the agent's id", &shared.config.agent_id)?);
    metadata.insert("agentidentifiers", value("the agent's identifiers", &shared.identifiers())?);
    if let Some(file) = &shared.config.token_file {
        // Read each time, because the kubelet replaces the file.
        let token = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
        let mut bearer = value("the token", &format!("Bearer {}", token.trim()))?;
        bearer.set_sensitive(true);
        metadata.insert("authorization", bearer);
    }
    Ok(())
}
