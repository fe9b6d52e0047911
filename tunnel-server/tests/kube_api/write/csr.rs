//! CertificateSigningRequests: the requesters that get a certificate, and the server that answers.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use postern_fake_kube::{ApiServer, Fault, eventually};
use rcgen::CertificateParams;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tunnel_kube::SIGNER;
use tunnel_pki::{Holder, PrivateKey, TrustBundle, holder_of_certificate, validity};
use tunnel_runtime::NodeName;
use tunnel_server::kube::KubeContext;
use tunnel_server::kube::write::csr::run;
use tunnel_server::pki::{CaMaterial, CaState, Lifetimes, PkiMetrics, Revocation, Revocations, Standing};

use crate::fixture::context;

const CSRS: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";

struct Signer {
    lead: watch::Sender<bool>,
    context: KubeContext,
    ca: Arc<CaState>,
    metrics: PkiMetrics,
    task: JoinHandle<()>,
}

impl Signer {
    async fn start(server: &ApiServer, leads: bool) -> Self {
        Self::with(server, leads, Standing::default()).await
    }

    async fn with(server: &ApiServer, leads: bool, standing: Standing) -> Self {
        let (context, inputs) = context(server, leads).await;
        let ca = Arc::new(CaMaterial::generate().unwrap().state(Lifetimes::default()).unwrap());
        let metrics = PkiMetrics::default();
        let known = watch::channel(ca.clone()).1;
        let task = tokio::spawn(run(context.clone(), known, standing, metrics.clone()));
        Self { lead: inputs.leader, context, ca, metrics, task }
    }

    async fn stop(self) {
        self.context.stop.cancel();
        self.task.await.unwrap();
    }
}

fn ago(time: Duration) -> String {
    let at = jiff::Timestamp::try_from(SystemTime::now() - time).unwrap();
    format!("{at:.0}")
}

/// A request by `user` for a certificate of `node`.
fn request(name: &str, node: &str, user: &str) -> Value {
    let node: NodeName = node.parse().unwrap();
    let mut params = CertificateParams::default();
    params.distinguished_name = Holder::Agent.distinguished_name(&node);
    let pem = params.serialize_request(&PrivateKey::generate().unwrap()).unwrap().pem().unwrap();
    json!({
        "apiVersion": "certificates.k8s.io/v1",
        "kind": "CertificateSigningRequest",
        "metadata": {"name": name, "creationTimestamp": ago(Duration::ZERO)},
        "spec": {
            "signerName": SIGNER,
            "username": user,
            "groups": ["system:nodes", "system:authenticated"],
            "usages": ["digital signature", "client auth"],
            "request": k8s_openapi::ByteString(pem.into_bytes()),
        },
        "status": {},
    })
}

fn of_node(name: &str, node: &str) -> Value {
    request(name, node, &format!("system:node:{node}"))
}

fn get(server: &ApiServer, name: &str) -> CertificateSigningRequest {
    serde_json::from_value(server.get(CSRS, name).expect("the request")).unwrap()
}

fn certificates(csr: &CertificateSigningRequest) -> Option<Vec<CertificateDer<'static>>> {
    let pem = csr.status.as_ref()?.certificate.as_ref()?;
    Some(CertificateDer::pem_slice_iter(&pem.0).collect::<Result<_, _>>().unwrap())
}

/// Type, reason and message of each condition.
fn conditions(csr: &CertificateSigningRequest) -> Vec<(String, String, String)> {
    let conditions = csr.status.as_ref().and_then(|status| status.conditions.clone()).unwrap_or_default();
    assert!(conditions.iter().all(|condition| condition.status == "True"));
    conditions
        .into_iter()
        .map(|condition| {
            (condition.type_, condition.reason.unwrap_or_default(), condition.message.unwrap_or_default())
        })
        .collect()
}

async fn signed(server: &ApiServer, name: &str) -> Vec<CertificateDer<'static>> {
    eventually("it is signed", || certificates(&get(server, name))).await
}

