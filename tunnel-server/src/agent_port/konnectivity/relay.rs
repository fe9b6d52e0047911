//! One connection: the stream that the session opens for it, and the packets that relay it to the agent.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderMap, Request};
use tokio::sync::mpsc;
use tonic::Status;
use tunnel_link::grpc::{refuse, response};
use tunnel_link::konnectivity::Packet;
use tunnel_link::relay::{Deframer, HEADER_LEN, TARGET_HEADER, TARGET_RESET, header, status};
use tunnel_runtime::text::printable;

use super::connections::{AgentConnections, Arrived, Opened, Room};
use super::state::Agent;

/// Maximum wait for an agent's answer to a dial; its own dial takes up to 5 s.
const DIAL: Duration = Duration::from_secs(10);
/// Maximum silence of a target after its client has ended its direction: this protocol has no half-close.
const LINGER: Duration = Duration::from_secs(2);
/// Maximum number of bytes in one packet.
const PACKET: usize = 32 << 10;

/// Reason that a connection ended early.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error(transparent)]
    Stream(#[from] h2::Error),
    #[error("malformed segment")]
    Frame,
    #[error("the agent is gone")]
    Gone,
}

/// Serves one Relay stream, from the request to the end of the connection.
pub(super) async fn relay(agent: Arc<Agent>, request: Request<RecvStream>, mut respond: SendResponse<Bytes>) {
    let connections = &agent.connections;
    let opened = match dial(connections, request.headers(), &mut respond).await {
        Ok(Some(opened)) => opened,
        Ok(None) => return,
        Err(status) => return refuse(&mut respond, &status),
    };
    let connect_id = opened.connect_id;
    match respond.send_response(response(), false) {
        Ok(send) => relay_opened(connections, opened, send, request.into_body()).await,
        Err(error) => tracing::debug!(%error, "session ended during the dial"),
    }
    connections.close(connect_id).await;
}

/// Dials the target. Returns None if the client gave up.
async fn dial(
    connections: &AgentConnections,
    headers: &HeaderMap,
    respond: &mut SendResponse<Bytes>,
) -> Result<Option<Opened>, Status> {
    let target = headers.get(TARGET_HEADER).and_then(|value| value.to_str().ok());
    let target: SocketAddr = target
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| Status::invalid_argument(format!("{TARGET_HEADER} is not an IP address and port")))?;
    let (random, answer) = connections.dial();
    let asked = async {
        // Waits while the agent does not read.
        connections.send(Packet::dial_request(target.to_string(), random)).await?;
        match answer.await {
            Ok(Ok(opened)) => Ok(Some(opened)),
            Ok(Err(error)) => Err(status_of(target, &error)),
            Err(_) => Err(Status::unavailable("the agent is gone")),
        }
    };
    tokio::select! {
        biased;
        asked = asked => asked,
        _ = poll_fn(|cx| respond.poll_reset(cx)) => {
            connections.give_up(random);
            Ok(None)
        }
        () = tokio::time::sleep(DIAL) => {
            connections.give_up(random);
            let reason = format!("the agent did not answer the dial of {target} within {} s", DIAL.as_secs());
            Err(Status::deadline_exceeded(reason))
        }
    }
}

/// Translates an agent's error text to a status.
fn status_of(target: SocketAddr, error: &str) -> Status {
    let reason = format!("{target}: {}", printable(error, 300));
    if error.contains("connection refused") || error.contains("connection reset") {
        Status::unavailable(reason)
    } else if error.contains("timeout") || error.contains("deadline exceeded") {
        Status::deadline_exceeded(reason)
    } else {
        Status::not_found(reason)
    }
}

async fn relay_opened(
    connections: &AgentConnections,
    Opened { connect_id, mut arrived, room }: Opened,
    mut send: SendStream<Bytes>,
    inbound: RecvStream,
) {
    let (taken, over) = (AtomicU64::new(0), AtomicBool::new(false));
    let ended = {
        let mut up = std::pin::pin!(up(connections, connect_id, inbound, &over));
        let mut down = std::pin::pin!(down(&mut arrived, &mut send, &taken));
        tokio::select! {
            biased;
            ended = &mut down => {
                if ended.is_ok() {
                    // Data that the client still sends is dropped, as after a close; the end of the stream informs it.
                    over.store(true, Ordering::Relaxed);
                    let _ = tokio::time::timeout(LINGER, up).await;
                }
                ended
            }
            ended = &mut up => match ended {
                Err(broken) => Err(broken),
                Ok(()) => half_closed(connections, connect_id, (&taken, &room), down).await,
            },
        }
    };
    if let Err(broken) = ended {
        tracing::debug!(connect_id, error = %broken, "connection through a konnectivity agent failed");
        send.send_reset(Reason::CANCEL);
    }
}

