//! The egress listener's port: mutual TLS.
use std::fs;
use std::time::Duration;

use anyhow::{Result, ensure};
use postern_testbed::agent::Agent;
use postern_testbed::client::{digest, echo, pattern_digest};
use postern_testbed::server::Builder;
use postern_testbed::target::Behaviour;
use postern_testbed::tls::{self, Identity};
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, Testbed};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use super::ECHO;
use super::client::{CONNECTED, Caller, ask, over};
use crate::common::target;
use crate::web::Authority;

const PORT: u16 = 8132;

/// Creates a CA of callers, whose file replaces that of an earlier one. All have the same name.
fn callers(testbed: &Testbed) -> Result<Authority> {
    Authority::new(testbed, "callers")
}

/// Issues a caller's certificate.
fn caller(ca: &Authority, name: &str) -> Result<Identity> {
    let (certificate, key) = ca.client(name)?;
    Identity::read(&certificate, &key)
}

fn server<'a>(testbed: &'a Testbed, callers: &Authority) -> Builder<'a> {
    Builder::new(testbed)
        .flag("--redirect=off")
        .flag(format!("--egress-port={PORT}"))
        .flag(format!("--egress-client-ca={}", callers.file().display()))
}

/// Opens a caller's connection like kube-apiserver: it knows the server's CA, and uses the address as the server name.
async fn shake_hands(
    testbed: &Testbed,
    caller: Option<&Identity>,
    alpn: Option<&[u8]>,
) -> Result<TlsStream<TcpStream>> {
    let roots = tls::roots(&testbed.dir().join("server/ca/ca.crt"))?;
    let socket = TcpStream::connect((CLOUD, PORT)).await?;
    tls::handshake(socket, &CLOUD.to_string(), roots, caller, alpn).await
}

/// Makes a CONNECT with this certificate; fails if the server rejects it.
async fn visit(testbed: &Testbed, caller: Option<&Identity>) -> Result<()> {
    let stream = shake_hands(testbed, caller, None).await?;
    let (mut stream, answer) = ask(stream, &format!("edge-1:{ECHO}")).await?;
    ensure!(answer == CONNECTED, "answered {answer:?}");
    echo(&mut stream, b"over TLS").await
}

pub(super) async fn callers_need_a_certificate(testbed: &Testbed) -> Result<()> {
    let (theirs, ours) = (callers(testbed)?, callers(testbed)?);
    let server = server(testbed, &ours).flag("--egress-client-names=kube-apiserver,another");
    let server = server.start().await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let _echo = target(testbed, 1, ECHO, Behaviour::Echo)?;
    for _ in 0..20 {
        visit(testbed, Some(&caller(&ours, "kube-apiserver")?)).await?;
    }
    let line = server.wait_access("of the caller", |line| line.text("listener") == "egress").await?;
    ensure!(line.text("caller") == "kube-apiserver", "{line:?}");
    let stream = shake_hands(testbed, Some(&caller(&ours, "another")?), Some(b"h2")).await?;
    let mut grpc = Caller::on(over(stream).await?);
    let connect_id = grpc.connected(&format!("edge-1:{ECHO}")).await?;
    grpc.echo(connect_id, b"gRPC over TLS").await?;
    for (identity, who) in [
        (None, "nobody"),
        (Some(caller(&theirs, "kube-apiserver")?), "another CA's"),
        (Some(caller(&ours, "system:node:edge-1")?), "another name's"),
    ] {
        ensure!(visit(testbed, identity.as_ref()).await.is_err(), "{who} was let in");
    }
    Ok(())
}

pub(super) async fn certificates_follow_their_files(testbed: &Testbed) -> Result<()> {
    let first = callers(testbed)?;
    let server = server(testbed, &first).start().await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let _echo = target(testbed, 1, ECHO, Behaviour::Echo)?;
    visit(testbed, Some(&caller(&first, "a")?)).await?;
    testbed.expect_error("callers.crt: trust bundle: it has no certificate");
    fs::write(first.file(), "rubbish")?;
    server.wait_log("keeping its last good content").await?;
    visit(testbed, Some(&caller(&first, "a")?)).await?;
    let second = callers(testbed)?;
    let let_in = async || Ok(visit(testbed, Some(&caller(&second, "b")?)).await.is_ok());
    wait_until("the new CA's callers to be let in", Duration::from_secs(20), let_in, |is| *is).await?;
    ensure!(visit(testbed, Some(&caller(&first, "a")?)).await.is_err(), "the old CA's are let in");
    Ok(())
}

/// To the server a connection is over as soon as its kernel has the last bytes.
pub(super) async fn what_a_caller_reads_late_arrives(testbed: &Testbed) -> Result<()> {
    // More than the caller's kernel accepts, but not more than the server's.
    const LENGTH: u64 = 250_000;
    let callers = callers(testbed)?;
    let server = server(testbed, &callers).start().await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let _source = target(testbed, 1, ECHO, Behaviour::Source(7, LENGTH))?;
    let stream = shake_hands(testbed, Some(&caller(&callers, "kube-apiserver")?), None).await?;
    let (mut stream, answer) = ask(stream, &format!("edge-1:{ECHO}")).await?;
    ensure!(answer == CONNECTED, "answered {answer:?}");
    stream.shutdown().await?;
    let line = server.wait_access("of the transfer", |line| line.text("listener") == "egress").await?;
    ensure!(line.text("outcome") == "ok" && line.bytes_from_node()? == LENGTH, "{line:?}");
    let got = digest(&mut stream).await?;
    ensure!(got == (LENGTH, pattern_digest(7, LENGTH)), "the bytes changed: {got:?}");
    Ok(())
}
