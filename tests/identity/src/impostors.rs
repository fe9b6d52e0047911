//! Impostors of the server and of agents.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use postern_testbed::authority::Authority;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose as Usage, IsCa, Issuer, KeyPair,
};
use rustls::{ClientConfig, ServerConfig, version};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tunnel_pki::enrol::EnrollError;
use tunnel_pki::{ALPN_GRPC, ALPN_TUNNEL, Holder, SERVER_NAME};

use crate::harness::{Session, TestServer, connect, enroll, eventually, node};

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

fn private(key: &KeyPair) -> PrivateKeyDer<'static> {
    PrivateKeyDer::Pkcs8(key.serialize_der().into())
}

fn server_params() -> CertificateParams {
    let mut params = CertificateParams::new(vec![SERVER_NAME.to_owned()]).unwrap();
    params.extended_key_usages = vec![Usage::ServerAuth];
    params
}

struct Impostor {
    address: String,
    failed: Arc<AtomicUsize>,
    heard: Arc<Mutex<Vec<u8>>>,
}

/// Accepts TLS with this chain and key and keeps what the client sends.
async fn impostor(chain: Vec<CertificateDer<'static>>, key: PrivateKeyDer<'static>) -> Impostor {
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    config.alpn_protocols = vec![ALPN_GRPC.to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (failed, heard) = (Arc::new(AtomicUsize::new(0)), Arc::<Mutex<Vec<u8>>>::default());
    let (failures, ears) = (Arc::clone(&failed), Arc::clone(&heard));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            match acceptor.accept(stream).await {
                Ok(mut stream) => {
                    let mut said = Vec::new();
                    let _ = stream.read_to_end(&mut said).await;
                    ears.lock().unwrap().extend(said);
                }
                Err(_) => {
                    failures.fetch_add(1, Ordering::SeqCst);
                }
            }
        }
    });
    Impostor { address, failed, heard }
}

/// Checks that the agent keeps trying (the right server may come back) but sends the impostor nothing.
async fn assert_never_trusted(server: &TestServer, impostor: &Impostor) {
    let mut config = server.agent("edge-1", "victim", Some(&server.token("edge-1")));
    config.servers = vec![impostor.address.clone()];
    let agent = tokio::spawn(async move { enroll(&config).await.map(|_| ()) });
    eventually("two handshakes fail", async || (impostor.failed.load(Ordering::SeqCst) >= 2).then_some(()))
        .await;
    assert!(!agent.is_finished());
    agent.abort();
    assert!(impostor.heard.lock().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_with_another_ca_is_refused_for_good() {
    let server = TestServer::start().await;
    let other = TestServer::start().await;
    let mut config = server.agent("edge-1", "agent", Some(&server.token("edge-1")));
    config.servers = vec![other.address.clone()];
    let error = enroll(&config).await.unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, EnrollError::Refused { .. }), "{text}");
    assert!(text.contains(&server.ca_hash()) && text.contains(&other.ca_hash()), "{text}");
    assert_eq!(other.metrics.enrollments("enroll", "unknown_token"), 0, "it never saw the token");
}

/// The CA's certificate is public: presenting it proves nothing without its key.
#[tokio::test(flavor = "multi_thread")]
async fn a_man_in_the_middle_who_shows_the_true_ca_is_refused() {
    let server = TestServer::start().await;
    let ca = server.ca.state().unwrap().bundle().roots()[0].clone();
    let (own_key, leaf_key) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
    // Signed in the true CA's name by another key.
    let forger = Issuer::from_ca_cert_der(&ca, own_key).unwrap();
    let leaf = server_params().signed_by(&leaf_key, &forger).unwrap().der().clone();
    let impostor = impostor(vec![leaf, ca.clone()], private(&leaf_key)).await;
    assert_never_trusted(&server, &impostor).await;

    // A self-signed certificate that is its own CA, next to the real one.
    let own = server_params().self_signed(&leaf_key).unwrap().der().clone();
    let impostor = self::impostor(vec![own, ca], private(&leaf_key)).await;
    assert_never_trusted(&server, &impostor).await;
}

