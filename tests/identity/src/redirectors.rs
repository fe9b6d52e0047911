//! A redirector's certificate: its enrolment, and its uses.

use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use jiff::Timestamp;
use tokio::io::AsyncReadExt;
use tonic::Code;
use tonic::transport::Endpoint;
use tunnel_link::proto::peer_client::PeerClient;
use tunnel_link::proto::{Holdings, RenewRequest, WatchRequest};
use tunnel_pki::enrol::EnrollConfig;
use tunnel_pki::{
    ALPN_GRPC, ALPN_PEER, ALPN_TUNNEL, AgentIdentity, Holder, PrivateKey, TrustBundle, agent_tls, create_csr,
};
use tunnel_server::pki::{Revocation, Revocations};

use crate::harness::{DEADLINE, TestServer, client, connect, enroll, node};
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

/// Asks a server for the nodes that it has.
async fn watch(port: &Port, identity: &AgentIdentity) -> Result<tonic::Streaming<Holdings>, tonic::Status> {
    let tls = agent_tls(identity, ALPN_PEER).unwrap();
    let mut stream = Some(TokioIo::new(connect(&port.address, tls).await.unwrap()));
    let connector = tower::service_fn(move |_: http::Uri| {
        let stream = stream.take();
        async move { stream.ok_or_else(|| std::io::Error::other("once only")) }
    });
    let channel = Endpoint::from_static("http://test").connect_with_connector(connector).await;
    let channel = channel.map_err(|error| tonic::Status::unavailable(error.to_string()))?;
    Ok(PeerClient::new(channel).watch(WatchRequest::default()).await?.into_inner())
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
    assert!(identity.bundle.verify_server(&identity.chain).is_err());
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
    let records = [(record.subject.clone(), record)].into();
    port.revocations.send_replace(Arc::new(Revocations { records, ..Revocations::default() }));
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
