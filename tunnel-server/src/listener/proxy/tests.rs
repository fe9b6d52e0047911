use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tunnel_link::outcome::{Hop, Outcome};
use tunnel_link::relay::{flushed, listen, prepare_socket};
use tunnel_pki::{ServerTls, TrustBundle};
use tunnel_runtime::clock::Clock;

use super::*;
use crate::admission::Shares;
use crate::caller::{Authenticator, Shown, Tokens};
use crate::listener::connect::{Gatekeeper, Services, parse};
use crate::listener::context::ListenerContext;
use crate::listener::judge::judge_all;
use crate::listener::serve::receive;
use crate::policy::Policy;

const PATIENCE: Duration = Duration::from_secs(10);
const ALL: &str = "rules:\n- name: all\n  from: [{clients: [127.0.0.0/8]}]\n  \
                   to: [{addresses: [127.0.0.0/8], ports: ['*']}]\n";

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

struct Site {
    listener: Arc<Connect>,
    context: ListenerContext,
    root: CertificateDer<'static>,
}

impl Site {
    fn new(policy: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let root = params.self_signed(&key).unwrap().der().clone();
        let issuer = Issuer::new(params, key);
        let roots = TrustBundle::new(vec![root.clone()]).unwrap();
        let key = KeyPair::generate().unwrap();
        let own = CertificateParams::new(["localhost".to_owned()]).unwrap().signed_by(&key, &issuer).unwrap();
        let key = PrivateKeyDer::Pkcs8(key.serialize_der().into());
        let tls = ServerTls::new(vec![own.der().clone()], &key, &roots, None, Clock::default()).unwrap();
        let context = ListenerContext::without_nodes();
        let tokens = Tokens::parse("alices-own-token,alice,1\n").unwrap();
        let gatekeeper = Gatekeeper {
            authenticator: Arc::new(Authenticator::new(tokens, None)),
            services: Services::Resolver,
            policy: ArcSwap::from_pointee(Policy::parse(policy).unwrap()),
            router: context.router.clone(),
        };
        let reception = Reception { gatekeeper: Arc::new(gatekeeper), context: context.clone() };
        let listener = Connect { reception, tls: Arc::new(CallerTls::new(Arc::new(tls)).unwrap()) };
        Self { listener: Arc::new(listener), context, root }
    }

    async fn connect(&self) -> TcpStream {
        let listener = listen("127.0.0.1:0".parse().unwrap(), prepare_socket).unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, client) = listener.accept().await.unwrap();
        let shares = Shares::new(1);
        let place = shares.admit_unauthenticated(client.ip()).unwrap();
        tokio::spawn(receive(
            self.listener.clone(),
            accepted,
            client,
            self.context.clone(),
            shares,
            Some(place),
        ));
        socket
    }

    async fn client(&self, tls: bool) -> Box<dyn Stream> {
        let socket = self.connect().await;
        if !tls {
            return Box::new(socket);
        }
        let mut roots = RootCertStore::empty();
        roots.add(self.root.clone()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = "localhost".try_into().unwrap();
        Box::new(TlsConnector::from(Arc::new(config)).connect(name, socket).await.unwrap())
    }

    /// Returns everything that a client gets that sends these bytes.
    async fn ask(&self, tls: bool, bytes: &[u8]) -> String {
        let mut client = self.client(tls).await;
        client.write_all(bytes).await.unwrap();
        rest(&mut client).await
    }

    /// Returns a client that has sent a request, with these header lines, and the target that has got it.
    async fn asking(&self, headers: &str) -> (TcpStream, TcpStream) {
        let (listener, address) = target().await;
        let mut client = self.connect().await;
        let request = format!("GET http://{address}/ HTTP/1.1\r\nHost: {address}\r\n{headers}\r\n");
        client.write_all(request.as_bytes()).await.unwrap();
        let (mut target, _) = listener.accept().await.unwrap();
        head(&mut target).await;
        (client, target)
    }
}

async fn rest(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut all = Vec::new();
    timeout(PATIENCE, stream.read_to_end(&mut all)).await.expect("it ends").unwrap();
    String::from_utf8(all).unwrap()
}

