//! The egress listener's port: mutual TLS.
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::Agent;
use postern_testbed::client::{digest, echo, pattern_digest};
use postern_testbed::server::Builder;
use postern_testbed::target::Behaviour;
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, Testbed, tls};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
};
use rustls::ClientConfig;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
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

    /// Issues a caller's certificate.
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

/// Opens a caller's connection like kube-apiserver: it knows the server's CA, and uses the address as the server name.
async fn shake_hands(
    testbed: &Testbed,
    caller: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
    alpn: Option<&[u8]>,
) -> Result<TlsStream<TcpStream>> {
    let roots = tls::roots(&testbed.dir().join("server/ca/ca.crt"))?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots);
    let mut config = match caller {
        Some((chain, key)) => builder.with_client_auth_cert(chain, key)?,
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = alpn.into_iter().map(<[u8]>::to_vec).collect();
    let socket = TcpStream::connect(SocketAddr::from((CLOUD, PORT))).await?;
    let name = ServerName::from(std::net::IpAddr::from(CLOUD));
    Ok(TlsConnector::from(Arc::new(config)).connect(name, socket).await?)
}

/// Makes a CONNECT with this certificate; fails if the server rejects it.
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
        .flag("--egress-client-names=kube-apiserver,another")
        .start()
        .await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let _echo = target(testbed, 1, ECHO, Behaviour::Echo)?;
    for _ in 0..20 {
        visit(testbed, Some(ours.caller("kube-apiserver")?)).await?;
    }
    let line = server.wait_access("of the caller", |line| line.text("listener") == "egress").await?;
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
    testbed.expect_error("callers.crt: trust bundle: it has no certificate");
    fs::write(&path, "rubbish")?;
    server.wait_log("keeping its last good content").await?;
    visit(testbed, Some(first.caller("a")?)).await?;
    second.write(&path)?;
    let let_in = async || Ok(visit(testbed, Some(second.caller("b")?)).await.is_ok());
    wait_until("the new CA's callers to be let in", Duration::from_secs(20), let_in, |is| *is).await?;
    ensure!(visit(testbed, Some(first.caller("a")?)).await.is_err(), "the old CA's are let in");
    Ok(())
}

/// To the server a connection is over as soon as its kernel has the last bytes.
pub(super) async fn what_a_caller_reads_late_arrives(testbed: &Testbed) -> Result<()> {
    // More than the caller's kernel accepts, but not more than the server's.
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
    let line = server.wait_access("of the transfer", |line| line.text("listener") == "egress").await?;
    ensure!(line.text("outcome") == "ok" && line.bytes_from_node()? == LENGTH, "{line:?}");
    let got = digest(&mut stream).await?;
    ensure!(got == (LENGTH, pattern_digest(7, LENGTH)), "the bytes changed: {got:?}");
    Ok(())
}
