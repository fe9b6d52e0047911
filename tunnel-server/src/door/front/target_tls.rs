//! TLS to targets: verified against the cluster's CA and the node's name or addresses, with a certificate that is this server's
//! own.
//!
//! A certificate and not a token: whoever has taken over one edge node could use a token that it is shown at every other.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{CertificateError, ClientConfig, Error};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tunnel_core::config::ConfigError;
use tunnel_core::identity::{TrustBundle, server_verifier};
use tunnel_core::log_once::LogOnce;

use crate::config::TargetConfig;
use crate::settings::{InternalDoor, Settings};

/// How often the files are looked at again.
const EVERY: Duration = Duration::from_secs(10);

/// The files with the certificates, as they were read.
pub(crate) struct TargetFiles {
    files: TargetConfig,
    material: Material,
}

/// How targets are spoken to.
pub(crate) struct TargetTls {
    files: TargetConfig,
    material: ArcSwap<Material>,
    settings: watch::Receiver<Arc<Settings>>,
}

/// What the files hold.
struct Material {
    /// As text, to notice a change.
    texts: Vec<Option<String>>,
    /// None: there is no CA.
    verifier: Option<Arc<WebPkiServerVerifier>>,
    certificate: Option<Arc<SingleCertAndKey>>,
}

impl TargetFiles {
    /// # Errors
    /// One that was given cannot be used.
    pub(crate) fn read(files: TargetConfig) -> Result<Self, ConfigError> {
        Ok(Self { material: Material::read(&files)?, files })
    }
}

impl TargetTls {
    pub(crate) fn new(read: TargetFiles, settings: watch::Receiver<Arc<Settings>>) -> Self {
        let TargetFiles { files, material } = read;
        Self { files, material: ArcSwap::from_pointee(material), settings }
    }

    /// Follows the files until the stop. What cannot be used leaves the last ones in effect.
    pub(crate) async fn follow(self: Arc<Self>, stop: CancellationToken) {
        let mut failing = LogOnce::default();
        while stop.run_until_cancelled(tokio::time::sleep(EVERY)).await.is_some() {
            match Material::read(&self.files) {
                Ok(material) => {
                    failing.clear();
                    if material.texts != self.material.load().texts {
                        self.material.store(Arc::new(material));
                        tracing::info!("the certificates for TLS to nodes are in effect");
                    }
                }
                Err(error) => {
                    if failing.is_new(&error) {
                        tracing::error!(%error, "TLS to nodes goes on with the certificates known so far");
                    }
                }
            }
        }
    }

    /// Whether this port of nodes is plain HTTP.
    pub(super) fn is_plain(&self, port: u16) -> bool {
        self.files.plain_ports.contains(&port)
            || self.settings.borrow().internal.get(&port) == Some(&InternalDoor::Http)
    }

    /// For a target whose certificate has to be valid for one of these names.
    ///
    /// # Errors
    /// Why there can be no TLS.
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
        // Each connection shows the present certificate, and is checked against the present CA.
        config.resumption = Resumption::disabled();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        if h2 {
            config.alpn_protocols.insert(0, b"h2".to_vec());
        }
        Ok(Arc::new(config))
    }
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

impl Material {
    fn read(files: &TargetConfig) -> Result<Self, ConfigError> {
        const CA: &str = "--kubelet-certificate-authority";
        let read = |key: &'static str, path: &Option<PathBuf>| {
            path.as_deref().map(|path| read(key, path)).transpose().map(Option::flatten)
        };
        let ca = read(CA, &files.ca)?;
        if let (None, Some(path)) = (&ca, &files.ca) {
            return Err(ConfigError::new(CA, path.display().to_string(), "there is no such file"));
        }
        let chain = read("--kubelet-client-certificate", &files.certificate)?;
        let key = read("--kubelet-client-key", &files.key)?;
        if chain.is_none() && files.certificate.is_some() {
            tracing::warn!("--kubelet-client-certificate is not there yet: kubelets will answer 401");
        }
        let wrong = |key: &'static str, path: &Option<PathBuf>, reason: String| {
            ConfigError::new(key, path.as_deref().unwrap_or(Path::new("")).display().to_string(), reason)
        };
        let verifier = match &ca {
            None => None,
            Some(pem) => {
                let fail = |reason: String| wrong(CA, &files.ca, reason);
                let bundle = TrustBundle::from_pem(pem).map_err(|error| fail(error.to_string()))?;
                let roots = Arc::new(bundle.root_store());
                let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider()).build();
                Some(verifier.map_err(|error| fail(error.to_string()))?)
            }
        };
        let certificate = match (&chain, &key) {
            (Some(chain), Some(key)) => {
                let fail = |reason: String| wrong("--kubelet-client-certificate", &files.certificate, reason);
                Some(certified(chain, key).map_err(fail)?)
            }
            _ => None,
        };
        Ok(Self { texts: vec![ca, chain, key], verifier, certificate })
    }
}

/// `None`: there is no such file.
fn read(key: &'static str, path: &Path) -> Result<Option<String>, ConfigError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(ConfigError::new(key, path.display().to_string(), error.to_string())),
    }
}

fn certified(chain: &str, key: &str) -> Result<Arc<SingleCertAndKey>, String> {
    let chain = CertificateDer::pem_slice_iter(chain.as_bytes())
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| format!("not PEM: {error}"))?;
    if chain.is_empty() {
        return Err("it has no certificate".to_owned());
    }
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes())
        .map_err(|error| format!("--kubelet-client-key is not a private key in PEM: {error}"))?;
    let key = rustls::crypto::ring::sign::any_supported_type(&key).map_err(|error| error.to_string())?;
    let certified = CertifiedKey::new(chain, key);
    match certified.keys_match() {
        Ok(()) => Ok(Arc::new(SingleCertAndKey::from(certified))),
        Err(error) => Err(format!("it does not belong to --kubelet-client-key: {error}")),
    }
}

/// A certificate is the node's if it is valid for any of its names and addresses: kubelets' differ in what they have.
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
