//! The key exchange of links: post-quantum where both ends know one, in one round trip with everybody.

use std::sync::Arc;

use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::{ClientConfig, ClientConnection, HandshakeKind, NamedGroup, ServerConfig, version};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tunnel_pki::{ALPN_TUNNEL, AgentIdentity, agent_tls, server_name};

use crate::harness::{DEADLINE, TestServer, connect};

/// A segment's bytes where a frame has 1,500: 20 each are IP's and TCP's, 12 are TCP's timestamps.
const SEGMENT: usize = 1448;

/// The key exchanges of programs from before X25519MLKEM768.
fn older() -> Arc<CryptoProvider> {
    let kx_groups = vec![aws_lc_rs::kx_group::X25519];
    Arc::new(CryptoProvider { kx_groups, ..aws_lc_rs::default_provider() })
}

fn older_agent(identity: &AgentIdentity) -> Arc<ClientConfig> {
    let mut tls = ClientConfig::builder_with_provider(older())
        .with_protocol_versions(&[&version::TLS13])
        .unwrap()
        .with_root_certificates(identity.bundle.root_store())
        .with_client_cert_resolver(
            agent_tls(identity, ALPN_TUNNEL).unwrap().client_auth_cert_resolver.clone(),
        );
    tls.alpn_protocols = vec![ALPN_TUNNEL.to_vec()];
    Arc::new(tls)
}

/// An older server of this installation.
async fn older_server(server: &TestServer) -> String {
    let present = server.certificate.tls.acceptor();
    let mut tls = ServerConfig::builder_with_provider(older())
        .with_protocol_versions(&[&version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_cert_resolver(present.config().cert_resolver.clone());
    tls.alpn_protocols = vec![ALPN_TUNNEL.to_vec()];
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut stream = TlsAcceptor::from(Arc::new(tls)).accept(stream).await.unwrap();
        let _ = stream.read_u8().await;
    });
    address
}

/// Returns the group of a handshake that takes one round trip.
async fn group(address: &str, tls: Arc<ClientConfig>) -> NamedGroup {
    let mut tls = ClientConfig::clone(&tls);
    tls.resumption = Resumption::disabled();
    let stream = connect(address, Arc::new(tls)).await.unwrap();
    let tls = stream.get_ref().1;
    assert_eq!(tls.handshake_kind(), Some(HandshakeKind::Full), "not with a HelloRetryRequest");
    tls.negotiated_key_exchange_group().unwrap().name()
}

#[tokio::test(flavor = "multi_thread")]
async fn it_is_post_quantum_and_older_programs_agree_on_x25519() {
    let server = TestServer::start().await;
    let (_, identity) = server.enrolled("edge-1").await;
    let tls = agent_tls(&identity, ALPN_TUNNEL).unwrap();
    assert_eq!(group(&server.address, tls.clone()).await, NamedGroup::X25519MLKEM768);
    assert_eq!(group(&server.address, older_agent(&identity)).await, NamedGroup::X25519);
    assert_eq!(group(&older_server(&server).await, tls).await, NamedGroup::X25519);
}

/// Such a ClientHello takes two segments, which may come apart.
#[tokio::test(flavor = "multi_thread")]
async fn a_hello_in_pieces_is_read() {
    let server = TestServer::start().await;
    let (_, identity) = server.enrolled("edge-1").await;
    let tls = agent_tls(&identity, ALPN_TUNNEL).unwrap();
    let mut client = ClientConnection::new(tls, server_name()).unwrap();
    let mut hello = Vec::new();
    client.write_tls(&mut hello).unwrap();
    assert!(hello.len() > SEGMENT, "{} bytes: it has no post-quantum key", hello.len());
    let mut stream = TcpStream::connect(&server.address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    for byte in hello {
        stream.write_all(&[byte]).await.unwrap();
        tokio::task::yield_now().await;
    }
    let shaking = async {
        while client.is_handshaking() {
            let mut bytes = [0; 4096];
            let length = stream.read(&mut bytes).await.unwrap();
            assert!(length > 0, "the server closed");
            client.read_tls(&mut &bytes[..length]).unwrap();
            client.process_new_packets().unwrap();
        }
    };
    tokio::time::timeout(DEADLINE, shaking).await.unwrap();
    assert_eq!(client.negotiated_key_exchange_group().unwrap().name(), NamedGroup::X25519MLKEM768);
}
