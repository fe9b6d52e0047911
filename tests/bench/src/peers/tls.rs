//! Certificates for the peers that speak TLS: P-256 as Postern's own.
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use postern_testbed::CLOUD;
use postern_testbed::cluster::pki::Pki;

/// Files in PEM.
#[derive(Clone, Debug)]
pub(crate) struct Certificates {
    /// The CA of all certificates.
    pub(crate) ca: PathBuf,
    /// Certificate of the end that is dialled.
    pub(crate) server: PathBuf,
    /// Its key.
    pub(crate) server_key: PathBuf,
    /// Chain and key of the end that is dialled, in one file as HAProxy wants them.
    pub(crate) server_both: PathBuf,
    /// Certificate of the end that dials.
    pub(crate) client: PathBuf,
    /// Its key.
    pub(crate) client_key: PathBuf,
}

impl Certificates {
    /// Makes them in `dir`, for the cloud host and one address at the edge.
    pub(crate) fn create(dir: &Path, edge: &str) -> Result<Self> {
        let pki = Pki::create(dir.to_owned())?;
        let server = pki.server("server", "server", &[CLOUD.to_string(), edge.to_owned()])?;
        let client = pki.client("client", "client", &[])?;
        let server_both = dir.join("server.pem");
        let both = [fs::read(&server.certificate)?, fs::read(&server.key)?].concat();
        fs::write(&server_both, both).with_context(|| format!("writing {}", server_both.display()))?;
        Ok(Self {
            ca: pki.file("ca.crt"),
            server: server.certificate,
            server_key: server.key,
            server_both,
            client: client.certificate,
            client_key: client.key,
        })
    }
}
