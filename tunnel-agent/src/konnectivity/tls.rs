//! TLS with konnectivity's servers.

use std::path::Path;
use std::sync::Arc;

use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tunnel_link::link::{Wire, tune_link};
use tunnel_pki::{ALPN_GRPC, Zeroizing, foreign_tls};
use tunnel_runtime::config::{ConfigError, HostPort};
use tunnel_runtime::error::chain;

use crate::config::KonnectivityConfig;
use crate::reach::{Reach, Reached, Server, tls_hint};

/// Reads the files once, so that an agent does not start without them.
///
/// # Errors
/// A file that cannot be used.
pub(crate) fn check_files(config: &KonnectivityConfig) -> Result<(), ConfigError> {
    let files = "--konnectivity-ca, --konnectivity-cert and --konnectivity-key";
    client_config(config).map_err(|reason| ConfigError::without_value(files, reason))?;
    let Some(token) = &config.token_file else { return Ok(()) };
    let value = || token.display().to_string();
    let found = std::fs::metadata(token).map(drop);
    found.map_err(|error| ConfigError::new("--konnectivity-token-file", value(), error.to_string()))
}

/// Reads the files as they are now, because renewals of certificates replace them.
///
/// # Errors
/// The file that cannot be used, and the reason.
pub(crate) fn client_config(config: &KonnectivityConfig) -> Result<Arc<ClientConfig>, String> {
    let mut roots = RootCertStore::empty();
    for root in certificates(&config.ca)? {
        roots.add(root).map_err(|error| format!("{}: {error}", config.ca.display()))?;
    }
    let client = match &config.client {
        Some((chain, key)) => {
            let pem = Zeroizing::new(read(key)?);
            let of_key = PrivateKeyDer::from_pem_slice(&pem);
            let of_key = of_key.map_err(|error| format!("{}: no private key: {error}", key.display()))?;
            Some((certificates(chain)?, of_key))
        }
        None => None,
    };
    let alpn = config.alpn.iter().map(|name| name.as_bytes().to_vec()).chain([ALPN_GRPC.to_vec()]).collect();
    let named = |error: &dyn std::fmt::Display| match &config.client {
        Some((chain, key)) => format!("{} with {}: {error}", chain.display(), key.display()),
        None => error.to_string(),
    };
    foreign_tls(roots, client, alpn, config.clock).map_err(|error| named(&error))
}

/// Connects to the server and does the TLS handshake. Also returns the address of the proxy in use.
///
/// # Errors
/// The step that failed, and the reason.
pub(crate) async fn connect(
    reach: &Reach,
    server: &HostPort,
    tls: Arc<ClientConfig>,
) -> Result<(TlsStream<Wire>, Option<String>), String> {
    let reached = reach.connect(&Server::Named(server.to_string())).await;
    let Reached { stream, proxy, .. } =
        reached.map_err(|error| format!("connecting to {server}: {error}"))?;
    tune_link(&stream);
    let name = ServerName::try_from(server.host.trim_end_matches('.').to_owned());
    let name = name.map_err(|error| format!("{server}: {error}"))?;
    match TlsConnector::from(tls).connect(name, stream).await {
        Ok(stream) => Ok((stream, proxy)),
        Err(error) => Err(format!("TLS with {server}: {}{}", chain(&error), tls_hint(proxy.as_deref()))),
    }
}

/// Reads certificates. At least one is required.
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let pem = read(path)?;
    let parsed = CertificateDer::pem_slice_iter(&pem).collect::<Result<Vec<_>, _>>();
    let certificates = parsed.map_err(|error| format!("{}: not PEM: {error}", path.display()))?;
    if certificates.is_empty() {
        return Err(format!("{}: no certificate in it", path.display()));
    }
    Ok(certificates)
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tunnel_runtime::clock::Clock;

    use super::*;

    #[test]
    fn a_file_that_cannot_be_used_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| dir.path().join(name);
        let key = rcgen::KeyPair::generate().unwrap();
        let own =
            rcgen::CertificateParams::new(vec!["edge-1".to_owned()]).unwrap().self_signed(&key).unwrap();
        std::fs::write(file("ca"), own.pem()).unwrap();
        std::fs::write(file("key"), key.serialize_pem()).unwrap();
        std::fs::write(file("other"), rcgen::KeyPair::generate().unwrap().serialize_pem()).unwrap();
        let config = |ca: &str, client: Option<(&str, &str)>| {
            let config = KonnectivityConfig {
                server: "a:8091".parse().unwrap(),
                ca: file(ca),
                client: client.map(|(chain, key)| (file(chain), file(key))),
                token_file: None,
                agent_id: "edge-1".to_owned(),
                identifiers: None,
                alpn: vec!["konnectivity".to_owned()],
                sync_interval: Duration::from_secs(1),
                sync_interval_cap: Duration::from_secs(10),
                clock: Clock::default(),
            };
            client_config(&config)
        };
        let made = config("ca", Some(("ca", "key"))).unwrap();
        assert_eq!(made.alpn_protocols, [b"konnectivity".to_vec(), b"h2".to_vec()]);
        assert!(made.client_auth_cert_resolver.has_certs());
        assert!(!config("ca", None).unwrap().client_auth_cert_resolver.has_certs());
        for (ca, client, at_fault) in [
            ("none", None, "none: No such file"),
            ("key", None, "key: no certificate in it"),
            ("ca", Some(("key", "key")), "key: no certificate in it"),
            ("ca", Some(("ca", "ca")), "ca: no private key"),
            ("ca", Some(("ca", "other")), "other: "),
        ] {
            let error = config(ca, client).err().unwrap_or_default();
            assert!(error.contains(at_fault), "{ca} {client:?}: {error:?} lacks {at_fault:?}");
        }
    }
}
