//! The cluster's certificates and kubeconfigs, in kubeadm's layout: one CA signs the certificates that the API server,
//! the kubelets and the administrator present to each other.
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, SanType,
};

/// The user as which an API server calls aggregated API servers.
pub const FRONT_PROXY: &str = "front-proxy-client";

/// A certificate and its key, as files.
#[derive(Debug, Clone)]
pub struct Pair {
    pub certificate: PathBuf,
    /// Key in PEM (PKCS#8).
    pub key: PathBuf,
}

/// The CA and the folder of all files.
#[derive(Debug)]
pub struct Pki {
    dir: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

impl Pki {
    /// Makes the CA, the key that signs service account tokens, and the API servers' credentials for aggregated API
    /// servers (`front-proxy-…`).
    pub fn create(dir: PathBuf) -> Result<Self> {
        fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
        // A separate CA: a holder of one of its certificates may act as any user.
        let front_proxy =
            Self { issuer: authority(&dir, "front-proxy-ca", "front-proxy-ca")?, dir: dir.clone() };
        front_proxy.client(FRONT_PROXY, FRONT_PROXY, &[])?;
        let tokens = KeyPair::generate().context("making the key for service account tokens")?;
        write(&dir.join("service-account.key"), &tokens.serialize_pem())?;
        write(&dir.join("service-account.pub"), &tokens.public_key_pem())?;
        Ok(Self { issuer: authority(&dir, "ca", "kubernetes")?, dir })
    }

    /// Returns the path of a file in the folder: `ca.crt`, `ca.key`, `front-proxy-ca.crt`, `front-proxy-client.crt`,
    /// `front-proxy-client.key`, `service-account.key`, `service-account.pub`.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Issues a client certificate: the user is the CN, the groups are the Os.
    pub fn client(&self, name: &str, user: &str, groups: &[&str]) -> Result<Pair> {
        let mut params = CertificateParams::default();
        params.distinguished_name = subject(user, groups);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(name, params)
    }

    /// Issues a server certificate. Names that are addresses become IP SANs.
    pub fn server(&self, name: &str, common_name: &str, names: &[String]) -> Result<Pair> {
        let mut params = CertificateParams::default();
        params.distinguished_name = subject(common_name, &[]);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        for name in names {
            params.subject_alt_names.push(match name.parse::<IpAddr>() {
                Ok(address) => SanType::IpAddress(address),
                Err(_) => {
                    SanType::DnsName(name.as_str().try_into().with_context(|| format!("name {name:?}"))?)
                }
            });
        }
        self.sign(name, params)
    }

    /// Writes a kubeconfig whose user is that pair; it refers to files.
    pub fn kubeconfig(&self, name: &str, server: &str, user: &Pair) -> Result<PathBuf> {
        let user = format!(
            "client-certificate: {}\n    client-key: {}",
            user.certificate.display(),
            user.key.display()
        );
        self.kubeconfig_of(name, server, &user)
    }

    /// Writes a kubeconfig whose user has a bearer token.
    pub fn kubeconfig_with_token(&self, name: &str, server: &str, token: &str) -> Result<PathBuf> {
        self.kubeconfig_of(name, server, &format!("token: {token}"))
    }

    fn kubeconfig_of(&self, name: &str, server: &str, user: &str) -> Result<PathBuf> {
        let path = self.dir.join(format!("{name}.conf"));
        let authority = self.file("ca.crt");
        let text = format!(
            "apiVersion: v1
kind: Config
current-context: {name}
clusters:
- name: kubernetes
  cluster:
    server: {server}
    certificate-authority: {}
users:
- name: {name}
  user:
    {user}
contexts:
- name: {name}
  context:
    cluster: kubernetes
    user: {name}
",
            authority.display()
        );
        write(&path, &text)?;
        Ok(path)
    }

    /// Signs a certificate. Overwrites existing files of `name`, which is how a certificate is rotated.
    fn sign(&self, name: &str, mut params: CertificateParams) -> Result<Pair> {
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate().with_context(|| format!("making the key of {name}"))?;
        let certificate = params.signed_by(&key, &self.issuer).with_context(|| format!("signing {name}"))?;
        let pair =
            Pair { certificate: self.file(&format!("{name}.crt")), key: self.file(&format!("{name}.key")) };
        write(&pair.certificate, &certificate.pem())?;
        write(&pair.key, &key.serialize_pem())?;
        Ok(pair)
    }
}

/// Makes a CA as `NAME.crt` and `NAME.key` in `dir`.
fn authority(dir: &Path, name: &str, common_name: &str) -> Result<Issuer<'static, KeyPair>> {
    let key = KeyPair::generate().with_context(|| format!("making the key of {name}"))?;
    let mut params = CertificateParams::default();
    params.distinguished_name = subject(common_name, &[]);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    let certificate = params.self_signed(&key).with_context(|| format!("signing {name}"))?;
    write(&dir.join(format!("{name}.crt")), &certificate.pem())?;
    write(&dir.join(format!("{name}.key")), &key.serialize_pem())?;
    Ok(Issuer::new(params, key))
}

fn subject(user: &str, groups: &[&str]) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, user);
    for group in groups {
        name.push(DnType::OrganizationName, *group);
    }
    name
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}
