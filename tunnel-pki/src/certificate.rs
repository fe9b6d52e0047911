//! Format of certificates: required fields, and reading them.

use std::time::{Duration, SystemTime};

use rustls_pki_types::CertificateDer;
use sha2::{Digest, Sha256};
use tunnel_runtime::{NodeName, NodeNameError};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::{ExtendedKeyUsage, GeneralName};
use x509_parser::prelude::FromDer;
use x509_parser::x509::{AttributeTypeAndValue, X509Name};

use super::error::IdentityError;
use super::holder::{
    AGENT_COMMON_NAME_PREFIX, AGENT_ORGANIZATION, Holder, REDIRECTOR_COMMON_NAME_PREFIX,
    REDIRECTOR_ORGANIZATION,
};

/// DNS name in every tunnel-server's certificate. Agents verify this name whatever address they dialled. The CA is
/// private, so an address behind NAT, a load balancer or a port mapping works without being in the certificate.
pub const SERVER_NAME: &str = "tunnel-server.postern.internal";
/// Subject organisation of the certificates that servers present to each other.
pub const PEER_ORGANIZATION: &str = "postern:servers";
/// Prefix of the server's id in the common name of such a certificate.
pub const PEER_COMMON_NAME_PREFIX: &str = "postern:server:";
/// Time by which `notBefore` precedes the issue, because an edge node's clock may be that far behind. Not counted as
/// part of a certificate's life.
pub const BACKDATE: Duration = Duration::from_secs(300);

/// Part of a certificate's life after which it is renewed, in percent.
const RENEW_AFTER_PERCENT: u32 = 80;

pub(super) fn parse<'a>(certificate: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, IdentityError> {
    match X509Certificate::from_der(certificate) {
        Ok(([], parsed)) => Ok(parsed),
        Ok(_) => Err(IdentityError::Parse("bytes follow after its end".into())),
        Err(error) => Err(IdentityError::Parse(error.to_string())),
    }
}

/// Returns the holder of an enrolled certificate, and its node.
///
/// # Errors
/// [`IdentityError::NotAgent`] with the reason if it has exactly the format of neither an agent's certificate nor a
/// redirector's.
pub fn holder_of_certificate(certificate: &CertificateDer<'_>) -> Result<(Holder, NodeName), IdentityError> {
    match client_of_certificate(certificate)? {
        Client::Agent(node) => Ok((Holder::Agent, node)),
        Client::Redirector(node) => Ok((Holder::Redirector, node)),
        Client::Server(_) => Err(IdentityError::NotAgent(format!(
            "its organisation is {PEER_ORGANIZATION:?}: it is a server's"
        ))),
    }
}

/// Subject of a client's certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Client {
    /// The agent of a node.
    Agent(NodeName),
    /// A server, by its id.
    Server(String),
    /// The redirector of a node.
    Redirector(NodeName),
}

/// Returns the subject of a client certificate: an agent, with `O=postern:agents` and `CN=postern:node:<node>`; a server,
/// with `O=postern:servers` and `CN=postern:server:<id>`; or a redirector, with `O=postern:redirectors` and
/// `CN=postern:redirector:<node>`.
///
/// # Errors
/// [`IdentityError::NotAgent`] with the reason if it has exactly none of these formats: one organisation and one common
/// name, nothing else; extended key usage client authentication and no other; not a CA. The TLS handshake checks that a
/// trusted root signed it.
pub fn client_of_certificate(certificate: &CertificateDer<'_>) -> Result<Client, IdentityError> {
    let parsed = parse(certificate)?;
    let subject = parsed.subject();
    let organization = single(subject, "organisation", subject.iter_organization())?;
    if ![AGENT_ORGANIZATION, PEER_ORGANIZATION, REDIRECTOR_ORGANIZATION].contains(&organization) {
        return Err(IdentityError::NotAgent(format!(
            "its organisation is {organization:?}, not {AGENT_ORGANIZATION:?}"
        )));
    }
    let common_name = single(subject, "common name", subject.iter_common_name())?;
    if subject.iter_attributes().count() != 2 {
        return Err(IdentityError::NotAgent(
            "its subject has more than an organisation and a common name".into(),
        ));
    }
    let client = match organization {
        PEER_ORGANIZATION => Client::Server(server_of_common_name(common_name)?),
        REDIRECTOR_ORGANIZATION => {
            Client::Redirector(node_of_common_name(common_name, REDIRECTOR_COMMON_NAME_PREFIX)?)
        }
        _ => Client::Agent(node_of_common_name(common_name, AGENT_COMMON_NAME_PREFIX)?),
    };
    require_usage(&parsed, "client authentication", |usage| usage.client_auth)
        .map_err(IdentityError::NotAgent)?;
    Ok(client)
}

