//! Tests that a window which limits a long path grows, for each kind of receiver.

use std::sync::Arc;
use std::time::Duration;

use http::Request;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tunnel_link::link::Flow;
use tunnel_link::relay::{Abort, Relay, Side, Traffic};

use crate::support::{direct, forwarded_along, relay, stalls, within};

/// Returns the state of a path so long that memory passes more than a window in each round trip.
fn long() -> Arc<Flow> {
    let flow = Flow::default();
    flow.rtt.add(Duration::from_millis(300));
    Arc::new(flow)
}

/// Writes until the other end is gone.
fn flood(mut to: impl AsyncWrite + Unpin + Send + 'static) {
    tokio::spawn(async move { while to.write_all(&[7; 64 << 10]).await.is_ok() {} });
}

/// Reads up to the end.
fn take(mut from: impl AsyncRead + Unpin + Send + 'static) {
    tokio::spawn(async move { tokio::io::copy(&mut from, &mut tokio::io::sink()).await });
}

async fn grows(flow: &Flow) {
    within(async {
        while flow.window() <= Flow::default().window() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}

/// At a forwarding server, the window of the link from which the bytes come grows.
#[tokio::test]
async fn forwarded() {
    let (to_client, to_agent) = (long(), long());
    let link = forwarded_along(to_client.clone(), to_agent.clone()).await;
    let (client, _end) = relay(&link.send, stalls(), b"").await;
    let (target, _) = within(link.targets.accept()).await.unwrap();
    let (from_target, to_target) = target.into_split();
    let (from_client, to_server) = client.into_split();
    take(from_client);
    flood(to_target);
    grows(&to_agent).await;
    assert_eq!(to_client.window(), Flow::default().window(), "nothing has come from the client");
    take(from_target);
    flood(to_server);
    grows(&to_client).await;
}

/// The client is not a plain socket.
#[tokio::test]
async fn pumped() {
    let link = direct().await;
    let mut send = link.send.clone().ready().await.unwrap();
    let (near, far) = tokio::io::duplex(64 << 10);
    let flow = long();
    let path = flow.clone();
    tokio::spawn(async move {
        let (response, mut stream) = send.send_request(Request::new(()), false).unwrap();
        let body = response.await.unwrap().into_body();
        let (bound, abort, traffic) = (stalls(), Arc::new(Abort::default()), Traffic::default());
        let relay =
            Relay { side: Side::Server, flow: &path, stalls: &bound, abort: &abort, traffic: &traffic };
        let (mut read, mut write) = tokio::io::split(far);
        // Runs until the test is over.
        let _ = relay.pump(&mut read, &mut write, &mut stream, body).await;
    });
    let (target, _) = within(link.targets.accept()).await.unwrap();
    let (_from_target, to_target) = target.into_split();
    let (from_tunnel, _to_tunnel) = tokio::io::split(near);
    take(from_tunnel);
    flood(to_target);
    grows(&flow).await;
}
