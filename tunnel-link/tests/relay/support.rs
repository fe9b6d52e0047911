//! A link in memory, and connections relayed over it.

use std::future::ready;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::client::SendRequest;
use http::{Request, Response};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::mpsc;
use tunnel_link::link::{self, Flow};
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{Abort, Forward, Relay, RelayError, Side, StallBound, Traffic, prepare_socket};

pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

pub(crate) type Ended = Result<(), Outcome>;

/// An HTTP/2 link whose agent end connects every stream to the listener `targets`.
pub(crate) struct Link {
    pub(crate) send: SendRequest<Bytes>,
    pub(crate) targets: TcpListener,
    pub(crate) agent_ends: mpsc::UnboundedReceiver<Ended>,
}

/// Creates a link: one of those below.
pub(crate) type MakeLink = fn() -> Pin<Box<dyn Future<Output = Link> + Send>>;

/// Runs each test over a link with the agent, and over one with a server that forwards connections to such a link.
macro_rules! over_both {
    ($($test:ident),* $(,)?) => {
        $(mod $test {
            use crate::support;

            #[tokio::test]
            async fn direct() {
                super::$test(|| Box::pin(support::direct())).await;
            }

            #[tokio::test]
            async fn forwarded() {
                super::$test(|| Box::pin(support::forwarded())).await;
            }
        })*
    };
}
pub(crate) use over_both;

/// Creates a link with a server that has the link with the agent.
pub(crate) async fn forwarded() -> Link {
    forwarded_along(Arc::default(), Arc::default()).await
}

/// Like [`forwarded`]; `client` and `agent` are that server's path estimates of its two links.
pub(crate) async fn forwarded_along(client: Arc<Flow>, agent: Arc<Flow>) -> Link {
    let Link { send: to_agent, targets, agent_ends } = direct().await;
    // The two ends report how it ended.
    let (send, _) = in_front_of(to_agent, client, agent).await;
    Link { send, targets, agent_ends }
}

/// Creates a link with a server in front of the given one, which is with an agent. Also yields how the connections ended
/// at that server.
pub(crate) async fn in_front_of(
    to_agent: SendRequest<Bytes>,
    client: Arc<Flow>,
    agent: Arc<Flow>,
) -> (SendRequest<Bytes>, mpsc::UnboundedReceiver<Outcome>) {
    let (ends, middle_ends) = mpsc::unbounded_channel();
    let (server_io, middle_io) = tokio::io::duplex(1 << 20);
    tokio::spawn(async move {
        let mut connection = link::server_builder().handshake(middle_io).await.unwrap();
        let stalls = stalls();
        while let Some(Ok((request, mut respond))) = connection.accept().await {
            let (to_agent, stalls) = (to_agent.clone(), stalls.clone());
            let (client, agent, ends) = (client.clone(), agent.clone(), ends.clone());
            tokio::spawn(async move {
                let mut to_agent = to_agent.ready().await.unwrap();
                let (response, mut send) = to_agent.send_request(Request::new(()), false).unwrap();
                let (abort, traffic) = (Arc::new(Abort::default()), Traffic::default());
                let forward = Forward {
                    client: &client,
                    agent: &agent,
                    stalls: &stalls,
                    abort: &abort,
                    traffic: &traffic,
                };
                let answer = async { Ok(response.await?) };
                let ended = forward.run((request.into_body(), &mut respond), &mut send, answer).await;
                let _ = ends.send(ended.unwrap_or_else(|ended| ended.outcome()));
            });
        }
    });
    let (send, connection) = link::client_builder().handshake(server_io).await.unwrap();
    tokio::spawn(connection);
    (send, middle_ends)
}

/// Creates a link with the agent.
pub(crate) async fn direct() -> Link {
    let (server_io, agent_io) = tokio::io::duplex(1 << 20);
    let targets = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = targets.local_addr().unwrap();
    let (ends, agent_ends) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let mut connection = link::server_builder().handshake(agent_io).await.unwrap();
        let stalls = Arc::new(StallBound::new(link::AGENT_STALL_BYTES, link::STREAM_WINDOW as usize));
        while let Some(Ok((request, mut respond))) = connection.accept().await {
            let (stalls, ends) = (stalls.clone(), ends.clone());
            tokio::spawn(async move {
                let mut socket = TcpStream::connect(address).await.unwrap();
                prepare_socket(&socket);
                let mut send = respond.send_response(Response::new(()), false).unwrap();
                let (abort, traffic) = (Arc::new(Abort::default()), Traffic::default());
                let relay = Relay {
                    side: Side::Agent,
                    flow: &Flow::default(),
                    stalls: &stalls,
                    abort: &abort,
                    traffic: &traffic,
                };
                let ended =
                    relay.run(&mut socket, Bytes::new(), &mut send, ready(Ok(request.into_body()))).await;
                let _ = ends.send(ended.map_err(|error| error.outcome(Side::Agent)));
            });
        }
    });
    let (send, connection) = link::client_builder().handshake(server_io).await.unwrap();
    tokio::spawn(connection);
    Link { send, targets, agent_ends }
}

/// End of a connection at the server: the outcome, and the bytes from and to its socket.
pub(crate) type ServerEnd = tokio::task::JoinHandle<(Ended, u64, u64)>;

pub(crate) async fn relay(
    send: &SendRequest<Bytes>,
    stalls: Arc<StallBound>,
    prefix: &'static [u8],
) -> (TcpStream, ServerEnd) {
    relay_of(TcpSocket::new_v4().unwrap(), send, stalls, prefix, Arc::default()).await
}

/// The same of this client, and with what may be seen of the connection.
pub(crate) async fn relay_of(
    client: TcpSocket,
    send: &SendRequest<Bytes>,
    stalls: Arc<StallBound>,
    prefix: &'static [u8],
    seen: Arc<(Arc<Abort>, Traffic)>,
) -> (TcpStream, ServerEnd) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = client.connect(listener.local_addr().unwrap()).await.unwrap();
    let (mut socket, _) = listener.accept().await.unwrap();
    prepare_socket(&socket);
    let mut send = send.clone().ready().await.unwrap();
    let end = tokio::spawn(async move {
        let (response, mut stream) = send.send_request(Request::new(()), false).unwrap();
        let (abort, traffic) = &*seen;
        let relay = Relay { side: Side::Server, flow: &Flow::default(), stalls: &stalls, abort, traffic };
        let inbound = async { Ok(response.await?.into_body()) };
        let ended = relay.run(&mut socket, Bytes::from_static(prefix), &mut stream, inbound).await;
        let bytes = (traffic.from_socket(), traffic.to_socket());
        (ended.map_err(|error: RelayError| error.outcome(Side::Server)), bytes.0, bytes.1)
    });
    (client, end)
}

pub(crate) fn stalls() -> Arc<StallBound> {
    Arc::new(StallBound::new(link::SERVER_STALL_BYTES, link::STREAM_WINDOW as usize))
}

pub(crate) async fn within<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, work).await.expect("in time")
}

pub(crate) fn pattern(len: usize, seed: u32) -> Vec<u8> {
    let mut state = seed | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state.to_le_bytes()[1]
        })
        .collect()
}