/// Returns the id in `postern:server:<id>`.
fn server_of_common_name(common_name: &str) -> Result<String, IdentityError> {
    match common_name.strip_prefix(PEER_COMMON_NAME_PREFIX) {
        Some(id) if !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_graphic()) => Ok(id.to_owned()),
        _ => Err(IdentityError::NotAgent(format!(
            "its common name {common_name:?} is not {PEER_COMMON_NAME_PREFIX:?} and a server's id"
        ))),
    }
}

/// Returns the node after the prefix, as in `postern:node:<name>`.
fn node_of_common_name(common_name: &str, prefix: &str) -> Result<NodeName, IdentityError> {
    let Some(name) = common_name.strip_prefix(prefix) else {
        return Err(IdentityError::NotAgent(format!(
            "its common name {common_name:?} does not begin with {prefix:?}"
        )));
    };
    name.parse().map_err(|error: NodeNameError| IdentityError::NotAgent(error.to_string()))
}

fn single<'a>(
    subject: &X509Name<'a>,
    what: &str,
    mut attributes: impl Iterator<Item = &'a AttributeTypeAndValue<'a>>,
) -> Result<&'a str, IdentityError> {
    let (Some(first), None) = (attributes.next(), attributes.next()) else {
        return Err(IdentityError::NotAgent(format!("its subject \"{subject}\" has not exactly one {what}")));
    };
    first.as_str().map_err(|error| IdentityError::NotAgent(format!("its {what} is not text: {error}")))
}

/// Returns the names (DNS names and addresses, as text) in a tunnel-server's certificate.
///
/// # Errors
/// [`IdentityError::NotServer`] with the reason if the certificate does not have exactly a server's format: it names
/// [`SERVER_NAME`], its extended key usage is server authentication and no other, and it is not a CA.
pub fn server_names_of_certificate(certificate: &CertificateDer<'_>) -> Result<Vec<String>, IdentityError> {
    let parsed = parse(certificate)?;
    let names = alternative_names(&parsed)?;
    if !names.iter().any(|name| name == SERVER_NAME) {
        return Err(IdentityError::NotServer(format!("it does not name {SERVER_NAME}")));
    }
    require_usage(&parsed, "server authentication", |usage| usage.server_auth)
        .map_err(IdentityError::NotServer)?;
    Ok(names)
}

pub(super) fn alternative_names(certificate: &X509Certificate<'_>) -> Result<Vec<String>, IdentityError> {
    match certificate.subject_alternative_name() {
        Ok(Some(extension)) => Ok(extension.value.general_names.iter().filter_map(name_text).collect()),
        Ok(None) => Ok(Vec::new()),
        Err(error) => Err(IdentityError::NotServer(format!("its alternative names: {error}"))),
    }
}

fn name_text(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => {
            let v4 = <[u8; 4]>::try_from(*bytes).map(|octets| std::net::IpAddr::from(octets).to_string());
            let v6 = <[u8; 16]>::try_from(*bytes).map(|octets| std::net::IpAddr::from(octets).to_string());
            v4.or(v6).ok()
        }
        _ => None,
    }
}