/// An agent's certificate is from the true CA, but an agent is no server.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_poses_as_the_server_is_refused() {
    let server = TestServer::start().await;
    let (_, agent) = server.enrolled("edge-9").await;
    let ca = server.ca.state().unwrap().bundle().roots()[0].clone();
    let chain = vec![agent.chain[0].clone(), ca];
    let impostor = impostor(chain, agent.key.clone_key()).await;
    assert_never_trusted(&server, &impostor).await;
    // Nor does an enrolled agent trust it.
    let (_, victim) = server.enrolled("edge-1").await;
    assert!(Session::open(&impostor.address, &victim).await.is_err());
}

/// TLS settings of a client with a certificate that need not be an agent's; they do not check the server's shape.
fn client_with(server: &TestServer, chain: Vec<CertificateDer<'static>>, key: &KeyPair) -> Arc<ClientConfig> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&version::TLS13])
        .unwrap()
        .with_root_certificates(server.ca.state().unwrap().bundle().root_store())
        .with_client_auth_cert(chain, private(key))
        .unwrap();
    config.alpn_protocols = vec![ALPN_TUNNEL.to_vec()];
    Arc::new(config)
}

async fn refused(server: &TestServer, tls: Arc<ClientConfig>) -> String {
    server.refused.lock().unwrap().clear();
    let used = async {
        let mut stream = connect(&server.address, tls).await?;
        stream.write_all(b"ping").await?;
        stream.read_u8().await
    };
    assert!(used.await.is_err(), "the server accepted it");
    eventually("the server notes the refusal", async || server.refused.lock().unwrap().pop()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_of_any_other_shape_are_refused_with_the_reason() {
    let server = TestServer::start().await;
    let other = TestServer::start().await;
    let ca_of = |server: &TestServer| Authority::open(server.state_dir()).unwrap().0;
    let agent = |change: fn(&mut CertificateParams)| {
        let mut params = CertificateParams::default();
        params.distinguished_name = Holder::Agent.distinguished_name(&node("edge-1"));
        params.extended_key_usages = vec![Usage::ClientAuth];
        change(&mut params);
        params
    };
    let key = KeyPair::generate().unwrap();
    type Change = fn(&mut CertificateParams);
    let cases: [(Change, &str); 5] = [
        (|params| params.distinguished_name.push(DnType::CommonName, "edge-1"), "does not begin with"),
        (
            |params| params.distinguished_name.push(DnType::OrganizationName, "system:masters"),
            "system:masters",
        ),
        (|params| params.distinguished_name.push(DnType::CountryName, "XX"), "more than"),
        (|params| params.extended_key_usages.push(Usage::ServerAuth), "client authentication alone"),
        (|params| params.extended_key_usages = Vec::new(), "no extended key usage"),
    ];
    let issuer = ca_of(&server);
    for (change, reason) in cases {
        let leaf = agent(change).signed_by(&key, &issuer).unwrap().der().clone();
        let found = refused(&server, client_with(&server, vec![leaf], &key)).await;
        assert!(found.contains(reason), "want {reason}: {found}");
    }
    // The right shape from another CA, from itself, and a CA as a client.
    let foreign = agent(|_| {}).signed_by(&key, &ca_of(&other)).unwrap().der().clone();
    refused(&server, client_with(&server, vec![foreign], &key)).await;
    let own = agent(|_| {}).self_signed(&key).unwrap().der().clone();
    refused(&server, client_with(&server, vec![own], &key)).await;
    let authority = agent(|params| params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained));
    let authority = authority.signed_by(&key, &issuer).unwrap().der().clone();
    refused(&server, client_with(&server, vec![authority], &key)).await;
    // Unchanged, the certificate is accepted: the others are refused for the right reasons.
    let good = agent(|_| {}).signed_by(&key, &issuer).unwrap().der().clone();
    let mut stream = connect(&server.address, client_with(&server, vec![good], &key)).await.unwrap();
    stream.write_all(b"!").await.unwrap();
    assert_eq!(stream.read_u8().await.unwrap(), b'!');
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_1_2_is_not_spoken() {
    let server = TestServer::start().await;
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&version::TLS12])
        .unwrap()
        .with_root_certificates(server.ca.state().unwrap().bundle().root_store())
        .with_no_client_auth();
    config.alpn_protocols = vec![ALPN_GRPC.to_vec()];
    assert!(connect(&server.address, Arc::new(config)).await.is_err());
    let found = eventually("the server notes it", async || server.refused.lock().unwrap().pop()).await;
    assert!(found.contains("Tls12NotOffered") || found.contains("Tls13Required"), "{found}");
}
