//! The steps of a request from its creation to its answer.

use k8s_openapi::api::certificates::v1::CertificateSigningRequestSpec;
use rcgen::CertificateParams;
use tunnel_pki::{Holder, PrivateKey};
use tunnel_routing::inventory::InventoryNode;

use super::*;

fn request(user: &str) -> CertificateSigningRequest {
    let mut params = CertificateParams::default();
    params.distinguished_name = Holder::Agent.distinguished_name(&"edge-1".parse().unwrap());
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

const ACCOUNTS: Accounts<'_> =
    Accounts { namespace: "kube-system", agent: "tunnel-agent", redirector: "tunnel-redirector" };

fn next(csr: &CertificateSigningRequest) -> Step {
    step(csr, ACCOUNTS, &Standing::default())
}

#[test]
fn a_good_request_is_approved_then_signed() {
    assert!(matches!(next(&good()), Step::Approve(_)));
    // Also if another leader or a person approved it.
    let approved = with_condition(good(), APPROVED, "x", String::new());
    assert!(matches!(next(&approved), Step::Sign(_)));
    let mut signed = approved;
    signed.status.as_mut().unwrap().certificate = Some(ByteString(b"x".to_vec()));
    assert!(matches!(next(&signed), Step::Ignore));
}

#[test]
fn a_bad_request_is_never_signed() {
    assert!(matches!(next(&bad()), Step::Refuse { approved: false, reason: "OtherNode", .. }));
    // An approved one is marked as failed.
    let approved = with_condition(bad(), APPROVED, "x", String::new());
    assert!(matches!(next(&approved), Step::Refuse { approved: true, reason: "OtherNode", .. }));
    for condition in [DENIED, FAILED] {
        for csr in [good(), bad()] {
            assert!(matches!(next(&with_condition(csr, condition, "x", String::new())), Step::Ignore));
        }
    }
    assert!(matches!(next(&with_condition(approved, FAILED, "x", String::new())), Step::Ignore));
}

#[test]
fn an_edge_nodes_redirector_is_denied() {
    let mut csr = request("system:serviceaccount:kube-system:tunnel-redirector");
    let mut params = CertificateParams::default();
    params.distinguished_name = Holder::Redirector.distinguished_name(&"edge-1".parse().unwrap());
    let pem = params.serialize_request(&PrivateKey::generate().unwrap()).unwrap().pem().unwrap();
    csr.spec.request = ByteString(pem.into_bytes());
    let bound = [("node-name", "edge-1"), ("pod-name", "tunnel-redirector-x")];
    let bound =
        bound.map(|(key, value)| (format!("authentication.kubernetes.io/{key}"), vec![value.to_owned()]));
    csr.spec.extra = Some(bound.into());
    assert!(matches!(next(&csr), Step::Approve(_)), "nothing is known of the node");
    for (edge, was_edge) in [(true, false), (false, true)] {
        let node = InventoryNode { edge, was_edge, ..InventoryNode::new("edge-1".parse().unwrap()) };
        let known = watch::channel(Some(Arc::new([node].into_iter().collect()))).1;
        let standing = Standing::new(watch::channel(Arc::default()).1, known, true);
        let denied = step(&csr, ACCOUNTS, &standing);
        assert!(matches!(denied, Step::Refuse { approved: false, reason: "EdgeNode", .. }), "{denied:?}");
    }
}

#[test]
fn other_signers_requests_and_deleted_ones_are_left_alone() {
    for signer in ["kubernetes.io/kubelet-serving", "", "postern.internal/agent2", "Postern.internal/agent"] {
        for mut other in [good(), bad(), with_condition(good(), APPROVED, "x", String::new())] {
            other.spec.signer_name = signer.to_owned();
            assert!(matches!(next(&other), Step::Ignore), "{signer}");
        }
    }
    let mut deleted = good();
    deleted.metadata.deletion_timestamp =
        Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::now()));
    assert!(matches!(next(&deleted), Step::Ignore));
}

#[test]
fn an_answer_to_a_deleted_request_is_forgotten() {
    let of = |uid: &str| {
        let mut csr = good();
        csr.metadata.uid = Some(uid.to_owned());
        csr
    };
    let mut answered: HashSet<String> = ["a", "b", "c"].map(str::to_owned).into();
    forget(&mut answered, &watcher::Event::Apply(of("a")));
    forget(&mut answered, &watcher::Event::Delete(of("b")));
    assert!(answered.len() == 2 && !answered.contains("b"), "{answered:?}");
    forget(&mut answered, &watcher::Event::Init);
    assert!(answered.is_empty());
}

#[test]
fn delays_grow_with_the_age_of_a_request() {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    let now = SystemTime::now();
    let of_age = |age: i64| {
        let mut csr = good();
        let created = jiff::Timestamp::try_from(now).unwrap() - jiff::SignedDuration::from_secs(age);
        csr.metadata.creation_timestamp = Some(Time(created));
        retry_after(&csr, now).as_secs_f64()
    };
    // The API server's clock may be ahead.
    for (age, least, most) in [(-600, 0.5, 1.0), (0, 0.5, 1.0), (20, 5.0, 10.0), (86_400, 30.0, 60.0)] {
        let delay = of_age(age);
        assert!(delay >= least && delay <= most, "{delay} s at {age} s");
    }
    assert!(retry_after(&good(), now) <= Duration::from_secs(1));
}
