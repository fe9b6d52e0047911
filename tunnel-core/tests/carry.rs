//! The pump between real sockets, over a real HTTP/2 connection (in memory): what arrives, and how it ends.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop where it is")]

use std::future::ready;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::client::SendRequest;
use http::{HeaderMap, Request, Response};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tunnel_core::carry::{Abort, Relay, RelayError, Side, StallBound, Traffic, header};
use tunnel_core::link;
use tunnel_core::outcome::Outcome;

const DEADLINE: Duration = Duration::from_secs(30);

type Ended = Result<(), Outcome>;

/// An HTTP/2 link whose agent side connects every stream to what `targets` accepts.
struct Link {
    send: SendRequest<Bytes>,
    targets: TcpListener,
    agent_ends: mpsc::UnboundedReceiver<Ended>,
}

async fn link() -> Link {
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
                let mut send = respond.send_response(Response::new(()), false).unwrap();
                let (abort, traffic) = (Arc::new(Abort::default()), Traffic::default());
                let relay = Relay { side: Side::Agent, stalls: &stalls, abort: &abort, traffic: &traffic };
                let ended =
                    relay.run(&mut socket, Bytes::new(), &mut send, ready(Ok(request.into_body()))).await;
                let _ = ends.send(ended.map_err(|broken| broken.outcome(Side::Agent)));
            });
        }
    });
    let (send, connection) = link::client_builder().handshake(server_io).await.unwrap();
    tokio::spawn(connection);
    Link { send, targets, agent_ends }
}

/// What the server side of one carried connection reports at its end.
type ServerEnd = tokio::task::JoinHandle<(Ended, u64, u64)>;

async fn carry(
    send: &SendRequest<Bytes>,
    stalls: Arc<StallBound>,
    prefix: &'static [u8],
) -> (TcpStream, ServerEnd) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let caller = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (mut socket, _) = listener.accept().await.unwrap();
    link::tune_carried(&socket).unwrap();
    let mut send = send.clone().ready().await.unwrap();
    let end = tokio::spawn(async move {
        let (response, mut stream) = send.send_request(Request::new(()), false).unwrap();
        let (abort, traffic) = (Arc::new(Abort::default()), Traffic::default());
        let relay = Relay { side: Side::Server, stalls: &stalls, abort: &abort, traffic: &traffic };
        let inbound = async { Ok(response.await?.into_body()) };
        let ended = relay.run(&mut socket, Bytes::from_static(prefix), &mut stream, inbound).await;
        let bytes = (traffic.from_socket(), traffic.to_socket());
        (ended.map_err(|broken: RelayError| broken.outcome(Side::Server)), bytes.0, bytes.1)
    });
    (caller, end)
}

fn stalls() -> Arc<StallBound> {
    Arc::new(StallBound::new(link::SERVER_STALL_BYTES, link::STREAM_WINDOW as usize))
}

async fn within<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, work).await.expect("in time")
}

