//! The cluster's certificates and kubeconfigs, as kubeadm lays them out: one CA signs what the API server, the
//! kubelets and the administrator present to each other.
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, SanType,
};

/// A certificate and its key, as files.
#[derive(Debug, Clone)]
pub struct Pair {
    pub certificate: PathBuf,
    /// The key, PEM (PKCS#8).
    pub key: PathBuf,
}

/// The CA and the folder of all files.
#[derive(Debug)]
pub struct Pki {
    dir: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

impl Pki {
    /// Makes the CA and the key that signs service account tokens.
    pub fn create(dir: PathBuf) -> Result<Self> {
        fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
        let key = KeyPair::generate().context("making the CA's key")?;
        let mut params = CertificateParams::default();
        params.distinguished_name = subject("kubernetes", &[]);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let certificate = params.self_signed(&key).context("signing the CA")?;
        let tokens = KeyPair::generate().context("making the key for service account tokens")?;
        write(&dir.join("ca.crt"), &certificate.pem())?;
        write(&dir.join("ca.key"), &key.serialize_pem())?;
        write(&dir.join("service-account.key"), &tokens.serialize_pem())?;
        write(&dir.join("service-account.pub"), &tokens.public_key_pem())?;
        Ok(Self { dir, issuer: Issuer::new(params, key) })
    }

    /// A file of the folder: `ca.crt`, `ca.key`, `service-account.key`, `service-account.pub`.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// A client's certificate: the user is the CN, its groups are the Os.
    pub fn client(&self, name: &str, user: &str, groups: &[&str]) -> Result<Pair> {
        let mut params = CertificateParams::default();
        params.distinguished_name = subject(user, groups);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(name, params)
    }

    /// A server's certificate. Names that are addresses become IP SANs.
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

    /// A kubeconfig whose user is that pair; it refers to files.
    pub fn kubeconfig(&self, name: &str, server: &str, user: &Pair) -> Result<PathBuf> {
        let user = format!(
            "client-certificate: {}\n    client-key: {}",
            user.certificate.display(),
            user.key.display()
        );
        self.kubeconfig_of(name, server, &user)
    }

    /// A kubeconfig whose user has a bearer token.
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

    /// Overwrites existing files of `name`: that is how a certificate is rotated.
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
