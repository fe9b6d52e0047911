//! TLS to targets: verified against the cluster's CA and the node's name or addresses, with this server's own client
//! certificate.
//!
//! A certificate rather than a token: an attacker who controls one edge node could use the token that it receives at
//! every other node.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::sign::SingleCertAndKey;
use rustls::{CertificateError, ClientConfig, Error};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use tokio::sync::watch;
use tunnel_pki::{IdentityError, TrustBundle, certified_pem, server_verifier};
use tunnel_runtime::config::ConfigError;
use tunnel_runtime::reloaded::{FileMetrics, NamedFile, ReloadedFile, Texts};

use crate::listener::config::TargetConfig;
use crate::runtime::settings::{InternalListener, Settings};

/// TLS settings for targets.
pub(crate) struct TargetTls {
    plain_ports: BTreeSet<u16>,
    material: ArcSwap<Material>,
    settings: watch::Receiver<Arc<Settings>>,
}

/// Content of the certificate files.
#[derive(Default)]
pub(crate) struct Material {
    /// `None` without a CA.
    verifier: Option<Arc<WebPkiServerVerifier>>,
    certificate: Option<Arc<SingleCertAndKey>>,
}

impl TargetTls {
    /// Reads the certificate files; `None` if none are given.
    ///
    /// # Errors
    /// A given file cannot be used.
    pub(crate) fn read(
        config: &TargetConfig,
        metrics: &FileMetrics,
    ) -> Result<Option<(ReloadedFile<Material>, Material)>, ConfigError> {
        let named = |key, path: &Option<PathBuf>| path.as_deref().map(|path| NamedFile::new(key, path));
        let given = [
            named("--kubelet-certificate-authority", &config.ca),
            named("--kubelet-client-certificate", &config.certificate).map(NamedFile::optional),
            named("--kubelet-client-key", &config.key).map(NamedFile::optional),
        ];
        let files: Vec<_> = given.iter().flatten().cloned().collect();
        if files.is_empty() {
            return Ok(None);
        }
        let parse = move |texts: &Texts| Material::parse(&given, texts);
        ReloadedFile::open("kubelet-tls", files, parse, metrics).map(Some)
    }

    pub(crate) fn new(
        plain_ports: BTreeSet<u16>,
        material: Material,
        settings: watch::Receiver<Arc<Settings>>,
    ) -> Self {
        Self { plain_ports, material: ArcSwap::from_pointee(material), settings }
    }

    pub(crate) fn set(&self, material: Material) {
        self.material.store(Arc::new(material));
    }

    /// True if this port of nodes is plain HTTP.
    pub(super) fn is_plain(&self, port: u16) -> bool {
        self.plain_ports.contains(&port)
            || self.settings.borrow().internal.get(&port) == Some(&InternalListener::Http)
    }

    /// Returns the settings for a target whose certificate has to be valid for one of these names.
    ///
    /// # Errors
    /// TLS is impossible, for example without a CA.
    pub(super) fn config(
        &self,
        names: Vec<ServerName<'static>>,
        h2: bool,
    ) -> Result<Arc<ClientConfig>, String> {
        let material = self.material.load();
        let verifier = material.verifier.clone().ok_or(
            "no certificates of nodes can be verified: give --kubelet-certificate-authority, or name the port in \
             --http-ports if it is plain HTTP",
        )?;
        let verifier = server_verifier(move |leaf, rest, _, now| of_any(&names, &verifier, leaf, rest, now));
        let builder = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .dangerous()
            .with_custom_certificate_verifier(verifier);
        let mut config = match &material.certificate {
            Some(certificate) => builder.with_client_cert_resolver(certificate.clone()),
            None => builder.with_no_client_auth(),
        };
        // Every connection has to show the current certificate, and to be checked against the current CA.
        config.resumption = Resumption::disabled();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        if h2 {
            config.alpn_protocols.insert(0, b"h2".to_vec());
        }
        Ok(Arc::new(config))
    }
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

impl Material {
    /// Parses the CA, the certificate and its key. `texts` holds the texts of the files that are given.
    fn parse(given: &[Option<NamedFile>; 3], texts: &Texts) -> Result<Self, ConfigError> {
        let mut texts = texts.iter();
        let [ca, chain, key] = given.each_ref().map(|file| {
            let text = file.as_ref().and_then(|_| texts.next()?.as_deref());
            file.as_ref().map(|file| (file, text))
        });
        let verifier = match ca {
            Some((file, Some(pem))) => {
                let bundle =
                    TrustBundle::from_foreign_pem(pem).map_err(|error| file.error(error.to_string()))?;
                let roots = Arc::new(bundle.root_store());
                let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider()).build();
                Some(verifier.map_err(|error| file.error(error.to_string()))?)
            }
            _ => None,
        };
        let certificate = match (chain, key) {
            (Some((file, Some(chain))), Some((key_file, Some(key)))) => {
                let certified = certified_pem(chain, key).map_err(|error| match error {
                    IdentityError::Key(_) => key_file.error(error.to_string()),
                    _ => file.error(error.to_string()),
                });
                Some(certified?)
            }
            (Some(_), _) => {
                tracing::warn!("--kubelet-client-certificate is not there yet: kubelets will answer 401");
                None
            }
            _ => None,
        };
        Ok(Self { verifier, certificate })
    }
}

/// Accepts a certificate that is valid for any of the node's names and addresses: kubelets' certificates differ in
/// which they have.
fn of_any(
    names: &[ServerName<'_>],
    verifier: &WebPkiServerVerifier,
    leaf: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
    now: UnixTime,
) -> Result<(), Error> {
    let mut last = Error::InvalidCertificate(CertificateError::NotValidForName);
    for name in names {
        match verifier.verify_server_cert(leaf, intermediates, name, &[], now) {
            Ok(_) => return Ok(()),
            Err(
                error @ Error::InvalidCertificate(
                    CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
                ),
            ) => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}
