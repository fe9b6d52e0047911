//! The CA in memory: its roots, and the certificates that it signs.

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyUsagePurpose, PublicKeyData, SanType, SerialNumber,
};
use rustls_pki_types::CertificateDer;
use serde::Serialize;
use tunnel_pki::{
    BACKDATE, CsrKey, Holder, PEER_COMMON_NAME_PREFIX, PEER_ORGANIZATION, PrivateKey, SERVER_NAME, Tickets,
    TrustBundle, Validity, public_key_hash, validity,
};
use tunnel_runtime::NodeName;
use tunnel_runtime::clock::Clock;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::error::PkiError;
use super::token::parse_ttl;

const DAY: Duration = Duration::from_secs(86_400);
/// Time by which `notBefore` of roots' and servers' certificates precedes the moment of issue, for clocks that differ.
/// For agents' certificates it is shorter, [`BACKDATE`], because those issued before a readmission are refused.
const OWN_BACKDATE: Duration = DAY;
/// Longer than machines last: the operator decides when to replace a root.
const ROOT_LIFE: Duration = Duration::from_secs(10 * 365 * 86_400);

#[derive(Clone, Copy, Debug)]
pub struct Lifetimes {
    pub agent: Duration,
    pub server: Duration,
    /// By which certificates are issued.
    pub clock: Clock,
}

impl Default for Lifetimes {
    fn default() -> Self {
        Self { agent: 30 * DAY, server: 30 * DAY, clock: Clock::default() }
    }
}

impl Lifetimes {
    /// The defaults, overridden by `POSTERN_AGENT_CERTIFICATE_LIFE` and `POSTERN_SERVER_CERTIFICATE_LIFE` (such as
    /// `90s`), so that a test or a drill can watch renewals.
    pub fn from_environment() -> Result<Self, PkiError> {
        Self::from_lookup(|key| std::env::var(key).ok())
    }

    pub(super) fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, PkiError> {
        let read = |key: &str, default: Duration| match lookup(key) {
            Some(text) => parse_ttl(&text)
                .map_err(|reason| PkiError::Duration { text: format!("{key}={text}"), reason }),
            None => Ok(default),
        };
        let default = Self::default();
        Ok(Self {
            agent: read("POSTERN_AGENT_CERTIFICATE_LIFE", default.agent)?,
            server: read("POSTERN_SERVER_CERTIFICATE_LIFE", default.server)?,
            clock: default.clock,
        })
    }
}

/// A root's role in a rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Issuing,
    /// Newer than the signing root: trusted, to be activated.
    Introduced,
    /// Older than the signing root: still trusted, to be retired.
    Retiring,
}

/// A root certificate and, if present, its key.
pub struct Root {
    pub certificate: CertificateDer<'static>,
    /// Hash of its public key, as pinned by agents.
    pub hash: String,
    /// 1 for the installation's first root, incremented by every introduction. It is the certificate's serial number.
    pub generation: u64,
    signer: Option<Issuer<'static, PrivateKey>>,
}

impl Root {
    pub(super) fn create(generation: u64) -> Result<(Self, PrivateKey), PkiError> {
        let key = PrivateKey::generate()?;
        let mut params = ca_params(&key, 1);
        params.serial_number = Some(SerialNumber::from(generation));
        set_own_validity(&mut params, ROOT_LIFE, Clock::default());
        let certificate = params.self_signed(&key).map_err(|error| PkiError::sign(&error))?.der().clone();
        let pair = PrivateKey::from_der(&key.to_der())?;
        Ok((Self::new(certificate, Some(pair))?, key))
    }

    /// `key` must belong to the certificate.
    pub(super) fn new(
        certificate: CertificateDer<'static>,
        key: Option<PrivateKey>,
    ) -> Result<Self, PkiError> {
        let parsed = match X509Certificate::from_der(&certificate) {
            Ok((_, parsed)) => parsed,
            Err(error) => return Err(PkiError::Sign(format!("root certificate: {error}"))),
        };
        let hash = public_key_hash(parsed.public_key().raw);
        let serial = u64::try_from(&parsed.tbs_certificate.serial).ok();
        let generation = serial.filter(|serial| *serial > 0).ok_or_else(|| {
            PkiError::Sign("root certificate: its serial number is not a generation".into())
        })?;
        let signer = match key {
            Some(key) if public_key_hash(&key.subject_public_key_info()) != hash => {
                return Err(PkiError::Sign("it is not the key of the root certificate".into()));
            }
            Some(key) => {
                Some(Issuer::from_ca_cert_der(&certificate, key).map_err(|error| PkiError::sign(&error))?)
            }
            None => None,
        };
        Ok(Self { certificate, hash, generation, signer })
    }

