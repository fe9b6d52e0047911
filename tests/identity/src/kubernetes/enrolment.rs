//! The certificate by CertificateSigningRequest, from the agent's request to a handshake with the server.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use postern_fake_kube::{ApiServer, Fault, eventually};
use rustls_pki_types::CertificateSigningRequestDer;
use rustls_pki_types::pem::PemObject;
use serde_json::{Value, json};
use tunnel_agent::reach::Reach;
use tunnel_pki::enrol::{
    CsrEnrolment, EnrollConfig, EnrollError, IdentityKeeper, IdentityMetrics, Pace, Recovery, Refused,
    recover,
};
use tunnel_pki::{
    AgentIdentity, CsrKey, Holder, PrivateKey, create_csr, pem_of_certificates, public_key_of_csr,
};
use tunnel_runtime::clock::Clock;
use tunnel_server::pki::{CaState, Revocation};

use super::servers::Port;
use super::{CSRS, PACE, Signer, agent_api, enrolment, links, open};
use crate::harness::{DEADLINE, Session, TestServer, log, mode, node, publish};

async fn done(
    task: tokio::task::JoinHandle<Result<AgentIdentity, EnrollError>>,
) -> Result<AgentIdentity, EnrollError> {
    tokio::time::timeout(DEADLINE, task).await.expect("neither enrolled nor gave up").unwrap()
}

fn ask(enrolment: &Arc<CsrEnrolment>) -> tokio::task::JoinHandle<Result<AgentIdentity, EnrollError>> {
    let enrolment = enrolment.clone();
    tokio::spawn(async move { enrolment.ensure_identity().await })
}

/// Its pod's token names the node on which it runs, as an agent's does.
#[tokio::test(flavor = "multi_thread")]
async fn a_redirector_enrols_by_csr() {
    let (api, server) = (ApiServer::start(), TestServer::start().await);
    let signer = Signer::start(&api, server.certificate.ca.clone()).await;
    let (holder, state_dir) = ((Holder::Redirector, node("cloud-2")), api.dir().join("redirector"));
    let redirector = Arc::new(CsrEnrolment::new(agent_api(&api).await, holder, state_dir.clone(), PACE));
    let enrolling = ask(&redirector);
    // Its node's kubelet may not ask for it.
    let first = signer.answer(&api, "system:node:cloud-2").await;
    let denied = eventually("the denial", || api.get(CSRS, first["metadata"]["name"].as_str()?)).await;
    let reason = &denied["status"]["conditions"][0]["reason"];
    assert_eq!(reason, "OtherHolder", "{denied}");
    let by_pod = |csr: &mut Value| {
        csr["spec"]["username"] = json!("system:serviceaccount:kube-system:tunnel-redirector");
        csr["spec"]["groups"] = json!(["system:serviceaccounts"]);
        csr["spec"]["extra"] = json!({
            "authentication.kubernetes.io/node-name": ["cloud-2"],
            "authentication.kubernetes.io/pod-name": ["tunnel-redirector-x"],
        });
    };
    signer.answer_as(&api, by_pod).await;
    let identity = done(enrolling).await.unwrap();
    assert_eq!((identity.holder, identity.node), (Holder::Redirector, node("cloud-2")));
    assert!(state_dir.join("redirector.crt").exists());
}

