//! Connections that one server forwards to another: they are not forwarded again, and outlive a link that is used up.

use std::net::SocketAddr;
use std::sync::Arc;

use futures_util::stream;
use postern_fake_kube::eventually;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};
use tunnel_link::proto::Segment;
use tunnel_link::proto::peer_client::PeerClient;
use tunnel_link::relay::{NODE_HEADER, TARGET_HEADER};
use tunnel_runtime::config::HostPort;
use tunnel_server::runtime::settings::Settings;

use super::links;
use super::servers::Port;
use crate::harness::{self, TestServer, channel, node};

/// Status with which a server refuses a connection to edge-1 that another one asks it for.
async fn refusal(server: &TestServer, port: &Port) -> Status {
    let request = wanted(stream::pending::<Segment>(), "192.0.2.1:10250".parse().unwrap());
    client(server, port).await.relay(request).await.expect_err("it is refused")
}

pub(super) async fn client(server: &TestServer, port: &Port) -> PeerClient<Channel> {
    PeerClient::new(channel(&port.address, server.certificate.peer_tls.load_full()).await)
}

/// A connection from edge-1 to `target`.
pub(super) fn wanted<T>(segments: T, target: SocketAddr) -> Request<T> {
    let mut request = Request::new(segments);
    request.metadata_mut().insert(NODE_HEADER, "edge-1".parse().unwrap());
    request.metadata_mut().insert(TARGET_HEADER, target.to_string().parse().unwrap());
    request
}

#[tokio::test(flavor = "multi_thread")]
async fn it_is_not_forwarded_again() {
    let server = TestServer::start().await;
    let (config, identity) = server.enrolled("edge-1").await;
    let (near, far) = (Port::of(&server, "server-a").await, Port::of(&server, "server-b").await);
    let (_identity, identity) = watch::channel(Arc::new(identity));
    let (links, runtime, _announced) = links(&config.state_dir, identity);
    let known: Vec<HostPort> = vec![near.address.parse().unwrap()];
    let (_servers, servers) = watch::channel(Arc::new(known));
    tokio::spawn(links.follow(servers));
    eventually("a session", || near.has_edge_1().then_some(())).await;
    let following = far.follow(&server, &near);
    let told = || (far.peers.holders(&node("edge-1")).len() == 1).then_some(());
    eventually("the other server to know it", told).await;

    // The one with the session asks the agent, whose policy does not allow the target.
    let status = refusal(&server, &near).await;
    assert_eq!(status.code(), Code::PermissionDenied, "{status}");
    // The other one could forward it to the first, as it does for its own clients.
    let status = refusal(&server, &far).await;
    assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
    assert!(status.message().contains("no agent of edge-1 is attached to this server"), "{status}");
    runtime.shutdown.force();
    drop(far);
    following.await.unwrap();
}

/// A target that sends back what it gets.
pub(super) async fn echo() -> SocketAddr {
    let echo = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = echo.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = echo.accept().await {
            tokio::spawn(async move {
                let (mut from, mut to) = socket.split();
                tokio::io::copy(&mut from, &mut to).await
            });
        }
    });
    target
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_is_used_up_is_replaced_and_finishes_what_it_relays() {
    let target = echo().await;
    let server = TestServer::start().await;
    let (config, identity) = server.enrolled("edge-1").await;
    let port = Port::with_links_of(20, &server, "server-a").await;
    let settings = Settings { loopback: [target.port()].into(), ..Settings::default() };
    port.settings.send_replace(Arc::new(settings));
    let (_identity, identity) = watch::channel(Arc::new(identity));
    let (links, runtime, _announced) = links(&config.state_dir, identity);
    let known: Vec<HostPort> = vec![port.address.parse().unwrap()];
    let (_servers, servers) = watch::channel(Arc::new(known));
    tokio::spawn(links.follow(servers));
    let session = || port.sessions.get(&node("edge-1"));
    let first = eventually("a session", session).await;

    let (send, mut segments) = mpsc::channel(1);
    let request = wanted(stream::poll_fn(move |cx| segments.poll_recv(cx)), target);
    let mut held = client(&server, &port).await.relay(request).await.unwrap().into_inner();
    let mut echoed = async |text: &'static str| {
        send.send(Segment { data: text.into() }).await.unwrap();
        assert_eq!(held.message().await.unwrap().unwrap().data, text);
    };
    echoed("before").await;
    let mut before = first.id;
    for _ in 0..2 {
        harness::eventually("the next session", async || {
            refusal(&server, &port).await;
            session().filter(|session| session.id != before)
        })
        .await;
        before = session().unwrap().id;
        echoed("beside the next session").await;
    }
    assert!(!first.closed.is_cancelled());
    // The agent ends it once nothing is left on it.
    drop((send, held));
    eventually("the end of the first session", || first.closed.is_cancelled().then_some(())).await;
    runtime.shutdown.force();
}
