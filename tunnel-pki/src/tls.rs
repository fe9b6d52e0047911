//! TLS settings of both ends.

use std::io;
use std::sync::Arc;
use std::time::SystemTime;

use arc_swap::ArcSwap;
use rustls::client::{Resumption, TicketRequest};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{
    ClientHello, NoServerSessionStorage, ParsedCertificate, ResolvesServerCert, WebPkiClientVerifier,
};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::time_provider::TimeProvider;
use rustls::{
    AlertDescription, CertificateError, ClientConfig, OtherError, RootCertStore, ServerConfig, version,
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::TlsAcceptor;
use tunnel_runtime::clock::Clock;
use tunnel_runtime::error::causes;

use super::agent::{AgentIdentity, chain_and_key};
use super::bundle::TrustBundle;
use super::certificate::{SERVER_NAME, client_of_certificate, parse, parse_ca_hash};
use super::error::IdentityError;
use super::tickets::Tickets;
use super::verify::{Trust, client_verifier, provider, refuse, server_verifier};

/// ALPN protocol (RFC 7301) of the tunnel: the agent serves gRPC on the connection that it dialled.
pub const ALPN_TUNNEL: &[u8] = b"postern/1";
/// ALPN protocol of a server that forwards to another one, and learns from it which nodes that one has.
pub const ALPN_PEER: &[u8] = b"postern-peer/1";
/// ALPN protocol of an agent that opens streams for workloads on its node.
pub const ALPN_EDGE: &[u8] = b"postern-edge/1";
/// ALPN protocol of ordinary gRPC on the same port.
pub const ALPN_GRPC: &[u8] = b"h2";

/// Each attempt that a busy server turns away uses one up, and an agent without one needs a full handshake.
const WANTED_TICKETS: TicketRequest = TicketRequest { new_session_count: 4, resumption_count: 4 };

fn tls_error(error: impl std::fmt::Display) -> IdentityError {
    IdentityError::Tls(error.to_string())
}

/// Returns [`SERVER_NAME`] for SNI and verification.
pub fn server_name() -> ServerName<'static> {
    // A constant of this crate, checked by a test.
    ServerName::try_from(SERVER_NAME).expect("SERVER_NAME is a DNS name")
}

/// The clock of a host, as rustls reads it.
#[derive(Debug)]
struct Time(Clock);

impl TimeProvider for Time {
    fn current_time(&self) -> Option<UnixTime> {
        Some(unix_time(self.0.now()))
    }
}

/// Before 1970 no certificate is valid, as then.
fn unix_time(time: SystemTime) -> UnixTime {
    UnixTime::since_unix_epoch(time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default())
}

fn client(
    trust: Trust,
    clock: Clock,
) -> Result<rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert>, IdentityError> {
    let verifier = server_verifier(move |leaf, rest, name, now| trust.verify(leaf, rest, name, now));
    Ok(ClientConfig::builder_with_details(provider(), Arc::new(Time(clock)))
        .with_protocol_versions(&[&version::TLS13])
        .map_err(tls_error)?
        .dangerous()
        .with_custom_certificate_verifier(verifier))
}

/// Builds a certificate with its key, as rustls would, but without giving the key to rustls, which would not wipe it.
///
/// # Errors
/// Fails if rustls does not accept them, or if they do not belong together.
pub fn certified(
    chain: Vec<CertificateDer<'static>>,
    key: &PrivateKeyDer<'_>,
) -> Result<Arc<SingleCertAndKey>, IdentityError> {
    let key = rustls::crypto::aws_lc_rs::sign::any_supported_type(key).map_err(tls_error)?;
    let first = leaf(&chain)?;
    // Not with rustls' `keys_match`, which refuses certificates of X.509 version 1: MicroK8s' are.
    let certified = parse(&first)?;
    if key.public_key().is_some_and(|public| public.as_ref() != certified.public_key().raw) {
        return Err(IdentityError::Key("it does not belong to the certificate".to_owned()));
    }
    Ok(Arc::new(SingleCertAndKey::from(CertifiedKey::new(chain, key))))
}

