//! The egress door's port: mutual TLS.
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as Task, Poll, ready};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::Agent;
use postern_testbed::client::{PATIENCE, digest, echo, pattern_digest};
use postern_testbed::server::Builder;
use postern_testbed::target::Behaviour;
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, Testbed, tls, wan};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
};
use rustls::ClientConfig;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf, join};
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::ECHO;
use super::client::{CONNECTED, Caller, ask, over};
use crate::common::target;

const PORT: u16 = 8132;

/// A CA of callers.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Result<Self> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "callers");
        Ok(Self(CertifiedIssuer::self_signed(params, KeyPair::generate()?)?))
    }

    fn write(&self, path: &Path) -> Result<()> {
        fs::write(path, self.0.pem()).with_context(|| format!("writing {}", path.display()))
    }

    /// A caller's certificate.
    fn caller(&self, name: &str) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages.push(ExtendedKeyUsagePurpose::ClientAuth);
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.0)?;
        let private = PrivateKeyDer::try_from(key.serialize_der()).map_err(anyhow::Error::msg)?;
        Ok((vec![certificate.der().clone()], private))
    }
}

fn client_ca(testbed: &Testbed) -> PathBuf {
    testbed.dir().join("callers.crt")
}

async fn dial_port() -> Result<TcpStream> {
    TcpStream::connect(SocketAddr::from((CLOUD, PORT))).await.context("connecting to the egress port")
}

async fn shake_hands(
    testbed: &Testbed,
    caller: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
    alpn: Option<&[u8]>,
) -> Result<TlsStream<TcpStream>> {
    shake_hands_on(dial_port().await?, testbed, caller, alpn).await
}

/// A caller's connection. As kube-apiserver does it: the server's CA is known, and its address is the name.
async fn shake_hands_on<S: AsyncRead + AsyncWrite + Unpin>(
    socket: S,
    testbed: &Testbed,
    caller: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
    alpn: Option<&[u8]>,
) -> Result<TlsStream<S>> {
    let roots = tls::roots(&testbed.dir().join("server/ca/ca.crt"))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots);
    let mut config = match caller {
        Some((chain, key)) => builder.with_client_auth_cert(chain, key)?,
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = alpn.into_iter().map(<[u8]>::to_vec).collect();
    let name = ServerName::from(std::net::IpAddr::from(CLOUD));
    Ok(TlsConnector::from(Arc::new(config)).connect(name, socket).await?)
}

/// What becomes of a CONNECT with this certificate; an error when the server does not let it in.
async fn visit(
    testbed: &Testbed,
    caller: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
) -> Result<()> {
    let stream = shake_hands(testbed, caller, None).await?;
    let (mut stream, answer) = ask(stream, &format!("edge-1:{ECHO}")).await?;
    ensure!(answer == CONNECTED, "answered {answer:?}");
    echo(&mut stream, b"over TLS").await
}

pub(super) async fn callers_need_a_certificate(testbed: &Testbed) -> Result<()> {
    let (ours, theirs) = (Authority::new()?, Authority::new()?);
    ours.write(&client_ca(testbed))?;
    let server = Builder::new(testbed)
        .flag("--redirect=off")
        .flag(format!("--egress-port={PORT}"))
        .flag(format!("--egress-client-ca={}", client_ca(testbed).display()))
        .flag("--egress-clients=kube-apiserver,another")
        .start()
        .await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let _echo = target(testbed, 1, ECHO, Behaviour::Echo)?;
    for _ in 0..20 {
        visit(testbed, Some(ours.caller("kube-apiserver")?)).await?;
    }
    let line = server.wait_access("of the caller", |line| line.text("door") == "egress").await?;
    ensure!(line.text("caller") == "kube-apiserver", "{line:?}");
    let stream = shake_hands(testbed, Some(ours.caller("another")?), Some(b"h2")).await?;
    let mut grpc = Caller::on(over(stream).await?);
    let connect_id = grpc.connected(&format!("edge-1:{ECHO}")).await?;
    grpc.echo(connect_id, b"gRPC over TLS").await?;
    for (caller, who) in [
        (None, "nobody"),
        (Some(theirs.caller("kube-apiserver")?), "another CA's"),
        (Some(ours.caller("system:node:edge-1")?), "another name's"),
    ] {
        ensure!(visit(testbed, caller).await.is_err(), "{who} was let in");
    }
    Ok(())
}

pub(super) async fn certificates_follow_their_files(testbed: &Testbed) -> Result<()> {
    let (first, second) = (Authority::new()?, Authority::new()?);
    let path = client_ca(testbed);
    first.write(&path)?;
    let server = Builder::new(testbed)
        .flag("--redirect=off")
        .flag(format!("--egress-port={PORT}"))
        .flag(format!("--egress-client-ca={}", path.display()))
        .start()
        .await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let _echo = target(testbed, 1, ECHO, Behaviour::Echo)?;
    visit(testbed, Some(first.caller("a")?)).await?;
    fs::write(&path, "rubbish")?;
    server.wait_log("the egress door keeps the certificates that it has").await?;
    visit(testbed, Some(first.caller("a")?)).await?;
    second.write(&path)?;
    let let_in = async || Ok(visit(testbed, Some(second.caller("b")?)).await.is_ok());
    wait_until("the new CA's callers to be let in", Duration::from_secs(20), let_in, |is| *is).await?;
    ensure!(visit(testbed, Some(first.caller("a")?)).await.is_err(), "the old CA's are let in");
    Ok(())
}

