//! Resumed sessions: who is refused in a full handshake is refused when a session is resumed, too.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use rustls::client::{Resumption, TicketRequest};
use rustls::{ClientConfig, HandshakeKind};
use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_rustls::client::TlsStream;
use tunnel_pki::{
    ALPN_EDGE, ALPN_GRPC, ALPN_TUNNEL, AgentIdentity, agent_tls, concerns_certificates, pinned_tls,
};
use tunnel_server::pki::{Lifetimes, PkiMetrics, Revocation, ServerCertificate, ServerNames};

use crate::harness::{DEADLINE, TestServer, connect, eventually, node, publish};
use crate::kubernetes::{Port, links};

const FULL: HandshakeKind = HandshakeKind::Full;
const RESUMED: HandshakeKind = HandshakeKind::Resumed;

/// Connects and reads what the server says first, with which its tickets come.
async fn shake(
    address: &str,
    tls: Arc<ClientConfig>,
) -> std::io::Result<(HandshakeKind, TlsStream<TcpStream>)> {
    let mut stream = connect(address, tls).await?;
    let kind = stream.get_ref().1.handshake_kind().unwrap();
    tokio::time::timeout(DEADLINE, stream.read_u8()).await.unwrap()?;
    Ok((kind, stream))
}

async fn kind(address: &str, identity: &AgentIdentity, alpn: &[u8]) -> HandshakeKind {
    shake(address, agent_tls(identity, alpn).unwrap()).await.unwrap().0
}

/// Settings that resume sessions of the identity with another ALPN protocol, as no agent does.
fn resuming(identity: &AgentIdentity, alpn: &[u8]) -> Arc<ClientConfig> {
    let mut tls = ClientConfig::clone(&agent_tls(identity, ALPN_TUNNEL).unwrap());
    tls.alpn_protocols = vec![alpn.to_vec()];
    Arc::new(tls)
}

