//! TLS of the listeners for callers: this process's own certificate, and optional certificates of callers.

use std::sync::Arc;

use arc_swap::ArcSwap;
use rcgen::{CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, KeyUsagePurpose};
use rustls::ServerConfig;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoClientAuth, ResolvesServerCert};
use tokio_rustls::TlsAcceptor;
use tunnel_pki::{
    IdentityError, PrivateKey, ServerTls, TrustBundle, caller_config, caller_verifier, certified,
};

use super::certified::Accepted;

const HTTP_1: &[u8] = b"http/1.1";
const HTTP_2: &[u8] = b"h2";

/// Server TLS settings, which always use this process's current certificate.
pub struct CallerTls {
    certificate: Arc<dyn ResolvesServerCert>,
    /// The same certificate if it is a server's, which has names.
    own: Option<Arc<ServerTls>>,
    config: ArcSwap<ServerConfig>,
    accepted: Accepted,
}

impl CallerTls {
    /// Creates settings without any roots: callers are not asked for certificates.
    ///
    /// # Errors
    /// rustls rejects the settings.
    pub fn new(own: Arc<ServerTls>) -> Result<Self, IdentityError> {
        Self::with(own.clone(), Some(own))
    }

    /// Creates settings with a new self-signed certificate for this name, for a process whose own certificate is a
    /// client's.
    ///
    /// # Errors
    /// `name` cannot be in a certificate.
    pub fn self_signed(name: &str) -> Result<Self, IdentityError> {
        let key = PrivateKey::generate()?;
        let failed = |error: rcgen::Error| IdentityError::Tls(error.to_string());
        let mut params = CertificateParams::new([name.to_owned()]).map_err(failed)?;
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let certificate = params.self_signed(&key).map_err(failed)?;
        Self::with(certified(vec![certificate.der().clone()], &key.to_der())?, None)
    }

    fn with(
        certificate: Arc<dyn ResolvesServerCert>,
        own: Option<Arc<ServerTls>>,
    ) -> Result<Self, IdentityError> {
        let config = config(&certificate, Arc::new(NoClientAuth))?;
        Ok(Self { certificate, own, config: ArcSwap::from_pointee(config), accepted: Accepted::default() })
    }

    /// Lets callers show a certificate that one of these roots has signed, from now on.
    ///
    /// # Errors
    /// rustls rejects the roots; the earlier ones stay.
    pub fn accept_roots(&self, roots: &TrustBundle) -> Result<(), IdentityError> {
        let verifier = caller_verifier(roots.root_store(), false)?;
        self.config.store(Arc::new(config(&self.certificate, verifier.clone())?));
        self.accepted.set(verifier);
        Ok(())
    }

    /// The verifier in effect, for callers' certificates that have been accepted before.
    pub(crate) fn accepted(&self) -> &Accepted {
        &self.accepted
    }

    /// Returns an acceptor for HTTP/2 and HTTP/1.1 with the current settings; take a new one for each connection.
    pub fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(self.config.load_full())
    }

    /// Returns an acceptor for HTTP/1.1 only.
    pub fn acceptor_of_http_1(&self) -> TlsAcceptor {
        let mut config = ServerConfig::clone(&self.config.load());
        config.alpn_protocols = vec![HTTP_1.to_vec()];
        TlsAcceptor::from(Arc::new(config))
    }

    /// True if the server's certificate is valid for this name or address.
    pub fn is_own_name(&self, name: &str) -> bool {
        self.own.as_ref().is_some_and(|own| own.names(name))
    }
}

fn config(
    certificate: &Arc<dyn ResolvesServerCert>,
    verifier: Arc<dyn ClientCertVerifier>,
) -> Result<ServerConfig, IdentityError> {
    caller_config(certificate.clone(), verifier, &[HTTP_2, HTTP_1])
}
