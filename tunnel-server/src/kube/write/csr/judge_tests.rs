//! Covers every way in which a request can be wrong.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use rcgen::{CertificateParams, CustomExtension, DistinguishedName, DnType, KeyPair, SanType};
use tunnel_kube::SIGNER;
use tunnel_pki::{AGENT_ORGANIZATION, PrivateKey};
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::prelude::FromDer as _;

use super::*;
use crate::caller::{NODE_NAME, POD_NAME};

const SERVICE_ACCOUNT: &str = "system:serviceaccount:kube-system:tunnel-agent";
const ACCOUNTS: Accounts<'_> =
    Accounts { namespace: "kube-system", agent: "tunnel-agent", redirector: "tunnel-redirector" };

fn subject(parts: &[(DnType, &str)]) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    for (kind, value) in parts {
        name.push(kind.clone(), *value);
    }
    name
}

fn of_node(node: &str) -> DistinguishedName {
    subject(&[
        (DnType::OrganizationName, AGENT_ORGANIZATION),
        (DnType::CommonName, &format!("postern:node:{node}")),
    ])
}

fn params(name: DistinguishedName) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = name;
    params
}

fn pem(params: &CertificateParams) -> String {
    params.serialize_request(&PrivateKey::generate().unwrap()).unwrap().pem().unwrap()
}

fn section(der: &[u8]) -> ByteString {
    let base64 = serde_json::to_string(&ByteString(der.to_vec())).unwrap();
    let base64 = base64.trim_matches('"');
    ByteString(
        format!("-----BEGIN CERTIFICATE REQUEST-----\n{base64}\n-----END CERTIFICATE REQUEST-----\n")
            .into_bytes(),
    )
}

/// A valid request of edge-1's kubelet.
fn good() -> CertificateSigningRequest {
    CertificateSigningRequest {
        spec: CertificateSigningRequestSpec {
            signer_name: SIGNER.to_owned(),
            username: Some("system:node:edge-1".to_owned()),
            groups: Some(vec!["system:nodes".to_owned(), "system:authenticated".to_owned()]),
            usages: Some(vec![CLIENT_AUTH.to_owned()]),
            request: ByteString(pem(&params(of_node("edge-1"))).into_bytes()),
            ..CertificateSigningRequestSpec::default()
        },
        ..CertificateSigningRequest::default()
    }
}

fn with(change: impl FnOnce(&mut CertificateSigningRequestSpec)) -> CertificateSigningRequest {
    let mut csr = good();
    change(&mut csr.spec);
    csr
}

fn asking(params: &CertificateParams) -> CertificateSigningRequest {
    with(|spec| spec.request = ByteString(pem(params).into_bytes()))
}

fn from_pod(extra: &[(&str, &[&str])]) -> CertificateSigningRequest {
    with(|spec| {
        spec.username = Some(SERVICE_ACCOUNT.to_owned());
        spec.groups = Some(vec!["system:serviceaccounts".to_owned()]);
        let values = |values: &[&str]| values.iter().map(|value| (*value).to_owned()).collect();
        let pod = (POD_NAME.to_owned(), vec!["tunnel-agent-x".to_owned()]);
        let extra: BTreeMap<_, _> =
            extra.iter().map(|(key, named)| ((*key).to_owned(), values(named))).collect();
        spec.extra = Some(extra.into_iter().chain([pod]).collect());
    })
}

fn approved(csr: &CertificateSigningRequest) -> Approved {
    judge(csr, ACCOUNTS).unwrap()
}

#[track_caller]
fn assert_denied(csr: &CertificateSigningRequest, reason: &str, part: &str) {
    let Denial(given, message) = judge(csr, ACCOUNTS).expect_err(reason);
    assert!(given == reason && message.contains(part), "{reason} {part:?}: {given} {message}");
}

#[test]
fn a_node_gets_its_own_certificate() {
    assert_eq!(approved(&good()).node.as_str(), "edge-1");
    assert_eq!(approved(&good()).life, None);
    let bound = from_pod(&[(NODE_NAME, &["edge-1"])]);
    assert_eq!(approved(&bound).node.as_str(), "edge-1");
    let both = with(|spec| spec.usages = Some(vec![DIGITAL_SIGNATURE.to_owned(), CLIENT_AUTH.to_owned()]));
    approved(&both);
    let short = with(|spec| spec.expiration_seconds = Some(600));
    assert_eq!(approved(&short).life, Some(Duration::from_secs(600)));
}

