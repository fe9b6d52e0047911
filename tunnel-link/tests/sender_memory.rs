//! Tests that data which the other end cannot take is not read from the socket: the sender's end would hold it without
//! counting it. A separate process, because it counts all of the process's allocations.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop where it is")]

use std::alloc::System;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use h2::RecvStream;
use h2::client::SendRequest;
use http::{Request, Response};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tunnel_link::link::{self, Flow};
use tunnel_link::relay::{Abort, Relay, SMALL_READ, Side, StallBound, Traffic, prepare_socket};

const CLIENTS: usize = 64;
const WINDOW: usize = link::STREAM_WINDOW as usize;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

fn allocated() -> usize {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated - stats.bytes_deallocated
}

/// Like an agent whose target does not read: takes a window, keeps its flow control, and holds no memory here.
async fn take_a_window(mut request: RecvStream, taken: Arc<AtomicUsize>) {
    while let Some(Ok(chunk)) = request.data().await {
        taken.fetch_add(chunk.len(), Ordering::Relaxed);
    }
}

/// Starts clients that send without end, and waits until their windows are used up.
async fn upload(send: &SendRequest<Bytes>, clients: usize, taken: &AtomicUsize) {
    let before = taken.load(Ordering::Relaxed);
    let stalls = Arc::new(StallBound::new(link::SERVER_STALL_BYTES, WINDOW));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    for _ in 0..clients {
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut socket, _) = listener.accept().await.unwrap();
        prepare_socket(&socket);
        tokio::spawn(async move { while client.write_all(&[7; 64 << 10]).await.is_ok() {} });
        let mut send = send.clone().ready().await.unwrap();
        let stalls = stalls.clone();
        tokio::spawn(async move {
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
    }
    let all = clients * (WINDOW - 2 * SMALL_READ);
    tokio::time::timeout(Duration::from_secs(30), async {
        while taken.load(Ordering::Relaxed) - before < all {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .unwrap();
    // Clients that can still read do so.
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn what_cannot_be_sent_is_not_read() {
    // A small buffer: it grows to this size while bytes are in flight, and stays there.
    let (server_io, agent_io) = tokio::io::duplex(64 << 10);
    let taken = Arc::new(AtomicUsize::new(0));
    let counter = taken.clone();
    tokio::spawn(async move {
        let mut connection = link::server_builder().handshake(agent_io).await.unwrap();
        let mut answers = Vec::new();
        while let Some(Ok((request, mut respond))) = connection.accept().await {
            let answer: h2::SendStream<Bytes> = respond.send_response(Response::new(()), false).unwrap();
            answers.push(answer);
            tokio::spawn(take_a_window(request.into_body(), counter.clone()));
        }
    });
    let (send, connection) = link::client_builder().handshake(server_io).await.unwrap();
    tokio::spawn(connection);
    // After this the link's own memory is allocated.
    upload(&send, CLIENTS, &taken).await;
    let before = allocated();
    upload(&send, CLIENTS, &taken).await;
    let grown = allocated().saturating_sub(before);
    assert!(grown < CLIENTS * (12 << 10), "{} bytes for each that cannot send", grown / CLIENTS);
}
