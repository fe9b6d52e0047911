//! The certificate by CertificateSigningRequest, from the agent's request to a handshake with the server.

use std::fs;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde_json::json;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tunnel_agent::enroll::{EnrollConfig, EnrollError, IdentityKeeper, IdentityMetrics, Recovery};
use tunnel_agent::kube::csr::{CsrEnrolment, recover};
use tunnel_agent::metrics::Metrics;
use tunnel_agent::policy::Policy;
use tunnel_agent::session::{Attached, EpochSource, Links, Shared};
use tunnel_core::identity::AgentIdentity;
use tunnel_server::pki::Lifetimes;

use super::scripted::{ApiServer, Fault, eventually};
use super::{CSRS, Signer, enrolment, open};
use crate::harness::{DEADLINE, Session, TestServer, log, mode, node};

async fn done(
    task: tokio::task::JoinHandle<Result<AgentIdentity, EnrollError>>,
) -> Result<AgentIdentity, EnrollError> {
    tokio::time::timeout(DEADLINE, task).await.expect("neither enrolled nor gave up").unwrap()
}

fn ask(enrolment: &Arc<CsrEnrolment>) -> tokio::task::JoinHandle<Result<AgentIdentity, EnrollError>> {
    let enrolment = enrolment.clone();
    tokio::spawn(async move { enrolment.ensure_identity().await })
}

