//! A redirector's certificate: its enrolment, and its uses.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use h2::client::SendRequest;
use jiff::Timestamp;
use tokio::io::AsyncReadExt;
use tokio::task::JoinHandle;
use tonic::Code;
use tunnel_link::grpc;
use tunnel_link::proto::peer_client::PeerClient;
use tunnel_link::proto::{Holdings, RenewRequest, WatchRequest};
use tunnel_link::relay::{NODE_HEADER, PEER_RELAY_PATH, TARGET_HEADER};
use tunnel_pki::enrol::EnrollConfig;
use tunnel_pki::{
    ALPN_GRPC, ALPN_PEER, ALPN_TUNNEL, AgentIdentity, Holder, PrivateKey, TrustBundle, agent_tls, create_csr,
};
use tunnel_routing::inventory::{Inventory, Selector, parse};
use tunnel_server::pki::Revocation;

use crate::harness::{DEADLINE, TestServer, client, connect, enroll, eventually, node, publish};
use crate::kubernetes::Port;

fn token(server: &TestServer, holder: Holder) -> String {
    let hour = Duration::from_secs(3600);
    server.tokens().create((holder, &node("cloud-2")), hour, Timestamp::now()).unwrap().0.expose()
}

async fn enrolled(server: &TestServer) -> AgentIdentity {
    let token = token(server, Holder::Redirector);
    let config =
        EnrollConfig { holder: Holder::Redirector, ..server.agent("cloud-2", "redirector", Some(&token)) };
    let identity = enroll(&config).await.unwrap();
    assert!(config.state_dir.join("redirector.key").exists() && !config.state_dir.join("agent.key").exists());
    identity
}

/// A link of a redirector's, or of whoever has its certificate.
struct Link {
    send: SendRequest<Bytes>,
    driver: JoinHandle<Result<(), h2::Error>>,
}

impl Link {
    async fn open(port: &Port, identity: &AgentIdentity) -> Self {
        let stream = connect(&port.address, agent_tls(identity, ALPN_PEER).unwrap()).await.unwrap();
        let (send, connection) = h2::client::handshake(stream).await.unwrap();
        Self { send, driver: tokio::spawn(connection) }
    }

    /// Asks the server for the nodes that it has.
    async fn watch(&self) -> Result<tonic::Streaming<Holdings>, tonic::Status> {
        let mut client = PeerClient::with_origin(grpc::Channel::new(self.send.clone()), grpc::origin());
        Ok(client.watch(WatchRequest::default()).await?.into_inner())
    }

    /// Asks for a connection, which this server cannot make; the answer says why.
    async fn relay(&self, node: &str, target: &str) -> tonic::Status {
        let request = http::Request::post(format!("https://server{PEER_RELAY_PATH}"))
            .header(NODE_HEADER, node)
            .header(TARGET_HEADER, target)
            .body(())
            .unwrap();
        let mut send = self.send.clone().ready().await.unwrap();
        let (answer, _body) = send.send_request(request, false).unwrap();
        let answer = answer.await.unwrap();
        tonic::Status::from_header_map(answer.headers()).expect("it is refused")
    }

    async fn ended(self) -> Result<(), h2::Error> {
        tokio::time::timeout(DEADLINE, self.driver).await.expect("the link ends").unwrap()
    }
}

async fn watch(port: &Port, identity: &AgentIdentity) -> Result<tonic::Streaming<Holdings>, tonic::Status> {
    let tls = agent_tls(identity, ALPN_PEER).unwrap();
    let stream = connect(&port.address, tls).await.unwrap();
    let link = h2::client::handshake(stream).await;
    let (send, connection) = link.map_err(|error| tonic::Status::unavailable(error.to_string()))?;
    Link { send, driver: tokio::spawn(connection) }.watch().await
}

