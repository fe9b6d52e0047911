//! From the edge to the cloud: listeners on this node whose connections a server makes, as far as its policy permits.
//!
//! The agent only relays. A workload speaks HTTP CONNECT, or another request to a proxy, with the server itself,
//! through the tunnel; for a static mapping the stream's headers name the target.

mod link;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::FutureExt as _;
use tokio::io::{AsyncWriteExt as _, Interest};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tunnel_link::link::Flow;
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{Abort, Relay, RelayError, Relaying, Side, Traffic, end_on_drop, end_quiet};
use tunnel_runtime::accept::accept;
use tunnel_runtime::config::HostPort;
use tunnel_runtime::live::Live;
use tunnel_runtime::log_once::LogRarely;

use crate::config::Listen;
use crate::listeners::OUTBOUND;
use crate::runtime::Runtime;
use crate::session::{LinkSet, Shared};
use link::{Links, Stream};

/// Time since accept after which a client that has closed its end, and has no link yet, counts as gone. Before that it
/// may have half-closed and wait for the answer.
const PATIENCE: Duration = Duration::from_secs(3);
/// Maximum time for a client to read the error.
const ANSWER: Duration = Duration::from_secs(1);

/// Relays the connections.
pub(crate) struct Outbound {
    runtime: Runtime,
    links: Links,
    live: Arc<Live<Outgoing>>,
}

/// A relayed connection.
#[derive(Debug, Default)]
struct Outgoing {
    traffic: Traffic,
    abort: Arc<Abort>,
    flow: Arc<Flow>,
}

impl Outgoing {
    fn relaying(&self) -> Option<Relaying<'_>> {
        let Self { traffic, abort, flow } = self;
        Some(Relaying { traffic, abort, rtt: flow.rtt.last() })
    }
}

impl Outbound {
    /// `servers` are the known ones. Those with a session are tried first.
    pub(crate) fn new(
        shared: Arc<Shared>,
        sessions: Arc<LinkSet>,
        servers: watch::Receiver<Arc<Vec<HostPort>>>,
    ) -> Arc<Self> {
        let runtime = shared.runtime.clone();
        Arc::new(Self { runtime, links: Links::new(shared, servers, sessions), live: Arc::default() })
    }

    /// Serves a listener until the drain, except while another agent of this node has taken over.
    pub(crate) async fn serve(self: Arc<Self>, listen: Listen, listener: TcpListener) {
        let (listen, refused, failing) = (Arc::new(listen), LogRarely::default(), LogRarely::default());
        loop {
            let (socket, client) = tokio::select! {
                accepted = self.accept(&listener, &failing) => accepted,
                () = self.runtime.shutdown.draining() => return,
            };
            if !listen.permits(client.ip()) {
                self.runtime.metrics.outbound(Outcome::Denied);
                if let Some(left_out) = refused.due(Instant::now()) {
                    tracing::warn!(address = %listen.address, %client, left_out, "client not permitted");
                }
                continue;
            }
            let (outbound, listen) = (self.clone(), listen.clone());
            self.runtime.tasks.spawn(async move { outbound.handle(socket, client, &listen).await });
        }
    }

    /// Ends each connection once it is idle, as [`end_quiet`] does.
    pub(crate) async fn end_quiet(&self) {
        end_quiet(|| self.live.all(), Outgoing::relaying).await;
    }

    /// Accepts the next client. Once another agent has taken over, it accepts the clients of the shared socket.
    async fn accept(&self, listener: &TcpListener, failing: &LogRarely) -> (TcpStream, SocketAddr) {
        loop {
            self.runtime.handover.leads().await;
            tokio::select! {
                biased;
                () = self.runtime.handover.passed() => {}
                accepted = accept(|| listener.accept(), OUTBOUND, failing) => return accepted,
            }
        }
    }

    async fn handle(&self, mut socket: TcpStream, client: SocketAddr, listen: &Listen) {
        let Some(_place) = self.runtime.places.take() else {
            self.runtime.metrics.outbound(Outcome::Busy);
            return tracing::debug!(%client, limit = self.runtime.places.limit(), "refused a connection, there are as many as permitted");
        };
        let since = Instant::now();
        // A request of a client that is gone must not be executed once the network is back.
        let given_up = || since.elapsed() >= PATIENCE && has_closed(&socket);
        let opened = self.links.open(listen.target.as_ref(), given_up).await;
        let ended = match opened {
            Ok(stream) => self.relay(&mut socket, stream).await,
            Err(error) => {
                if let (None, RelayError::Dial(Outcome::NoTunnel, reason)) = (&listen.target, &error) {
                    unavailable(&mut socket, reason).await;
                }
                Err(error)
            }
        };
        let outcome = ended.as_ref().map_or_else(|error| error.outcome(Side::Server), |()| Outcome::Ok);
        self.runtime.metrics.outbound(outcome);
        let error = ended.err().map(tracing::field::display);
        tracing::debug!(address = %listen.address, %client, %outcome, error, "connection to the cloud");
    }

    /// Relays one connection. Towards a server this end has the role of a server, because it opens the stream.
    async fn relay(&self, socket: &mut TcpStream, stream: Stream) -> Result<(), RelayError> {
        let Stream { link, mut send, answer } = stream;
        let outgoing = self.live.enter(Outgoing { flow: link.flow.clone(), ..Outgoing::default() });
        let relay = Relay {
            side: Side::Server,
            flow: &link.flow,
            stalls: &link.stalls,
            abort: &outgoing.abort,
            traffic: &outgoing.traffic,
        };
        let mut running = std::pin::pin!(relay.run(socket, Bytes::new(), &mut send, answer));
        let outcome = tokio::select! {
            biased;
            ended = &mut running => return ended,
            () = link.over.cancelled() => Outcome::TunnelLost,
            () = self.runtime.shutdown.forced() => Outcome::Shutdown,
        };
        outgoing.abort.trigger(outcome);
        running.await
    }
}

/// True if the client has closed its end, even if data sent before is still unread.
fn has_closed(socket: &TcpStream) -> bool {
    let ready = socket.ready(Interest::READABLE).now_or_never();
    matches!(ready, Some(Ok(ready)) if ready.is_read_closed())
}

/// Answers a proxy client while there is no server.
async fn unavailable(socket: &mut TcpStream, reason: &str) {
    let body = format!("tunnel-agent: {reason}\n");
    let text = format!(
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n{body}",
        body.len()
    );
    let answered = async {
        // Unread data would turn the close into a reset, which may overtake the answer.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_to_the_cloud_ends_once_it_is_quiet() {
        let live = Arc::<Live<Outgoing>>::default();
        let idle = live.enter(Outgoing::default());
        end_quiet(|| live.all(), Outgoing::relaying).await;
        assert_eq!(idle.abort.triggered().now_or_never(), Some((Outcome::Shutdown, "")));
    }

    #[tokio::test]
    async fn a_client_that_has_closed_is_noticed_behind_what_it_sent() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (socket, _) = listener.accept().await.unwrap();
        assert!(!has_closed(&socket));
        client.write_all(b"a request").await.unwrap();
        socket.readable().await.unwrap();
        assert!(!has_closed(&socket), "it waits for the answer");
        drop(client);
        let noticed = async {
            while !has_closed(&socket) {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), noticed).await.unwrap();
    }
}