async fn head(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(timeout(PATIENCE, stream.read_u8()).await.expect("a whole head").unwrap());
    }
    String::from_utf8(head).unwrap()
}

async fn target() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

#[tokio::test]
async fn bytes_behind_the_head_reach_the_target() {
    let site = Site::new(ALL);
    for tls in [false, true] {
        let (listener, address) = target().await;
        let mut client = site.client(tls).await;
        // More than hyper reads with the head.
        let data = vec![b'x'; 200_000];
        let head_and_data = [format!("CONNECT {address} HTTP/1.1\r\n\r\n").as_bytes(), &data].concat();
        let sent = async {
            client.write_all(&head_and_data).await.unwrap();
            client.shutdown().await.unwrap();
            rest(&mut client).await
        };
        let served = async {
            let (mut target, _) = listener.accept().await.unwrap();
            // The target's first byte comes behind the answer although it comes at once.
            target.write_all(b"first").await.unwrap();
            let read = rest(&mut target).await;
            target.write_all(b", and last").await.unwrap();
            read
        };
        let (answer, read) = tokio::join!(sent, served);
        assert!(read.as_bytes() == data, "tls {tls}: {} bytes came", read.len());
        assert!(answer.starts_with("HTTP/1.1 200 Connection established\r\n"), "tls {tls}: {answer:?}");
        assert!(answer.ends_with("\r\n\r\nfirst, and last"), "tls {tls}: {answer:?}");
    }
}

#[tokio::test]
async fn each_half_ends_by_itself() {
    let site = Site::new(ALL);
    for (tls, version) in [(false, "1.1"), (true, "1.1"), (false, "1.0")] {
        let (listener, address) = target().await;
        let mut client = site.client(tls).await;
        client.write_all(format!("CONNECT {address} HTTP/{version}\r\n\r\n").as_bytes()).await.unwrap();
        let (mut target, _) = listener.accept().await.unwrap();
        let head = head(&mut client).await;
        assert!(head.contains(" 200 ") && !head.contains("content-length"), "tls {tls}: {head:?}");
        target.write_all(b"all").await.unwrap();
        target.shutdown().await.unwrap();
        assert_eq!(rest(&mut client).await, "all");
        client.write_all(b"still").await.unwrap();
        client.shutdown().await.unwrap();
        assert_eq!(rest(&mut target).await, "still", "tls {tls}");
    }
}

#[tokio::test]
async fn a_client_that_closes_its_half_first_gets_its_answer() {
    let site = Site::new(ALL);
    let (listener, address) = target().await;
    let mut client = site.connect().await;
    client.write_all(format!("CONNECT {address} HTTP/1.1\r\n\r\n").as_bytes()).await.unwrap();
    client.shutdown().await.unwrap();
    let (mut target, _) = listener.accept().await.unwrap();
    target.write_all(b"answer").await.unwrap();
    assert_eq!(rest(&mut target).await, "");
    drop(target);
    assert!(rest(&mut client).await.ends_with("\r\n\r\nanswer"));
}

#[tokio::test]
async fn a_targets_reset_is_the_clients() {
    let site = Site::new(ALL);
    for tls in [false, true] {
        let (listener, address) = target().await;
        let mut client = site.client(tls).await;
        client.write_all(format!("CONNECT {address} HTTP/1.1\r\n\r\n").as_bytes()).await.unwrap();
        let (target, _) = listener.accept().await.unwrap();
        head(&mut client).await;
        tunnel_link::relay::reset_on_drop(&target);
        drop(target);
        let end = timeout(PATIENCE, client.read(&mut [0])).await.expect("it ends");
        assert_eq!(end.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset, "tls {tls}");
    }
}