#[tokio::test]
async fn only_the_leader_approves_and_signs() {
    let server = ApiServer::start();
    let signer = Signer::start(&server, false).await;
    server.put(CSRS, of_node("early", "edge-1"));
    let signed_by = async |signer: &Signer, name: &str| {
        signer.ca.bundle().issuer_of(&signed(&server, name).await[0]).is_some()
    };
    // Another server leads, and answers this one and a later one: an approval and a certificate each.
    let other = Signer::start(&server, true).await;
    assert!(signed_by(&other, "early").await);
    server.put(CSRS, of_node("later", "edge-1"));
    assert!(signed_by(&other, "later").await);
    assert_eq!((server.writes(CSRS), server.open_watches(CSRS)), (4, 1), "a server that does not lead");
    other.stop().await;
    server.put(CSRS, of_node("a", "edge-1"));
    signer.lead.send_replace(true);
    let chain = signed(&server, "a").await;
    assert_eq!(holder_of_certificate(&chain[0]).unwrap(), (Holder::Agent, "edge-1".parse().unwrap()));
    // After the certificate come the roots that the agent is to trust.
    assert_eq!(TrustBundle::new(chain[1..].to_vec()).unwrap(), *signer.ca.bundle());
    assert_eq!(signer.ca.bundle().issuer_of(&chain[0]), Some(0));
    let life = validity(&chain[0]).unwrap().life();
    assert_eq!(life, Lifetimes::default().agent);
    let known = conditions(&get(&server, "a"));
    assert!(
        matches!(&known[..], [(approved, _, message)] if approved == "Approved" && message.contains("edge-1")),
        "{known:?}"
    );
    eventually("it is counted", || (signer.metrics.enrollments("csr", "issued") == 1).then_some(())).await;

    // A server that loses the lead stops writing, and continues when it leads again.
    signer.lead.send_replace(false);
    eventually("the watch is closed", || (server.open_watches(CSRS) == 0).then_some(())).await;
    let writes = server.writes(CSRS);
    let other = Signer::start(&server, true).await;
    for name in ["b", "c"] {
        server.put(CSRS, of_node(name, "edge-2"));
        assert!(signed_by(&other, name).await);
    }
    assert_eq!(server.writes(CSRS), writes + 4);
    other.stop().await;
    server.put(CSRS, of_node("d", "edge-2"));
    signer.lead.send_replace(true);
    assert!(signed_by(&signer, "d").await);
    signer.stop().await;
}

#[tokio::test]
async fn impostors_are_denied_with_the_reason_and_never_signed() {
    let server = ApiServer::start();
    let signer = Signer::start(&server, true).await;
    server.put(CSRS, request("other-node", "edge-1", "system:node:edge-2"));
    server.put(CSRS, request("person", "edge-1", "kubernetes-admin"));
    let mut usages = of_node("usages", "edge-1");
    usages["spec"]["usages"] = json!(["client auth", "server auth"]);
    server.put(CSRS, usages);
    let mut foreign = of_node("foreign", "edge-1");
    foreign["spec"]["signerName"] = json!("kubernetes.io/kube-apiserver-client");
    let foreign = server.put(CSRS, foreign);
    // An administrator's approval does not change that.
    let mut approved = request("approved", "edge-1", "system:node:edge-2");
    let by_hand =
        json!([{"type": "Approved", "status": "True", "reason": "KubectlApprove", "message": "by hand"}]);
    approved["status"] = json!({"conditions": by_hand});
    server.put(CSRS, approved);
    // A request that an earlier leader approved is signed.
    let mut left = of_node("left", "edge-3");
    left["status"] = json!({"conditions": by_hand});
    server.put(CSRS, left);

    signed(&server, "left").await;
    for (name, condition, reason, part) in [
        ("other-node", "Denied", "OtherNode", "the requester is node edge-2"),
        ("person", "Denied", "NotANode", "\"kubernetes-admin\" is neither a node"),
        ("usages", "Denied", "WrongUsages", "server auth"),
    ] {
        let known =
            eventually(name, || Some(conditions(&get(&server, name))).filter(|known| !known.is_empty()))
                .await;
        let [(kind, because, message)] = &known[..] else { panic!("{known:?}") };
        assert_eq!((kind.as_str(), because.as_str()), (condition, reason));
        assert!(message.contains(part), "{message}");
        assert!(certificates(&get(&server, name)).is_none());
    }
    let known = eventually("approved", || {
        Some(conditions(&get(&server, "approved"))).filter(|known| known.len() == 2)
    })
    .await;
    assert_eq!(
        (known[0].0.as_str(), known[1].0.as_str(), known[1].1.as_str()),
        ("Approved", "Failed", "OtherNode")
    );
    assert!(certificates(&get(&server, "approved")).is_none());
    assert_eq!(server.get(CSRS, "foreign").unwrap(), foreign, "other signers' requests are not touched");
    // Counted once the API server has answered, which is after the object shows it.
    eventually("all are counted", || {
        let count = |outcome| signer.metrics.enrollments("csr", outcome);
        ((count("denied"), count("failed")) == (3, 1)).then_some(())
    })
    .await;
    signer.stop().await;
}

