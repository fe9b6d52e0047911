//! From the edge to the cloud: listeners on this node whose connections a server makes, as far as its policy permits.
//!
//! The agent only carries. A workload speaks HTTP CONNECT, or another request to a proxy, with the server itself, through
//! the tunnel; a static map names its target in the stream's head.

mod link;
mod listen;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ipnet::IpNet;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tunnel_core::carry::{Abort, Relay, RelayError, Side, Traffic, end_on_drop, prepare_socket};
use tunnel_core::config::HostPort;
use tunnel_core::identity::AgentIdentity;
use tunnel_core::outcome::Outcome;

use crate::metrics::Metrics;
use crate::reach::Reach;
use crate::session::Handover;
use link::{Links, Stream};
pub use listen::Listen;
pub(crate) use listen::{BoundListeners, MOST_LISTENERS, NAME, bind, copy, listen_late};

/// The pause after a failed accept: errors of a single connection do not repeat, EMFILE does.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);
/// How long a client may take to read why it gets nothing.
const ANSWER: Duration = Duration::from_secs(1);

/// What carries the connections.
pub(crate) struct Outbound {
    links: Links,
    handover: Handover,
    metrics: Metrics,
    tasks: TaskTracker,
    draining: CancellationToken,
    forced: CancellationToken,
}

impl Outbound {
    pub(crate) fn new(
        reach: Reach,
        identity: watch::Receiver<Arc<AgentIdentity>>,
        servers: watch::Receiver<Arc<Vec<HostPort>>>,
        handover: Handover,
        metrics: Metrics,
        tasks: TaskTracker,
        (draining, forced): (CancellationToken, CancellationToken),
    ) -> Arc<Self> {
        let links = Links::new(reach, identity, servers);
        Arc::new(Self { links, handover, metrics, tasks, draining, forced })
    }

    /// Serves a listener until the drain, but for the time in which another agent of this node has taken over.
    pub(crate) async fn serve(self: Arc<Self>, listen: Listen, listener: TcpListener) {
        let listen = Arc::new(listen);
        loop {
            let accepted = tokio::select! {
                accepted = self.accept(&listener) => accepted,
                () = self.draining.cancelled() => return,
            };
            match accepted {
                Ok((socket, client)) => {
                    let (outbound, listen) = (self.clone(), listen.clone());
                    self.tasks.spawn(async move { outbound.carry(socket, client, &listen).await });
                }
                Err(error) => {
                    tracing::warn!(address = %listen.address, %error, "cannot accept a connection to the cloud");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    /// The next client. Once another agent has taken over, which listens on the same socket, they are that one's.
    async fn accept(&self, listener: &TcpListener) -> io::Result<(TcpStream, SocketAddr)> {
        loop {
            self.handover.leads().await;
            tokio::select! {
                biased;
                () = self.handover.passed() => {}
                accepted = listener.accept() => return accepted,
            }
        }
    }

    async fn carry(&self, mut socket: TcpStream, client: SocketAddr, listen: &Listen) {
        // Armed first: whatever goes wrong, the client sees a reset.
        if let Err(error) = prepare_socket(&socket) {
            return tracing::debug!(%client, %error, "a client left at once");
        }
        if !permits(&listen.clients, client.ip()) {
            self.metrics.outbound(Outcome::Denied);
            return tracing::warn!(address = %listen.address, %client, "this listener is not for that client");
        }
        let ended = match self.links.open(listen.target.as_ref()).await {
            Ok(stream) => self.relay(&mut socket, stream).await,
            Err(reason) => {
                if listen.target.is_none() {
                    unavailable(&mut socket, &reason).await;
                }
                Err(RelayError::Dial(Outcome::NoTunnel, reason))
            }
        };
        let outcome = ended.as_ref().map_or_else(|error| error.outcome(Side::Server), |()| Outcome::Ok);
        self.metrics.outbound(outcome);
        let error = ended.err().map(tracing::field::display);
        tracing::debug!(address = %listen.address, %client, %outcome, error, "connection to the cloud");
    }

    /// To a server this end is what a server is to an agent: the one that asks.
    async fn relay(&self, socket: &mut TcpStream, stream: Stream) -> Result<(), RelayError> {
        let Stream { link, mut send, answer } = stream;
        let (abort, traffic) = (Arc::new(Abort::default()), Traffic::default());
        let relay = Relay {
            side: Side::Server,
            flow: &link.flow,
            stalls: &link.stalls,
            abort: &abort,
            traffic: &traffic,
        };
        let mut running = std::pin::pin!(relay.run(socket, Bytes::new(), &mut send, answer));
        let outcome = tokio::select! {
            biased;
            ended = &mut running => return ended,
            () = link.over.cancelled() => Outcome::TunnelLost,
            () = self.forced.cancelled() => Outcome::Shutdown,
        };
        abort.trigger(outcome);
        running.await
    }
}

fn permits(clients: &[IpNet], client: IpAddr) -> bool {
    let client = client.to_canonical();
    clients.iter().any(|range| range.contains(&client))
}

/// The answer to a proxy's client while there is no server.
async fn unavailable(socket: &mut TcpStream, reason: &str) {
    let body = format!("tunnel-agent: {reason}\n");
    let text = format!(
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n{body}",
        body.len()
    );
    let answered = async {
        // A request that is not read would turn the close into a reset, which may overtake the answer.
        socket.readable().await?;
        let mut request = vec![0; 4096];
        match socket.try_read(&mut request) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
            _ => {}
        }
        socket.write_all(text.as_bytes()).await?;
        socket.shutdown().await
    };
    if matches!(tokio::time::timeout(ANSWER, answered).await, Ok(Ok(()))) {
        end_on_drop(socket);
    }
}
