//! TLS of the listeners for callers: this process's own certificate, and optional certificates of callers.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use rcgen::{CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, KeyUsagePurpose};
use rustls::ServerConfig;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoClientAuth, ResolvesServerCert};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tunnel_pki::{
    IdentityError, PrivateKey, ServerTls, TrustBundle, caller_config, caller_verifier, certified,
};

use super::certified::{Accepted, Certified};

/// Maximum time for a client's handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
const HTTP_1: &[u8] = b"http/1.1";
const HTTP_2: &[u8] = b"h2";

/// Server TLS settings, which always use this process's current certificate.
pub struct CallerTls {
    certificate: Arc<dyn ResolvesServerCert>,
    /// The same certificate if it is a server's, which has names.
    own: Option<Arc<ServerTls>>,
    config: ArcSwap<ServerConfig>,
    /// The verifier in effect, for callers' certificates that have been accepted before.
    pub(crate) accepted: Accepted,
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
        self.set(None, caller_verifier(roots.root_store(), false)?)
    }

    /// Sets the verifier of callers' certificates, and the certificate that they are shown instead of this process's own.
    ///
    /// # Errors
    /// rustls rejects them; the earlier ones stay.
    pub(crate) fn set(
        &self,
        certificate: Option<&Arc<dyn ResolvesServerCert>>,
        verifier: Arc<dyn ClientCertVerifier>,
    ) -> Result<(), IdentityError> {
        let certificate = certificate.unwrap_or(&self.certificate);
        self.config.store(Arc::new(config(certificate, verifier.clone())?));
        self.accepted.set(verifier);
        Ok(())
    }

    /// Does a client's handshake with the current settings. Returns the certificate that it has shown.
    ///
    /// # Errors
    /// The reason of the failure.
    pub(crate) async fn accept<S>(
        &self,
        socket: S,
        only_http_1: bool,
    ) -> Result<(TlsStream<S>, Option<Certified>), String>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let mut config = self.config.load_full();
        if only_http_1 {
            Arc::make_mut(&mut config).alpn_protocols = vec![HTTP_1.to_vec()];
        }
        let accepting = TlsAcceptor::from(config).accept(socket);
        let stream = match tokio::time::timeout(HANDSHAKE, accepting).await {
            Ok(accepted) => accepted.map_err(|error| format!("TLS: {error}"))?,
            Err(_) => return Err(format!("no TLS handshake within {} s", HANDSHAKE.as_secs())),
        };
        let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
        let certified = Certified::new(chain, self.accepted.clone());
        Ok((stream, certified))
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