/// The same from PEM.
///
/// # Errors
/// Also fails if the texts cannot be parsed: [`IdentityError::Key`] is about the key.
pub fn certified_pem(chain: &str, key: &str) -> Result<Arc<SingleCertAndKey>, IdentityError> {
    let (chain, key) = chain_and_key(chain, key)?;
    if chain.is_empty() {
        return Err(IdentityError::Parse("it has no certificate".to_owned()));
    }
    certified(chain, &key)
}

fn finish(mut config: ClientConfig, alpn: &[u8]) -> Arc<ClientConfig> {
    config.alpn_protocols = vec![alpn.to_vec()];
    // Every handshake must present the current certificate and be checked against the current roots.
    config.resumption = Resumption::disabled();
    config.send_ticket_request = None;
    Arc::new(config)
}

/// TLS 1.3 with the agent's certificate. The server's certificate must be signed by one of the identity's roots and
/// name [`SERVER_NAME`]. An agent's links resume earlier sessions of the same identity.
pub fn agent_tls(identity: &AgentIdentity, alpn: &[u8]) -> Result<Arc<ClientConfig>, IdentityError> {
    let config = match identity.tls.get() {
        Some(config) => config,
        None => {
            let mut config = client(Trust::Roots(Arc::new(identity.bundle.root_store())), identity.clock)?
                .with_client_cert_resolver(certified(identity.chain.clone(), &identity.key)?);
            config.resumption = Resumption::in_memory_sessions(1);
            config.send_ticket_request = Some(WANTED_TICKETS);
            identity.tls.get_or_init(|| config)
        }
    };
    let mut config = config.clone();
    if alpn != ALPN_TUNNEL && alpn != ALPN_EDGE {
        // Others look at the certificate that the server has now, which a resumed session does not show.
        return Ok(finish(config, alpn));
    }
    config.alpn_protocols = vec![alpn.to_vec()];
    Ok(Arc::new(config))
}

/// TLS 1.3 for connecting to other servers: presents a server's certificate, and requires one signed by one of these
/// roots. ALPN [`ALPN_PEER`].
///
/// # Errors
/// Fails if rustls does not accept the certificate or the key.
pub fn peer_tls(
    chain: Vec<CertificateDer<'static>>,
    key: &PrivateKeyDer<'_>,
    bundle: &TrustBundle,
    clock: Clock,
) -> Result<Arc<ClientConfig>, IdentityError> {
    let config = client(Trust::Roots(Arc::new(bundle.root_store())), clock)?
        .with_client_cert_resolver(certified(chain, key)?);
    Ok(finish(config, ALPN_PEER))
}

