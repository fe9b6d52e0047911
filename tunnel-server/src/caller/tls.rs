//! The TLS side of the doors for callers: the server's own certificate, and optional certificates of callers.

use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::ServerConfig;
use rustls::server::NoClientAuth;
use rustls::server::danger::ClientCertVerifier;
use tokio_rustls::TlsAcceptor;
use tunnel_core::identity::{IdentityError, ServerTls, TrustBundle, caller_config, caller_verifier};

const HTTP_1: &[u8] = b"http/1.1";
const HTTP_2: &[u8] = b"h2";

/// It shows the server's certificate as that is now.
pub struct CallerTls {
    own: Arc<ServerTls>,
    config: ArcSwap<ServerConfig>,
}

impl CallerTls {
    /// Without any roots: certificates of callers are not asked for.
    ///
    /// # Errors
    /// rustls does not take the settings.
    pub fn new(own: Arc<ServerTls>) -> Result<Self, IdentityError> {
        let config = config(&own, Arc::new(NoClientAuth))?;
        Ok(Self { own, config: ArcSwap::from_pointee(config) })
    }

    /// From now on a caller may show a certificate that one of these has signed.
    ///
    /// # Errors
    /// rustls does not take them; those before stay.
    pub fn accept_roots(&self, roots: &TrustBundle) -> Result<(), IdentityError> {
        let verifier = caller_verifier(roots.root_store(), false)?;
        self.config.store(Arc::new(config(&self.own, verifier)?));
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
        self.own.names(name)
    }
}

fn config(
    own: &Arc<ServerTls>,
    verifier: Arc<dyn ClientCertVerifier>,
) -> Result<ServerConfig, IdentityError> {
    caller_config(own.clone(), verifier, &[HTTP_2, HTTP_1])
}
