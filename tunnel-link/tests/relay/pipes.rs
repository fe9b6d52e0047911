//! Tests streams of this process in place of sockets.

use std::sync::Arc;

use http::{Request, Response};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tunnel_link::link::{self, Flow};
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{Pipe, StallBound, Traffic, TunnelStream, pipe};

use crate::support::{Link, MakeLink, over_both, pattern, stalls, within};

over_both! {
    both_directions_pass_whole_and_end_each_for_itself,
    dropping_it_resets_the_target,
    a_reset_of_the_target_is_no_end,
    one_that_is_shut_down_and_dropped_ends_well,
    one_that_does_not_read_is_cut_at_the_bound,
    an_end_from_outside_is_an_error,
}

/// Opens a stream to the next connection that the target accepts. Also returns its byte counters.
async fn open(link: &Link, stalls: Arc<StallBound>, over: Option<Outcome>) -> (TunnelStream, Arc<Traffic>) {
    let mut send = link.send.clone().ready().await.unwrap();
    let (near, far) = pipe();
    let traffic = Arc::<Traffic>::default();
    let counted = traffic.clone();
    tokio::spawn(async move {
        let (response, mut stream) = send.send_request(Request::new(()), false).unwrap();
        let body = response.await.unwrap().into_body();
        let flow = Flow::default();
        let pipe = Pipe { flow: &flow, stalls: &stalls, traffic: &counted };
        let over = async {
            match over {
                Some(outcome) => outcome,
                None => std::future::pending().await,
            }
        };
        far.run(pipe, &mut stream, body, over).await;
    });
    (near, traffic)
}

async fn opened(make: MakeLink) -> (Link, TunnelStream, TcpStream, Arc<Traffic>) {
    let link = make().await;
    let (stream, traffic) = open(&link, stalls(), None).await;
    let (target, _) = within(link.targets.accept()).await.unwrap();
    (link, stream, target, traffic)
}

async fn both_directions_pass_whole_and_end_each_for_itself(make: MakeLink) {
    let (mut link, stream, mut target, traffic) = opened(make).await;
    let (up, down) = (pattern(3 << 20, 1), pattern(5 << 20, 2));
    let (mut read, mut write) = tokio::io::split(stream);
    let sent = up.clone();
    let writing = tokio::spawn(async move {
        write.write_all(&sent).await.unwrap();
        write.shutdown().await.unwrap();
        write
    });
    let mut arrived = Vec::new();
    within(target.read_to_end(&mut arrived)).await.unwrap();
    assert!(arrived == up, "{} of {} bytes", arrived.len(), up.len());
    // The other direction is still open.
    let answer = down.clone();
    let answering = tokio::spawn(async move {
        target.write_all(&answer).await.unwrap();
        target.shutdown().await.unwrap();
    });
    let mut back = Vec::new();
    within(read.read_to_end(&mut back)).await.unwrap();
    assert!(back == down, "{} of {} bytes", back.len(), down.len());
    answering.await.unwrap();
    let _write = writing.await.unwrap();
    assert_eq!(within(link.agent_ends.recv()).await, Some(Ok(())));
    assert_eq!((traffic.from_socket(), traffic.to_socket()), (up.len() as u64, down.len() as u64));
}

async fn dropping_it_resets_the_target(make: MakeLink) {
    let (mut link, mut stream, mut target, _) = opened(make).await;
    stream.write_all(b"half a request").await.unwrap();
    let mut arrived = [0; 14];
    within(target.read_exact(&mut arrived)).await.unwrap();
    drop(stream);
    let end = within(target.read(&mut arrived)).await;
    assert!(end.is_err(), "the target saw {end:?} instead of a reset");
    assert_eq!(within(link.agent_ends.recv()).await, Some(Err(Outcome::ClientReset)));
}

