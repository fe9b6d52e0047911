//! Two servers behind one address, with the generated service over real TLS, and a target on this host.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use prometheus_client::registry::Registry;
use rustls_pki_types::PrivateKeyDer;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status, Streaming};
use tunnel_link::konnectivity::agent_service_server::{AgentService, AgentServiceServer};
use tunnel_link::konnectivity::packet::Payload;
use tunnel_link::konnectivity::{Packet, PacketType};

use super::*;
use crate::runtime::{Runtime, of_flags};

const PATIENCE: Duration = Duration::from_secs(20);

/// A stream that an agent has opened.
struct Attached {
    server: &'static str,
    metadata: MetadataMap,
    packets: mpsc::Sender<Result<Packet, Status>>,
    incoming: Streaming<Packet>,
}

struct Service {
    server: &'static str,
    attached: mpsc::Sender<Attached>,
}

#[tonic::async_trait]
impl AgentService for Service {
    type ConnectStream = ReceiverStream<Result<Packet, Status>>;

    async fn connect(
        &self,
        request: Request<Streaming<Packet>>,
    ) -> Result<Response<Self::ConnectStream>, Status> {
        let (packets, answers) = mpsc::channel(4);
        let metadata = request.metadata().clone();
        if metadata.get("authorization").is_none_or(|token| token != "Bearer secret") {
            return Err(Status::unauthenticated("no token"));
        }
        let attached = Attached { server: self.server, metadata, packets, incoming: request.into_inner() };
        self.attached.send(attached).await.map_err(|_| Status::unavailable("the test is over"))?;
        let mut response = Response::new(ReceiverStream::new(answers));
        response.metadata_mut().insert("serverid", self.server.parse().unwrap());
        response.metadata_mut().insert("servercount", "2".parse().unwrap());
        Ok(response)
    }
}

impl Attached {
    async fn send(&self, packet: Packet) {
        self.packets.send(Ok(packet)).await.unwrap();
    }

    async fn next(&mut self) -> Packet {
        let next = timeout(PATIENCE, self.incoming.message()).await;
        next.expect("no packet").unwrap().expect("the stream ended")
    }

    async fn ended(&mut self) {
        let next = timeout(PATIENCE, self.incoming.message()).await.expect("the stream goes on");
        assert!(matches!(next, Ok(None) | Err(_)), "{next:?}");
    }

    async fn dial(&mut self, target: String, random: i64) -> Result<i64, String> {
        self.send(Packet::dial_request(target, random)).await;
        match self.next().await.payload {
            Some(Payload::DialResponse(answer)) if answer.random == random => {
                if answer.error.is_empty() {
                    Ok(answer.connect_id)
                } else {
                    Err(answer.error)
                }
            }
            other => panic!("{other:?}"),
        }
    }