/// Handles the end of the client's direction, which this protocol cannot express: the connection stays open while the
/// target sends, and is then closed. A target is not silent while its data waits for the client: what it sends next would be
/// lost, and the client could not tell.
async fn half_closed(
    connections: &AgentConnections,
    connect_id: i64,
    (taken, room): (&AtomicU64, &Room),
    mut down: Pin<&mut impl Future<Output = Result<(), Broken>>>,
) -> Result<(), Broken> {
    let mut closing = false;
    loop {
        let before = taken.load(Ordering::Relaxed);
        match tokio::time::timeout(LINGER, &mut down).await {
            Ok(ended) => return ended,
            Err(_) if taken.load(Ordering::Relaxed) != before || !room.is_empty() => {}
            Err(_) if closing => return Err(Broken::Gone),
            Err(_) => {
                closing = true;
                // The answer ends `down`.
                connections.send(Packet::close_request(connect_id)).await.map_err(|_| Broken::Gone)?;
            }
        }
    }
}

/// Relays from the session to the agent, up to the client's end. Drops data once the connection is `over`.
async fn up(
    connections: &AgentConnections,
    connect_id: i64,
    mut inbound: RecvStream,
    over: &AtomicBool,
) -> Result<(), Broken> {
    let mut deframer = Deframer::default();
    while let Some(chunk) = inbound.data().await {
        let mut chunk = chunk?;
        let length = chunk.len();
        while let Some(mut data) = deframer.next(&mut chunk).map_err(|_| Broken::Frame)? {
            while !data.is_empty() && !over.load(Ordering::Relaxed) {
                let piece = data.split_to(data.len().min(PACKET));
                connections.send(Packet::data(connect_id, piece)).await.map_err(|_| Broken::Gone)?;
            }
        }
        inbound.flow_control().release_capacity(length)?;
    }
    Ok(())
}

/// Relays from the agent to the session, including the target's end. Counts the bytes taken.
async fn down(
    arrived: &mut mpsc::UnboundedReceiver<Arrived>,
    send: &mut SendStream<Bytes>,
    taken: &AtomicU64,
) -> Result<(), Broken> {
    loop {
        let next = tokio::select! {
            biased;
            next = arrived.recv() => next,
            reset = poll_fn(|cx| send.poll_reset(cx)) => {
                return Err(reset.map_or_else(Broken::from, |reason| Broken::Stream(reason.into())));
            }
        };
        match next {
            Some(Arrived::Data(data, room)) => {
                let Some(head) = header(data.len()) else { return Err(Broken::Frame) };
                let mut segment = BytesMut::with_capacity(HEADER_LEN + data.len());
                segment.put_slice(&head);
                segment.put_slice(&data);
                send_all(send, segment.freeze()).await?;
                taken.fetch_add(data.len() as u64, Ordering::Relaxed);
                drop(room);
            }
            Some(Arrived::Closed(error)) => {
                send.send_trailers(status(if error.is_empty() { "0" } else { TARGET_RESET }))?;
                return Ok(());
            }
            None => return Err(Broken::Gone),
        }
    }
}

