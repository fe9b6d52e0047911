//! Tests streams of this process in place of targets: the client's bytes come through the tunnel.

use std::time::Duration;

use http::Response;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tunnel_link::link::{self, Flow};
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{Pipe, Traffic, TunnelStream, pipe_of_client, reset_on_drop};

use crate::support::{ServerEnd, pattern, relay, stalls, within};

/// Returns a client, the end of its relay, and what this process has of it.
async fn opened() -> (TcpStream, ServerEnd, TunnelStream) {
    let (near, far) = tokio::io::duplex(1 << 20);
    let (made, piped) = oneshot::channel();
    tokio::spawn(async move {
        let mut connection = link::server_builder().handshake(far).await.unwrap();
        let (request, mut respond) = connection.accept().await.unwrap().unwrap();
        tokio::spawn(async move {
            let mut send = respond.send_response(Response::new(()), false).unwrap();
            let (stream, relayed) = pipe_of_client();
            made.send(stream).unwrap();
            let (flow, stalls, traffic) = (Flow::default(), stalls(), Traffic::default());
            let pipe = Pipe { flow: &flow, stalls: &stalls, traffic: &traffic };
            relayed.run(pipe, &mut send, request.into_body(), std::future::pending()).await;
        });
        while connection.accept().await.is_some() {}
    });
    let (send, connection) = link::client_builder().handshake(near).await.unwrap();
    tokio::spawn(connection);
    let (client, end) = relay(&send, stalls(), b"").await;
    (client, end, within(piped).await.unwrap())
}

#[tokio::test]
async fn each_half_passes_whole_and_ends_by_itself() {
    let (mut client, end, mut stream) = opened().await;
    let (up, down) = (pattern(3 << 20, 1), pattern(5 << 20, 2));
    stream.write_all(b"first").await.unwrap();
    let (sent, answer) = (up.clone(), down.clone());
    let using = tokio::spawn(async move {
        let mut first = [0; 5];
        client.read_exact(&mut first).await.unwrap();
        client.write_all(&sent).await.unwrap();
        client.shutdown().await.unwrap();
        let mut arrived = Vec::new();
        client.read_to_end(&mut arrived).await.unwrap();
        (first, arrived)
    });
    let mut arrived = Vec::new();
    within(stream.read_to_end(&mut arrived)).await.unwrap();
    assert!(arrived == up, "{} of {} bytes", arrived.len(), up.len());
    within(stream.write_all(&answer)).await.unwrap();
    stream.shutdown().await.unwrap();
    drop(stream);
    let (first, arrived) = within(using).await.unwrap();
    assert_eq!(&first, b"first");
    assert!(arrived == down, "{} of {} bytes", arrived.len(), down.len());
    assert_eq!(within(end).await.unwrap().0, Ok(()));
}

#[tokio::test]
async fn a_drop_resets_the_client_behind_what_was_written() {
    let (mut client, end, mut stream) = opened().await;
    stream.write_all(b"half an answer").await.unwrap();
    drop(stream);
    let mut arrived = [0; 14];
    within(client.read_exact(&mut arrived)).await.unwrap();
    assert_eq!(&arrived, b"half an answer");
    let more = within(client.read(&mut arrived)).await;
    assert!(more.is_err(), "the client saw {more:?} instead of a reset");
    assert_eq!(within(end).await.unwrap().0, Err(Outcome::TargetReset));
}

#[tokio::test]
async fn a_client_that_does_not_read_is_reset_too() {
    let (_client, end, mut stream) = opened().await;
    let piece = vec![b'x'; 64 << 10];
    while tokio::time::timeout(Duration::from_millis(500), stream.write_all(&piece)).await.is_ok() {}
    drop(stream);
    assert_eq!(within(end).await.unwrap().0, Err(Outcome::TargetReset));
}

#[tokio::test]
async fn a_client_that_sends_more_than_anybody_wants_gets_the_whole_answer() {
    let (client, _end, mut stream) = opened().await;
    let (mut read, mut write) = client.into_split();
    let writing = tokio::spawn(async move {
        let piece = vec![b'x'; 64 << 10];
        while write.write_all(&piece).await.is_ok() {}
    });
    let answer = pattern(1 << 20, 3);
    // Everything in its way is full.
    within(stream.read_exact(&mut [0; 1 << 16])).await.unwrap();
    within(stream.write_all(&answer)).await.unwrap();
    stream.status().end_on_drop();
    drop(stream);
    let mut arrived = vec![0; answer.len()];
    within(read.read_exact(&mut arrived)).await.unwrap();
    assert!(arrived == answer);
    // It is not let go on for ever.
    within(writing).await.unwrap();
}

#[tokio::test]
async fn a_reset_of_the_client_is_noticed_also_while_nobody_reads() {
    let (mut client, end, mut stream) = opened().await;
    client.write_all(b"half a request").await.unwrap();
    let mut arrived = [0; 14];
    within(stream.read_exact(&mut arrived)).await.unwrap();
    reset_on_drop(&client);
    drop(client);
    let status = stream.status();
    assert_eq!(within(status.failed()).await.0, Outcome::ClientReset);
    let end_of_request = within(stream.read(&mut arrived)).await;
    assert!(end_of_request.is_err(), "it saw {end_of_request:?} instead of an error");
    assert_eq!(within(end).await.unwrap().0, Err(Outcome::ClientReset));
}

#[tokio::test]
async fn a_client_waits_while_nobody_reads() {
    let (mut client, _end, mut stream) = opened().await;
    let (piece, mut sent) = (vec![b'x'; 64 << 10], 0usize);
    while let Ok(written) = tokio::time::timeout(Duration::from_millis(500), client.write(&piece)).await {
        sent += written.unwrap();
        assert!(sent < 64 << 20, "nothing stops it");
    }
    client.shutdown().await.unwrap();
    let mut arrived = Vec::new();
    within(stream.read_to_end(&mut arrived)).await.unwrap();
    assert_eq!(arrived.len(), sent);
}