/// It must not look like the end of an answer.
async fn a_reset_of_the_target_is_no_end(make: MakeLink) {
    let (_link, mut stream, mut target, _) = opened(make).await;
    let status = stream.status();
    target.write_all(b"half an answer").await.unwrap();
    let mut arrived = [0; 14];
    within(stream.read_exact(&mut arrived)).await.unwrap();
    tunnel_link::relay::reset_on_drop(&target);
    drop(target);
    let end = within(stream.read(&mut arrived)).await;
    assert!(end.is_err(), "it saw {end:?} instead of an error");
    assert_eq!(status.failure().map(|(outcome, _)| outcome), Some(Outcome::TargetReset));
}

async fn one_that_is_shut_down_and_dropped_ends_well(make: MakeLink) {
    let (mut link, mut stream, mut target, _) = opened(make).await;
    stream.write_all(b"request").await.unwrap();
    stream.shutdown().await.unwrap();
    drop(stream);
    let mut arrived = Vec::new();
    within(target.read_to_end(&mut arrived)).await.unwrap();
    assert_eq!(arrived, b"request");
    drop(target);
    assert_eq!(within(link.agent_ends.recv()).await, Some(Ok(())));
}

async fn one_that_does_not_read_is_cut_at_the_bound(make: MakeLink) {
    let link = make().await;
    // Each holds a window and the limit is one: the second that does not read is one too many within the grace period.
    let window = link::STREAM_WINDOW as usize;
    let bound = Arc::new(StallBound::new(window / 4, window / 4));
    let (mut streams, mut targets) = (Vec::new(), Vec::new());
    for _ in 0..4 {
        let (stream, _) = open(&link, bound.clone(), None).await;
        let (mut target, _) = within(link.targets.accept()).await.unwrap();
        targets.push(tokio::spawn(async move {
            let chunk = vec![7; 64 << 10];
            // Writes until the connection is cut or the test is over.
            while target.write_all(&chunk).await.is_ok() {}
        }));
        streams.push(stream);
    }
    let cut = async {
        loop {
            let failed = streams.iter().filter_map(|stream| stream.status().failure()).next();
            if let Some((outcome, _)) = failed {
                return outcome;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    assert_eq!(within(cut).await, Outcome::Stalled);
    for target in targets {
        target.abort();
    }
}

/// The peer announces HTTP/2's default window of 64 KiB, for each stream and for all of them together.
#[tokio::test]
async fn one_that_is_idle_holds_nothing_of_the_links_window() {
    let (near, far) = tokio::io::duplex(1 << 20);
    let (arrives, mut arrived) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let mut connection = h2::server::handshake(far).await.unwrap();
        let mut answers = Vec::new();
        while let Some(Ok((request, mut respond))) = connection.accept().await {
            answers.push(respond.send_response(Response::new(()), false).unwrap());
            let arrives = arrives.clone();
            tokio::spawn(async move {
                let mut body = request.into_body();
                while let Some(Ok(chunk)) = body.data().await {
                    arrives.send(chunk.len()).unwrap();
                }
            });
        }
    });
    let (send, connection) = link::client_builder().handshake(near).await.unwrap();
    tokio::spawn(connection);
    let targets = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let link = Link { send, targets, agent_ends: mpsc::unbounded_channel().1 };
    let mut streams = Vec::new();
    for _ in 0..2 {
        let (mut stream, _) = open(&link, stalls(), None).await;
        stream.write_all(b"a request").await.unwrap();
        assert!(within(arrived.recv()).await.is_some());
        streams.push(stream);
    }
}

async fn an_end_from_outside_is_an_error(make: MakeLink) {
    let link = make().await;
    let (mut stream, _) = open(&link, stalls(), Some(Outcome::TunnelLost)).await;
    let mut arrived = [0; 1];
    let end = within(stream.read(&mut arrived)).await;
    assert!(end.is_err(), "it saw {end:?} instead of an error");
    assert_eq!(stream.status().failure(), Some((Outcome::TunnelLost, "tunnel_lost".to_owned())));
}
