//! The relay between real sockets, over a real HTTP/2 connection (in memory): what arrives, and how it ends.
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
use tunnel_core::carry::{
    Abort, Relay, RelayError, Side, StallBound, StallBudget, Traffic, flushed, header, prepare_socket,
    reset_on_drop,
};
use tunnel_core::link::{self, Flow};
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
                prepare_socket(&socket).unwrap();
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

/// How one carried connection ended for the server: the outcome, and the bytes from and to its socket.
type ServerEnd = tokio::task::JoinHandle<(Ended, u64, u64)>;

async fn carry(
    send: &SendRequest<Bytes>,
    stalls: Arc<StallBound>,
    prefix: &'static [u8],
) -> (TcpStream, ServerEnd) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (mut socket, _) = listener.accept().await.unwrap();
    prepare_socket(&socket).unwrap();
    let mut send = send.clone().ready().await.unwrap();
    let end = tokio::spawn(async move {
        let (response, mut stream) = send.send_request(Request::new(()), false).unwrap();
        let (abort, traffic) = (Arc::new(Abort::default()), Traffic::default());
        let relay = Relay {
            side: Side::Server,
            flow: &Flow::default(),
            stalls: &stalls,
            abort: &abort,
            traffic: &traffic,
        };
        let inbound = async { Ok(response.await?.into_body()) };
        let ended = relay.run(&mut socket, Bytes::from_static(prefix), &mut stream, inbound).await;
        let bytes = (traffic.from_socket(), traffic.to_socket());
        (ended.map_err(|error: RelayError| error.outcome(Side::Server)), bytes.0, bytes.1)
    });
    (client, end)
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
    let (mut client, end) = carry(&link.send, stalls(), b"first ").await;
    let (mut target, _) = within(link.targets.accept()).await.unwrap();
    let (up, down) = (pattern(5 << 20, 7), pattern(5 << 20, 9));
    let sent = (up.clone(), down.clone());
    let target = tokio::spawn(async move {
        let mut got = Vec::new();
        target.read_to_end(&mut got).await.unwrap();
        // The client's half-close has arrived; the other direction is still open.
        target.write_all(&sent.1).await.unwrap();
        target.shutdown().await.unwrap();
        got
    });
    within(async {
        client.write_all(&sent.0).await.unwrap();
        client.shutdown().await.unwrap();
        let mut got = Vec::new();
        client.read_to_end(&mut got).await.unwrap();
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
    let (mut client, end) = carry(&link.send, stalls(), b"").await;
    let (mut target, _) = within(link.targets.accept()).await.unwrap();
    target.write_all(b"banner").await.unwrap();
    drop(target);
    let mut got = Vec::new();
    within(client.read_to_end(&mut got)).await.unwrap();
    assert_eq!(got, b"banner");
    drop(client);
    assert_eq!(within(end).await.unwrap(), (Ok(()), 0, 6));
}

#[tokio::test]
async fn a_reset_by_the_target_is_a_reset_for_the_client() {
    let mut link = link().await;
    let (mut client, end) = carry(&link.send, stalls(), b"").await;
    let (mut target, _) = within(link.targets.accept()).await.unwrap();
    client.write_all(b"x").await.unwrap();
    within(target.read_u8()).await.unwrap();
    reset_on_drop(&target);
    drop(target);
    let error = within(client.read_u8()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert_eq!(within(end).await.unwrap().0, Err(Outcome::TargetReset));
    assert_eq!(within(link.agent_ends.recv()).await, Some(Err(Outcome::TargetReset)));
}

/// What a target had sent when it reset the connection arrives first, however late the client reads it.
#[tokio::test]
async fn what_a_target_sent_before_its_reset_arrives() {
    let mut link = link().await;
    let (mut client, end) = carry(&link.send, stalls(), b"").await;
    let (mut target, _) = within(link.targets.accept()).await.unwrap();
    // More than the kernel holds for the client, less than a window.
    let data = pattern(900 << 10, 5);
    within(target.write_all(&data)).await.unwrap();
    within(flushed(&target)).await;
    reset_on_drop(&target);
    drop(target);
    assert_eq!(within(link.agent_ends.recv()).await, Some(Err(Outcome::TargetReset)));
    assert_reset_after(&mut client, &data).await;
    assert_eq!(within(end).await.unwrap(), (Err(Outcome::TargetReset), 0, data.len() as u64));
}

/// As an HTTP server that refuses a large upload: it answers, and closes while the client is still sending.
#[tokio::test]
async fn an_answer_to_an_upload_that_is_not_read_arrives() {
    for ends_first in [false, true] {
        let mut link = link().await;
        let (client, end) = carry(&link.send, stalls(), b"").await;
        let (mut target, _) = within(link.targets.accept()).await.unwrap();
        let data = pattern(900 << 10, 6);
        let (mut read, mut write) = client.into_split();
        let upload = tokio::spawn(async move {
            let piece = vec![0; 64 << 10];
            while write.write_all(&piece).await.is_ok() {}
            write.forget();
        });
        within(target.read_u8()).await.unwrap();
        within(target.write_all(&data)).await.unwrap();
        if ends_first {
            target.shutdown().await.unwrap();
        }
        within(flushed(&target)).await;
        reset_on_drop(&target);
        drop(target);
        assert_eq!(within(link.agent_ends.recv()).await, Some(Err(Outcome::TargetReset)), "{ends_first}");
        let mut got = vec![0; data.len()];
        within(read.read_exact(&mut got)).await.unwrap();
        assert!(got == data, "the answer differs");
        within(upload).await.unwrap();
        assert_eq!(within(end).await.unwrap().0, Err(Outcome::TargetReset), "{ends_first}");
    }
}

async fn assert_reset_after(client: &mut TcpStream, data: &[u8]) {
    let mut got = Vec::new();
    let error = within(client.read_to_end(&mut got)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert!(got == data, "{} of {} bytes, or others", got.len(), data.len());
}

#[tokio::test]
async fn a_reset_by_the_client_is_a_reset_for_the_target() {
    let mut link = link().await;
    let (mut client, end) = carry(&link.send, stalls(), b"").await;
    let (mut target, _) = within(link.targets.accept()).await.unwrap();
    target.write_all(b"x").await.unwrap();
    within(client.read_u8()).await.unwrap();
    reset_on_drop(&client);
    drop(client);
    let error = within(target.read_u8()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert_eq!(within(end).await.unwrap().0, Err(Outcome::ClientReset));
    assert_eq!(within(link.agent_ends.recv()).await, Some(Err(Outcome::ClientReset)));
}

/// The client resets while the target does not read: a layer that waits for flow control would miss it.
#[tokio::test]
async fn a_reset_passes_a_stream_that_is_blocked_the_other_way() {
    let mut link = link().await;
    let (client, end) = carry(&link.send, stalls(), b"").await;
    let (_target, _) = within(link.targets.accept()).await.unwrap();
    let big = vec![0; 64 << 10];
    // Fills every buffer up to the target, which never reads.
    while tokio::time::timeout(Duration::from_millis(500), client.writable()).await.is_ok() {
        let _ = client.try_write(&big);
    }
    // Nothing is read or written: only the client's reset itself can be noticed.
    reset_on_drop(&client);
    drop(client);
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
        let (mut client, end) = carry(&send, stalls(), b"").await;
        let mut got = Vec::new();
        let error = within(client.read_to_end(&mut got)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{trailers:?}");
        assert_eq!(within(end).await.unwrap().0, Err(Outcome::Protocol), "{trailers:?}");
    }
}

#[tokio::test]
async fn a_lost_link_is_a_reset_on_both_ends() {
    let link = link().await;
    let (mut client, end) = carry(&link.send, stalls(), b"").await;
    let (mut target, _) = within(link.targets.accept()).await.unwrap();
    target.write_all(b"x").await.unwrap();
    within(client.read_u8()).await.unwrap();
    let Link { send, targets: _targets, mut agent_ends } = link;
    // As if the server's task died; the rest of the link notifies the agent.
    drop(send);
    end.abort();
    assert!(within(end).await.unwrap_err().is_cancelled());
    assert_eq!(within(client.read_u8()).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert!(within(agent_ends.recv()).await.unwrap().is_err());
    assert_eq!(within(target.read_u8()).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
}

/// Receivers that do not read, of large and of tiny writes, neither slow nor break other connections of their link.
#[tokio::test]
async fn stalled_receivers_do_not_affect_other_connections() {
    let link = link().await;
    let stalls = stalls();
    let mut stalled = Vec::new();
    for index in 0..40 {
        let (client, end) = carry(&link.send, stalls.clone(), b"").await;
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
        stalled.push((client, end, writer));
    }
    within(async {
        while stalls.blocked() < 10 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    for _ in 0..50 {
        let (mut client, end) = carry(&link.send, stalls.clone(), b"").await;
        // The link's targets are accepted in order; every stalled one is taken already.
        let (mut target, _) = within(link.targets.accept()).await.unwrap();
        client.write_all(b"ping").await.unwrap();
        let mut got = [0; 4];
        within(target.read_exact(&mut got)).await.unwrap();
        target.write_all(b"pong").await.unwrap();
        within(client.read_exact(&mut got)).await.unwrap();
        assert_eq!(&got, b"pong");
        drop((client, target));
        assert_eq!(within(end).await.unwrap().0, Ok(()));
    }
    assert!(stalled.iter().all(|(_, end, _)| !end.is_finished()), "stalled is not failed");
    for (_, end, writer) in &stalled {
        end.abort();
        writer.abort();
    }
}

/// A refused dial: the agent answers with a status and resets the rest of the request.
#[tokio::test]
async fn the_status_of_a_refused_dial_survives_the_reset_of_the_request() {
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
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (mut socket, _) = listener.accept().await.unwrap();
    prepare_socket(&socket).unwrap();
    let mut send = send.ready().await.unwrap();
    let (response, mut stream) = send.send_request(Request::new(()), false).unwrap();
    let inbound = async {
        let response = response.await?;
        Err(RelayError::Dial(
            Outcome::Refused,
            response.headers()["grpc-status"].to_str().unwrap().to_owned(),
        ))
    };
    let relay = Relay {
        side: Side::Server,
        flow: &Flow::default(),
        stalls: &stalls,
        abort: &abort,
        traffic: &traffic,
    };
    let ended = within(relay.run(&mut socket, Bytes::from_static(b"early"), &mut stream, inbound)).await;
    assert_eq!(ended.unwrap_err().outcome(Side::Server), Outcome::Refused);
    drop(socket);
    assert_eq!(within(client.read_u8()).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
}

/// Stalled receivers may hold a bounded number of bytes: beyond it, the one without progress for longest is reset.
#[tokio::test]
async fn the_longest_stalled_is_reset_above_the_bound() {
    let mut link = link().await;
    let window = link::STREAM_WINDOW as usize;
    // Room for one; twice that within the grace.
    let stalls = Arc::new(StallBound::new(window, window));
    let mut stalled = Vec::new();
    for _ in 0..4 {
        let (client, end) = carry(&link.send, stalls.clone(), b"").await;
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
        stalled.push((client, end, writer));
    }
    let (mut first, end, writer) = stalled.remove(0);
    assert_eq!(within(end).await.unwrap().0, Err(Outcome::Stalled));
    let mut rest = Vec::new();
    assert_eq!(within(first.read_to_end(&mut rest)).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert_eq!(within(link.agent_ends.recv()).await, Some(Err(Outcome::Stalled)));
    within(writer).await.unwrap();
    within(async {
        while stalls.blocked() > 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    for (_, end, writer) in &stalled {
        end.abort();
        writer.abort();
    }
}

/// A socket whose receiver reads 10 KB/s becomes writable every ten seconds or so. That is slow, not stalled.
#[tokio::test]
async fn a_slow_reader_is_spared_before_those_that_do_not_read() {
    let link = link().await;
    let window = link::STREAM_WINDOW as usize;
    let budget = StallBudget::new(64 * window);
    let stalls = Arc::new(StallBound::within(2 * window, window, &budget));
    let mut open = Vec::new();
    for blocked in 1..=4 {
        let (client, end) = carry(&link.send, stalls.clone(), b"").await;
        let (mut target, _) = within(link.targets.accept()).await.unwrap();
        let writer = tokio::spawn(async move { while target.write_all(&[7; 64 << 10]).await.is_ok() {} });
        within(async {
            while stalls.blocked() < blocked {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        open.push((client, end, writer));
    }
    // The slow one has been blocked for longest.
    let (mut slow, slow_end, slow_writer) = open.remove(0);
    let mut piece = [0; 1000];
    let reading = async {
        while open.iter().filter(|(_, end, _)| end.is_finished()).count() < 2 {
            slow.read_exact(&mut piece).await.expect("the slow reader is not reset");
            assert_eq!(piece, [7; 1000]);
            stalls.sweep();
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    within(reading).await;
    assert!(!slow_end.is_finished());
    slow_end.abort();
    slow_writer.abort();
    let mut stalled = 0;
    for (client, end, writer) in open {
        if end.is_finished() {
            assert_eq!(end.await.unwrap().0, Err(Outcome::Stalled));
            stalled += 1;
        } else {
            end.abort();
        }
        writer.abort();
        drop(client);
    }
    assert_eq!(stalled, 2);
}

/// Links that fill the memory together: the one that holds most pays, whatever its own bound.
#[tokio::test]
async fn the_memory_of_the_process_is_bounded_across_links() {
    let window = link::STREAM_WINDOW as usize;
    let budget = StallBudget::new(8 * window);
    let (greedy, modest) = (link().await, link().await);
    let bound = || Arc::new(StallBound::within(64 * window, window, &budget));
    let (much, little) = (bound(), bound());
    let mut open = Vec::new();
    for number in 0..24 {
        let (link, stalls) = if number < 2 { (&modest, &little) } else { (&greedy, &much) };
        let (client, end) = carry(&link.send, stalls.clone(), b"").await;
        let (mut target, _) = within(link.targets.accept()).await.unwrap();
        tokio::spawn(async move { while target.write_all(&[7; 64 << 10]).await.is_ok() {} });
        open.push((client, end));
    }
    within(async {
        loop {
            let cut = open.iter().filter(|(_, end)| end.is_finished()).count();
            // A quarter more is allowed to those that were blocked only now.
            if cut > 0 && cut + much.blocked() + little.blocked() == 24 && budget.held() <= 10 * window {
                break;
            }
            // As before each PING.
            much.sweep();
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    assert!(open[..2].iter().all(|(_, end)| !end.is_finished()), "the modest link's are spared");
    for (client, end) in open {
        if end.is_finished() {
            assert_eq!(end.await.unwrap().0, Err(Outcome::Stalled));
        } else {
            end.abort();
        }
        drop(client);
    }
}

#[tokio::test]
async fn a_reset_after_a_half_close_is_noticed_while_the_target_is_silent() {
    let mut link = link().await;
    let (mut client, end) = carry(&link.send, stalls(), b"").await;
    let (mut target, _) = within(link.targets.accept()).await.unwrap();
    client.write_all(b"request").await.unwrap();
    client.shutdown().await.unwrap();
    let mut got = Vec::new();
    within(target.read_to_end(&mut got)).await.unwrap();
    reset_on_drop(&client);
    drop(client);
    assert_eq!(within(end).await.unwrap().0, Err(Outcome::ClientReset));
    assert_eq!(within(link.agent_ends.recv()).await, Some(Err(Outcome::ClientReset)));
}

/// While the client does not read, small pieces are gathered, and arrive in order among large ones.
#[tokio::test]
async fn bytes_gathered_for_a_slow_reader_arrive_in_order() {
    let link = link().await;
    let stalls = stalls();
    let (mut client, end) = carry(&link.send, stalls.clone(), b"").await;
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
    within(client.read_to_end(&mut got)).await.unwrap();
    assert!(got == data, "{} of {} bytes, or others", got.len(), data.len());
    within(writer).await.unwrap();
    drop(client);
    assert_eq!(within(end).await.unwrap(), (Ok(()), 0, data.len() as u64));
}
