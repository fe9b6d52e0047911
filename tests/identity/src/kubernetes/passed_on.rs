//! A connection that one server asks another for goes no further than that one.

use std::sync::Arc;

use futures_util::stream;
use postern_fake_kube::eventually;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;
use tonic::{Code, Request, Status};
use tunnel_agent::session::LinkSet;
use tunnel_core::carry::{NODE_HEADER, TARGET_HEADER};
use tunnel_core::config::HostPort;
use tunnel_core::proto::Segment;
use tunnel_core::proto::peer_client::PeerClient;

use super::servers::Port;
use super::shared;
use crate::harness::{TestServer, channel, node};

/// Why a server does not carry a connection to edge-1 that another one asks it for.
async fn refusal(server: &TestServer, port: &Port) -> Status {
    let channel = channel(&port.address, server.certificate.peer_tls().load_full()).await;
    let mut request = Request::new(stream::pending::<Segment>());
    request.metadata_mut().insert(NODE_HEADER, "edge-1".parse().unwrap());
    request.metadata_mut().insert(TARGET_HEADER, "192.0.2.1:10250".parse().unwrap());
    PeerClient::new(channel).carry(request).await.expect_err("it is refused")
}

#[tokio::test(flavor = "multi_thread")]
async fn it_is_not_passed_on_again() {
    let server = TestServer::start().await;
    let (config, identity) = server.enrolled("edge-1").await;
    let (near, far) = (Port::of(&server, "server-a").await, Port::of(&server, "server-b").await);
    let (_identity, identity) = watch::channel(Arc::new(identity));
    let (shared, _announced) = shared(&config.state_dir);
    let links = LinkSet::new(shared.clone(), identity, TaskTracker::new());
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
    // The other one could pass it on to that, as it does for its own clients.
    let status = refusal(&server, &far).await;
    assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
    assert!(status.message().contains("no agent of edge-1 is attached to this server"), "{status}");
    shared.forced.cancel();
    drop(far);
    following.await.unwrap();
}