#[tokio::test]
async fn who_is_not_permitted_is_told_why() {
    let site = Site::new("rules: []\n");
    // More than the kernel takes while nobody reads: the answer must not be overtaken by a reset.
    let early = "x".repeat(300_000);
    for (tls, credentials, status, reason) in [
        (false, "", 407, "the policy does not permit nobody from 127.0.0.1 to reach 127.0.0.1:1\n"),
        (true, "", 407, "the policy does not permit nobody from 127.0.0.1 to reach 127.0.0.1:1\n"),
        (true, "Bearer alices-own-token", 403, "the policy does not permit user alice from 127.0.0.1"),
        (true, "Bearer nobodys-token", 407, "not in --token-auth-file"),
    ] {
        let field = match credentials {
            "" => String::new(),
            credentials => format!("Proxy-Authorization: {credentials}\r\n"),
        };
        let client = site.client(tls).await;
        let (mut read, mut write) = tokio::io::split(client);
        let request = format!("CONNECT 127.0.0.1:1 HTTP/1.1\r\n{field}\r\n{early}");
        let writing = tokio::spawn(async move { write.write_all(request.as_bytes()).await });
        let answer = rest(&mut read).await;
        writing.abort();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
        let body = answer.split_once("\r\n\r\n").unwrap().1;
        assert!(body.starts_with("tunnel-server: ") && body.contains(reason), "{answer}");
        assert!(answer.contains("connection: close\r\n"), "{answer}");
        assert!(answer.contains("content-type: text/plain; charset=utf-8\r\n"), "{answer}");
        for challenge in ["Basic realm=\"postern\", charset=\"UTF-8\"", "Bearer realm=\"postern\""] {
            let line = format!("proxy-authenticate: {challenge}\r\n");
            assert_eq!(answer.contains(&line), status == 407, "{answer}");
        }
    }
}

#[tokio::test]
async fn what_is_wrong_with_a_request_is_answered() {
    let site = Site::new(ALL);
    let (listener, refused) = target().await;
    drop(listener);
    let long = format!("CONNECT {refused} HTTP/1.1\r\nA: {}\r\n\r\n", "a".repeat(100_000));
    let framed = format!("CONNECT {refused} HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n");
    for (request, status, body) in [
        (long.as_str(), 431, ""),
        (&framed, 400, "tunnel-server: a CONNECT request has no body\n"),
        ("CONNECT 127.0.0.1 HTTP/1.1\r\n\r\n", 400, "tunnel-server: CONNECT 127.0.0.1: add the port\n"),
        (
            "GET /pods HTTP/1.1\r\nHost: e\r\nAccept: application/json\r\n\r\n",
            400,
            "tunnel-server: this is a proxy: send CONNECT HOST:PORT, or a request with a whole http:// URL\n",
        ),
        (
            "CONNECT nonsense:1 HTTP/1.1\r\n\r\n",
            400,
            "tunnel-server: \"nonsense\" is not an edge node's name, an address, or SERVICE.NAMESPACE\n",
        ),
        ("CONNECT kant\u{e9}:1 HTTP/1.1\r\n\r\n", 400, ""),
        ("SSH-2.0-OpenSSH_9\r\n", 400, ""),
        (
            &format!("CONNECT {refused} HTTP/1.1\r\n\r\n"),
            502,
            &format!("tunnel-server: dial tcp {refused}: connection refused\n"),
        ),
    ] {
        let answer = site.ask(false, request.as_bytes()).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
        assert!(answer.ends_with(&format!("\r\n\r\n{body}")) || body.is_empty(), "{answer}");
        assert!(answer.contains("connection: close\r\n"), "{answer}");
    }
}

#[tokio::test]
async fn a_token_is_taken_over_tls_or_from_this_host() {
    let site = Site::new(ALL);
    let request = b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nProxy-Authorization: Bearer nobodys-token\r\n\r\n";
    assert!(site.ask(false, request).await.starts_with("HTTP/1.1 407 "));
    let asked =
        http::Request::connect("127.0.0.1:1").header("proxy-authorization", "Bearer alices-own-token");
    let asked = parse(&asked.body(()).unwrap().into_parts().0).unwrap();
    let elsewhere = "192.0.2.1".parse().unwrap();
    let refused = site.listener.reception.decide(&asked, Shown::Nothing, elsewhere, false).await;
    assert!(refused.err().unwrap().reason.starts_with("a token or password is taken over TLS only"));
}