/// What the API server has been asked to sign, without who asked.
fn asked(request: &serde_json::Value) -> &str {
    request["spec"]["request"].as_str().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_enrols_by_csr_and_then_lives_on_its_files() {
    let (api, server) = (ApiServer::start(), TestServer::start().await);
    let signer = Signer::start(&api, server.certificate.ca()).await;
    let (agent, state_dir) = enrolment(&api, "edge-1", "agent").await;
    // The API server is away at first, and fails while the agent waits.
    api.down();
    let enrolling = ask(&agent);
    api.up();
    api.inject("get", "certificatesigningrequests", Fault::Status(503), 2);
    let request = signer.answer(&api, "system:node:edge-1").await;
    let name = request["metadata"]["name"].as_str().unwrap();
    assert!(name.starts_with("postern-edge-1-"), "{name}");
    assert_eq!(request["spec"]["signerName"], "postern.internal/agent");
    let identity = done(enrolling).await.unwrap();
    assert_eq!(identity.node, node("edge-1"));
    assert_eq!(identity.bundle, *server.ca.state().unwrap().bundle());
    Session::open(&server.address, &identity).await.unwrap();
    let file = |name: &str| state_dir.join(name);
    assert_eq!([mode(&state_dir), mode(&file("agent.key"))], [0o700, 0o600]);
    assert!(!file("agent.key.next").exists());
    // The API server is not needed again.
    api.down();
    let again = done(ask(&agent)).await.unwrap();
    assert_eq!(again.chain, identity.chain);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_is_said_and_asked_again_and_a_request_that_vanished_is_made_again() {
    let (api, server) = (ApiServer::start(), TestServer::start().await);
    let signer = Signer::start(&api, server.certificate.ca()).await;
    let (agent, state_dir) = enrolment(&api, "edge-7", "agent").await;
    let enrolling = ask(&agent);
    let first = signer.answer(&api, "system:node:edge-8").await;
    eventually("the reason is in the log", || {
        log()
            .contains("Denied: the requester is node edge-8, but the certificate would be for node edge-7")
            .then_some(())
    })
    .await;
    assert!(!state_dir.join("agent.crt").exists());
    let second = eventually("another request", || open(&api)).await;
    assert_eq!(asked(&second), asked(&first), "the same key");
    api.remove(CSRS, second["metadata"]["name"].as_str().unwrap());
    let third = signer.answer(&api, "system:node:edge-7").await;
    assert_ne!(third["metadata"]["name"], second["metadata"]["name"]);
    let identity = done(enrolling).await.unwrap();
    Session::open(&server.address, &identity).await.unwrap();
}

/// A signer that is not ours must not make the agent trust it with another node or key.
#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_that_is_not_what_was_asked_for_is_not_taken() {
    let (api, server) = (ApiServer::start(), TestServer::start().await);
    let (agent, state_dir) = enrolment(&api, "edge-1", "agent").await;
    let state = server.ca.state().unwrap();
    let other = TestServer::start().await.ca.state().unwrap();
    let pem = tunnel_core::identity::pem_of_certificates;
    let (_, theirs) = server.enrolled("edge-1").await;
    let (_, neighbour) = server.enrolled("edge-2").await;
    let enrolling = ask(&agent);
    for (text, reason) in [
        ("hello".to_owned(), "it has no certificate"),
        (pem(&theirs.chain), "trust bundle: it has no certificate"),
        (pem(&theirs.chain) + &state.bundle().to_pem(), "not the certificate's key"),
        (pem(&neighbour.chain) + &state.bundle().to_pem(), "not the certificate's key"),
        (pem(&theirs.chain) + &other.bundle().to_pem(), "not the certificate's key"),
        (state.bundle().to_pem().repeat(2), "not an agent's certificate"),
    ] {
        let request = eventually("a request", || open(&api)).await;
        let certificate = k8s_openapi::ByteString(text.into_bytes());
        api.edit(CSRS, request["metadata"]["name"].as_str().unwrap(), |csr| {
            csr["status"] = json!({"certificate": certificate});
        });
        let expected = "the certificate is of no use: ";
        eventually(reason, || {
            log().lines().any(|line| line.contains(expected) && line.contains(reason)).then_some(())
        })
        .await;
        assert!(!state_dir.join("agent.crt").exists());
    }
    enrolling.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn files_that_are_of_no_use_are_replaced() {
    let lifetimes = Lifetimes { agent: Duration::from_secs(1), ..Lifetimes::default() };
    let (api, server) = (ApiServer::start(), TestServer::with(lifetimes).await);
    let signer = Signer::start(&api, server.certificate.ca()).await;
    let (agent, state_dir) = enrolment(&api, "edge-1", "agent").await;
    let enrolling = ask(&agent);
    signer.answer(&api, "system:node:edge-1").await;
    let mut identity = done(enrolling).await.unwrap();
    // Ended; broken; another node's.
    for damage in ["ended", "broken", "of another node"] {
        eventually("it ends", || identity.validity().is_over(SystemTime::now()).then_some(())).await;
        let name = if damage == "of another node" { "edge-2" } else { "edge-1" };
        if damage == "broken" {
            fs::write(state_dir.join("agent.crt"), "garbage").unwrap();
        }
        let (agent, _) = enrolment(&api, name, "agent").await;
        let enrolling = ask(&agent);
        signer.answer(&api, &format!("system:node:{name}")).await;
        let next = done(enrolling).await.unwrap();
        assert_eq!(next.node, node(name), "{damage}");
        assert_ne!(next.chain, identity.chain);
        identity = next;
    }
}

fn shared(state_dir: &std::path::Path) -> (Arc<Shared>, mpsc::Receiver<tunnel_agent::session::Announced>) {
    let (bundles, announced) = mpsc::channel(16);
    let addresses = watch::channel(Arc::new(Vec::new())).1;
    let shared = Shared {
        node: node("edge-1"),
        epochs: EpochSource::open(state_dir.join("epoch")).unwrap(),
        policy: Arc::new(Policy::new(Vec::new(), Arc::default(), Arc::default())),
        addresses,
        bundles,
        attached: Attached::default(),
        metrics: Metrics::new(&mut prometheus_client::registry::Registry::default()),
        draining: CancellationToken::new(),
        forced: CancellationToken::new(),
    };
    (Arc::new(shared), announced)
}

/// The server's CA was replaced by another one: neither side takes the other's certificate, and no token can help.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_no_server_takes_enrols_again() {
    let (api, old, new) = (ApiServer::start(), TestServer::start().await, TestServer::start().await);
    let signer = Signer::start(&api, old.certificate.ca()).await;
    let (agent, state_dir) = enrolment(&api, "edge-1", "agent").await;
    let enrolling = ask(&agent);
    signer.answer(&api, "system:node:edge-1").await;
    let identity = done(enrolling).await.unwrap();
    drop(signer);
    let signer = Signer::start(&api, new.certificate.ca()).await;

    let config = EnrollConfig {
        servers: vec![new.address.clone()],
        node: node("edge-1"),
        state_dir: state_dir.clone(),
        token: None,
        ca_hash: None,
    };
    let keeper =
        IdentityKeeper::with_recovery(config, identity, IdentityMetrics::default(), Recovery::ApiServer);
    let keeper = Arc::new(keeper);
    assert!(Session::open(&new.address, &keeper.current()).await.is_err());
    let (shared, _announced) = shared(&state_dir);
    let links = Links::new(shared.clone(), keeper.subscribe(), TaskTracker::new());
    links.set(&[new.address.parse().unwrap()]);
    let recovering = tokio::spawn(recover(agent, keeper.clone(), links.clone()));
    eventually("the link is refused", || links.refused_for()).await;
    signer.answer(&api, "system:node:edge-1").await;
    let hash = new.ca_hash();
    eventually("the new CA's certificate", || {
        (keeper.current().bundle.hashes() == std::slice::from_ref(&hash)).then_some(())
    })
    .await;
    Session::open(&new.address, &keeper.current()).await.unwrap();
    // It is on disk, with its key.
    let (again, _) = enrolment(&api, "edge-1", "agent").await;
    assert_eq!(done(ask(&again)).await.unwrap().chain, keeper.current().chain);
    recovering.abort();
    shared.forced.cancel();
}