/// The request that the API server has been asked to sign, without the requester.
fn asked(request: &Value) -> &str {
    request["spec"]["request"].as_str().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_enrols_by_csr_and_then_lives_on_its_files() {
    let (api, server) = (ApiServer::start(), TestServer::start().await);
    let signer = Signer::start(&api, server.certificate.ca.clone()).await;
    let (agent, state_dir) = enrolment(&api, "edge-1", "agent").await;
    // The API server is down at first, and fails while the agent waits.
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

/// The clock of a node without a battery may be years ahead until a time server sets it.
#[tokio::test]
async fn an_identity_that_had_expired_by_a_wrong_clock_is_used_once_that_is_right() {
    const NODE: &str = "edge-ahead";
    let (api, server) = (ApiServer::start(), TestServer::start().await);
    let signer = Signer::start(&api, server.certificate.ca.clone()).await;
    let (agent, state_dir) = enrolment(&api, NODE, "agent").await;
    let enrolling = ask(&agent);
    signer.answer(&api, "system:node:edge-ahead").await;
    let identity = done(enrolling).await.unwrap();
    // The API server, by which it would get another one, is down.
    api.down();
    let holder = (Holder::Agent, node(NODE));
    let mut again = CsrEnrolment::new(agent_api(&api).await, holder, state_dir, Pace::default());
    again.clock = Clock::of(1);
    again.clock.set(SystemTime::now() + Duration::from_secs(400 * 86_400));
    let (clock, starting) = (again.clock, ask(&Arc::new(again)));
    let waits = |line: &str| line.contains(NODE) && line.contains("enrolling again");
    eventually("it doubts its certificate", || log().lines().any(waits).then_some(())).await;
    clock.set(SystemTime::now());
    assert_eq!(done(starting).await.unwrap().chain, identity.chain);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_request_is_logged_and_repeated_and_a_deleted_one_is_made_again() {
    let (api, server) = (ApiServer::start(), TestServer::start().await);
    let signer = Signer::start(&api, server.certificate.ca.clone()).await;
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

/// The answer to its creation is lost, and later neither the certificate nor the kubeconfig can be used for a moment.
#[tokio::test(flavor = "multi_thread")]
async fn passing_failures_make_no_second_request() {
    // Used by no other test, so that the log lines are this test's.
    const NODE: &str = "edge-once";
    let (api, server) = (ApiServer::start(), TestServer::start().await);
    let signer = Signer::start(&api, server.certificate.ca.clone()).await;
    let (agent, _) = enrolment(&api, NODE, "agent").await;
    let waits = |line: &str| line.contains(NODE) && line.contains("enrolment failed, retrying");
    api.inject("create", "certificatesigningrequests", Fault::Truncate, 1);
    let enrolling = ask(&agent);
    let request = eventually("a request", || open(&api)).await;
    eventually("it waits", || log().lines().any(waits).then_some(())).await;
    let reads = format!("{CSRS}/{}", request["metadata"]["name"].as_str().unwrap());
    eventually("it is read", || (api.requests("get", &reads) > 0).then_some(())).await;
    let kubeconfig = fs::read(api.kubeconfig()).unwrap();
    fs::write(api.kubeconfig(), "clusters: 3").unwrap();
    let read = api.requests("get", &reads);
    api.inject("get", "certificatesigningrequests", Fault::Status(401), 1);
    eventually("it is read again", || (api.requests("get", &reads) > read + 1).then_some(())).await;
    fs::write(api.kubeconfig(), kubeconfig).unwrap();
    signer.answer(&api, &format!("system:node:{NODE}")).await;
    done(enrolling).await.unwrap();
    assert_eq!(api.list(CSRS).len(), 1, "{:?}", api.list(CSRS));
}

fn key_of(request: &Value) -> CsrKey {
    let pem: ByteString = serde_json::from_value(request["spec"]["request"].clone()).unwrap();
    public_key_of_csr(&CertificateSigningRequestDer::from_pem_slice(&pem.0).unwrap()).unwrap()
}

/// Gives a request this certificate (PEM), as a signer does.
fn sign(api: &ApiServer, request: &Value, pem: String) {
    let certificate = ByteString(pem.into_bytes());
    api.edit(CSRS, request["metadata"]["name"].as_str().unwrap(), |csr| {
        csr["status"] = json!({"certificate": certificate});
    });
}

/// A foreign signer cannot give the agent a certificate for another node or key.
#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_other_than_the_requested_one_is_not_used() {
    // Used by no other test, so that the log lines are this test's.
    const NODE: &str = "edge-untaken";
    let (api, server) = (ApiServer::start(), TestServer::start().await);
    let (agent, state_dir) = enrolment(&api, NODE, "agent").await;
    let (ours, theirs) = (server.ca.state().unwrap(), TestServer::start().await.ca.state().unwrap());
    let (_, known) = server.enrolled(NODE).await;
    let (leaf, roots) = (pem_of_certificates(&known.chain), ours.bundle().to_pem());
    let issue = |ca: &CaState, name: &str, key: &CsrKey| {
        pem_of_certificates(&ca.issue_agent(&node(name), key).unwrap().chain)
    };
    type Answer<'a> = Box<dyn Fn(&CsrKey) -> String + Send + 'a>;
    let answers: [(Answer<'_>, &str); 6] = [
        (Box::new(|_| "hello".to_owned()), "certificate cannot be parsed: it has no certificate"),
        (Box::new(|_| leaf.clone()), "trust bundle: it has no certificate"),
        (Box::new(|_| leaf.clone() + &roots), "not the certificate's key"),
        (Box::new(|_| roots.repeat(2)), "not an agent's certificate"),
        // The right key for the rest.
        (
            Box::new(|key| issue(&ours, "edge-other", key) + &roots),
            "the certificate is for node edge-other, not for edge-untaken",
        ),
        (Box::new(|key| issue(&theirs, NODE, key) + &roots), "no root of it signed the certificate"),
    ];
    let enrolling = ask(&agent);
    for (answer, reason) in answers {
        let request = eventually("a request", || open(&api)).await;
        let certificate = answer(&key_of(&request));
        let before = log().len();
        sign(&api, &request, certificate);
        let line = eventually(reason, || {
            let log = log();
            let new = log[before..].lines();
            new.filter(|line| line.contains(NODE))
                .find(|line| line.contains("the certificate cannot be used: "))
                .map(str::to_owned)
        })
        .await;
        assert!(line.contains(reason), "not {reason:?}: {line}");
        assert!(!state_dir.join("agent.crt").exists());
    }
    // The right one is used.
    let request = eventually("a request", || open(&api)).await;
    sign(&api, &request, issue(&ours, NODE, &key_of(&request)) + &roots);
    assert_eq!(done(enrolling).await.unwrap().bundle, *ours.bundle());
}

/// Puts an expired identity of this CA into the state directory.
async fn put_ended(server: &TestServer, name: &str, state_dir: &Path) {
    let (key, ca) = (PrivateKey::generate().unwrap(), server.ca.state().unwrap());
    let asked = public_key_of_csr(&create_csr(&key).unwrap()).unwrap();
    let issued = ca
        .issue_for((Holder::Agent, &node(name)), &asked, Duration::from_secs(1), SystemTime::UNIX_EPOCH)
        .unwrap();
    let (chain, key) = (pem_of_certificates(&issued.chain), key.to_pem());
    let identity = AgentIdentity::from_pem(&chain, &key, ca.bundle().clone()).unwrap();
    eventually("it ends", || identity.validity.is_over(SystemTime::now()).then_some(())).await;
    fs::write(state_dir.join("agent.key"), key).unwrap();
    fs::write(state_dir.join("agent.crt"), chain).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn unusable_files_are_replaced() {
    let (api, server) = (ApiServer::start(), TestServer::start().await);
    let signer = Signer::start(&api, server.certificate.ca.clone()).await;
    let (agent, state_dir) = enrolment(&api, "edge-1", "agent").await;
    let enrolling = ask(&agent);
    signer.answer(&api, "system:node:edge-1").await;
    let mut identity = done(enrolling).await.unwrap();
    for damage in ["ended", "broken", "of another node"] {
        let name = if damage == "of another node" { "edge-2" } else { "edge-1" };
        match damage {
            "ended" => put_ended(&server, name, &state_dir).await,
            "broken" => fs::write(state_dir.join("agent.crt"), "garbage").unwrap(),
            _ => {}
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

/// The server's CA was replaced: neither side accepts the other's certificate, and no token can help.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_no_server_accepts_enrols_again() {
    let (api, old, new) = (ApiServer::start(), TestServer::start().await, TestServer::start().await);
    let signer = Signer::start(&api, old.certificate.ca.clone()).await;
    let (agent, state_dir) = enrolment(&api, "edge-1", "agent").await;
    let enrolling = ask(&agent);
    signer.answer(&api, "system:node:edge-1").await;
    let identity = done(enrolling).await.unwrap();
    drop(signer);
    let signer = Signer::start(&api, new.certificate.ca.clone()).await;

    let config = EnrollConfig {
        servers: vec![new.address.clone()],
        holder: Holder::Agent,
        node: node("edge-1"),
        state_dir: state_dir.clone(),
        token: None,
        reach: Reach::default(),
        clock: Clock::default(),
    };
    let keeper = IdentityKeeper::start(config, identity, IdentityMetrics::default(), Recovery::ApiServer);
    let keeper = Arc::new(keeper);
    assert!(Session::open(&new.address, &keeper.current()).await.is_err());
    let (links, runtime, _announced) = links(&state_dir, keeper.subscribe());
    links.set(&[new.address.parse().unwrap()]);
    let refused = links.clone();
    let recovering = tokio::spawn(recover(agent, keeper.clone(), move || refused.refused()));
    eventually("the link is refused", || links.refused()).await;
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
    runtime.shutdown.force();
}

/// As with a renewal, a full disk is no reason to stay away.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_enrols_again_without_a_writable_directory() {
    let (api, server) = (ApiServer::start(), TestServer::start().await);
    let (config, identity) = server.enrolled("edge-1").await;
    let first = identity.chain.clone();
    let (agent, state_dir) = enrolment(&api, "edge-1", "agent").await;
    fs::write(&state_dir, "not a directory").unwrap();
    let keeper = IdentityKeeper::start(config, identity, IdentityMetrics::default(), Recovery::ApiServer);
    let keeper = Arc::new(keeper);
    let recovering = tokio::spawn(recover(agent, keeper.clone(), || Some(Refused::EnrollAgain)));
    let signer = Signer::start(&api, server.certificate.ca.clone()).await;
    signer.answer(&api, "system:node:edge-1").await;
    eventually("another certificate", || (keeper.current().chain != first).then_some(())).await;
    recovering.abort();
}

/// The server accepts the agent again before the request is answered: the request is dropped, and the keys are free.
#[tokio::test(flavor = "multi_thread")]
async fn a_new_enrolment_ends_when_it_is_no_longer_needed() {
    let (api, old, new) = (ApiServer::start(), TestServer::start().await, TestServer::start().await);
    let (config, identity) = old.enrolled("edge-1").await;
    let port = Port::of(&new, "server-1").await;
    let (agent, _) = enrolment(&api, "edge-1", "agent").await;
    let keeper =
        IdentityKeeper::start(config.clone(), identity, IdentityMetrics::default(), Recovery::ApiServer);
    let keeper = Arc::new(keeper);
    let (links, runtime, _announced) = links(&config.state_dir, keeper.subscribe());
    links.set(&[port.address.parse().unwrap()]);
    let refused = links.clone();
    let recovering = tokio::spawn(recover(agent, keeper.clone(), move || refused.refused()));
    let request = eventually("a request", || open(&api)).await;
    let (_, other) = new.enrolled("edge-1").await;
    let chain = other.chain.clone();
    keeper.replace(other).await;
    drop(
        tokio::time::timeout(DEADLINE, keeper.hold_pending_key()).await.expect("the keys are not given back"),
    );
    // Each attempt with another certificate begins without refusals, and may last longer than that.
    eventually("it is attached", || links.attached().then_some(())).await;
    // An answer that comes now is too late.
    let key = key_of(&request);
    let late =
        pem_of_certificates(&old.ca.state().unwrap().issue_agent(&node("edge-1"), &key).unwrap().chain);
    sign(&api, &request, late);
    assert_eq!(keeper.current().chain, chain);
    // It is on disk with its own key, whichever one was pending.
    let stored = tunnel_pki::enrol::ensure_identity(&config).await.unwrap();
    assert_eq!(stored.chain, chain);
    recovering.abort();
    runtime.shutdown.force();
}

/// The node was revoked and readmitted: no server takes the certificate any more, and a new one comes through the API
/// server.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_of_a_readmitted_node_enrols_again() {
    let (api, server) = (ApiServer::start(), TestServer::start().await);
    let (config, identity) = server.enrolled("edge-1").await;
    let first = identity.chain.clone();
    let port = Port::of(&server, "server-1").await;
    let (agent, _) = enrolment(&api, "edge-1", "agent").await;
    let keeper = Arc::new(IdentityKeeper::start(
        config.clone(),
        identity,
        IdentityMetrics::default(),
        Recovery::ApiServer,
    ));
    let (links, runtime, _announced) = links(&config.state_dir, keeper.subscribe());
    links.set(&[port.address.parse().unwrap()]);
    eventually("it is attached", || links.attached().then_some(())).await;

    let now = jiff::Timestamp::now();
    let record = Revocation::revoke(None, &node("edge-1"), now).readmit(now).unwrap();
    publish(&port.revocations, record);
    eventually("the session ends", || port.sessions.live().is_empty().then_some(())).await;
    let refused = links.clone();
    let recovering = tokio::spawn(recover(agent, keeper.clone(), move || refused.refused()));
    let signer = Signer::with(&api, server.certificate.ca.clone(), port.standing.clone()).await;
    signer.answer(&api, "system:node:edge-1").await;
    eventually("another certificate", || (keeper.current().chain != first).then_some(())).await;
    eventually("it is attached again", || {
        (links.attached() && port.sessions.live().iter().eq([&node("edge-1")])).then_some(())
    })
    .await;
    // Otherwise it would enrol again and again.
    eventually("no refusal of the first certificate counts", || links.refused().is_none().then_some(()))
        .await;
    recovering.abort();
    runtime.shutdown.force();
}