fn require_usage(
    certificate: &X509Certificate<'_>,
    wanted: &str,
    has: impl Fn(&ExtendedKeyUsage<'_>) -> bool,
) -> Result<(), String> {
    if certificate.is_ca() {
        return Err("it is a CA".into());
    }
    let extension = certificate
        .extended_key_usage()
        .map_err(|error| format!("its extended key usage: {error}"))?
        .ok_or_else(|| format!("it has no extended key usage, want {wanted}"))?;
    let usage = extension.value;
    let others = [
        usage.any,
        usage.server_auth,
        usage.client_auth,
        usage.code_signing,
        usage.email_protection,
        usage.time_stamping,
        usage.ocsp_signing,
    ];
    let count = others.iter().filter(|set| **set).count() + usage.other.len();
    if has(usage) && count == 1 {
        Ok(())
    } else {
        Err(format!("its extended key usage is not {wanted} alone"))
    }
}

/// True if a certificate may sign others (basic constraints, RFC 5280 section 4.2.1.9).
pub fn is_ca(certificate: &CertificateDer<'_>) -> bool {
    parse(certificate).is_ok_and(|parsed| parsed.is_ca())
}

/// True if `root` signed `certificate`. Ignores the dates of both.
pub(super) fn is_signed_by(certificate: &CertificateDer<'_>, root: &CertificateDer<'_>) -> bool {
    let (Ok(certificate), Ok(root)) = (parse(certificate), parse(root)) else { return false };
    certificate.issuer().as_raw() == root.subject().as_raw()
        && certificate.verify_signature(Some(root.public_key())).is_ok()
}

/// Returns `sha256:` and the hexadecimal SHA-256 of the certificate's SubjectPublicKeyInfo, as in kubeadm's
/// `--discovery-token-ca-cert-hash`. It identifies the CA's key, in whichever certificate.
pub fn ca_hash(certificate: &CertificateDer<'_>) -> Result<String, IdentityError> {
    Ok(public_key_hash(parse(certificate)?.public_key().raw))
}

/// Returns `sha256:` and the hexadecimal SHA-256 of a DER SubjectPublicKeyInfo.
pub fn public_key_hash(public_key_info: &[u8]) -> String {
    format!("sha256:{:x}", Sha256::digest(public_key_info))
}

pub(super) fn public_key_info(certificate: &CertificateDer<'_>) -> Result<Vec<u8>, IdentityError> {
    Ok(parse(certificate)?.public_key().raw.to_vec())
}

/// Checks a CA hash in the format of [`ca_hash`] and returns it in lower case.
///
/// # Errors
/// [`IdentityError::CaHash`] if it has another format.
pub fn parse_ca_hash(text: &str) -> Result<String, IdentityError> {
    let lower = text.trim().to_ascii_lowercase();
    match lower.strip_prefix("sha256:") {
        Some(hex) if hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit()) => Ok(lower),
        _ => Err(IdentityError::CaHash(text.chars().take(100).collect())),
    }
}

/// Validity period of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// The certificate's `notBefore`, which is [`BACKDATE`] before its issue.
    pub not_before: SystemTime,
    /// The certificate's `notAfter`.
    pub not_after: SystemTime,
}

impl Validity {
    /// Time of the certificate's issue.
    pub fn issued(&self) -> SystemTime {
        // A certificate shorter than the backdating is not one of ours; all of it counts as life.
        Some(self.not_before + BACKDATE).filter(|issued| *issued < self.not_after).unwrap_or(self.not_before)
    }

    /// Time from the issue to `not_after`.
    pub fn life(&self) -> Duration {
        self.not_after.duration_since(self.issued()).unwrap_or_default()
    }

    /// Time to renew: after 80 % of the life.
    pub fn renew_at(&self) -> SystemTime {
        self.issued() + self.life() * RENEW_AFTER_PERCENT / 100
    }

    /// True if the certificate has expired.
    pub fn is_over(&self, now: SystemTime) -> bool {
        now > self.not_after
    }
}

/// Returns a certificate's validity period.
pub fn validity(certificate: &CertificateDer<'_>) -> Result<Validity, IdentityError> {
    let parsed = parse(certificate)?;
    let time = |seconds: i64| match u64::try_from(seconds) {
        Ok(seconds) => SystemTime::UNIX_EPOCH + Duration::from_secs(seconds),
        Err(_) => SystemTime::UNIX_EPOCH,
    };
    let validity = parsed.validity();
    Ok(Validity {
        not_before: time(validity.not_before.timestamp()),
        not_after: time(validity.not_after.timestamp()),
    })
}