    pub fn has_key(&self) -> bool {
        self.signer.is_some()
    }

    pub fn validity(&self) -> Result<Validity, PkiError> {
        Ok(validity(&self.certificate)?)
    }
}

pub struct IssuedCertificate {
    /// Leaf first, as sent to the peer.
    pub chain: Vec<CertificateDer<'static>>,
    /// Expiry of the leaf.
    pub not_after: SystemTime,
    /// [`Root::hash`] of the root that signed it.
    pub root: String,
}

/// A snapshot of the CA: its roots and their keys.
pub struct CaState {
    roots: Vec<Root>,
    bundle: TrustBundle,
    lifetimes: Lifetimes,
}

impl CaState {
    /// The first root must have its key.
    pub(super) fn new(roots: Vec<Root>, lifetimes: Lifetimes) -> Result<Self, PkiError> {
        let bundle = TrustBundle::new(roots.iter().map(|root| root.certificate.clone()).collect())?;
        Ok(Self { roots, bundle, lifetimes })
    }

    /// The trusted roots, the signing one first.
    pub fn bundle(&self) -> &TrustBundle {
        &self.bundle
    }

    /// The signing root's hash, for `--ca-hash`.
    pub fn hash(&self) -> &str {
        // A bundle, and so the list, has at least one root.
        self.roots.first().map_or("", |root| &root.hash)
    }

    /// The roots, the signing one first.
    pub fn roots(&self) -> &[Root] {
        &self.roots
    }

    /// True if the root with this hash is one of these.
    pub fn trusts(&self, hash: &str) -> bool {
        self.roots.iter().any(|root| root.hash == hash)
    }

    pub(super) const fn clock(&self) -> Clock {
        self.lifetimes.clock
    }

    pub fn role(&self, root: &Root) -> Role {
        match self.roots.first() {
            Some(first) if root.generation > first.generation => Role::Introduced,
            Some(first) if root.generation < first.generation => Role::Retiring,
            _ => Role::Issuing,
        }
    }

    fn signer(&self) -> Result<(&Root, &Issuer<'static, PrivateKey>), PkiError> {
        self.roots
            .first()
            .and_then(|root| Some((root, root.signer.as_ref()?)))
            .ok_or_else(|| PkiError::Sign("the key of the signing root is not here".into()))
    }

    /// The same for all servers with these roots.
    pub(super) fn tickets(&self) -> Result<Tickets, PkiError> {
        let (_, issuer) = self.signer()?;
        Ok(Tickets::new(issuer.key(), &self.bundle, self.clock()))
    }

    /// Signs a certificate for the node: `O=postern:agents`, `CN=postern:node:<node>`, client authentication only.
    pub fn issue_agent(&self, node: &NodeName, key: &CsrKey) -> Result<IssuedCertificate, PkiError> {
        self.issue_for((Holder::Agent, node), key, self.lifetimes.agent, SystemTime::UNIX_EPOCH)
    }

    /// Does the work of [`CaState::issue_agent`] for any holder. `life` is capped at the usual lifetime. The
    /// certificate counts as issued after `after`, even if that is ahead of the clock by less than [`BACKDATE`]: an
    /// older one may be refused.
    pub fn issue_for(
        &self,
        (holder, node): (Holder, &NodeName),
        key: &CsrKey,
        life: Duration,
        after: SystemTime,
    ) -> Result<IssuedCertificate, PkiError> {
        let mut params = leaf_params(ExtendedKeyUsagePurpose::ClientAuth);
        params.distinguished_name = holder.distinguished_name(node);
        let now = self.clock().now();
        // Dates in certificates are whole seconds. It must already be valid by the clocks of other servers.
        let issued = (after + Duration::from_secs(1)).min(now + BACKDATE * 4 / 5).max(now);
        set_validity(&mut params, issued, self.lifetimes.agent.min(life));
        self.sign(&params, &key.public_key)
    }