#[tokio::test]
async fn a_request_with_a_whole_url_is_forwarded() {
    let site = Site::new(ALL);
    let (listener, address) = target().await;
    let serving = async {
        let (mut target, _) = listener.accept().await.unwrap();
        let head = head(&mut target).await;
        let mut body = [0; 3];
        target.read_exact(&mut body).await.unwrap();
        target.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-A: b\r\n\r\nhi").await.unwrap();
        (head, body)
    };
    let request = format!(
        "POST http://{address}/x?y HTTP/1.1\r\nHost: other\r\nAuthorization: Basic eA==\r\n\
         Proxy-Authorization: Bearer alices-own-token\r\nContent-Length: 3\r\n\r\nabcGET / HTTP/1.1\r\n\r\n"
    );
    let (answer, (head, body)) = tokio::join!(site.ask(false, request.as_bytes()), serving);
    assert!(head.starts_with("POST /x?y HTTP/1.1\r\n"), "{head}");
    assert!(head.contains(&format!("host: {address}\r\n")), "{head}");
    assert!(head.contains("authorization: Basic eA==\r\n"), "the target's own: {head}");
    assert!(!head.contains("alices-own-token"), "the target gets no credentials: {head}");
    assert_eq!(&body, b"abc");
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("\r\n\r\nhi"), "{answer}");
    assert!(answer.contains("x-a: b\r\n") && answer.contains("connection: close\r\n"), "{answer}");
}

#[tokio::test(start_paused = true)]
async fn a_slow_head_is_answered() {
    let site = Site::new(ALL);
    let mut client = site.connect().await;
    client.write_all(b"CONNECT 127.0.0.1:1 HTTP/1.1\r\n").await.unwrap();
    let answer = rest_unhurried(&mut client).await;
    assert!(answer.starts_with("HTTP/1.1 408 Request Timeout\r\n"), "{answer}");
    assert!(answer.ends_with("\r\n\r\ntunnel-server: no whole request within 10 s\n"), "{answer}");
}

/// Without a limit, which would pass at once.
async fn rest_unhurried(stream: &mut TcpStream) -> String {
    let mut all = String::new();
    stream.read_to_string(&mut all).await.unwrap();
    all
}

/// The rules, the tokens' owners and the certificate's CA may change while a connection is open.
#[tokio::test]
async fn an_open_connection_ends_when_its_right_is_gone() {
    const TO: &str = "to: [{addresses: [127.0.0.0/8], ports: ['*']}]";
    let by_token = format!("rules:\n- name: tokens\n  from: [{{user: alice}}]\n  {TO}\n");
    let other = format!("rules:\n- name: another\n  from: [{{clients: [127.0.0.0/8]}}]\n  {TO}\n");
    for (policy, token) in
        [(ALL, ""), (by_token.as_str(), "Proxy-Authorization: Bearer alices-own-token\r\n")]
    {
        let site = Site::new(policy);
        let keeper = site.listener.reception.gatekeeper.clone();
        let metrics = site.context.metrics.clone();
        let (listener, address) = target().await;
        let mut client = site.client(false).await;
        client.write_all(format!("CONNECT {address} HTTP/1.1\r\n{token}\r\n").as_bytes()).await.unwrap();
        let (mut target, _) = listener.accept().await.unwrap();
        head(&mut client).await;
        if token.is_empty() {
            // Another rule that permits the same will do.
            keeper.policy.store(Arc::new(Policy::parse(&other).unwrap()));
        }
        judge_all(&metrics, Instant::now()).await;
        client.write_all(b"x").await.unwrap();
        assert_eq!(timeout(PATIENCE, target.read_u8()).await.expect("it is relayed").unwrap(), b'x');
        let reason = if token.is_empty() {
            keeper.policy.store(Arc::new(Policy::default()));
            "the policy no longer permits nobody to reach this"
        } else {
            keeper.authenticator.set_tokens(Tokens::default());
            "the token is not in --token-auth-file"
        };
        judge_all(&metrics, Instant::now()).await;
        let end = timeout(PATIENCE, client.read(&mut [0])).await.expect("it ends");
        assert_eq!(end.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset, "{reason}");
        let end = timeout(PATIENCE, target.read(&mut [0])).await.expect("its target's as well");
        assert_eq!(end.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset, "{reason}");
        let logged = async {
            while metrics.failures.all().is_empty() {
                tokio::task::yield_now().await;
            }
        };
        timeout(PATIENCE, logged).await.expect("it is recorded");
        let last = metrics.failures.all()[&Hop::Policy].recent[0].clone();
        assert_eq!((last.outcome, last.detail.as_str()), (Outcome::Denied, reason));
    }
}