/// A kubelet may only be its node's agent: a redirector reaches every edge node.
#[test]
fn a_redirectors_certificate_is_for_its_service_account_only() {
    let node: NodeName = "cloud-2".parse().unwrap();
    let request = |holder: Holder| ByteString(pem(&params(holder.distinguished_name(&node))).into_bytes());
    let from = |user: &str, holder| {
        let mut csr = from_pod(&[(NODE_NAME, &["cloud-2"])]);
        csr.spec.username = Some(user.to_owned());
        csr.spec.request = request(holder);
        csr
    };
    let redirector = "system:serviceaccount:kube-system:tunnel-redirector";
    let own = approved(&from(redirector, Holder::Redirector));
    assert_eq!((own.holder, own.node), (Holder::Redirector, node.clone()));
    assert_eq!(approved(&from(SERVICE_ACCOUNT, Holder::Agent)).holder, Holder::Agent);
    assert_denied(&from(redirector, Holder::Agent), "OtherHolder", "a node's redirector, not of its agent");
    assert_denied(
        &from(SERVICE_ACCOUNT, Holder::Redirector),
        "OtherHolder",
        "a node's agent, not of its redirector",
    );
    let kubelet = with(|spec| {
        spec.username = Some("system:node:cloud-2".to_owned());
        spec.request = request(Holder::Redirector);
    });
    assert_denied(&kubelet, "OtherHolder", "not of its redirector");
    for other in [
        "system:serviceaccount:other:tunnel-redirector",
        "system:serviceaccount:kube-system:tunnel-redirector-2",
    ] {
        assert_denied(&from(other, Holder::Redirector), "NotANode", "neither a node");
    }
}

#[test]
fn the_agents_own_request_is_approved() {
    let key = PrivateKey::generate().unwrap();
    let node: NodeName = "edge-1".parse().unwrap();
    let mut params = params(Holder::Agent.distinguished_name(&node));
    params.is_ca = rcgen::IsCa::NoCa;
    let csr = with(|spec| {
        spec.request = ByteString(params.serialize_request(&key).unwrap().pem().unwrap().into_bytes());
    });
    let hash = tunnel_pki::public_key_hash(&rcgen::PublicKeyData::subject_public_key_info(&key));
    assert_eq!(approved(&csr).key.hash, hash);
}

#[test]
fn requesters_that_are_not_the_node() {
    assert_denied(&with(|spec| spec.username = Some("system:node:edge-2".to_owned())), "OtherNode", "edge-2");
    for groups in [None, Some(vec![]), Some(vec!["system:nodes2".to_owned(), "system:masters".to_owned()])] {
        assert_denied(&with(|spec| spec.groups = groups), "NotANode", "system:nodes");
    }
    for user in [
        None,
        Some(""),
        Some("edge-1"),
        Some("system:node"),
        Some("kubernetes-admin"),
        Some("system:serviceaccount:default:tunnel-agent"),
        Some("system:serviceaccount:kube-system:default"),
        Some("system:serviceaccount:kube-system:tunnel-agent2"),
        Some("system:serviceaccount:kube-system"),
        Some("xsystem:node:edge-1"),
    ] {
        // Even with the extra and the group of a valid requester.
        let csr = with(|spec| {
            spec.username = user.map(str::to_owned);
            spec.extra = Some(BTreeMap::from([(NODE_NAME.to_owned(), vec!["edge-1".to_owned()])]));
        });
        assert_denied(&csr, "NotANode", "neither a node");
    }
    for user in ["system:node:", "system:node:Edge-1", "system:node:../edge-1", "system:node:edge-1\n"] {
        assert_denied(&with(|spec| spec.username = Some(user.to_owned())), "NotANode", "node name");
    }
}

#[test]
fn service_account_tokens_that_name_no_node_or_another_one() {
    assert_denied(&from_pod(&[]), "NotANode", "not bound to a pod on a node");
    assert_denied(&with(|spec| spec.username = Some(SERVICE_ACCOUNT.to_owned())), "NotANode", "not bound");
    assert_denied(&from_pod(&[(NODE_NAME, &["edge-2"])]), "OtherNode", "edge-2");
    assert_denied(&from_pod(&[(NODE_NAME, &["edge-1", "edge-2"])]), "NotANode", "2 values");
    assert_denied(&from_pod(&[(NODE_NAME, &[])]), "NotANode", "0 values");
    assert_denied(&from_pod(&[(NODE_NAME, &[""])]), "NotANode", "empty");
    // The token is bound to a Node: its creator chose the node.
    let unbound = with(|spec| {
        spec.username = Some(SERVICE_ACCOUNT.to_owned());
        spec.extra = Some(BTreeMap::from([(NODE_NAME.to_owned(), vec!["edge-1".to_owned()])]));
    });
    assert_denied(&unbound, "NotANode", "not bound to a pod: ");
    // Namespace and name are configurable.
    let bound = from_pod(&[(NODE_NAME, &["edge-1"])]);
    assert!(judge(&bound, Accounts { namespace: "postern", ..ACCOUNTS }).is_err());
    assert!(judge(&bound, Accounts { agent: "agent", ..ACCOUNTS }).is_err());
}

