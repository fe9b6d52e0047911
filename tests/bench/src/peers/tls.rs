//! Certificates for the peers that speak TLS: P-256 as Postern's own.
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use postern_testbed::CLOUD;
use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};

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
        fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "bench");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = Issuer::new(params.clone(), KeyPair::generate().context("the CA's key")?);
        let root = params.self_signed(issuer.key()).context("the CA's certificate")?;
        let leaf = |name: &str, usage: ExtendedKeyUsagePurpose| {
            let key = KeyPair::generate().context("a key")?;
            let names = vec![CLOUD.to_string(), edge.to_owned()];
            let mut params = CertificateParams::new(names).context("the names of a certificate")?;
            params.distinguished_name.push(DnType::CommonName, name);
            params.extended_key_usages = vec![usage];
            let certificate = params.signed_by(&key, &issuer).context("signing")?;
            anyhow::Ok((certificate.pem(), key.serialize_pem()))
        };
        let (server, server_key) = leaf("server", ExtendedKeyUsagePurpose::ServerAuth)?;
        let (client, client_key) = leaf("client", ExtendedKeyUsagePurpose::ClientAuth)?;
        let write = |name: &str, text: &str| {
            let path = dir.join(name);
            fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
            anyhow::Ok(path)
        };
        Ok(Self {
            ca: write("ca.crt", &root.pem())?,
            server: write("server.crt", &server)?,
            server_key: write("server.key", &server_key)?,
            server_both: write("server.pem", &format!("{server}{server_key}"))?,
            client: write("client.crt", &client)?,
            client_key: write("client.key", &client_key)?,
        })
    }
}
