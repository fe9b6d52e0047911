//! Tests that bytes, half-closes and resets pass both ways.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::client::SendRequest;
use http::{HeaderMap, Request, Response};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tunnel_link::link::{self, Flow};
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{
    Abort, Relay, RelayError, Side, Traffic, flushed, header, prepare_socket, reset_on_drop,
};

use crate::support::{Link, MakeLink, in_front_of, over_both, pattern, relay, relay_of, stalls, within};

over_both! {
    bytes_and_half_closes_pass_both_ways,
    a_target_that_speaks_first_and_closes_is_an_ok_connection,
    a_reset_by_the_target_is_a_reset_for_the_client,
    what_a_target_sent_before_its_reset_arrives,
    an_answer_arrives_though_its_connection_is_ended,
    an_answer_to_an_upload_that_is_not_read_arrives,
    a_client_that_is_blocked_both_ways_goes_on_after_the_targets_reset,
    a_reset_by_the_client_is_a_reset_for_the_target,
    a_reset_passes_a_stream_that_is_blocked_the_other_way,
    a_lost_link_is_a_reset_on_both_ends,
    a_reset_after_a_half_close_is_noticed_while_the_target_is_silent,
}

async fn bytes_and_half_closes_pass_both_ways(link: MakeLink) {
    let mut link = link().await;
    let (mut client, end) = relay(&link.send, stalls(), b"first ").await;
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

async fn a_target_that_speaks_first_and_closes_is_an_ok_connection(link: MakeLink) {
    let link = link().await;
    let (mut client, end) = relay(&link.send, stalls(), b"").await;
    let (mut target, _) = within(link.targets.accept()).await.unwrap();
    target.write_all(b"banner").await.unwrap();
    drop(target);
    let mut got = Vec::new();
    within(client.read_to_end(&mut got)).await.unwrap();
    assert_eq!(got, b"banner");
    drop(client);
    assert_eq!(within(end).await.unwrap(), (Ok(()), 0, 6));
}

async fn a_reset_by_the_target_is_a_reset_for_the_client(link: MakeLink) {
    let mut link = link().await;
    let (mut client, end) = relay(&link.send, stalls(), b"").await;
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

/// The data that a target had sent before its reset arrives first, however late the client reads it.
async fn what_a_target_sent_before_its_reset_arrives(link: MakeLink) {
    let mut link = link().await;
    let (mut client, end) = relay(&link.send, stalls(), b"").await;
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

/// A drain ends the connection while the kernel still has a part of an answer, for a client that reads slowly.
async fn an_answer_arrives_though_its_connection_is_ended(link: MakeLink) {
    let mut link = link().await;
    let client = TcpSocket::new_v4().unwrap();
    client.set_recv_buffer_size(4096).unwrap();
    let seen = Arc::<(Arc<Abort>, Traffic)>::default();
    let (mut client, end) = relay_of(client, &link.send, stalls(), b"", seen.clone()).await;
    let (mut target, _) = within(link.targets.accept()).await.unwrap();
    let data = pattern(60 << 10, 8);
    within(target.write_all(&data)).await.unwrap();
    let (abort, traffic) = &*seen;
    within(async {
        while traffic.to_socket() < data.len() as u64 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    abort.trigger(Outcome::Shutdown);
    assert!(within(link.agent_ends.recv()).await.unwrap().is_err());
    assert_reset_after(&mut client, &data).await;
    assert_eq!(within(end).await.unwrap(), (Err(Outcome::Shutdown), 0, data.len() as u64));
}

/// Like an HTTP server that refuses a large upload: it answers, and closes while the client is still sending.
async fn an_answer_to_an_upload_that_is_not_read_arrives(link: MakeLink) {
    for ends_first in [false, true] {
        let mut link = link().await;
        let (client, end) = relay(&link.send, stalls(), b"").await;
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

/// Neither end reads, so both directions are full. The client, which writes before it reads, must not hang.
async fn a_client_that_is_blocked_both_ways_goes_on_after_the_targets_reset(link: MakeLink) {
    let mut link = link().await;
    let (mut client, end) = relay(&link.send, stalls(), b"").await;
    let (target, _) = within(link.targets.accept()).await.unwrap();
    fill(&target).await;
    fill(&client).await;
    reset_on_drop(&target);
    drop(target);
    within(client.writable()).await.unwrap();
    let error = within(client.read_to_end(&mut Vec::new())).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert_eq!(within(end).await.unwrap().0, Err(Outcome::TargetReset));
    assert_eq!(within(link.agent_ends.recv()).await, Some(Err(Outcome::TargetReset)));
}

/// Fills every buffer up to the other end, which does not read.
async fn fill(socket: &TcpStream) {
    let big = vec![0; 64 << 10];
    while tokio::time::timeout(Duration::from_millis(500), socket.writable()).await.is_ok() {
        let _ = socket.try_write(&big);
    }
}

async fn assert_reset_after(client: &mut TcpStream, data: &[u8]) {
    let mut got = Vec::new();
    let error = within(client.read_to_end(&mut got)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert!(got == data, "{} of {} bytes, or others", got.len(), data.len());
}

async fn a_reset_by_the_client_is_a_reset_for_the_target(link: MakeLink) {
    let mut link = link().await;
    let (mut client, end) = relay(&link.send, stalls(), b"").await;
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

/// The client resets while the target does not read; a layer that waits for flow control would miss it.
async fn a_reset_passes_a_stream_that_is_blocked_the_other_way(link: MakeLink) {
    let mut link = link().await;
    let (client, end) = relay(&link.send, stalls(), b"").await;
    let (_target, _) = within(link.targets.accept()).await.unwrap();
    fill(&client).await;
    // Nothing is read or written, so only the client's reset itself can be noticed.
    reset_on_drop(&client);
    drop(client);
    assert_eq!(within(end).await.unwrap().0, Err(Outcome::ClientReset));
    assert_eq!(within(link.agent_ends.recv()).await, Some(Err(Outcome::ClientReset)));
}

/// An agent whose stream ends without `grpc-status: 0` may have lost bytes. Each server reports the same outcome,
/// although this agent does not reset the rest of the request, which the server with the client then does.
#[tokio::test]
async fn an_end_without_a_good_status_is_a_reset() {
    let (unknown, target_reset) = (Outcome::Protocol, Outcome::TargetReset);
    for (trailers, outcome) in [(None, unknown), (Some("13"), unknown), (Some("10"), target_reset)] {
        let (mut client, end) = relay(&ends_with(trailers).await, stalls(), b"").await;
        assert_reset_after(&mut client, b"data").await;
        assert_eq!(within(end).await.unwrap().0, Err(outcome), "{trailers:?}");

        let to_agent = ends_with(trailers).await;
        let (send, mut middle_ends) = in_front_of(to_agent, Arc::default(), Arc::default()).await;
        let (mut client, end) = relay(&send, stalls(), b"").await;
        assert_reset_after(&mut client, b"data").await;
        assert_eq!(within(end).await.unwrap().0, Err(outcome), "{trailers:?}, forwarded");
        assert_eq!(within(middle_ends.recv()).await, Some(outcome), "{trailers:?}, forwarded");
    }
}

/// Creates a link with an agent that sends four bytes on the first stream and ends its half with these trailers.
async fn ends_with(trailers: Option<&'static str>) -> SendRequest<Bytes> {
    let (server_io, agent_io) = tokio::io::duplex(1 << 20);
    tokio::spawn(async move {
        let mut connection = link::server_builder().handshake(agent_io).await.unwrap();
        let (_request, mut respond) = connection.accept().await.unwrap().unwrap();
        let mut send = respond.send_response(Response::new(()), false).unwrap();
        let mut segment = header(4).unwrap().to_vec();
        segment.extend_from_slice(b"data");
        send.send_data(Bytes::from(segment), trailers.is_none()).unwrap();
        if let Some(status) = trailers {
            let status = HeaderMap::from_iter([("grpc-status".parse().unwrap(), status.parse().unwrap())]);
            send.send_trailers(status).unwrap();
        }
        while connection.accept().await.is_some() {}
    });
    let (send, connection) = link::client_builder().handshake(server_io).await.unwrap();
    tokio::spawn(connection);
    send
}

async fn a_lost_link_is_a_reset_on_both_ends(link: MakeLink) {
    let link = link().await;
    let (mut client, end) = relay(&link.send, stalls(), b"").await;
    let (mut target, _) = within(link.targets.accept()).await.unwrap();
    target.write_all(b"x").await.unwrap();
    within(client.read_u8()).await.unwrap();
    let Link { send, targets: _targets, mut agent_ends } = link;
    // As if the server's task had died; the rest of the link notifies the agent.
    drop(send);
    end.abort();
    assert!(within(end).await.unwrap_err().is_cancelled());
    assert_eq!(within(client.read_u8()).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert!(within(agent_ends.recv()).await.unwrap().is_err());
    assert_eq!(within(target.read_u8()).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
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
    prepare_socket(&socket);
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

async fn a_reset_after_a_half_close_is_noticed_while_the_target_is_silent(link: MakeLink) {
    let mut link = link().await;
    let (mut client, end) = relay(&link.send, stalls(), b"").await;
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