#[test]
fn usages_other_than_a_clients() {
    for usages in [
        &[][..],
        &[DIGITAL_SIGNATURE],
        &["server auth"],
        &[CLIENT_AUTH, "server auth"],
        &[CLIENT_AUTH, DIGITAL_SIGNATURE, "key encipherment"],
        &[CLIENT_AUTH, "cert sign"],
        &[CLIENT_AUTH, "any"],
        &[CLIENT_AUTH, CLIENT_AUTH],
        &["Client Auth"],
    ] {
        let usages: Vec<_> = usages.iter().map(|usage| (*usage).to_owned()).collect();
        assert_denied(&with(|spec| spec.usages = Some(usages)), "WrongUsages", "client auth");
    }
    assert_denied(&with(|spec| spec.usages = None), "WrongUsages", "client auth");
}

#[test]
fn invalid_lifetimes() {
    for seconds in [0, -1, i32::MIN] {
        assert_denied(
            &with(|spec| spec.expiration_seconds = Some(seconds)),
            "InvalidExpiration",
            &seconds.to_string(),
        );
    }
}

#[test]
fn subjects_other_than_the_one() {
    use DnType::{CommonName, CountryName, OrganizationName, OrganizationalUnitName};
    let (org, name) = ((OrganizationName, AGENT_ORGANIZATION), (CommonName, "postern:node:edge-1"));
    for parts in [
        vec![],
        vec![name.clone()],
        vec![org.clone()],
        vec![(OrganizationName, "system:masters"), name.clone()],
        vec![(OrganizationName, "system:nodes"), (CommonName, "system:node:edge-1")],
        vec![org.clone(), (CommonName, "edge-1")],
        vec![org.clone(), (CommonName, "postern:node:")],
        vec![org.clone(), (CommonName, "postern:node:Edge-1")],
        vec![org.clone(), (CommonName, "postern:node:edge-1 ")],
        vec![org.clone(), (CommonName, "Postern:node:edge-1")],
        vec![org.clone(), name.clone(), (CountryName, "DE")],
        vec![org.clone(), name.clone(), (OrganizationalUnitName, "system:masters")],
    ] {
        assert_denied(&asking(&params(subject(&parts))), "WrongSubject", "subject");
    }
    let wanted = "want exactly O=postern:agents and CN=postern:node:edge-1";
    assert_denied(&asking(&params(subject(&[]))), "WrongSubject", wanted);
    assert_denied(&asking(&params(of_node("edge-2"))), "OtherNode", "would be for node edge-2");
}

/// rcgen's names hold each kind once, so a second value gets a custom kind with the same object identifier.
#[test]
fn two_organisations_or_two_common_names() {
    use DnType::{CommonName, CustomDnType, OrganizationName};
    // Object identifiers 2.5.4.10 and 2.5.4.3, given as numbers: rcgen does not recognise them as its own kinds.
    let more_organisation = CustomDnType(vec![2, 5, 4, 10]);
    let more_name = CustomDnType(vec![2, 5, 4, 3]);
    let (org, name) = ((OrganizationName, AGENT_ORGANIZATION), (CommonName, "postern:node:edge-1"));
    for parts in [
        vec![org.clone(), name.clone(), (more_organisation.clone(), "system:masters")],
        vec![(more_organisation, "system:masters"), org.clone(), name.clone()],
        vec![org.clone(), name.clone(), (more_name.clone(), "postern:node:edge-2")],
        vec![org, (more_name, "postern:node:edge-2"), name],
    ] {
        let csr = asking(&params(subject(&parts)));
        let text = String::from_utf8(csr.spec.request.0.clone()).unwrap();
        let der = <(SectionKind, Vec<u8>)>::from_pem_slice(text.as_bytes()).unwrap().1;
        let (_, parsed) = X509CertificationRequest::from_der(&der).unwrap();
        let info = parsed.certification_request_info;
        let counts = (info.subject.iter_organization().count(), info.subject.iter_common_name().count());
        assert_eq!(counts.0 + counts.1, 3, "the request has what this test is about");
        assert_denied(&csr, "WrongSubject", "want exactly");
    }
}

#[test]
fn requests_for_extensions() {
    let mut names = params(of_node("edge-1"));
    names.subject_alt_names = vec![SanType::DnsName("tunnel-server.postern.internal".try_into().unwrap())];
    let mut address = params(of_node("edge-1"));
    address.subject_alt_names = vec![SanType::IpAddress("10.0.0.1".parse().unwrap())];
    let mut usage = params(of_node("edge-1"));
    usage.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ServerAuth];
    let mut custom = params(of_node("edge-1"));
    // Basic constraints with CA set.
    custom.custom_extensions =
        vec![CustomExtension::from_oid_content(&[2, 5, 29, 19], vec![0x30, 0x03, 0x01, 0x01, 0xff])];
    for params in [names, address, usage, custom] {
        assert_denied(&asking(&params), "ExtensionsRequested", "2.5.29");
    }
}

