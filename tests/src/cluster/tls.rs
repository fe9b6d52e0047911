//! TLS to kubelets with the cluster's CA, as the API server and Prometheus do it.
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::pki::{Pair, Pki};
use crate::client::{self, PATIENCE};

/// Shakes hands on a connection that is there; the kubelet's certificate must be the CA's and be for `name`.
pub async fn handshake(
    stream: TcpStream,
    name: &str,
    pki: &Pki,
    user: Option<&Pair>,
) -> Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    for root in certificates(&pki.file("ca.crt"))? {
        roots.add(root).context("the cluster's CA")?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .context("TLS versions")?
        .with_root_certificates(roots);
    let config = match user {
        Some(pair) => builder
            .with_client_auth_cert(
                certificates(&pair.certificate)?,
                PrivateKeyDer::from_pem_file(&pair.key).context("the user's key")?,
            )
            .context("the user's certificate")?,
        None => builder.with_no_client_auth(),
    };
    let name = ServerName::try_from(name.to_owned()).with_context(|| format!("server name {name:?}"))?;
    let handshake = TlsConnector::from(Arc::new(config)).connect(name, stream);
    timeout(PATIENCE, handshake).await.context("the TLS handshake did not end")?.context("TLS handshake")
}

/// The certificate that the other side showed.
pub fn certificate(stream: &TlsStream<TcpStream>) -> Result<Vec<u8>> {
    let chain = stream.get_ref().1.peer_certificates().context("no certificate was shown")?;
    Ok(chain.first().context("an empty chain")?.to_vec())
}

/// GET over TLS: the body of a 200.
pub async fn get(stream: TlsStream<TcpStream>, path: &str) -> Result<String> {
    let (status, body) = client::http(stream, "GET", path, "").await?;
    ensure!(status == 200, "{path} answered {status}: {body}");
    Ok(body)
}

fn certificates(path: &std::path::Path) -> Result<Vec<CertificateDer<'static>>> {
    let text = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    let found = CertificateDer::pem_slice_iter(&text).collect::<Result<_, _>>();
    found.with_context(|| format!("certificates in {}", path.display()))
}