    async fn echo(&mut self, connect_id: i64) {
        self.send(Packet::data(connect_id, Bytes::from_static(b"hello"))).await;
        match self.next().await.payload {
            Some(Payload::Data(data)) => {
                assert_eq!((data.connect_id, &data.data[..]), (connect_id, &b"hello"[..]));
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Runs both servers behind one port, and an echo. Returns the port of the servers and that of the echo.
async fn serve(
    dir: &std::path::Path,
    attached: mpsc::Sender<Attached>,
    tasks: &mut JoinSet<()>,
) -> (u16, u16) {
    let key = rcgen::KeyPair::generate().unwrap();
    let own = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap().self_signed(&key).unwrap();
    std::fs::write(dir.join("ca"), own.pem()).unwrap();
    std::fs::write(dir.join("token"), "secret\n").unwrap();
    let private = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let mut tls =
        rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![own.der().clone()], private)
            .unwrap();
    tls.alpn_protocols = vec![b"h2".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(tls));
    let mut ports = Vec::new();
    for server in ["one", "two"] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        ports.push(listener.local_addr().unwrap().port());
        let service = AgentServiceServer::new(Service { server, attached: attached.clone() });
        let serving = tonic::transport::Server::builder()
            .add_service(service)
            .serve_with_incoming(TcpListenerStream::new(listener));
        tasks.spawn(async move { serving.await.unwrap() });
    }
    let shared = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = shared.local_addr().unwrap().port();
    let turn = AtomicUsize::new(0);
    tasks.spawn(async move {
        while let Ok((socket, _)) = shared.accept().await {
            let (acceptor, port) =
                (acceptor.clone(), ports[turn.fetch_add(1, Ordering::Relaxed) % ports.len()]);
            tokio::spawn(async move {
                let Ok(mut agent) = acceptor.accept(socket).await else { return };
                let mut server = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
                // Ends when either side does.
                let _ = tokio::io::copy_bidirectional(&mut agent, &mut server).await;
            });
        }
    });
    let echo = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let echo_port = echo.local_addr().unwrap().port();
    tasks.spawn(async move {
        while let Ok((mut socket, _)) = echo.accept().await {
            tokio::spawn(async move {
                let mut piece = [0; 1024];
                while let Ok(length @ 1..) = socket.read(&mut piece).await {
                    if socket.write_all(&piece[..length]).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    (port, echo_port)
}

fn set(dir: &std::path::Path, port: u16) -> (Arc<Set>, Runtime) {
    let file = |flag: &str, name: &str| format!("--konnectivity-{flag}={}", dir.join(name).display());
    let flags = [
        format!("--konnectivity-server=127.0.0.1:{port}"),
        file("ca", "ca"),
        file("token-file", "token"),
        "--konnectivity-agent-id=agent-1".to_owned(),
        "--konnectivity-sync-interval=20ms".to_owned(),
        "--konnectivity-sync-interval-cap=100ms".to_owned(),
        "--allow-target=127.0.0.0/8:*".to_owned(),
    ];
    let runtime = of_flags(&flags.each_ref().map(String::as_str));
    let config = runtime.config.konnectivity.clone().unwrap();
    let metrics = KonnectivityMetrics::register(&mut Registry::default());
    (Set::new(Shared::new(runtime.clone(), config, metrics)), runtime)
}

async fn wait_for(set: &Set, accept: impl Fn(&KonnectivityStatus) -> bool) {
    let accepted = async {
        while !accept(&set.status()) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, accepted).await.unwrap_or_else(|_| panic!("{:?}", set.status()));
}

#[tokio::test]
async fn every_server_behind_an_address_is_found_and_served() {
    let dir = tempfile::tempdir().unwrap();
    let (sender, mut attached) = mpsc::channel(4);
    let mut tasks = JoinSet::new();
    let (port, echo) = serve(dir.path(), sender, &mut tasks).await;
    let (set, Runtime { shutdown: own, readiness, .. }) = set(dir.path(), port);
    let running = tokio::spawn(set.clone().run());
    let mut next = async || timeout(PATIENCE, attached.recv()).await.expect("nobody attaches").unwrap();

    let (mut one, mut two) = (next().await, next().await);
    assert_eq!((one.server, two.server), ("one", "two"));
    assert_eq!(one.metadata.get("agentid").unwrap(), "agent-1");
    assert_eq!(one.metadata.get("agentidentifiers").unwrap(), "host=edge-1&ipv4=127.0.0.1");
    let mut relayed = Vec::new();
    for stream in [&mut one, &mut two] {
        let connect_id = stream.dial(format!("127.0.0.1:{echo}"), 7).await.unwrap();
        stream.echo(connect_id).await;
        relayed.push(connect_id);
        let by_name = stream.dial(format!("edge-1:{echo}"), 8).await.unwrap();
        stream.echo(by_name).await;
        stream.send(Packet::close_request(by_name)).await;
        assert_eq!(stream.next().await.r#type(), PacketType::CloseRsp);
        let error = stream.dial("10.0.0.1:22".to_owned(), 9).await.unwrap_err();
        assert!(error.contains("may not be dialled here"), "{error}");
        let error = stream.dial("127.0.0.1:1".to_owned(), 10).await.unwrap_err();
        assert!(error.contains("connection refused"), "{error}");
    }
    assert!(
        relayed[0] > 0 && relayed[1] > relayed[0],
        "numbers are the agent's, not the stream's: {relayed:?}"
    );
    assert!(readiness.is_ready());
    // Closed connections end with their target.
    wait_for(&set, |status| status.attached.iter().all(|server| server.connections == 1)).await;
    let status = set.status();
    assert_eq!((status.server_count, status.attached.len()), (Some(2), 2), "{status:?}");

    // The load balancer may lead to the other one first. That stream is left at once.
    drop(one);
    let mut again = next().await;
    let mut known = None;
    if again.server == "two" {
        let mut left = std::mem::replace(&mut again, next().await);
        assert_eq!(left.next().await.r#type(), PacketType::Drain);
        known = Some(left);
    }
    assert_eq!(again.server, "one");
    if let Some(mut left) = known {
        left.ended().await;
    }
    two.echo(relayed[1]).await;
    // A server sees a stream before the agent has its answer.
    wait_for(&set, |status| status.attached.len() == 2).await;

    // Open connections go on. The stream ends with them.
    own.begin();
    assert_eq!(again.next().await.r#type(), PacketType::Drain);
    assert_eq!(two.next().await.r#type(), PacketType::Drain);
    again.ended().await;
    two.echo(relayed[1]).await;
    assert!(!running.is_finished());
    two.send(Packet::close_request(relayed[1])).await;
    assert_eq!(two.next().await.r#type(), PacketType::CloseRsp);
    two.ended().await;
    timeout(PATIENCE, running).await.expect("it goes on").unwrap();
}

#[tokio::test]
async fn why_no_server_takes_it_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let (sender, _attached) = mpsc::channel(4);
    let mut tasks = JoinSet::new();
    let (port, _) = serve(dir.path(), sender, &mut tasks).await;
    std::fs::write(dir.path().join("token"), "another").unwrap();
    let (set, Runtime { shutdown: own, readiness, .. }) = set(dir.path(), port);
    let running = tokio::spawn(set.clone().run());
    let said = async |part: &str| {
        let said = || set.status().last_error.unwrap_or_default();
        let waiting = async {
            while !said().contains(part) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(PATIENCE, waiting).await.unwrap_or_else(|_| panic!("{part:?}: {:?}", said()));
    };
    said("the server refused the call: Unauthenticated: no token").await;
    let ca = std::fs::read(dir.path().join("ca")).unwrap();
    let key = rcgen::KeyPair::generate().unwrap();
    let other =
        rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap().self_signed(&key).unwrap();
    std::fs::write(dir.path().join("ca"), other.pem()).unwrap();
    said("TLS with 127.0.0.1:").await;
    std::fs::write(dir.path().join("ca"), ca).unwrap();
    std::fs::remove_file(dir.path().join("token")).unwrap();
    said("token: No such file").await;
    assert!(!readiness.is_ready());
    // The file is read again.
    std::fs::write(dir.path().join("token"), "secret").unwrap();
    timeout(PATIENCE, async {
        while !readiness.is_ready() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("it does not attach");
    own.force();
    timeout(PATIENCE, running).await.expect("it goes on").unwrap();
}