fn nodes(cloud_2_is_an_edge: bool) -> Inventory {
    let label = if cloud_2_is_an_edge { "enable" } else { "disable" };
    let text = format!(
        "{{kind: List, items: [
            {{metadata: {{name: cloud-2, labels: {{superedge.io/edge-node: {label}}}}}}},
            {{metadata: {{name: edge-1, labels: {{superedge.io/edge-node: enable}}}},
              status: {{addresses: [{{type: InternalIP, address: 192.0.2.1}}]}}}}]}}"
    );
    parse(&text, &Selector::default()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_but_passing_on() {
    let server = TestServer::start().await;
    let identity = enrolled(&server).await;
    assert_eq!((identity.holder, identity.node.as_str()), (Holder::Redirector, "cloud-2"));
    let port = Port::of(&server, "server-a").await;

    // It is no agent.
    let mut link = connect(&port.address, agent_tls(&identity, ALPN_TUNNEL).unwrap()).await.unwrap();
    let mut bytes = Vec::new();
    let read = tokio::time::timeout(DEADLINE, link.read_to_end(&mut bytes)).await.expect("it is closed");
    assert!(read.is_err() || bytes.is_empty(), "the server began a session: {bytes:?}");
    // It is no server.
    assert!(identity.bundle.verify_server(&identity.chain, SystemTime::now()).is_err());
    // It may ask a server for its nodes. It has no CA, and gets the roots.
    let mut told = watch(&port, &identity).await.unwrap();
    let first = told.message().await.unwrap().unwrap();
    assert_eq!(first.server_id, "server-a");
    assert_eq!(TrustBundle::from_pem(&first.trust_bundle).unwrap(), identity.bundle);
    // Agents may not.
    let (_, agent) = server.enrolled("edge-1").await;
    assert!(watch(&port, &agent).await.is_err());

    // Revoked, its link ends, and the next is refused with the reason.
    let record = Revocation::revoke(None, &node("cloud-2"), Timestamp::now());
    publish(&port.revocations, record);
    let ended = async { while let Ok(Some(_)) = told.message().await {} };
    tokio::time::timeout(DEADLINE, ended).await.expect("the link ends");
    let refused = watch(&port, &identity).await.expect_err("it is refused");
    assert_eq!(refused.code(), Code::Unauthenticated, "{refused}");
    assert!(refused.message().contains("was revoked"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewal_is_for_a_redirector_again() {
    let server = TestServer::start().await;
    let identity = enrolled(&server).await;
    let key = PrivateKey::generate().unwrap();
    let mut enrollment = client(&server.address, agent_tls(&identity, ALPN_GRPC).unwrap()).await;
    let answer =
        enrollment.renew(RenewRequest { csr: create_csr(&key).unwrap() }).await.unwrap().into_inner();
    let bundle = TrustBundle::from_pem(&answer.trust_bundle).unwrap();
    let renewed = AgentIdentity::from_pem(&answer.certificate_chain, &key.to_pem(), bundle).unwrap();
    assert_eq!((renewed.holder, renewed.node.as_str()), (Holder::Redirector, "cloud-2"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_for_one_of_the_two() {
    let server = TestServer::start().await;
    for (holder, other) in [(Holder::Agent, Holder::Redirector), (Holder::Redirector, Holder::Agent)] {
        let token = token(&server, other);
        let config = EnrollConfig { holder, ..server.agent("cloud-2", &holder.to_string(), Some(&token)) };
        let error = enroll(&config).await.unwrap_err().to_string();
        assert!(error.contains(&format!("the token is for the {other} of its node")), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_edge_nodes_kubelet_gets_none() {
    let server = TestServer::start().await;
    let identity = enrolled(&server).await;
    let port = Port::of(&server, "server-a").await;
    port.nodes.send_replace(Some(Arc::new(nodes(false))));
    let mut told = watch(&port, &identity).await.unwrap();
    // It is an edge node now: the link ends, and the next one is refused.
    for known in [&port.nodes, &server.nodes] {
        known.send_replace(Some(Arc::new(nodes(true))));
    }
    let ended = async { while let Ok(Some(_)) = told.message().await {} };
    tokio::time::timeout(DEADLINE, ended).await.expect("the link ends");
    let refused = watch(&port, &identity).await.expect_err("it is refused");
    assert!(refused.message().contains("cloud-2 is an edge node"), "{refused}");
    // So are a renewal and an enrolment.
    let mut enrollment = client(&server.address, agent_tls(&identity, ALPN_GRPC).unwrap()).await;
    let csr = create_csr(&PrivateKey::generate().unwrap()).unwrap();
    let refused = enrollment.renew(RenewRequest { csr }).await.expect_err("it is refused");
    assert!(refused.message().contains("cloud-2 is an edge node"), "{refused}");
    let token = token(&server, Holder::Redirector);
    let config =
        EnrollConfig { holder: Holder::Redirector, ..server.agent("cloud-2", "again", Some(&token)) };
    let error = enroll(&config).await.expect_err("it is refused").to_string();
    assert!(error.contains("cloud-2 is an edge node"), "{error}");
    assert_eq!(server.metrics.enrollments("renew", "edge_node"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn it_reaches_tunnelled_ports_of_the_node_only() {
    let server = TestServer::start().await;
    let identity = enrolled(&server).await;
    let port = Port::of(&server, "server-a").await;
    port.router.set_inventory(nodes(false));
    let link = Link::open(&port, &identity).await;
    for (node, target) in [
        ("edge-1", "192.0.2.1:22"),
        ("edge-1", "192.0.2.2:10250"),
        ("edge-1", "127.0.0.1:10250"),
        ("edge-2", "192.0.2.1:10250"),
        ("cloud-2", "192.0.2.1:10250"),
    ] {
        let refused = link.relay(node, target).await;
        assert_eq!(refused.code(), Code::PermissionDenied, "{node} {target}: {refused}");
        assert!(refused.message().contains("a redirector reaches"), "{refused}");
    }
    let no_agent = link.relay("edge-1", "192.0.2.1:10250").await;
    assert_eq!(no_agent.code(), Code::FailedPrecondition, "{no_agent}");
    // The ports that agents dial on loopback.
    port.router.set_ports(&[9100].into(), &[9100].into());
    assert_eq!(link.relay("edge-1", "127.0.0.1:9100").await.code(), Code::FailedPrecondition);
}

#[tokio::test(flavor = "multi_thread")]
async fn its_links_calls_and_streams_are_few() {
    let server = TestServer::start().await;
    let identity = enrolled(&server).await;
    let port = Port::of(&server, "server-a").await;
    let first = Link::open(&port, &identity).await;
    let mut told = first.watch().await.unwrap();
    assert_eq!(told.message().await.unwrap().unwrap().server_id, "server-a");
    let refused = first.watch().await.expect_err("a second Watch");
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    assert!(refused.message().contains("has a Watch already"), "{refused}");
    // Another one once the first has ended.
    drop(told);
    eventually("a Watch after the first one", async || first.watch().await.ok()).await;
    let streams = first.send.current_max_send_streams();
    assert!(streams < 1024, "{streams} streams at a time, of a server with 1024 files");

    // Its oldest link makes room for a ninth one: that may be a lost one.
    let mut more = Vec::new();
    for _ in 0..7 {
        let link = Link::open(&port, &identity).await;
        link.watch().await.unwrap();
        more.push(link);
    }
    let ninth = eventually("a ninth link", async || {
        let link = Link::open(&port, &identity).await;
        link.watch().await.is_ok().then_some(link)
    })
    .await;
    let _ = first.ended().await;
    assert!(more.iter().all(|link| !link.driver.is_finished()) && !ninth.driver.is_finished());
}

#[tokio::test(flavor = "multi_thread")]
async fn handshakes_do_not_wait_for_the_threads_that_relay() {
    let server = TestServer::start().await;
    let identity = enrolled(&server).await;
    let port = Port::of(&server, "server-a").await;
    let (go_on, blocked) = std::sync::mpsc::channel::<()>();
    port.workers.next().spawn(async move {
        let _ = blocked.recv();
    });
    let shaken = connect(&port.address, agent_tls(&identity, ALPN_PEER).unwrap());
    let shaken = tokio::time::timeout(Duration::from_secs(10), shaken).await;
    drop(go_on);
    shaken.expect("the handshake is done while the only thread of the links is busy").unwrap();
}
