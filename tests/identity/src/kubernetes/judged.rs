//! Links that are judged while they last: roots that are retired, and servers that are revoked.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures_util::stream;
use jiff::Timestamp;
use postern_fake_kube::eventually;
use tokio::sync::{mpsc, watch};
use tonic::{Code, Streaming};
use tunnel_link::proto::peer_client::PeerClient;
use tunnel_link::proto::{Holdings, Segment, WatchRequest};
use tunnel_pki::{AgentIdentity, peer_tls};
use tunnel_runtime::clock::Clock;
use tunnel_server::pki::{Revocation, Subject};
use tunnel_server::runtime::settings::Settings;

use super::forwarded::{client, echo, wanted};
use super::links;
use super::servers::Port;
use crate::harness::{DEADLINE, TestServer, channel, enroll, node, publish};

/// Reads until the other server says that it is to be dialled again, and then until the link ends.
async fn until_ended(told: &mut Streaming<Holdings>) -> bool {
    let (ended, mut draining) = (tokio::time::Instant::now() + DEADLINE, false);
    while let Ok(Some(holdings)) = tokio::time::timeout_at(ended, told.message()).await.unwrap_or(Ok(None)) {
        draining |= holdings.draining;
    }
    assert!(tokio::time::Instant::now() < ended, "the link goes on");
    draining
}

fn server(id: &str) -> Subject {
    Subject::of_server(id).unwrap()
}