#[tokio::test]
async fn a_lifetime_can_be_shortened_but_not_extended() {
    let server = ApiServer::start();
    let signer = Signer::start(&server, true).await;
    for (name, seconds) in [("short", 600), ("long", i32::MAX)] {
        let mut csr = of_node(name, "edge-1");
        csr["spec"]["expirationSeconds"] = json!(seconds);
        server.put(CSRS, csr);
    }
    let life = |chain: &[CertificateDer<'_>]| validity(&chain[0]).unwrap().life();
    assert_eq!(life(&signed(&server, "short").await), Duration::from_secs(600));
    assert_eq!(life(&signed(&server, "long").await), Lifetimes::default().agent);
    signer.stop().await;
}

#[tokio::test]
async fn failed_requests_to_the_api_server_are_repeated() {
    let server = ApiServer::start();
    let signer = Signer::start(&server, true).await;
    // The approval fails, then the certificate; then another writer has changed the request.
    server.inject("update", "certificatesigningrequests", Fault::Status(500), 1);
    server.inject("update", "certificatesigningrequests", Fault::Status(409), 1);
    server.inject("update", "certificatesigningrequests", Fault::Truncate, 1);
    server.put(CSRS, of_node("a", "edge-1"));
    signed(&server, "a").await;
    assert!(server.faults_are_spent());
    server.down();
    server.put(CSRS, of_node("b", "edge-2"));
    server.up();
    signed(&server, "b").await;
    signer.stop().await;
}

#[tokio::test]
async fn a_thousand_concurrent_requests_are_answered() {
    const COUNT: usize = 1000;
    let server = ApiServer::start();
    let requests: Vec<_> =
        (0..COUNT).map(|at| of_node(&format!("csr-{at}"), &format!("edge-{at}"))).collect();
    server.put_all(CSRS, requests);
    let signer = Signer::start(&server, true).await;
    eventually("all of them", || (signer.metrics.enrollments("csr", "issued") == COUNT as u64).then_some(()))
        .await;
    assert!(server.list(CSRS).iter().all(|csr| csr["status"]["certificate"].is_string()));
    // Each was approved once and signed once.
    assert_eq!(server.writes(CSRS), 2 * COUNT);
    signer.stop().await;
}

#[tokio::test]
async fn a_revoked_node_is_denied_until_it_is_readmitted() {
    let server = ApiServer::start();
    let revocations = watch::Sender::<Arc<Revocations>>::default();
    let standing = Standing::new(revocations.subscribe(), watch::channel(None).1, true);
    let edge: NodeName = "edge-1".parse().unwrap();
    let record = Revocation::revoke(None, &edge, jiff::Timestamp::now());
    let publish = |record: Revocation| {
        let records = [(record.subject.clone(), record)].into();
        revocations.send_replace(Arc::new(Revocations { records, ..Revocations::default() }));
    };
    publish(record.clone());
    let signer = Signer::with(&server, true, standing.clone()).await;
    server.put(CSRS, of_node("revoked", "edge-1"));
    server.put(CSRS, of_node("other", "edge-2"));
    signed(&server, "other").await;
    let denied = eventually("it is denied", || conditions(&get(&server, "revoked")).into_iter().next()).await;
    assert_eq!((denied.0.as_str(), denied.1.as_str()), ("Denied", "NodeRevoked"));
    assert!(denied.2.contains("agent readmit edge-1"), "{}", denied.2);
    // At once after the readmission, the certificate counts as a newer one.
    publish(record.readmit(jiff::Timestamp::now()).unwrap());
    server.put(CSRS, of_node("readmitted", "edge-1"));
    let chain = signed(&server, "readmitted").await;
    let validity = validity(&chain[0]).unwrap();
    assert_eq!(standing.judge((Holder::Agent, &edge), validity.issued()), Ok(()));
    assert!(validity.not_before < SystemTime::now(), "and is valid already");
    signer.stop().await;
}
