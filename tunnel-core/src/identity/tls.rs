use std::io;
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::client::Resumption;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::CryptoProvider;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{CertificateError, ClientConfig, OtherError, RootCertStore, ServerConfig, version};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::TlsAcceptor;

use super::verify::{AgentVerifier, Trust, TunnelServerVerifier};
use super::{ALPN_GRPC, ALPN_TUNNEL, AgentIdentity, IdentityError, SERVER_NAME, TrustBundle, parse_ca_hash};

/// Always given by name: the process default belongs to whoever links us.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn tls_error(error: impl std::fmt::Display) -> IdentityError {
    IdentityError::Tls(error.to_string())
}

/// [`SERVER_NAME`] as the TLS library wants it, for SNI and verification.
pub fn server_name() -> ServerName<'static> {
    // A constant of this crate; a test calls this.
    ServerName::try_from(SERVER_NAME).expect("SERVER_NAME is a DNS name")
}

fn client(
    trust: Trust,
) -> Result<rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert>, IdentityError> {
    let provider = provider();
    Ok(ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&version::TLS13])
        .map_err(tls_error)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(TunnelServerVerifier { trust, provider })))
}

fn finish(mut config: ClientConfig, alpn: &[u8]) -> Arc<ClientConfig> {
    config.alpn_protocols = vec![alpn.to_vec()];
    // Every handshake shows the certificate of the moment and is checked against the roots of the moment.
    config.resumption = Resumption::disabled();
    Arc::new(config)
}

/// TLS 1.3 with the agent's certificate; the server must come from the identity's roots and name [`SERVER_NAME`].
pub fn agent_tls(identity: &AgentIdentity, alpn: &[u8]) -> Result<Arc<ClientConfig>, IdentityError> {
    let config = client(Trust::Roots(Arc::new(identity.bundle.root_store())))?
        .with_client_auth_cert(identity.chain.clone(), identity.key.clone_key())
        .map_err(tls_error)?;
    Ok(finish(config, alpn))
}

/// TLS 1.3 without a certificate of one's own, to a server that comes from roots already known: an agent whose
/// certificate has ended enrols again by this.
pub fn anonymous_tls(bundle: &TrustBundle, alpn: &[u8]) -> Result<Arc<ClientConfig>, IdentityError> {
    Ok(finish(client(Trust::Roots(Arc::new(bundle.root_store())))?.with_no_client_auth(), alpn))
}

/// TLS 1.3 for the first enrolment: the chain must come from a CA certificate that the server presents itself and
/// whose key has the hash `ca_hash`. The name [`SERVER_NAME`], dates and usage are checked as ever. ALPN `h2`.
pub fn pinned_tls(ca_hash: &str) -> Result<Arc<ClientConfig>, IdentityError> {
    let config = client(Trust::Pinned(parse_ca_hash(ca_hash)?))?.with_no_client_auth();
    Ok(finish(config, ALPN_GRPC))
}

impl TrustBundle {
    /// Whether a server's chain (leaf first) would be accepted if these roots were the trusted ones.
    pub fn verify_server(&self, chain: &[CertificateDer<'_>]) -> Result<(), IdentityError> {
        let (leaf, rest) =
            chain.split_first().ok_or_else(|| IdentityError::Parse("an empty chain".into()))?;
        let verifier =
            TunnelServerVerifier { trust: Trust::Roots(Arc::new(self.root_store())), provider: provider() };
        verifier.verify_server_cert(leaf, rest, &server_name(), &[], UnixTime::now()).map_err(|error| {
            IdentityError::Bundle(format!("it does not verify the present server: {error}"))
        })?;
        Ok(())
    }
}

/// Our own reason inside the error of a TLS handshake, when it was one of our checks that refused the peer.
pub fn refusal(error: &io::Error) -> Option<&IdentityError> {
    let inner = error.get_ref()?.downcast_ref::<rustls::Error>()?;
    match inner {
        rustls::Error::InvalidCertificate(CertificateError::Other(OtherError(reason))) => {
            reason.downcast_ref::<IdentityError>()
        }
        _ => None,
    }
}

/// The TLS side of a server's agent port. The settings can be replaced at any time; connections that are already
/// open keep theirs.
///
/// TLS 1.3 only, ALPN [`ALPN_TUNNEL`] and [`ALPN_GRPC`]. A client certificate is optional (enrolment has none yet);
/// one that is shown must come from the client roots and be of an agent's exact shape. There is no session
/// resumption: a resumed session would carry a client certificate past its end or past its root's retirement.
#[derive(Debug)]
pub struct ServerTls {
    config: ArcSwap<ServerConfig>,
}

impl ServerTls {
    /// `chain` is leaf first and should hold the CA's certificate too: a first enrolment pins it by hash.
    pub fn new(
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
        client_roots: &TrustBundle,
    ) -> Result<Self, IdentityError> {
        Ok(Self { config: ArcSwap::from(server_config(chain, key, client_roots.root_store())?) })
    }

    /// New certificate, key and client roots for the handshakes from now on. An error changes nothing.
    pub fn replace(
        &self,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
        client_roots: &TrustBundle,
    ) -> Result<(), IdentityError> {
        self.config.store(server_config(chain, key, client_roots.root_store())?);
        Ok(())
    }

    /// An acceptor with the settings of this moment: take a new one for each connection.
    pub fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(self.config.load_full())
    }
}

fn server_config(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    client_roots: RootCertStore,
) -> Result<Arc<ServerConfig>, IdentityError> {
    let provider = provider();
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(client_roots), Arc::clone(&provider))
        .allow_unauthenticated()
        .build()
        .map_err(tls_error)?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&version::TLS13])
        .map_err(tls_error)?
        .with_client_cert_verifier(Arc::new(AgentVerifier(verifier)))
        .with_single_cert(chain, key)
        .map_err(tls_error)?;
    config.alpn_protocols = vec![ALPN_TUNNEL.to_vec(), ALPN_GRPC.to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_servers_name_is_a_dns_name() {
        assert_eq!(server_name().to_str(), SERVER_NAME);
    }
}