/// The agent of a node with an identity that the test replaces.
async fn attach(
    server: &TestServer,
    port: &Port,
    name: &str,
) -> (watch::Sender<Arc<AgentIdentity>>, impl Sized + use<>) {
    let (config, identity) = server.enrolled(name).await;
    let (renewed, identity) = watch::channel(Arc::new(identity));
    let (links, runtime, announced) = links(&config.state_dir, identity);
    links.set(&[port.address.parse().unwrap()]);
    eventually("a session", || port.sessions.get(&node(name))).await;
    let stop = runtime.shutdown.forced_token().clone().drop_guard();
    (renewed, (links, announced, stop))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retired_root_ends_links_and_a_renewed_agent_loses_no_connection() {
    let server = TestServer::start().await;
    let port = Port::of(&server, "server-a").await;
    let target = echo().await;
    let settings = Settings { loopback: [target.port()].into(), ..Settings::default() };
    port.settings.send_replace(Arc::new(settings));
    let (renewed, _agent) = attach(&server, &port, "edge-1").await;
    let (_never_renewed, _other) = attach(&server, &port, "edge-2").await;
    let session = || port.sessions.get(&node("edge-1"));
    let (first, other) = (session().unwrap(), port.sessions.get(&node("edge-2")).unwrap());
    // Whoever had the old key could have forged this server's certificate.
    let old = server.ca.state().unwrap();
    let (forged, key) = old.issue_peer("server-x").unwrap();
    let forged = peer_tls(forged.chain, &key.to_der(), old.bundle(), Clock::default()).unwrap();
    let mut forger = PeerClient::new(channel(&port.address, forged).await);
    let mut told = forger.watch(WatchRequest::default()).await.unwrap().into_inner();

    server.ca.introduce().unwrap();
    let new = server.ca.activate().unwrap();
    let mut ca = server.certificate.ca.clone();
    tokio::time::timeout(DEADLINE, ca.wait_for(|state| state.hash() == new)).await.unwrap().unwrap();
    port.roots.send_replace(Arc::new(ca.borrow_and_update().bundle().clone()));
    let (send, mut segments) = mpsc::channel(1);
    let request = wanted(stream::poll_fn(move |cx| segments.poll_recv(cx)), target);
    let mut held = client(&server, &port).await.relay(request).await.unwrap().into_inner();
    let mut echoed = async |text: &'static str| {
        send.send(Segment { data: text.into() }).await.unwrap();
        assert_eq!(held.message().await.unwrap().unwrap().data, text);
    };
    echoed("before").await;
    // The agent renews its certificate, and its session goes on under the old one.
    let config = server.agent("edge-1", "renewed", Some(&server.token("edge-1")));
    renewed.send_replace(Arc::new(enroll(&config).await.unwrap()));
    assert_eq!(session().unwrap().id, first.id);

    server.ca.retire(true).unwrap();
    tokio::time::timeout(DEADLINE, ca.wait_for(|state| state.roots().len() == 1)).await.unwrap().unwrap();
    port.roots.send_replace(Arc::new(ca.borrow().bundle().clone()));
    let second = eventually("the next session", || session().filter(|now| now.id != first.id)).await;
    assert!(until_ended(&mut told).await, "it was not told to dial again");
    eventually("the end of who has not renewed", || other.closed.is_cancelled().then_some(())).await;
    // The agent vouches for its earlier session, which finishes its connections. The time for that has passed for the other.
    echoed("after the retirement").await;
    assert!(!first.closed.is_cancelled() && session().unwrap().id == second.id);
    drop((send, held));
    eventually("the end of the first session", || first.closed.is_cancelled().then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_server_is_linked_with_nobody() {
    let ca = TestServer::start().await;
    let (near, far) = (Port::of(&ca, "server-a").await, Port::of(&ca, "server-b").await);
    let following = far.follow(&ca, &near);
    eventually("a link", || (!far.peers.all().is_empty()).then_some(())).await;
    // The one that is dialled ends the link, and says why. (The certificate of all of these servers names server-1.)
    let revoked = Revocation::revoke(None, server("server-1"), Timestamp::now());
    publish(&near.revocations, revoked.clone());
    eventually("its end", || far.peers.all().is_empty().then_some(())).await;
    let refused = client(&ca, &near).await.watch(WatchRequest::default()).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated, "{refused}");
    assert!(refused.message().contains("agent readmit --server server-1"), "{refused}");
    publish(&near.revocations, revoked.readmit(Timestamp::now()).unwrap());
    eventually("a link again", || (!far.peers.all().is_empty()).then_some(())).await;
    // The one that dials ends it as well.
    publish(&far.revocations, Revocation::revoke(None, server("server-a"), Timestamp::now()));
    eventually("its end", || far.peers.all().is_empty().then_some(())).await;

    // A server that learns that it is revoked lets its agents go.
    let (_identity, _agent) = attach(&ca, &near, "edge-1").await;
    publish(&near.revocations, Revocation::revoke(None, server("server-a"), Timestamp::now()));
    eventually("no session", || near.sessions.live().is_empty().then_some(())).await;
    drop(far);
    following.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_that_comes_back_gets_one_link() {
    let ca = TestServer::start().await;
    let (near, far) = (Port::of(&ca, "server-a").await, Port::of(&ca, "server-b").await);
    let all = Arc::new(BTreeSet::from([near.host_port()]));
    let addresses = watch::Sender::new(all.clone());
    let following = far.follow_all(&ca, addresses.subscribe());
    let linked = || far.peers.all();
    let first = eventually("a link", || linked().pop()).await;
    addresses.send_replace(Arc::default());
    eventually("it is left", || first.is_draining().then_some(())).await;
    assert_eq!(linked().len(), 1, "its server may have connections");
    addresses.send_replace(all);
    eventually("another link", || linked().iter().any(|peer| !peer.is_draining()).then_some(())).await;
    eventually("only that one", || (linked().len() == 1).then_some(())).await;
    assert!(!linked()[0].is_draining());
    drop(far);
    following.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_nodes_of_a_lost_server_are_known_while_its_address_is() {
    let ca = TestServer::start().await;
    let (near, far) = (Port::of(&ca, "server-a").await, Port::of(&ca, "server-b").await);
    let (_identity, _agent) = attach(&ca, &near, "edge-1").await;
    let addresses = watch::Sender::new(Arc::new(BTreeSet::from([near.host_port()])));
    let following = far.follow_all(&ca, addresses.subscribe());
    let (none, edge_1) = (BTreeSet::new(), BTreeSet::from([node("edge-1")]));
    let known = |nodes: &BTreeSet<_>, lost: &BTreeSet<_>| {
        let known = far.peers.nodes();
        (known.0 == *nodes && known.1 == *lost).then_some(())
    };
    eventually("the node", || known(&edge_1, &none)).await;
    // It ends the link.
    publish(&far.revocations, Revocation::revoke(None, server("server-a"), Timestamp::now()));
    eventually("the loss of its server", || known(&none, &edge_1)).await;
    addresses.send_replace(Arc::default());
    eventually("no node", || known(&none, &none)).await;
    drop(far);
    following.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn revocations_spread_between_servers() {
    let server = TestServer::start().await;
    let (near, far) = (Port::of(&server, "server-a").await, Port::of(&server, "server-b").await);
    let before = Revocation::revoke(None, &node("edge-1"), Timestamp::now());
    publish(&near.revocations, before.clone());
    let following = far.follow(&server, &near);
    let known = |record: &Revocation| {
        let known = far.store.load().unwrap().0;
        (known.records.get(&record.subject) == Some(record)).then_some(())
    };
    eventually("what was revoked before", || known(&before)).await;
    let after = Revocation::revoke(None, &node("edge-2"), Timestamp::now());
    publish(&near.revocations, after.clone());
    eventually("what was revoked since", || known(&after)).await;
    known(&before).expect("revocations only grow");
    // An older record takes nothing back, and nothing can follow one of the far future.
    let readmitted = before.readmit(Timestamp::now()).unwrap();
    far.store.merge(std::slice::from_ref(&readmitted)).unwrap();
    publish(&near.revocations, before);
    let future = Revocation::revoke(None, &node("edge-3"), Timestamp::MAX);
    publish(&near.revocations, future.clone());
    let last = Revocation::revoke(None, &node("edge-4"), Timestamp::now());
    publish(&near.revocations, last.clone());
    eventually("the last one", || known(&last)).await;
    assert!(known(&readmitted).is_some() && known(&future).is_none());
    drop(far);
    following.await.unwrap();
}