#[tokio::test]
async fn an_upgraded_connection_and_a_running_answer_end_with_their_right() {
    const UPGRADE: &str = "Connection: Upgrade\r\nUpgrade: x\r\n";
    let switching = format!("HTTP/1.1 101 Switching Protocols\r\n{UPGRADE}\r\n");
    for (wanted, answer) in
        [(UPGRADE, switching.as_str()), ("", "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf of it")]
    {
        let site = Site::new(ALL);
        let (mut client, mut target) = site.asking(wanted).await;
        target.write_all(answer.as_bytes()).await.unwrap();
        head(&mut client).await;
        site.listener.reception.gatekeeper.policy.store(Arc::new(Policy::default()));
        judge_all(&site.context.metrics, Instant::now()).await;
        let end = timeout(PATIENCE, client.read_to_end(&mut Vec::new())).await.expect("it ends");
        assert_eq!(end.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset, "{answer:?}");
        let mut rest = Vec::new();
        let end = timeout(PATIENCE, target.read_to_end(&mut rest)).await.expect("its target's as well");
        assert_eq!(end.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset, "{answer:?}");
        let logged = async {
            while site.context.metrics.failures.all().is_empty() {
                tokio::task::yield_now().await;
            }
        };
        timeout(PATIENCE, logged).await.expect("it is recorded");
        let last = site.context.metrics.failures.all()[&Hop::Policy].recent[0].clone();
        assert_eq!(last.detail, "the policy no longer permits nobody to reach this", "{answer:?}");
    }
}

#[tokio::test]
async fn a_client_that_does_not_read_is_cut_off_when_its_right_is_gone() {
    let site = Site::new(ALL);
    let (mut client, mut target) = site.asking("").await;
    target.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n").await.unwrap();
    // Until everything in between is full.
    let piece = vec![b'x'; 64 << 10];
    while timeout(Duration::from_millis(500), target.write_all(&piece)).await.is_ok() {}
    site.listener.reception.gatekeeper.policy.store(Arc::new(Policy::default()));
    judge_all(&site.context.metrics, Instant::now()).await;
    // Not at the client: kernels differ in what they take of a reset while the receiver's window is closed.
    let logged = async {
        while site.context.metrics.failures.all().is_empty() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(PATIENCE, logged).await.expect("it ends although nobody reads");
    let last = site.context.metrics.failures.all()[&Hop::Policy].recent[0].clone();
    assert_eq!(last.outcome, Outcome::Denied);
    let rest = timeout(Duration::from_secs(1), client.read_to_end(&mut Vec::new())).await;
    assert!(
        !matches!(rest, Ok(Ok(_))),
        "an end of file would be the end of an answer without a length: {rest:?}"
    );
}

#[tokio::test]
async fn what_a_target_sent_before_its_reset_arrives() {
    const SENT: usize = 200_000;
    const HEAD: &[u8] = b"HTTP/1.1 200 OK\r\n\r\n";
    let site = Site::new(ALL);
    let (mut client, mut target) = site.asking("").await;
    target.write_all(&[HEAD, &[b'x'; SENT]].concat()).await.unwrap();
    // The reset would overtake what has not arrived.
    flushed(&target).await;
    SockRef::from(&target).set_linger(Some(Duration::ZERO)).unwrap();
    drop(target);
    let ended = async {
        while site.context.metrics.failures.all().is_empty() {
            tokio::task::yield_now().await;
        }
    };
    let early = timeout(Duration::from_millis(500), ended).await;
    assert!(early.is_err(), "it waits for the client");
    let mut read = Vec::new();
    let end = timeout(PATIENCE, client.read_to_end(&mut read)).await.expect("it ends");
    assert_eq!(end.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
    // In chunks.
    assert_eq!(read.iter().filter(|byte| **byte == b'x').count(), SENT);
}
