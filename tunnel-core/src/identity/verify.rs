//! Certificate verifiers: rustls' own, then the exact shape of ours.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, OtherError, RootCertStore, SignatureScheme,
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

use super::certificate::{ca_hash, client_of_certificate, is_ca, server_names_of_certificate};
use super::error::IdentityError;

fn refuse(error: IdentityError) -> rustls::Error {
    rustls::Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(error))))
}

/// Accepts a certificate that the inner verifier accepts and that has exactly the shape of an agent's or a server's.
#[derive(Debug)]
pub(super) struct ClientVerifier(pub(super) Arc<dyn ClientCertVerifier>);

impl ClientCertVerifier for ClientVerifier {
    fn client_auth_mandatory(&self) -> bool {
        self.0.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.0.verify_client_cert(end_entity, intermediates, now)?;
        client_of_certificate(end_entity).map_err(refuse)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

/// What a [`TunnelServerVerifier`] trusts.
#[derive(Debug)]
pub(super) enum Trust {
    Roots(Arc<RootCertStore>),
    /// The CA certificate in the presented chain whose key has this hash.
    Pinned(String),
}

/// Accepts a certificate that a trusted root signed, is valid now, names the server, and has a server's exact shape.
#[derive(Debug)]
pub(super) struct TunnelServerVerifier {
    pub(super) trust: Trust,
    pub(super) provider: Arc<CryptoProvider>,
}

impl TunnelServerVerifier {
    fn roots(&self, presented: &[CertificateDer<'_>]) -> Result<Arc<RootCertStore>, IdentityError> {
        let expected = match &self.trust {
            Trust::Roots(roots) => return Ok(Arc::clone(roots)),
            Trust::Pinned(hash) => hash,
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

impl ServerCertVerifier for TunnelServerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let roots = self.roots(intermediates).map_err(refuse)?;
        let inner = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&self.provider))
            .build()
            .map_err(|error| refuse(IdentityError::Tls(error.to_string())))?;
        let verified =
            inner.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)?;
        server_names_of_certificate(end_entity).map_err(refuse)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(
            message,
            certificate,
            signature,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(
            message,
            certificate,
            signature,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