fn pattern(len: usize, seed: u32) -> Vec<u8> {
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

#[tokio::test]
async fn bytes_and_half_closes_pass_both_ways() {
    let mut link = link().await;
    let (mut caller, end) = carry(&link.send, stalls(), b"first ").await;
    let (mut target, _) = within(link.targets.accept()).await.unwrap();
    let (up, down) = (pattern(5 << 20, 7), pattern(5 << 20, 9));
    let sent = (up.clone(), down.clone());
    let target = tokio::spawn(async move {
        let mut got = Vec::new();
        target.read_to_end(&mut got).await.unwrap();
        // The caller's half-close has arrived; the other direction is still open.
        target.write_all(&sent.1).await.unwrap();
        target.shutdown().await.unwrap();
        got
    });
    within(async {
        caller.write_all(&sent.0).await.unwrap();
        caller.shutdown().await.unwrap();
        let mut got = Vec::new();
        caller.read_to_end(&mut got).await.unwrap();
        assert!(got == down, "download differs");
        assert!(target.await.unwrap() == [b"first ", &up[..]].concat(), "upload differs");
        assert_eq!(end.await.unwrap(), (Ok(()), up.len() as u64 + 6, down.len() as u64));
        assert_eq!(link.agent_ends.recv().await, Some(Ok(())));
    })
    .await;
}

#[tokio::test]
async fn a_target_that_speaks_first_and_closes_is_an_ok_connection() {
    let link = link().await;
    let (mut caller, end) = carry(&link.send, stalls(), b"").await;
    let (mut target, _) = within(link.targets.accept()).await.unwrap();
    target.write_all(b"banner").await.unwrap();
    drop(target);
    let mut got = Vec::new();
    within(caller.read_to_end(&mut got)).await.unwrap();
    assert_eq!(got, b"banner");
    drop(caller);
    assert_eq!(within(end).await.unwrap(), (Ok(()), 0, 6));
}

#[tokio::test]
async fn a_reset_by_the_target_is_a_reset_for_the_caller() {
    let mut link = link().await;
    let (mut caller, end) = carry(&link.send, stalls(), b"").await;
    let (mut target, _) = within(link.targets.accept()).await.unwrap();
    caller.write_all(b"x").await.unwrap();
    within(target.read_u8()).await.unwrap();
    tunnel_core::carry::reset_on_drop(&target);
    drop(target);
    let error = within(caller.read_u8()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert_eq!(within(end).await.unwrap().0, Err(Outcome::TargetReset));
    assert_eq!(within(link.agent_ends.recv()).await, Some(Err(Outcome::TargetReset)));
}

#[tokio::test]
async fn a_reset_by_the_caller_is_a_reset_for_the_target() {
    let mut link = link().await;
    let (mut caller, end) = carry(&link.send, stalls(), b"").await;
    let (mut target, _) = within(link.targets.accept()).await.unwrap();
    target.write_all(b"x").await.unwrap();
    within(caller.read_u8()).await.unwrap();
    tunnel_core::carry::reset_on_drop(&caller);
    drop(caller);
    let error = within(target.read_u8()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert_eq!(within(end).await.unwrap().0, Err(Outcome::ClientReset));
    assert_eq!(within(link.agent_ends.recv()).await, Some(Err(Outcome::ClientReset)));
}

/// The caller resets while the target does not read: a layer that waits for flow control would not notice.
#[tokio::test]
async fn a_reset_passes_a_stream_that_is_blocked_the_other_way() {
    let mut link = link().await;
    let (caller, end) = carry(&link.send, stalls(), b"").await;
    let (_target, _) = within(link.targets.accept()).await.unwrap();
    let big = vec![0; 64 << 10];
    // Fills every buffer up to the target, which never reads.
    while tokio::time::timeout(Duration::from_millis(500), caller.writable()).await.is_ok() {
        let _ = caller.try_write(&big);
    }
    // Nobody reads, nobody writes: only the caller's reset itself can tell.
    tunnel_core::carry::reset_on_drop(&caller);
    drop(caller);
    assert_eq!(within(end).await.unwrap().0, Err(Outcome::ClientReset));
    assert_eq!(within(link.agent_ends.recv()).await, Some(Err(Outcome::ClientReset)));
}

/// An agent whose stream ends without `grpc-status: 0` may have lost bytes.
#[tokio::test]
async fn an_end_without_a_status_is_a_reset() {
    for trailers in [None, Some("13")] {
        let (server_io, agent_io) = tokio::io::duplex(1 << 20);
        tokio::spawn(async move {
            let mut connection = link::server_builder().handshake(agent_io).await.unwrap();
            let (_request, mut respond) = connection.accept().await.unwrap().unwrap();
            let mut send = respond.send_response(Response::new(()), false).unwrap();
            let mut segment = header(4).unwrap().to_vec();
            segment.extend_from_slice(b"data");
            send.send_data(Bytes::from(segment), trailers.is_none()).unwrap();
            if let Some(status) = trailers {
                let status =
                    HeaderMap::from_iter([("grpc-status".parse().unwrap(), status.parse().unwrap())]);
                send.send_trailers(status).unwrap();
            }
            while connection.accept().await.is_some() {}
        });
        let (send, connection) = link::client_builder().handshake(server_io).await.unwrap();
        tokio::spawn(connection);
        let (mut caller, end) = carry(&send, stalls(), b"").await;
        let mut got = Vec::new();
        let error = within(caller.read_to_end(&mut got)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{trailers:?}");
        assert_eq!(within(end).await.unwrap().0, Err(Outcome::Protocol), "{trailers:?}");
    }
}

#[tokio::test]
async fn a_lost_link_is_a_reset_on_both_ends() {
    let link = link().await;
    let (mut caller, end) = carry(&link.send, stalls(), b"").await;
    let (mut target, _) = within(link.targets.accept()).await.unwrap();
    target.write_all(b"x").await.unwrap();
    within(caller.read_u8()).await.unwrap();
    let Link { send, targets: _targets, mut agent_ends } = link;
    // As if the server's task died; what of the link is left tells the agent.
    drop(send);
    end.abort();
    assert!(within(end).await.unwrap_err().is_cancelled());
    assert_eq!(within(caller.read_u8()).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert!(within(agent_ends.recv()).await.unwrap().is_err());
    assert_eq!(within(target.read_u8()).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
}

/// Readers that do not read, of large and of tiny writes, do not slow or break what shares the link with them.
#[tokio::test]
async fn stalled_readers_hold_up_nobody_else() {
    let link = link().await;
    let stalls = stalls();
    let mut stalled = Vec::new();
    for index in 0..40 {
        let (caller, end) = carry(&link.send, stalls.clone(), b"").await;
        let (target, _) = within(link.targets.accept()).await.unwrap();
        target.set_nodelay(true).unwrap();
        let piece = if index % 2 == 0 { 1 } else { 64 << 10 };
        let writer = tokio::spawn(async move {
            let mut target = target;
            let piece = vec![7; piece];
            for _ in 0..200_000 {
                if target.write_all(&piece).await.is_err() {
                    break;
                }
                tokio::task::yield_now().await;
            }
        });
        stalled.push((caller, end, writer));
    }
    within(async {
        while stalls.blocked() < 10 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    for _ in 0..50 {
        let (mut caller, end) = carry(&link.send, stalls.clone(), b"").await;
        // The link's targets are accepted in order; every stalled one is taken already.
        let (mut target, _) = within(link.targets.accept()).await.unwrap();
        caller.write_all(b"ping").await.unwrap();
        let mut got = [0; 4];
        within(target.read_exact(&mut got)).await.unwrap();
        target.write_all(b"pong").await.unwrap();
        within(caller.read_exact(&mut got)).await.unwrap();
        assert_eq!(&got, b"pong");
        drop((caller, target));
        assert_eq!(within(end).await.unwrap().0, Ok(()));
    }
    assert!(stalled.iter().all(|(_, end, _)| !end.is_finished()), "stalled is not failed");
    for (_, end, writer) in &stalled {
        end.abort();
        writer.abort();
    }
}

/// A refused dial: the agent answers with a status and resets what it does not want of the request.
#[tokio::test]
async fn a_status_outlives_the_reset_of_an_unwanted_request() {
    let (server_io, agent_io) = tokio::io::duplex(1 << 20);
    tokio::spawn(async move {
        let mut connection: h2::server::Connection<_, Bytes> =
            link::server_builder().handshake(agent_io).await.unwrap();
        let (request, mut respond) = connection.accept().await.unwrap().unwrap();
        respond
            .send_response(Response::builder().header("grpc-status", "14").body(()).unwrap(), true)
            .unwrap();
        drop((request, respond));
        while connection.accept().await.is_some() {}
    });
    let (send, connection) = link::client_builder().handshake(server_io).await.unwrap();
    tokio::spawn(connection);
    let (stalls, abort, traffic) = (stalls(), Arc::new(Abort::default()), Traffic::default());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut caller = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (mut socket, _) = listener.accept().await.unwrap();
    let mut send = send.ready().await.unwrap();
    let (response, mut stream) = send.send_request(Request::new(()), false).unwrap();
    let inbound = async {
        let response = response.await?;
        Err(RelayError::Dial(
            Outcome::Refused,
            response.headers()["grpc-status"].to_str().unwrap().to_owned(),
        ))
    };
    let relay = Relay { side: Side::Server, stalls: &stalls, abort: &abort, traffic: &traffic };
    let ended = within(relay.run(&mut socket, Bytes::from_static(b"early"), &mut stream, inbound)).await;
    assert_eq!(ended.unwrap_err().outcome(Side::Server), Outcome::Refused);
    drop(socket);
    assert_eq!(within(caller.read_u8()).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
}

/// What stalled readers may hold is bounded: beyond it the one without progress for longest is reset, and says why.
#[tokio::test]
async fn the_longest_stalled_is_reset_when_the_bound_is_passed() {
    let mut link = link().await;
    let window = link::STREAM_WINDOW as usize;
    // Room for one; twice that within the grace.
    let stalls = Arc::new(StallBound::new(window, window));
    let mut stalled = Vec::new();
    for _ in 0..4 {
        let (caller, end) = carry(&link.send, stalls.clone(), b"").await;
        let (target, _) = within(link.targets.accept()).await.unwrap();
        let writer = tokio::spawn(async move {
            let mut target = target;
            let piece = vec![7; 64 << 10];
            while target.write_all(&piece).await.is_ok() {}
        });
        within(async {
            let before = stalled.len().min(1);
            while stalls.blocked() <= before {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        stalled.push((caller, end, writer));
    }
    let (mut first, end, writer) = stalled.remove(0);
    assert_eq!(within(end).await.unwrap().0, Err(Outcome::Stalled));
    let mut rest = Vec::new();
    assert_eq!(within(first.read_to_end(&mut rest)).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert_eq!(within(link.agent_ends.recv()).await, Some(Err(Outcome::Stalled)));
    within(writer).await.unwrap();
    assert!(stalls.blocked() <= 2);
    for (_, end, writer) in &stalled {
        end.abort();
        writer.abort();
    }
}

#[tokio::test]
async fn a_reset_after_a_half_close_is_noticed_while_the_target_is_silent() {
    let mut link = link().await;
    let (mut caller, end) = carry(&link.send, stalls(), b"").await;
    let (mut target, _) = within(link.targets.accept()).await.unwrap();
    caller.write_all(b"request").await.unwrap();
    caller.shutdown().await.unwrap();
    let mut got = Vec::new();
    within(target.read_to_end(&mut got)).await.unwrap();
    tunnel_core::carry::reset_on_drop(&caller);
    drop(caller);
    assert_eq!(within(end).await.unwrap().0, Err(Outcome::ClientReset));
    assert_eq!(within(link.agent_ends.recv()).await, Some(Err(Outcome::ClientReset)));
}

/// While the caller does not read, small pieces are gathered, and arrive in order among large ones.
#[tokio::test]
async fn what_was_gathered_for_a_slow_reader_arrives_in_order() {
    let link = link().await;
    let stalls = stalls();
    let (mut caller, end) = carry(&link.send, stalls.clone(), b"").await;
    let (mut target, _) = within(link.targets.accept()).await.unwrap();
    target.set_nodelay(true).unwrap();
    let data = pattern(12 << 20, 3);
    let sent = data.clone();
    let writer = tokio::spawn(async move {
        let mut rest = &sent[..];
        let mut turn = 0;
        while !rest.is_empty() {
            // Runs of small pieces between large ones.
            let size = if turn % 200 < 180 { 1 + turn % 900 } else { 100_000 };
            let (piece, after) = rest.split_at(size.min(rest.len()));
            target.write_all(piece).await.unwrap();
            tokio::task::yield_now().await;
            (rest, turn) = (after, turn + 1);
        }
    });
    within(async {
        while stalls.blocked() == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    let mut got = Vec::new();
    within(caller.read_to_end(&mut got)).await.unwrap();
    assert!(got == data, "{} of {} bytes, or others", got.len(), data.len());
    within(writer).await.unwrap();
    drop(caller);
    assert_eq!(within(end).await.unwrap(), (Ok(()), 0, data.len() as u64));
}
