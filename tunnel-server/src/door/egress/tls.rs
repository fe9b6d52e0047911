//! TLS of the egress door: which callers are let in, and this server's certificate. Both follow their files.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use rustls::server::{ResolvesServerCert, ResolvesServerCertUsingSni};
use rustls::{CertificateError, RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tunnel_core::config::ConfigError;
use tunnel_core::identity::{ServerTls, caller_config, caller_verifier, certified, client_verifier};
use tunnel_core::log_once::LogOnce;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::config::EgressTlsConfig;

/// How soon a change of a file is noticed.
const POLL: Duration = Duration::from_secs(2);

/// Whether the files can be used.
pub(super) fn check(config: &EgressTlsConfig) -> Result<(), ConfigError> {
    let none = Arc::new(ResolvesServerCertUsingSni::new());
    server_config(config, &read(config)?, none).map(drop)
}

/// The present settings.
pub(crate) struct EgressTls {
    config: EgressTlsConfig,
    own: Arc<ServerTls>,
    files: Vec<Vec<u8>>,
    current: Arc<ArcSwap<ServerConfig>>,
}

impl EgressTls {
    /// # Errors
    /// A file cannot be read, or holds nothing that can be used.
    pub(crate) fn new(config: EgressTlsConfig, own: Arc<ServerTls>) -> Result<Self, ConfigError> {
        let files = read(&config)?;
        let current = Arc::new(ArcSwap::from_pointee(server_config(&config, &files, own.clone())?));
        Ok(Self { config, own, files, current })
    }

    pub(crate) fn current(&self) -> Arc<ArcSwap<ServerConfig>> {
        self.current.clone()
    }

    /// Follows the files. What cannot be used is logged, and the last that could stays.
    pub(crate) async fn follow(mut self, stop: CancellationToken) {
        let mut failing = LogOnce::default();
        while stop.run_until_cancelled(tokio::time::sleep(POLL)).await.is_some() {
            let changed = read(&self.config).and_then(|files| {
                if files == self.files {
                    return Ok(false);
                }
                self.current.store(Arc::new(server_config(&self.config, &files, self.own.clone())?));
                self.files = files;
                Ok(true)
            });
            match changed {
                Ok(changed) => {
                    if changed {
                        tracing::info!("the egress door's certificates were read again");
                    }
                    failing.clear();
                }
                Err(error) => {
                    if failing.is_new(&error) {
                        tracing::error!(%error, "the egress door keeps the certificates that it has");
                    }
                }
            }
        }
    }
}

pub(super) fn acceptor(current: &ArcSwap<ServerConfig>) -> TlsAcceptor {
    TlsAcceptor::from(current.load_full())
}

/// The files' contents: the CA, and certificate and key if they are given.
fn read(config: &EgressTlsConfig) -> Result<Vec<Vec<u8>>, ConfigError> {
    let read = |key: &str, path: &Path| {
        std::fs::read(path)
            .map_err(|error| ConfigError::new(key, path.display().to_string(), error.to_string()))
    };
    let mut files = vec![read("--egress-client-ca", &config.client_ca)?];
    if let Some((certificate, key)) = &config.certificate {
        files.push(read("--egress-cert", certificate)?);
        files.push(read("--egress-key", key)?);
    }
    Ok(files)
}

fn server_config(
    config: &EgressTlsConfig,
    files: &[Vec<u8>],
    own: Arc<dyn ResolvesServerCert>,
) -> Result<ServerConfig, ConfigError> {
    let bad =
        |key: &str, path: &Path, reason: String| ConfigError::new(key, path.display().to_string(), reason);
    let bad_ca = |reason: String| bad("--egress-client-ca", &config.client_ca, reason);
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&files[0]) {
        let certificate = certificate.map_err(|error| bad_ca(format!("not PEM: {error}")))?;
        roots.add(certificate).map_err(|error| bad_ca(format!("not a CA's certificate: {error}")))?;
    }
    if roots.is_empty() {
        return Err(bad_ca("it holds no certificate".to_owned()));
    }
    let verifier = caller_verifier(roots, true).map_err(|error| bad_ca(error.to_string()))?;
    let names = config.clients.clone();
    let verifier = client_verifier(verifier, move |certificate| {
        if names.is_empty() || names.contains(&common_name(certificate)) {
            return Ok(());
        }
        Err(rustls::Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
    });
    let shown = match (&config.certificate, files) {
        (Some((certificate, key)), [_, chain, key_pem]) => {
            let chain = CertificateDer::pem_slice_iter(chain)
                .collect::<Result<Vec<_>, _>>()
                .map_err(|error| bad("--egress-cert", certificate, format!("not PEM: {error}")))?;
            let private = PrivateKeyDer::from_pem_slice(key_pem)
                .map_err(|error| bad("--egress-key", key, format!("not a PEM key: {error}")))?;
            certified(chain, &private)
                .map_err(|error| bad("--egress-cert", certificate, error.to_string()))?
        }
        _ => own,
    };
    caller_config(shown, verifier, &[b"h2", b"http/1.1"]).map_err(|error| bad_ca(error.to_string()))
}

/// A certificate's common name; empty if it has none.
pub(super) fn common_name(certificate: &CertificateDer<'_>) -> String {
    X509Certificate::from_der(certificate)
        .ok()
        .and_then(|(_, parsed)| {
            let name = parsed.subject().iter_common_name().next()?;
            Some(name.as_str().ok()?.to_owned())
        })
        .unwrap_or_default()
}