    /// Creates a key and a certificate for the server: [`SERVER_NAME`] and the given names, server authentication only.
    ///
    /// The chain also has the signing root (pinned by hash in a first enrolment), all other roots and, for each of them
    /// whose key is present, the signing root cross-signed by it: an agent that was away when the signing root was
    /// introduced still verifies the server by a root that it knows.
    pub fn issue_server(
        &self,
        dns: &[String],
        addresses: &[IpAddr],
    ) -> Result<(IssuedCertificate, PrivateKey), PkiError> {
        let key = PrivateKey::generate()?;
        let mut params = leaf_params(ExtendedKeyUsagePurpose::ServerAuth);
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, SERVER_NAME);
        let own = std::iter::once(SERVER_NAME);
        for name in own.chain(dns.iter().map(String::as_str).filter(|name| *name != SERVER_NAME)) {
            let dns_name = dns_name(name)?;
            params.subject_alt_names.push(SanType::DnsName(dns_name));
        }
        params.subject_alt_names.extend(addresses.iter().copied().map(SanType::IpAddress));
        set_own_validity(&mut params, self.lifetimes.server, self.clock());
        let mut issued = self.sign(&params, &key)?;
        let (signing, issuer) = self.signer()?;
        issued.chain.push(signing.certificate.clone());
        for other in self.roots.iter().skip(1) {
            if let Some(signer) = &other.signer {
                let mut params = ca_params(issuer.key(), 0);
                params.serial_number = Some(random_serial());
                set_own_validity(&mut params, ROOT_LIFE, self.clock());
                let cross = params.signed_by(issuer.key(), signer).map_err(|error| PkiError::sign(&error))?;
                issued.chain.push(cross.der().clone());
            }
            issued.chain.push(other.certificate.clone());
        }
        Ok((issued, key))
    }

    /// Creates a key and a certificate for connections to other servers: `O=postern:servers`, `CN=postern:server:<id>`,
    /// client authentication only.
    pub fn issue_peer(&self, server_id: &str) -> Result<(IssuedCertificate, PrivateKey), PkiError> {
        let key = PrivateKey::generate()?;
        let mut params = leaf_params(ExtendedKeyUsagePurpose::ClientAuth);
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, PEER_ORGANIZATION);
        let name = format!("{PEER_COMMON_NAME_PREFIX}{server_id}");
        params.distinguished_name.push(DnType::CommonName, name);
        set_own_validity(&mut params, self.lifetimes.server, self.clock());
        Ok((self.sign(&params, &key)?, key))
    }

    fn sign(
        &self,
        params: &CertificateParams,
        key: &impl PublicKeyData,
    ) -> Result<IssuedCertificate, PkiError> {
        let (root, signer) = self.signer()?;
        let certificate = params.signed_by(key, signer).map_err(|error| PkiError::sign(&error))?;
        let leaf = certificate.der().clone();
        let not_after = validity(&leaf)?.not_after;
        Ok(IssuedCertificate { chain: vec![leaf], not_after, root: root.hash.clone() })
    }
}

/// Checks a name as rustls does in agents: TLS clients can match it.
pub(super) fn dns_name(name: &str) -> Result<rcgen::string::Ia5String, PkiError> {
    let refuse = |reason: String| PkiError::Name { name: name.chars().take(260).collect(), reason };
    let plain = name.strip_prefix("*.").unwrap_or(name);
    rustls_pki_types::DnsName::try_from(plain).map_err(|_| refuse("it is not a DNS name".into()))?;
    rcgen::string::Ia5String::try_from(name).map_err(|error| refuse(error.to_string()))
}

/// The name is derived from the key, so a cross-signed root has the same name.
fn ca_params(key: &PrivateKey, path_length: u8) -> CertificateParams {
    let hash = public_key_hash(&key.subject_public_key_info());
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, "postern");
    params.distinguished_name.push(DnType::CommonName, format!("postern CA {}", short_hash(&hash)));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(path_length));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

fn leaf_params(usage: ExtendedKeyUsagePurpose) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![usage];
    params.use_authority_key_identifier_extension = true;
    params.serial_number = Some(random_serial());
    params
}

fn set_validity(params: &mut CertificateParams, issued: SystemTime, life: Duration) {
    params.not_before = (issued - BACKDATE).into();
    params.not_after = (issued + life).into();
}

/// Sets the validity of a certificate whose time of issue does not matter.
fn set_own_validity(params: &mut CertificateParams, life: Duration, clock: Clock) {
    let now = clock.now();
    set_validity(params, now, life);
    if life > 2 * OWN_BACKDATE {
        params.not_before = (now - OWN_BACKDATE).into();
    }
}

/// 127 random bits, positive (RFC 5280 §4.1.2.2).
fn random_serial() -> SerialNumber {
    let mut bytes: [u8; 16] = rand::random();
    bytes[0] &= 0x7f;
    SerialNumber::from_slice(&bytes)
}

/// The first 16 hexadecimal digits of `sha256:…`.
pub(super) fn short_hash(hash: &str) -> &str {
    let hex = hash.strip_prefix("sha256:").unwrap_or(hash);
    hex.get(..16).unwrap_or(hex)
}
