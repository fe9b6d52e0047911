//! The steps of a request from its creation to its removal.

use k8s_openapi::api::certificates::v1::CertificateSigningRequestSpec;
use rcgen::CertificateParams;
use tunnel_core::identity::{PrivateKey, agent_distinguished_name};

use super::*;

const YOUNG: Duration = Duration::from_secs(1);

fn request(user: &str) -> CertificateSigningRequest {
    let mut params = CertificateParams::default();
    params.distinguished_name = agent_distinguished_name(&"edge-1".parse().unwrap());
    let pem = params.serialize_request(&PrivateKey::generate().unwrap()).unwrap().pem().unwrap();
    CertificateSigningRequest {
        spec: CertificateSigningRequestSpec {
            signer_name: SIGNER.to_owned(),
            username: Some(user.to_owned()),
            groups: Some(vec!["system:nodes".to_owned()]),
            usages: Some(vec!["client auth".to_owned()]),
            request: ByteString(pem.into_bytes()),
            ..CertificateSigningRequestSpec::default()
        },
        ..CertificateSigningRequest::default()
    }
}

fn good() -> CertificateSigningRequest {
    request("system:node:edge-1")
}

fn bad() -> CertificateSigningRequest {
    request("system:node:edge-2")
}

fn next(csr: &CertificateSigningRequest, age: Duration) -> Step {
    step(csr, age, "kube-system", "tunnel-agent", &Standing::default())
}

#[test]
fn a_good_request_is_approved_then_signed() {
    assert!(matches!(next(&good(), YOUNG), Step::Approve(_)));
    // Also one that another leader, or a person, approved before it could be signed.
    let approved = with_condition(good(), APPROVED, "x", String::new());
    assert!(matches!(next(&approved, YOUNG), Step::Sign(_)));
    let mut signed = approved;
    signed.status.as_mut().unwrap().certificate = Some(ByteString(b"x".to_vec()));
    assert!(matches!(next(&signed, YOUNG), Step::Wait(wait) if wait == KEEP_DONE - YOUNG));
}

#[test]
fn a_bad_request_is_never_signed() {
    assert!(matches!(next(&bad(), YOUNG), Step::Deny { reason: "OtherNode", .. }));
    // Even an approved one is marked as failed instead.
    let approved = with_condition(bad(), APPROVED, "x", String::new());
    assert!(matches!(next(&approved, YOUNG), Step::Fail { reason: "OtherNode", .. }));
    for condition in [DENIED, FAILED] {
        for csr in [good(), bad()] {
            assert!(matches!(
                next(&with_condition(csr, condition, "x", String::new()), YOUNG),
                Step::Wait(_)
            ));
        }
    }
    assert!(matches!(next(&with_condition(approved, FAILED, "x", String::new()), YOUNG), Step::Wait(_)));
}

#[test]
fn old_ones_are_removed() {
    let denied = with_condition(bad(), DENIED, "x", String::new());
    assert!(matches!(next(&denied, KEEP_DONE - YOUNG), Step::Wait(YOUNG)));
    assert!(matches!(next(&denied, KEEP_DONE), Step::Remove));
    assert!(matches!(next(&good(), KEEP_DONE), Step::Approve(_)), "its agent may still be waiting");
    assert!(matches!(next(&good(), KEEP_PENDING), Step::Remove));
    let mut other = denied;
    other.spec.signer_name = "kubernetes.io/kubelet-serving".to_owned();
    assert!(matches!(next(&other, KEEP_PENDING * 100), Step::Ignore));
}

#[test]
fn the_age_of_a_request_from_the_future_is_zero() {
    let mut csr = good();
    let at = |seconds: i64| {
        let now = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(seconds);
        Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now))
    };
    csr.metadata.creation_timestamp = at(3600);
    assert_eq!(age(&csr), Duration::ZERO);
    csr.metadata.creation_timestamp = at(-7200);
    assert!(age(&csr) >= Duration::from_secs(7200));
    csr.metadata.creation_timestamp = None;
    assert_eq!(age(&csr), Duration::ZERO);
}