/// For the server a connection is over as soon as its kernel has the last bytes.
pub(super) async fn what_a_caller_reads_late_arrives(testbed: &Testbed) -> Result<()> {
    // More than the caller's kernel takes, and not more than the server's.
    const LENGTH: u64 = 250_000;
    let callers = Authority::new()?;
    callers.write(&client_ca(testbed))?;
    let server = Builder::new(testbed)
        .flag("--redirect=off")
        .flag(format!("--egress-port={PORT}"))
        .flag(format!("--egress-client-ca={}", client_ca(testbed).display()))
        .start()
        .await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let _source = target(testbed, 1, ECHO, Behaviour::Source(7, LENGTH))?;
    let stream = shake_hands(testbed, Some(callers.caller("kube-apiserver")?), None).await?;
    let (mut stream, answer) = ask(stream, &format!("edge-1:{ECHO}")).await?;
    ensure!(answer == CONNECTED, "answered {answer:?}");
    stream.shutdown().await?;
    let line = server.wait_access("of the transfer", |line| line.text("door") == "egress").await?;
    ensure!(line.text("outcome") == "ok" && line.bytes_from_node()? == LENGTH, "{line:?}");
    let got = digest(&mut stream).await?;
    ensure!(got == (LENGTH, pattern_digest(7, LENGTH)), "the bytes changed: {got:?}");
    Ok(())
}

/// Length of a TLS record's head; its last two bytes are the length of what follows (RFC 8446 section 5.1).
const RECORD_HEAD: usize = 5;

/// Reads not more than one TLS record at a time, as Go's TLS does: rustls alone would return several from one read.
struct Records {
    socket: OwnedReadHalf,
    head: Vec<u8>,
    /// Of the record's bytes, behind its head.
    left: usize,
}

impl AsyncRead for Records {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Task<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let wanted = if this.left > 0 { this.left } else { RECORD_HEAD - this.head.len() };
        let wanted = wanted.min(buffer.remaining());
        let mut part = ReadBuf::new(buffer.initialize_unfilled_to(wanted));
        ready!(Pin::new(&mut this.socket).poll_read(cx, &mut part))?;
        let length = part.filled().len();
        if this.left > 0 {
            this.left -= length;
        } else {
            this.head.extend_from_slice(part.filled());
            if let [_, _, _, high, low] = this.head[..] {
                this.left = u16::from_be_bytes([high, low]).into();
                this.head.clear();
            }
        }
        buffer.advance(length);
        Poll::Ready(Ok(()))
    }
}

/// As `no_byte_overtakes_the_200`, with a target that is far away.
pub(super) async fn no_byte_overtakes_the_200_over_tls(testbed: &Testbed) -> Result<()> {
    const GREETING: &str = "220 a server that speaks first\r\n";
    let _wan = testbed.wan(1, wan::Path::new(50, 50))?;
    let callers = Authority::new()?;
    callers.write(&client_ca(testbed))?;
    let server = Builder::new(testbed)
        .flag("--redirect=off")
        .flag(format!("--egress-port={PORT}"))
        .flag(format!("--egress-client-ca={}", client_ca(testbed).display()))
        .start()
        .await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let _greeter = target(testbed, 1, ECHO, Behaviour::HelloFirst(GREETING))?;
    let request = format!("CONNECT edge-1:{ECHO} HTTP/1.1\r\nHost: {CLOUD}\r\n\r\n");
    for round in 0..50 {
        let (read, write) = dial_port().await?.into_split();
        let socket = join(Records { socket: read, head: Vec::new(), left: 0 }, write);
        let mut stream =
            shake_hands_on(socket, testbed, Some(callers.caller("kube-apiserver")?), None).await?;
        stream.write_all(request.as_bytes()).await?;
        stream.flush().await?;
        if round % 5 == 0 {
            // Late enough for the greeting to be there as well.
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        let mut read = vec![0; 4096];
        let length = timeout(PATIENCE, stream.read(&mut read)).await.context("no answer")??;
        ensure!(
            &read[..length] == CONNECTED.as_bytes(),
            "round {round}: one read returned {:?}",
            String::from_utf8_lossy(&read[..length])
        );
        let mut greeting = vec![0; GREETING.len()];
        timeout(PATIENCE, stream.read_exact(&mut greeting)).await.context("no greeting")??;
        ensure!(greeting == GREETING.as_bytes(), "round {round}: {greeting:?}");
        echo(&mut stream, b"behind the greeting").await.with_context(|| format!("round {round}"))?;
    }
    Ok(())
}
