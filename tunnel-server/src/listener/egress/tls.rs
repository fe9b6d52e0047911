//! TLS of the egress listener: permitted callers, and this server's certificate. Both follow their files.

use std::path::Path;
use std::sync::Arc;

use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ResolvesServerCert, ResolvesServerCertUsingSni};
use rustls::{CertificateError, ServerConfig};
use rustls_pki_types::CertificateDer;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tunnel_pki::{
    IdentityError, ServerTls, TrustBundle, caller_config, caller_verifier, certified_pem, client_verifier,
};
use tunnel_runtime::config::ConfigError;
use tunnel_runtime::reloaded::{FileMetrics, NamedFile, ReloadedFile, Texts, read_all};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::config::EgressTlsConfig;
use crate::caller::CallerTls;

/// Checks that the files can be used.
pub(super) fn check(config: &EgressTlsConfig) -> Result<(), ConfigError> {
    let none = Arc::new(ResolvesServerCertUsingSni::new());
    server_config(config, &read_all(&files(config))?, none).map(drop)
}

/// TLS settings, and the files that they follow.
pub(crate) struct EgressTls {
    file: ReloadedFile<Settings>,
    pub(crate) tls: Arc<CallerTls>,
}

/// The verifier is in the settings too, which do not give it out.
type Settings = (ServerConfig, Arc<dyn ClientCertVerifier>);

impl EgressTls {
    /// # Errors
    /// A file cannot be read, or its content cannot be used.
    pub(crate) fn new(
        config: EgressTlsConfig,
        own: Arc<ServerTls>,
        metrics: &FileMetrics,
    ) -> Result<Self, ConfigError> {
        let files = files(&config);
        let refused = |error: IdentityError| ConfigError::without_value("--egress-port", error.to_string());
        let tls = CallerTls::new(own.clone()).map_err(refused)?;
        let parse = move |texts: &Texts| server_config(&config, texts, own.clone());
        let (file, (first, verifier)) = ReloadedFile::open("egress-tls", files, parse, metrics)?;
        tls.set(first, verifier);
        Ok(Self { file, tls: Arc::new(tls) })
    }

    /// Notifies `changed` of each change.
    pub(crate) async fn follow(self, changed: Arc<Notify>, stop: CancellationToken) {
        let Self { file, tls } = self;
        let apply = |(config, verifier)| {
            tls.set(config, verifier);
            changed.notify_one();
            std::future::ready(Ok(()))
        };
        file.run(apply, stop).await;
    }
}

/// Returns the CA file, and the certificate and key files if they are given.
fn files(config: &EgressTlsConfig) -> Vec<NamedFile> {
    let mut files = vec![NamedFile::new("--egress-client-ca", &config.client_ca)];
    if let Some((certificate, key)) = &config.certificate {
        files.push(NamedFile::new("--egress-cert", certificate));
        files.push(NamedFile::new("--egress-key", key));
    }
    files
}

fn server_config(
    config: &EgressTlsConfig,
    texts: &Texts,
    own: Arc<dyn ResolvesServerCert>,
) -> Result<Settings, ConfigError> {
    let bad =
        |key: &str, path: &Path, reason: String| ConfigError::new(key, path.display().to_string(), reason);
    let bad_ca = |reason: String| bad("--egress-client-ca", &config.client_ca, reason);
    let pem = |at: usize| texts.get(at).and_then(Option::as_deref).unwrap_or_default();
    let verifier = TrustBundle::from_pem(pem(0)).and_then(|roots| caller_verifier(roots.root_store(), true));
    let verifier = verifier.map_err(|error| bad_ca(error.to_string()))?;
    let names = config.clients.clone();
    let verifier = client_verifier(verifier, move |certificate| {
        if names.is_empty() || names.contains(&common_name(certificate)) {
            return Ok(());
        }
        Err(rustls::Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
    });
    let shown = match &config.certificate {
        Some((certificate, key)) => certified_pem(pem(1), pem(2)).map_err(|error| match error {
            IdentityError::Key(_) => bad("--egress-key", key, error.to_string()),
            _ => bad("--egress-cert", certificate, error.to_string()),
        })?,
        None => own,
    };
    let settings = caller_config(shown, verifier.clone(), &[b"h2", b"http/1.1"]);
    settings.map(|settings| (settings, verifier)).map_err(|error| bad_ca(error.to_string()))
}

/// Returns a certificate's common name; empty if it has none.
pub(super) fn common_name(certificate: &CertificateDer<'_>) -> String {
    X509Certificate::from_der(certificate)
        .ok()
        .and_then(|(_, parsed)| {
            let name = parsed.subject().iter_common_name().next()?;
            Some(name.as_str().ok()?.to_owned())
        })
        .unwrap_or_default()
}
