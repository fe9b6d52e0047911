//! TLS to kubelets with the cluster's CA, as the API server and Prometheus do it.
use anyhow::{Context as _, Result, ensure};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use super::pki::{Pair, Pki};
use crate::client;
use crate::tls::{self, Identity};

/// Makes a TLS handshake on an open connection; the kubelet's certificate must be signed by the CA and valid for
/// `name`.
pub async fn handshake(
    stream: TcpStream,
    name: &str,
    pki: &Pki,
    user: Option<&Pair>,
) -> Result<TlsStream<TcpStream>> {
    let user = user.map(|pair| Identity::read(&pair.certificate, &pair.key)).transpose()?;
    tls::handshake(stream, name, tls::roots(&pki.file("ca.crt"))?, user.as_ref(), None).await
}

/// Returns the certificate that the peer presented.
pub fn certificate(stream: &TlsStream<TcpStream>) -> Result<Vec<u8>> {
    let chain = stream.get_ref().1.peer_certificates().context("no certificate was presented")?;
    Ok(chain.first().context("an empty chain")?.to_vec())
}

/// Makes a GET request over TLS; returns the body of a 200.
pub async fn get(stream: TlsStream<TcpStream>, path: &str) -> Result<String> {
    let (status, body) = client::http(stream, "GET", path, "").await?;
    ensure!(status == 200, "{path} answered {status}: {body}");
    Ok(body)
}
