//! TLS of the egress listener: permitted callers, and the certificate that they are shown.

use std::sync::Arc;

use rustls::CertificateError;
use rustls::server::ResolvesServerCert;
use rustls::server::danger::ClientCertVerifier;
use tunnel_pki::{IdentityError, TrustBundle, caller_verifier, certified_pem, client_verifier};
use tunnel_runtime::config::ConfigError;
use tunnel_runtime::reloaded::{FileMetrics, NamedFile, ReloadedFile, Texts};

use super::config::EgressTlsConfig;
use crate::caller::{CallerTls, caller_of_certificate};

/// Content of the files.
pub(crate) struct EgressTls {
    verifier: Arc<dyn ClientCertVerifier>,
    /// `None`: this server's own.
    certificate: Option<Arc<dyn ResolvesServerCert>>,
}

impl EgressTls {
    /// Reads the CA file, and the certificate and key files if they are given.
    ///
    /// # Errors
    /// A file cannot be used.
    pub(crate) fn read(
        config: &EgressTlsConfig,
        metrics: &FileMetrics,
    ) -> Result<(ReloadedFile<Self>, Self), ConfigError> {
        let ca = NamedFile::new("--egress-client-ca", &config.client_ca);
        let pair = config.certificate.as_ref().map(|(certificate, key)| {
            [NamedFile::new("--egress-cert", certificate), NamedFile::new("--egress-key", key)]
        });
        let files = [ca.clone()].into_iter().chain(pair.iter().flatten().cloned()).collect();
        let names = config.clients.clone();
        let parse = move |texts: &Texts| Self::parse(&names, &ca, pair.as_ref(), texts);
        ReloadedFile::open("egress-tls", files, parse, metrics)
    }

    fn parse(
        names: &[String],
        ca: &NamedFile,
        pair: Option<&[NamedFile; 2]>,
        texts: &Texts,
    ) -> Result<Self, ConfigError> {
        let pem = |at: usize| texts.get(at).and_then(Option::as_deref).unwrap_or_default();
        let verifier =
            TrustBundle::from_foreign_pem(pem(0)).and_then(|roots| caller_verifier(roots.root_store(), true));
        let verifier = verifier.map_err(|error| ca.error(error.to_string()))?;
        let names = names.to_vec();
        let verifier = client_verifier(verifier, move |certificate| {
            let named =
                || caller_of_certificate(certificate).is_ok_and(|caller| names.contains(&caller.name));
            if names.is_empty() || named() {
                return Ok(());
            }
            Err(rustls::Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
        });
        let certificate = match pair {
            Some([certificate, key]) => {
                let certified = certified_pem(pem(1), pem(2)).map_err(|error| match error {
                    IdentityError::Key(_) => key.error(error.to_string()),
                    _ => certificate.error(error.to_string()),
                });
                Some(certified? as Arc<dyn ResolvesServerCert>)
            }
            None => None,
        };
        Ok(Self { verifier, certificate })
    }

    /// Puts the content into effect.
    ///
    /// # Errors
    /// rustls rejects it.
    pub(crate) fn apply(self, tls: &CallerTls) -> Result<(), String> {
        tls.set(self.certificate.as_ref(), self.verifier).map_err(|error| error.to_string())
    }
}