/// Encodes the certificates as PEM (RFC 7468), in order.
pub fn pem_of_certificates(certificates: &[CertificateDer<'_>]) -> String {
    let config = pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF);
    certificates
        .iter()
        .map(|certificate| pem::encode_config(&pem::Pem::new("CERTIFICATE", certificate.as_ref()), config))
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rcgen::{
        BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose as Usage, IsCa, KeyPair,
    };

    use super::*;

    fn certificate(
        names: &[(DnType, &str)],
        usages: &[Usage],
        sans: &[&str],
        ca: bool,
    ) -> CertificateDer<'static> {
        let sans: Vec<String> = sans.iter().map(|san| (*san).to_owned()).collect();
        let mut params = CertificateParams::new(sans).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        for (kind, value) in names {
            params.distinguished_name.push(kind.clone(), *value);
        }
        params.extended_key_usages = usages.to_vec();
        if ca {
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        }
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
    }

    const O: DnType = DnType::OrganizationName;
    const CN: DnType = DnType::CommonName;

    #[test]
    fn an_agents_certificate_names_its_node() {
        let good = [(O, "postern:agents"), (CN, "postern:node:edge-1")];
        let client = client_of_certificate(&certificate(&good, &[Usage::ClientAuth], &[], false)).unwrap();
        assert_eq!(client, Client::Agent("edge-1".parse().unwrap()));
    }

    #[test]
    fn a_redirector_is_neither_an_agent_nor_a_server() {
        let name = |organization, name| {
            certificate(&[(O, organization), (CN, name)], &[Usage::ClientAuth], &[], false)
        };
        let redirector = name("postern:redirectors", "postern:redirector:cloud-2");
        let node: NodeName = "cloud-2".parse().unwrap();
        assert_eq!(client_of_certificate(&redirector).unwrap(), Client::Redirector(node.clone()));
        assert_eq!(holder_of_certificate(&redirector).unwrap(), (Holder::Redirector, node));
        let server = name("postern:servers", "postern:server:cloud-1");
        assert!(holder_of_certificate(&server).unwrap_err().to_string().contains("a server's"));
        for mixed in ["postern:node:cloud-2", "postern:server:cloud-2"] {
            assert!(client_of_certificate(&name("postern:redirectors", mixed)).is_err(), "{mixed}");
        }
        assert!(client_of_certificate(&name("postern:agents", "postern:redirector:cloud-2")).is_err());
    }

    #[test]
    fn other_certificates_are_refused_with_the_reason() {
        let good = vec![(O, "postern:agents"), (CN, "postern:node:edge-1")];
        let client = vec![Usage::ClientAuth];
        let cases = [
            (vec![(CN, "postern:node:edge-1")], client.clone(), false, "organisation"),
            (
                vec![(O, "system:masters"), (CN, "postern:node:edge-1")],
                client.clone(),
                false,
                "system:masters",
            ),
            (vec![(O, "postern:agents")], client.clone(), false, "common name"),
            (vec![(O, "postern:agents"), (CN, "edge-1")], client.clone(), false, "does not begin with"),
            (vec![(O, "postern:agents"), (CN, "postern:node:")], client.clone(), false, "empty"),
            (vec![(O, "postern:agents"), (CN, "postern:node:a/b")], client.clone(), false, "only lower-case"),
            (
                vec![
                    (O, "postern:agents"),
                    (CN, "postern:node:edge-1"),
                    (DnType::OrganizationalUnitName, "x"),
                ],
                client.clone(),
                false,
                "more than",
            ),
            (good.clone(), vec![], false, "no extended key usage"),
            (good.clone(), vec![Usage::ServerAuth], false, "client authentication alone"),
            (good.clone(), vec![Usage::ClientAuth, Usage::ServerAuth], false, "client authentication alone"),
            (good.clone(), vec![Usage::ClientAuth, Usage::Any], false, "client authentication alone"),
            (good.clone(), vec![Usage::ClientAuth, Usage::Other(vec![1, 2, 3])], false, "alone"),
            (good, client, true, "it is a CA"),
        ];
        for (names, usages, ca, reason) in cases {
            let error =
                client_of_certificate(&certificate(&names, &usages, &[], ca)).unwrap_err().to_string();
            assert!(error.contains(reason), "{names:?} {usages:?}: {error}");
        }
        assert!(matches!(
            client_of_certificate(&CertificateDer::from(vec![1, 2, 3])),
            Err(IdentityError::Parse(_))
        ));
    }

    /// rcgen keeps one value per attribute type, so the test makes the duplicate by patching a placeholder of equal
    /// length.
    #[test]
    fn two_common_names_are_refused() {
        let names = [
            (O, "postern:agents"),
            (CN, "postern:node:edge-1"),
            (DnType::CountryName, "postern:node:edge-2"),
        ];
        let mut der = certificate(&names, &[Usage::ClientAuth], &[], false).to_vec();
        let country = [0x06, 0x03, 0x55, 0x04, 0x06];
        let mut patched = 0;
        for at in 0..der.len() - country.len() {
            if der[at..at + country.len()] == country {
                der[at + 4] = 0x03;
                patched += 1;
            }
        }
        assert_eq!(patched, 2, "issuer and subject");
        let error = client_of_certificate(&CertificateDer::from(der)).unwrap_err().to_string();
        assert!(error.contains("not exactly one common name"), "{error}");
    }

    #[test]
    fn a_servers_certificate_has_its_name_and_usage() {
        let server = [Usage::ServerAuth];
        let names = ["a.example", SERVER_NAME, "10.0.0.1", "fd00::1"];
        let found = server_names_of_certificate(&certificate(&[], &server, &names, false)).unwrap();
        assert_eq!(found, names);
        for (usages, names, ca, reason) in [
            (&server[..], &["a.example"][..], false, "does not name"),
            (&server, &[], false, "does not name"),
            (&[Usage::ServerAuth, Usage::ClientAuth], &[SERVER_NAME], false, "alone"),
            (&[Usage::ClientAuth], &[SERVER_NAME], false, "alone"),
            (&server, &[SERVER_NAME], true, "it is a CA"),
        ] {
            let error = server_names_of_certificate(&certificate(&[], usages, names, ca)).unwrap_err();
            assert!(error.to_string().contains(reason), "{error}");
        }
    }

    #[test]
    fn renewal_is_due_at_80_percent_of_the_life_from_the_issue() {
        let issued = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let validity =
            Validity { not_before: issued - BACKDATE, not_after: issued + Duration::from_secs(100) };
        assert_eq!(validity.issued(), issued);
        assert_eq!(validity.renew_at(), issued + Duration::from_secs(80));
        assert!(!validity.is_over(validity.not_after));
        assert!(validity.is_over(validity.not_after + Duration::from_secs(1)));
        let short = Validity { not_before: issued, not_after: issued + Duration::from_secs(10) };
        assert_eq!(short.renew_at(), issued + Duration::from_secs(8));
    }

    #[test]
    fn ca_hashes_are_checked() {
        let hash = ca_hash(&certificate(&[], &[], &[], true)).unwrap();
        assert_eq!(parse_ca_hash(&hash).unwrap(), hash);
        assert_eq!(parse_ca_hash(&format!(" {}\n", hash.to_uppercase())).unwrap(), hash);
        for bad in
            ["", "sha256:", "sha256:12", &hash[7..], &hash.replace("sha256", "sha512"), &format!("{hash}0")]
        {
            assert!(parse_ca_hash(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn common_names_round_trip(name in "[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?(\\.[a-z0-9]{1,5}){0,3}") {
            let node = node_of_common_name(&format!("postern:node:{name}"), AGENT_COMMON_NAME_PREFIX).unwrap();
            prop_assert_eq!(node.as_str(), name);
        }

        #[test]
        fn common_names_never_panic(text in any::<String>()) {
            if let Ok(node) = node_of_common_name(&text, AGENT_COMMON_NAME_PREFIX) {
                prop_assert_eq!(format!("postern:node:{node}"), text);
            }
        }

        #[test]
        fn garbage_is_no_certificate(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(client_of_certificate(&CertificateDer::from(bytes.clone())).is_err());
            prop_assert!(server_names_of_certificate(&CertificateDer::from(bytes)).is_err());
        }
    }
}