/// Starts an agent that has sessions, which its first link resumes, and waits until that is refused.
async fn is_refused(server: &TestServer, port: &Port, identity: &Arc<AgentIdentity>, reason: &str) {
    let (_identity, identity) = watch::channel(identity.clone());
    let before = port.resumed();
    let (links, runtime, _announced) = links(&server.directory.path().join("agent"), identity);
    links.set(&[port.address.parse().unwrap()]);
    let _stop = runtime.shutdown.forced_token().clone().drop_guard();
    let mut said = Vec::new();
    eventually("a refusal", async || {
        said = links.status().into_iter().filter_map(|link| link.last_error).collect();
        said.iter().any(|error| error.contains(reason)).then_some(())
    })
    .await;
    assert!(port.resumed() > before, "its handshake was a full one: {said:?}");
    assert!(port.sessions.get(&node("edge-1")).is_none());
    runtime.shutdown.force();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_resumes_at_every_server_and_only_with_the_same_identity() {
    let server = TestServer::start().await;
    let (_, identity) = server.enrolled("edge-1").await;
    let port = Port::of(&server, "server-a").await;
    assert_eq!(kind(&port.address, &identity, ALPN_TUNNEL).await, FULL);
    assert_eq!(kind(&port.address, &identity, ALPN_TUNNEL).await, RESUMED);
    assert_eq!(port.resumed(), 1);
    // Another server of the installation, with a certificate of its own, which has never seen the agent.
    let names = ServerNames::default();
    let other =
        ServerCertificate::start(server.ca.clone(), names, "server-b", PkiMetrics::default()).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let accepting = async {
        let stream = other.tls.acceptor().accept(listener.accept().await.unwrap().0).await.unwrap();
        let shown = stream.get_ref().1.peer_certificates().unwrap().to_vec();
        (stream.get_ref().1.handshake_kind().unwrap(), shown)
    };
    let connecting = connect(&address, agent_tls(&identity, ALPN_EDGE).unwrap());
    let (accepted, connected) = tokio::join!(accepting, connecting);
    assert_eq!(accepted, (RESUMED, identity.chain.clone()));
    connected.unwrap();
    // A renewed identity, and one with other roots, begin anew. Renewals see the server's present certificate.
    let again = identity.with_bundle(identity.bundle.clone());
    assert_eq!(kind(&port.address, &again, ALPN_TUNNEL).await, FULL);
    assert_eq!(kind(&port.address, &identity, ALPN_GRPC).await, FULL);
    assert_eq!(kind(&port.address, &identity, ALPN_TUNNEL).await, RESUMED);
    // A renewal takes a full handshake, which proves that the client has the key.
    shake(&port.address, resuming(&identity, ALPN_GRPC)).await.unwrap_err();
}

#[tokio::test(flavor = "multi_thread")]
async fn who_shows_no_certificate_or_does_not_ask_gets_no_ticket() {
    let server = TestServer::start().await;
    let (_, identity) = server.enrolled("edge-1").await;
    let port = Port::of(&server, "server-a").await;
    let asked = Some(TicketRequest { new_session_count: 9, resumption_count: 9 });
    let remembering = |tls: Arc<ClientConfig>, asked: Option<TicketRequest>| {
        let mut tls = ClientConfig::clone(&tls);
        (tls.resumption, tls.send_ticket_request) = (Resumption::in_memory_sessions(8), asked);
        Arc::new(tls)
    };
    let anonymous = remembering(pinned_tls(&server.ca_hash()).unwrap(), asked);
    let silent = remembering(agent_tls(&identity, ALPN_TUNNEL).unwrap(), None);
    for tls in [anonymous, silent] {
        for _ in 0..2 {
            assert_eq!(shake(&port.address, tls.clone()).await.unwrap().0, FULL);
        }
    }
    // The same settings resume where the certificate is shown and tickets are asked for.
    let agent = remembering(agent_tls(&identity, ALPN_TUNNEL).unwrap(), asked);
    assert_eq!(shake(&port.address, agent.clone()).await.unwrap().0, FULL);
    assert_eq!(shake(&port.address, agent).await.unwrap().0, RESUMED);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_agent_is_refused_when_it_resumes() {
    let server = TestServer::start().await;
    let (_, identity) = server.enrolled("edge-1").await;
    let identity = Arc::new(identity);
    let port = Port::of(&server, "server-a").await;
    assert_eq!(kind(&port.address, &identity, ALPN_TUNNEL).await, FULL);
    publish(&port.revocations, Revocation::revoke(None, &node("edge-1"), Timestamp::now()));
    is_refused(&server, &port, &identity, "revoked").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_certificate_is_refused_when_it_resumes() {
    let agent = Duration::from_secs(4);
    let server = TestServer::with(Lifetimes { agent, ..Lifetimes::default() }).await;
    let (_, identity) = server.enrolled("edge-1").await;
    let identity = Arc::new(identity);
    let port = Port::of(&server, "server-a").await;
    assert_eq!(kind(&port.address, &identity, ALPN_TUNNEL).await, FULL);
    eventually("its end", async || (SystemTime::now() > identity.validity.not_after).then_some(())).await;
    is_refused(&server, &port, &identity, "expired").await;
}

/// It learns that from the alert of a full handshake, as an agent without a session does.
#[tokio::test(flavor = "multi_thread")]
async fn no_session_outlives_a_root() {
    let server = TestServer::start().await;
    let (_, identity) = server.enrolled("edge-1").await;
    let mut ca = server.certificate.ca.clone();
    let port = Port::of(&server, "server-a").await;
    let tls = agent_tls(&identity, ALPN_TUNNEL).unwrap();
    let shaken = async || shake(&port.address, tls.clone()).await;
    assert_eq!(shaken().await.unwrap().0, FULL);
    assert_eq!(shaken().await.unwrap().0, RESUMED);
    server.ca.introduce().unwrap();
    server.ca.activate().unwrap();
    tokio::time::timeout(DEADLINE, ca.wait_for(|state| state.roots().len() == 2)).await.unwrap().unwrap();
    assert_eq!(shaken().await.unwrap().0, FULL);
    assert_eq!(shaken().await.unwrap().0, RESUMED);
    server.ca.retire(true).unwrap();
    tokio::time::timeout(DEADLINE, ca.wait_for(|state| state.roots().len() == 1)).await.unwrap().unwrap();
    let error = shaken().await.unwrap_err();
    assert!(concerns_certificates(&error), "{error}");
}
