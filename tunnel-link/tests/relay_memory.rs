//! Tests that the bytes held for receivers that do not read take about as much memory as is counted. A separate
//! process, because it measures its resident memory.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop where it is")]

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::SendStream;
use http::{Request, Response};
use socket2::SockRef;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::mpsc;
use tunnel_link::link::{self, Flow};
use tunnel_link::relay::{Abort, Relay, Side, StallBound, Traffic, header, prepare_socket};

const CLIENTS: usize = 12;
/// More than the sockets hold, whose buffers are made small.
const BULK: usize = 256 << 10;
const CHUNK: usize = 16 << 10;

fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

fn segment(data: &[u8]) -> Bytes {
    [&header(data.len()).unwrap()[..], data].concat().into()
}

/// Creates a client that never reads, and the server's end of its connection.
async fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = TcpSocket::new_v4().unwrap();
    client.set_recv_buffer_size(4 << 10).unwrap();
    let client = client.connect(listener.local_addr().unwrap()).await.unwrap();
    let (socket, _) = listener.accept().await.unwrap();
    SockRef::from(&socket).set_send_buffer_size(4 << 10).unwrap();
    prepare_socket(&socket);
    (client, socket)
}

/// Fills the stream's window: bulk data that blocks the client's socket, then single bytes.
async fn flood(mut send: SendStream<Bytes>) -> SendStream<Bytes> {
    let window = link::STREAM_WINDOW as usize;
    let (bulk, byte) = (segment(&[7; CHUNK]), segment(b"x"));
    let mut sent = 0;
    for number in 0.. {
        let next = if sent < BULK { &bulk } else { &byte };
        if sent + next.len() > window {
            break;
        }
        send.send_data(next.clone(), false).unwrap();
        sent += next.len();
        if number % 256 == 0 {
            tokio::task::yield_now().await;
        }
    }
    send
}

#[tokio::test]
async fn a_window_of_single_bytes_takes_a_window_of_memory() {
    let (server_io, agent_io) = tokio::io::duplex(1 << 20);
    let (floods, mut flooded) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let mut connection = link::server_builder().handshake(agent_io).await.unwrap();
        while let Some(Ok((_request, mut respond))) = connection.accept().await {
            floods.send(respond.send_response(Response::new(()), false).unwrap()).unwrap();
        }
    });
    let (send, mut connection) = link::client_builder().handshake::<_, Bytes>(server_io).await.unwrap();
    let mut pings = connection.ping_pong().unwrap();
    tokio::spawn(connection);
    let stalls = Arc::new(StallBound::new(link::SERVER_STALL_BYTES, link::STREAM_WINDOW as usize));
    let before = resident();
    let mut open = Vec::new();
    for _ in 0..CLIENTS {
        let (client, mut socket) = sockets().await;
        let mut send = send.clone().ready().await.unwrap();
        let stalls = stalls.clone();
        let relayed = tokio::spawn(async move {
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
            relay.run(&mut socket, Bytes::new(), &mut stream, inbound).await
        });
        let flood = flood(flooded.recv().await.unwrap()).await;
        open.push((client, relayed, flood));
    }
    // Data sent before a PING has been read when its answer arrives, and has been gathered when its receiver was
    // polled.
    tokio::time::timeout(Duration::from_secs(30), pings.ping(h2::Ping::opaque())).await.unwrap().unwrap();
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    assert!(open.iter().all(|(_, relayed, _)| !relayed.is_finished()), "none was cut");
    assert_eq!(stalls.blocked(), CLIENTS);
    // The last piece may not have fitted, and the client has taken some data.
    assert!(stalls.held() > CLIENTS * link::STREAM_WINDOW as usize / 2, "{} bytes counted", stalls.held());
    let grown = resident().saturating_sub(before);
    let counted = CLIENTS * link::STREAM_WINDOW as usize;
    assert!(grown < 4 * counted, "{} MiB for {} MiB", grown >> 20, counted >> 20);
}