/// TLS 1.2 or 1.3 to a server of another system. Its certificate must name the dialled host and be signed by one of
/// these roots.
///
/// # Errors
/// Fails if rustls does not accept the certificate or the key.
pub fn foreign_tls(
    roots: RootCertStore,
    client: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'_>)>,
    alpn: Vec<Vec<u8>>,
    clock: Clock,
) -> Result<Arc<ClientConfig>, IdentityError> {
    let config = ClientConfig::builder_with_details(provider(), Arc::new(Time(clock)))
        .with_safe_default_protocol_versions()
        .map_err(tls_error)?
        .with_root_certificates(roots);
    let mut config = match client {
        Some((chain, key)) => config.with_client_cert_resolver(certified(chain, &key)?),
        None => config.with_no_client_auth(),
    };
    config.alpn_protocols = alpn;
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

/// TLS 1.3 for an enrolment by token, without a client certificate: the server also presents the CA certificate, whose key
/// must have the hash `ca_hash`. The name [`SERVER_NAME`], dates and usage are checked as usual. ALPN `h2`.
///
/// # Errors
/// Fails if `ca_hash` is malformed.
pub fn pinned_tls(ca_hash: &str) -> Result<Arc<ClientConfig>, IdentityError> {
    let config = client(Trust::Pinned(parse_ca_hash(ca_hash)?), Clock::default())?.with_no_client_auth();
    Ok(finish(config, ALPN_GRPC))
}

impl TrustBundle {
    /// Checks that a server's chain (leaf first) would be accepted with these roots as the trusted ones.
    pub fn verify_server(&self, chain: &[CertificateDer<'_>], now: SystemTime) -> Result<(), IdentityError> {
        let (leaf, rest) =
            chain.split_first().ok_or_else(|| IdentityError::Parse("an empty chain".into()))?;
        let trust = Trust::Roots(Arc::new(self.root_store()));
        trust
            .verify(leaf, rest, &server_name(), unix_time(now))
            .map_err(|error| IdentityError::Bundle(format!("it does not verify the present server: {error}")))
    }
}

/// Returns the reason in the error of a TLS handshake, if one of our own checks refused the peer.
pub fn refusal(error: &io::Error) -> Option<&IdentityError> {
    let inner = error.get_ref()?.downcast_ref::<rustls::Error>()?;
    match inner {
        rustls::Error::InvalidCertificate(CertificateError::Other(OtherError(reason))) => {
            reason.downcast_ref::<IdentityError>()
        }
        _ => None,
    }
}

/// True if a TLS connection failed because one end does not accept the other's certificate.
pub fn concerns_certificates(error: &io::Error) -> bool {
    let Some(inner) = error.get_ref() else { return false };
    match causes(inner).find_map(|cause| cause.downcast_ref::<rustls::Error>()) {
        Some(rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented) => true,
        Some(rustls::Error::AlertReceived(alert)) => refuses_certificate(*alert),
        _ => false,
    }
}

/// True for the alerts by which a peer refuses a certificate (RFC 8446 §6.2).
fn refuses_certificate(alert: AlertDescription) -> bool {
    matches!(
        alert,
        AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnknownCA
            | AlertDescription::AccessDenied
            | AlertDescription::DecryptError
            | AlertDescription::CertificateRequired
    )
}

/// TLS side of a server's agent port. The settings can be replaced at any time; open connections keep theirs.
///
/// TLS 1.3 only, ALPN [`ALPN_TUNNEL`], [`ALPN_PEER`], [`ALPN_EDGE`] and [`ALPN_GRPC`]. A client certificate is
/// optional (enrolment has none yet). If present, it must be signed by a client root and have exactly the format of an
/// agent's, a server's or a redirector's. Who showed one and asks for tickets (RFC 9149), as agents do, may resume its
/// session: [`Tickets`] says what is verified then.
#[derive(Debug)]
pub struct ServerTls {
    config: ArcSwap<ServerConfig>,
    leaf: ArcSwap<CertificateDer<'static>>,
    clock: Clock,
}

impl ServerTls {
    /// Creates the settings. Without `tickets`, no session is resumed. `chain` is leaf first and should include the CA's
    /// certificate, which a first enrolment pins by hash.
    ///
    /// # Errors
    /// Fails if rustls does not accept the certificate, the key or the roots.
    pub fn new(
        chain: Vec<CertificateDer<'static>>,
        key: &PrivateKeyDer<'_>,
        client_roots: &TrustBundle,
        tickets: Option<Tickets>,
        clock: Clock,
    ) -> Result<Self, IdentityError> {
        let leaf = leaf(&chain)?;
        let config = server_config(chain, key, client_roots.root_store(), tickets, clock)?;
        Ok(Self { config: ArcSwap::from(config), leaf: ArcSwap::from_pointee(leaf), clock })
    }

    /// Replaces certificate, key and client roots for later handshakes.
    ///
    /// # Errors
    /// Fails as [`ServerTls::new`] does; nothing has changed then.
    pub fn replace(
        &self,
        chain: Vec<CertificateDer<'static>>,
        key: &PrivateKeyDer<'_>,
        client_roots: &TrustBundle,
        tickets: Option<Tickets>,
    ) -> Result<(), IdentityError> {
        let leaf = leaf(&chain)?;
        self.config.store(server_config(chain, key, client_roots.root_store(), tickets, self.clock)?);
        self.leaf.store(Arc::new(leaf));
        Ok(())
    }

    /// True if the current certificate is valid for this DNS name or address.
    pub fn names(&self, name: &str) -> bool {
        let Ok(name) = ServerName::try_from(name) else { return false };
        let leaf = self.leaf.load();
        ParsedCertificate::try_from(&**leaf)
            .is_ok_and(|certificate| rustls::client::verify_server_name(&certificate, &name).is_ok())
    }

    /// Returns an acceptor with the current settings. Take a new one for each connection.
    pub fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(self.config.load_full())
    }
}

/// Supplies the current certificate and key to other ports with other clients.
impl ResolvesServerCert for ServerTls {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.config.load().cert_resolver.resolve(hello)
    }
}

