//! Certificates that the server itself would never issue, signed with its CA key.
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::time::SystemTime;

use anyhow::{Context as _, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, SerialNumber,
};
use rustls::pki_types::CertificateDer;
use tunnel_pki::SERVER_NAME;

/// The CA in a server's state folder.
#[derive(Debug)]
pub struct Authority(pub Issuer<'static, KeyPair>);

impl Authority {
    /// Opens the CA, which must have only one root.
    pub fn open(state_dir: &Path) -> Result<Self> {
        let dir = state_dir.join("ca");
        let certificate = fs::read_to_string(dir.join("ca.crt")).context("reading ca.crt")?;
        let mut keys =
            fs::read_dir(&dir).context("reading the CA's folder")?.flatten().map(|entry| entry.path());
        let key = keys
            .find(|path| path.extension().is_some_and(|kind| kind == "key"))
            .context("no key of the CA")?;
        let key = KeyPair::from_pem(&fs::read_to_string(&key)?).context("the CA's key")?;
        Ok(Self(Issuer::from_ca_cert_pem(&certificate, key).context("the CA's certificate")?))
    }

    /// Signs a certificate (PEM) for an agent of `node` with this validity.
    pub fn agent(&self, node: &str, key: &KeyPair, valid: Range<SystemTime>) -> Result<String> {
        let mut name = DistinguishedName::new();
        name.push(DnType::OrganizationName, "postern:agents");
        name.push(DnType::CommonName, format!("postern:node:{node}"));
        let mut params = CertificateParams::default();
        params.distinguished_name = name;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params.not_before = valid.start.into();
        params.not_after = valid.end.into();
        Ok(params.signed_by(key, &self.0).context("signing")?.pem())
    }

    /// Signs a certificate for a server with this validity.
    pub fn server(&self, key: &KeyPair, valid: Range<SystemTime>) -> Result<CertificateDer<'static>> {
        let mut params = CertificateParams::new(vec![SERVER_NAME.to_owned()]).context("the server's name")?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.not_before = valid.start.into();
        params.not_after = valid.end.into();
        Ok(params.signed_by(key, &self.0).context("signing")?.der().clone())
    }

    /// Returns the first root (PEM) with the same key but another validity.
    pub fn root(&self, valid: Range<SystemTime>) -> Result<String> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "postern");
        params.serial_number = Some(SerialNumber::from(1_u64));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(1));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.not_before = valid.start.into();
        params.not_after = valid.end.into();
        Ok(params.self_signed(self.0.key()).context("signing")?.pem())
    }
}
