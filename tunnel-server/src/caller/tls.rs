//! The TLS side of the doors for callers: this process's own certificate, and optional certificates of callers.

use std::sync::Arc;

use arc_swap::ArcSwap;
use rcgen::{CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, KeyUsagePurpose};
use rustls::ServerConfig;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoClientAuth, ResolvesServerCert};
use tokio_rustls::TlsAcceptor;
use tunnel_core::identity::{
    IdentityError, PrivateKey, ServerTls, TrustBundle, caller_config, caller_verifier, certified,
};

const HTTP_1: &[u8] = b"http/1.1";
const HTTP_2: &[u8] = b"h2";

/// It shows this process's certificate as that is now.
pub struct CallerTls {
    certificate: Arc<dyn ResolvesServerCert>,
    /// The same where it is a server's, and so has names.
    own: Option<Arc<ServerTls>>,
    config: ArcSwap<ServerConfig>,
}

impl CallerTls {
    /// Without any roots: certificates of callers are not asked for.
    ///
    /// # Errors
    /// rustls does not take the settings.
    pub fn new(own: Arc<ServerTls>) -> Result<Self, IdentityError> {
        Self::with(own.clone(), Some(own))
    }

    /// The same with a new certificate for this name that nobody has signed, for a process whose own is a client's.
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
        Ok(Self { certificate, own, config: ArcSwap::from_pointee(config) })
    }

    /// From now on a caller may show a certificate that one of these has signed.
    ///
    /// # Errors
    /// rustls does not take them; those before stay.
    pub fn accept_roots(&self, roots: &TrustBundle) -> Result<(), IdentityError> {
        let verifier = caller_verifier(roots.root_store(), false)?;
        self.config.store(Arc::new(config(&self.certificate, verifier)?));
        Ok(())
    }

    /// For HTTP/2 and HTTP/1.1, with the present settings; take a new one for each connection.
    pub fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(self.config.load_full())
    }

    /// The same for HTTP/1.1 only.
    pub fn acceptor_of_http_1(&self) -> TlsAcceptor {
        let mut config = ServerConfig::clone(&self.config.load());
        config.alpn_protocols = vec![HTTP_1.to_vec()];
        TlsAcceptor::from(Arc::new(config))
    }

    /// Whether the server's certificate is valid for this name or address.
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
