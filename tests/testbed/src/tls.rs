//! TLS: a client with certificates from files, and servers that ask for none.
use std::fs;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::client::PATIENCE;

/// A client's certificate chain and key.
#[derive(Debug)]
pub struct Identity(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

impl Identity {
    pub fn read(certificate: &Path, key: &Path) -> Result<Self> {
        let key = PrivateKeyDer::from_pem_file(key).with_context(|| format!("reading {}", key.display()))?;
        Ok(Self(certificates(certificate)?, key))
    }
}

/// Reads the trusted roots (PEM).
pub fn roots(path: &Path) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for root in certificates(path)? {
        roots.add(root).with_context(|| format!("a root in {}", path.display()))?;
    }
    Ok(roots)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let text = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    let found = CertificateDer::pem_slice_iter(&text).collect::<Result<_, _>>();
    found.with_context(|| format!("certificates in {}", path.display()))
}

/// Makes a TLS handshake on an open connection; the server's certificate must be valid for `name`.
pub async fn handshake(
    stream: TcpStream,
    name: &str,
    roots: RootCertStore,
    identity: Option<&Identity>,
    alpn: Option<&[u8]>,
) -> Result<TlsStream<TcpStream>> {
    let builder =
        ClientConfig::builder_with_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .context("TLS versions")?
            .with_root_certificates(roots);
    let mut config = match identity {
        Some(Identity(chain, key)) => builder
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .context("the client's certificate")?,
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = alpn.into_iter().map(<[u8]>::to_vec).collect();
    let name = ServerName::try_from(name.to_owned()).with_context(|| format!("server name {name:?}"))?;
    let handshake = TlsConnector::from(Arc::new(config)).connect(name, stream);
    timeout(PATIENCE, handshake).await.context("the TLS handshake did not end")?.context("TLS handshake")
}

/// Returns TLS for a server that presents this chain, and asks its clients for no certificate.
pub fn acceptor(
    chain: Vec<CertificateDer<'static>>,
    key: &KeyPair,
    alpn: Option<&[u8]>,
) -> Result<TlsAcceptor> {
    let mut config =
        ServerConfig::builder_with_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .context("TLS versions")?
            .with_no_client_auth()
            .with_single_cert(chain, PrivatePkcs8KeyDer::from(key.serialize_der()).into())
            .context("the server's certificate")?;
    config.alpn_protocols = alpn.into_iter().map(<[u8]>::to_vec).collect();
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Returns a certificate for `name` that no CA has signed, and TLS for a server with it.
pub fn self_signed(name: &str, alpn: Option<&[u8]>) -> Result<(CertificateDer<'static>, TlsAcceptor)> {
    let key = KeyPair::generate().context("a key")?;
    let params = CertificateParams::new(vec![name.to_owned()]).context("the name of a certificate")?;
    let certificate = params.self_signed(&key).context("signing")?.der().clone();
    Ok((certificate.clone(), acceptor(vec![certificate], &key, alpn)?))
}
