//! Certificate verifiers: first rustls' own, then the exact format of our certificates.

use std::fmt;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature,
};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, RootCertStore,
    SignatureScheme,
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

use super::certificate::{ca_hash, is_ca, server_names_of_certificate};
use super::error::IdentityError;

/// Passed explicitly everywhere: the process default belongs to the program that links this crate.
pub(super) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

pub(super) fn refuse(error: IdentityError) -> Error {
    Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(error))))
}

/// Accepts the clients that `inner` accepts if `check` accepts their certificate too.
pub fn client_verifier(
    inner: Arc<dyn ClientCertVerifier>,
    check: impl Fn(&CertificateDer<'_>) -> Result<(), Error> + Send + Sync + 'static,
) -> Arc<dyn ClientCertVerifier> {
    Arc::new(Checked { inner, check })
}

/// Accepts the servers that `check` accepts. It receives the certificate, those that came with it, the dialled name,
/// and the time. The verifier itself checks that the server has the certificate's key.
pub fn server_verifier(
    check: impl Fn(&CertificateDer<'_>, &[CertificateDer<'_>], &ServerName<'_>, UnixTime) -> Result<(), Error>
    + Send
    + Sync
    + 'static,
) -> Arc<dyn ServerCertVerifier> {
    Arc::new(Checked { inner: provider().signature_verification_algorithms, check })
}

/// A verifier combined with our own check.
struct Checked<V, F> {
    inner: V,
    check: F,
}

impl<V: fmt::Debug, F> fmt::Debug for Checked<V, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checked").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl<F> ClientCertVerifier for Checked<Arc<dyn ClientCertVerifier>, F>
where
    F: Fn(&CertificateDer<'_>) -> Result<(), Error> + Send + Sync,
{
    fn client_auth_mandatory(&self) -> bool {
        self.inner.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.inner.verify_client_cert(end_entity, intermediates, now)?;
        (self.check)(end_entity)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}

impl<F> ServerCertVerifier for Checked<WebPkiSupportedAlgorithms, F>
where
    F: Fn(&CertificateDer<'_>, &[CertificateDer<'_>], &ServerName<'_>, UnixTime) -> Result<(), Error>
        + Send
        + Sync,
{
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        (self.check)(end_entity, intermediates, server_name, now)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, &self.inner)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.inner)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_schemes()
    }
}

/// Roots for checking a tunnel-server's certificate.
#[derive(Debug)]
pub(super) enum Trust {
    Roots(Arc<RootCertStore>),
    /// The CA certificate in the presented chain whose key has this hash.
    Pinned(String),
}

impl Trust {
    /// Accepts a certificate that is signed by a trusted root, currently valid, names the server, and has exactly a
    /// server's format.
    pub(super) fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        now: UnixTime,
    ) -> Result<(), Error> {
        let roots = self.roots(intermediates).map_err(refuse)?;
        let inner = WebPkiServerVerifier::builder_with_provider(roots, provider())
            .build()
            .map_err(|error| refuse(IdentityError::Tls(error.to_string())))?;
        inner.verify_server_cert(leaf, intermediates, server_name, &[], now)?;
        server_names_of_certificate(leaf).map_err(refuse)?;
        Ok(())
    }

    fn roots(&self, presented: &[CertificateDer<'_>]) -> Result<Arc<RootCertStore>, IdentityError> {
        let expected = match self {
            Self::Roots(roots) => return Ok(Arc::clone(roots)),
            Self::Pinned(hash) => hash,
        };
        let mut hashes = Vec::new();
        // Only CA certificates count: the server's own certificate must not be its own root.
        for certificate in presented.iter().filter(|certificate| is_ca(certificate)) {
            let hash = ca_hash(certificate)?;
            if hash == *expected {
                let mut roots = RootCertStore::empty();
                roots
                    .add(certificate.clone().into_owned())
                    .map_err(|error| IdentityError::Parse(error.to_string()))?;
                return Ok(Arc::new(roots));
            }
            hashes.push(hash);
        }
        let presented = if hashes.is_empty() { "no CA".to_owned() } else { hashes.join(", ") };
        Err(IdentityError::CaMismatch { expected: expected.clone(), presented })
    }
}