/// A request with one attribute (RFC 2986 §4.1) of type `oid`, with `values` in DER.
fn with_attribute(oid: &'static [u64], values: &[u8]) -> CertificateSigningRequest {
    let (params, key) = (params(of_node("edge-1")), PrivateKey::generate().unwrap());
    let attributes = vec![rcgen::Attribute { oid, values: values.to_vec() }];
    let request = params.serialize_request_with_attributes(&key, attributes).unwrap();
    with(|spec| spec.request = ByteString(request.pem().unwrap().into_bytes()))
}

#[test]
fn attributes_other_than_an_empty_request_for_extensions() {
    const EXTENSIONS: &[u64] = &[1, 2, 840, 113_549, 1, 9, 14];
    const CHALLENGE: &[u64] = &[1, 2, 840, 113_549, 1, 9, 7];
    approved(&with_attribute(EXTENSIONS, &[0x31, 2, 0x30, 0]));
    let challenge = with_attribute(CHALLENGE, &[0x31, 3, 0x0c, 1, b'x']);
    assert_denied(&challenge, "ExtensionsRequested", "the attribute 1.2.840.113549.1.9.7");
}

#[test]
fn keys_that_are_weak_or_not_the_requesters() {
    for algorithm in [&rcgen::PKCS_ED25519, &rcgen::PKCS_ECDSA_P384_SHA384] {
        let key = KeyPair::generate_for(algorithm).unwrap();
        let request = params(of_node("edge-1")).serialize_request(&key).unwrap().pem().unwrap();
        let csr = with(|spec| spec.request = ByteString(request.into_bytes()));
        assert_denied(&csr, "InvalidRequest", "");
    }
    // The signature is not of the request's key: the requester does not have it.
    let mut der =
        params(of_node("edge-1")).serialize_request(&PrivateKey::generate().unwrap()).unwrap().der().to_vec();
    *der.last_mut().unwrap() ^= 1;
    let csr = with(|spec| spec.request = section(&der));
    assert_denied(&csr, "InvalidRequest", "not signed by the key");
}

#[test]
fn text_that_is_not_a_request() {
    let good = String::from_utf8(good().spec.request.0).unwrap();
    let renamed = |kind: &str| good.replace("CERTIFICATE REQUEST", kind);
    for (text, part) in [
        (String::new(), "not one PEM section"),
        ("hello".to_owned(), "not one PEM section"),
        (good[..good.len() / 2].to_owned(), "is not PEM: "),
        (good.repeat(2), "not one PEM section"),
        (format!("{good}{}", renamed("CERTIFICATE")), "not one PEM section"),
        (renamed("CERTIFICATE"), "not one PEM section"),
        (renamed("PRIVATE KEY"), "not one PEM section"),
        (good.replacen("\nMI", "\nAA", 1), "cannot be parsed"),
        ("a".repeat(MAX_REQUEST), "not one PEM section"),
        ("a".repeat(MAX_REQUEST + 1), "longer than"),
    ] {
        let csr = with(|spec| spec.request = ByteString(text.into_bytes()));
        assert_denied(&csr, "InvalidRequest", part);
    }
    assert_denied(&with(|spec| spec.request = section(&[0x30; 100])), "InvalidRequest", "cannot be parsed");
    assert_denied(&with(|spec| spec.request = ByteString(vec![0xff; 100])), "InvalidRequest", "");
}

#[test]
fn a_requesters_text_stays_on_one_line() {
    let csr = with(|spec| spec.username = Some(format!("\x1b[2J\n{}", "x".repeat(5000))));
    let Denial(_, message) = judge(&csr, ACCOUNTS).unwrap_err();
    assert!(!message.contains(char::is_control) && message.chars().count() <= MAX_MESSAGE, "{message}");
}

proptest::proptest! {
    #[test]
    fn garbage_never_panics_and_is_never_approved(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..600)) {
        for request in [section(&bytes), ByteString(bytes)] {
            let csr = with(|spec| spec.request = request);
            proptest::prop_assert!(judge(&csr, ACCOUNTS).is_err());
        }
    }

    #[test]
    fn no_name_of_a_user_is_another_node(user in "system:(node|serviceaccount):[a-z0-9:.-]{0,20}") {
        let csr = with(|spec| spec.username = Some(user.clone()));
        proptest::prop_assert_eq!(judge(&csr, ACCOUNTS).is_ok(), user == "system:node:edge-1");
    }
}