/// TLS 1.2 and 1.3 for callers other than agents; `verifier` checks their certificates.
///
/// # Errors
/// Fails if rustls does not accept the settings.
pub fn caller_config(
    certificate: Arc<dyn ResolvesServerCert>,
    verifier: Arc<dyn ClientCertVerifier>,
    alpn: &[&[u8]],
) -> Result<ServerConfig, IdentityError> {
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(tls_error)?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(certificate);
    config.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
    without_resumption(&mut config);
    Ok(config)
}

/// Verifies that a certificate is signed by one of these roots.
///
/// # Errors
/// Fails if rustls does not accept the roots.
pub fn caller_verifier(
    roots: RootCertStore,
    required: bool,
) -> Result<Arc<dyn ClientCertVerifier>, IdentityError> {
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider());
    let builder = if required { builder } else { builder.allow_unauthenticated() };
    builder.build().map_err(tls_error)
}

/// Disables resumption: a resumed session would keep a client's certificate alive after it expired or its root was
/// withdrawn.
fn without_resumption(config: &mut ServerConfig) {
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
}

fn leaf(chain: &[CertificateDer<'static>]) -> Result<CertificateDer<'static>, IdentityError> {
    chain.first().cloned().ok_or_else(|| IdentityError::Parse("the chain has no certificate".into()))
}

fn server_config(
    chain: Vec<CertificateDer<'static>>,
    key: &PrivateKeyDer<'_>,
    client_roots: RootCertStore,
    tickets: Option<Tickets>,
    clock: Clock,
) -> Result<Arc<ServerConfig>, IdentityError> {
    let verifier = client_verifier(caller_verifier(client_roots, false)?, |certificate| {
        client_of_certificate(certificate).map(drop).map_err(refuse)
    });
    let mut config = ServerConfig::builder_with_details(provider(), Arc::new(Time(clock)))
        .with_protocol_versions(&[&version::TLS13])
        .map_err(tls_error)?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(certified(chain, key)?);
    config.alpn_protocols =
        vec![ALPN_TUNNEL, ALPN_PEER, ALPN_EDGE, ALPN_GRPC].into_iter().map(<[u8]>::to_vec).collect();
    without_resumption(&mut config);
    if let Some(tickets) = tickets {
        config.ticketer = Arc::new(tickets);
        config.max_tls13_tickets = usize::from(WANTED_TICKETS.new_session_count);
    }
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_certificate_of_x509_version_1_is_used() {
        let (text, key) = (include_str!("../testdata/version_1.pem"), rcgen::KeyPair::generate().unwrap());
        assert!(certified_pem(text, text).is_ok());
        let error = certified_pem(text, &key.serialize_pem()).unwrap_err().to_string();
        assert!(error.contains("does not belong to the certificate"), "{error}");
    }

    #[test]
    fn the_servers_name_is_a_dns_name() {
        assert_eq!(server_name().to_str(), SERVER_NAME);
    }
}