async fn send_all(send: &mut SendStream<Bytes>, mut rest: Bytes) -> Result<(), Broken> {
    while !rest.is_empty() {
        send.reserve_capacity(rest.len());
        let capacity = poll_fn(|cx| send.poll_capacity(cx)).await.ok_or(Broken::Gone)??;
        send.send_data(rest.split_to(capacity.min(rest.len())), false)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use h2::client::ResponseFuture;
    use tonic::Code;
    use tunnel_link::konnectivity::packet::Payload;

    use super::*;

    /// A client's stream, and what the session's other end gets of it.
    struct StreamPair {
        answer: ResponseFuture,
        stream: SendStream<Bytes>,
        request: Request<RecvStream>,
        respond: SendResponse<Bytes>,
    }

    async fn stream_pair() -> StreamPair {
        let (near, far) = tokio::io::duplex(1 << 16);
        let (accepted, mut requests) = mpsc::channel(1);
        tokio::spawn(async move {
            let mut link = h2::server::handshake(far).await.unwrap();
            while let Some(Ok(request)) = link.accept().await {
                accepted.send(request).await.unwrap();
            }
        });
        let (client, link) = h2::client::handshake(near).await.unwrap();
        tokio::spawn(link);
        let mut client = client.ready().await.unwrap();
        let request = Request::post("https://agent/").header(TARGET_HEADER, "10.0.0.7:80").body(()).unwrap();
        let (answer, stream) = client.send_request(request, false).unwrap();
        let (request, respond) = requests.recv().await.unwrap();
        StreamPair { answer, stream, request, respond }
    }

    /// The next bytes for a client, which makes room for more.
    async fn read(body: &mut RecvStream) -> usize {
        let length = body.data().await.unwrap().unwrap().len();
        body.flow_control().release_capacity(length).unwrap();
        length
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_reads_late_after_its_end_gets_everything() {
        const LENGTH: usize = 100_000;
        let StreamPair { answer, mut stream, request, mut respond } = stream_pair().await;
        let (packets, mut sent) = mpsc::channel(8);
        let connections = Arc::new(AgentConnections::new(packets));
        let (random, dialled) = connections.dial();
        connections.take(Packet::dial_response(random, Ok(1))).await;
        let opened = dialled.await.unwrap().unwrap();
        let send = respond.send_response(response(), false).unwrap();
        let relaying = connections.clone();
        let relayed =
            tokio::spawn(async move { relay_opened(&relaying, opened, send, request.into_body()).await });
        stream.send_data(Bytes::new(), true).unwrap();
        // More than fits into the client's window, which reads nothing for now.
        connections.take(Packet::data(1, Bytes::from(vec![0; LENGTH]))).await;
        let mut body = answer.await.unwrap().into_body();
        tokio::time::sleep(LINGER * 3).await;
        assert!(sent.try_recv().is_err(), "the target is closed while its data waits");
        let mut left = HEADER_LEN + LENGTH;
        while left > 0 {
            left -= read(&mut body).await;
        }
        connections.take(Packet::data(1, Bytes::from_static(b"the end"))).await;
        assert_eq!(read(&mut body).await, HEADER_LEN + 7);
        // It takes everything, and the target is silent.
        let told = sent.recv().await.unwrap().unwrap().payload;
        assert!(matches!(told, Some(Payload::CloseRequest(request)) if request.connect_id == 1));
        connections.take(Packet::close_response(1, String::new())).await;
        assert!(body.data().await.is_none());
        assert_eq!(body.trailers().await.unwrap().unwrap()["grpc-status"], "0");
        relayed.await.unwrap();
    }

    #[tokio::test]
    async fn a_client_that_gives_up_is_not_held_by_an_agent_that_does_not_read() {
        let StreamPair { answer: _answer, mut stream, request, mut respond } = stream_pair().await;
        let (packets, _unread) = mpsc::channel(1);
        packets.try_send(Ok(Packet::drain())).unwrap();
        let connections = AgentConnections::new(packets);
        stream.send_reset(Reason::CANCEL);
        let dialled = dial(&connections, request.headers(), &mut respond);
        let dialled = tokio::time::timeout(DIAL * 6, dialled).await.expect("it waits for the agent");
        assert!(matches!(dialled, Ok(None)) && connections.is_empty());
    }

    #[test]
    fn an_agents_words_become_a_status() {
        let target = "192.168.50.2:10250".parse().unwrap();
        for (error, code) in [
            ("dial tcp 192.168.50.2:10250: connect: connection refused", Code::Unavailable),
            ("dial tcp 192.168.50.2:10250: i/o timeout", Code::DeadlineExceeded),
            ("context deadline exceeded", Code::DeadlineExceeded),
            ("dial tcp 192.168.50.2:10250: connect: no route to host", Code::NotFound),
        ] {
            assert_eq!(status_of(target, error).code(), code, "{error}");
        }
    }
}
