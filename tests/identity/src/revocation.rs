//! Clients that the Enrollment service refuses although their token or certificate is valid.

use std::sync::Arc;

use jiff::Timestamp;
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};
use serde_json::json;
use tonic::{Code, Status};
use tunnel_link::proto::RenewRequest;
use tunnel_pki::{ALPN_GRPC, AgentIdentity, Holder, PrivateKey, agent_tls, create_csr};
use tunnel_routing::inventory::{self, Inventory, Selector};
use tunnel_server::pki::{Lifetimes, Revocation};

use crate::harness::{TestServer, client, enroll, node, publish};

/// Asks for a renewal, as anyone with the identity's key can.
async fn renew(server: &TestServer, identity: &AgentIdentity, csr: Vec<u8>) -> Result<(), Status> {
    let mut client = client(&server.address, agent_tls(identity, ALPN_GRPC).unwrap()).await;
    client.renew(RenewRequest { csr }).await.map(drop)
}

fn csr() -> Vec<u8> {
    create_csr(&PrivateKey::generate().unwrap()).unwrap()
}

/// An inventory with this node.
fn known(name: &str) -> Option<Arc<Inventory>> {
    let node = json!({"kind": "Node", "metadata": {"name": name}});
    Some(Arc::new(inventory::parse(&node.to_string(), &Selector::default()).unwrap()))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copied_identity_never_comes_back() {
    let server = TestServer::start().await;
    let (config, copy) = server.enrolled("edge-1").await;
    let unused = server.token("edge-1");
    renew(&server, &copy, csr()).await.unwrap();

    let revoked = Revocation::revoke(None, &node("edge-1"), Timestamp::now());
    publish(&server.revocations, revoked.clone());
    let refused = renew(&server, &copy, csr()).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert!(refused.message().contains("agent readmit edge-1"), "{refused}");
    // The used token with its own key, an unused one, and one that was made since.
    std::fs::remove_file(config.state_dir.join("agent.crt")).unwrap();
    let since = server.token("edge-1");
    for (token, reason) in [
        (config.token.clone(), "was revoked"),
        (Some((unused.as_str().into(), server.ca_hash())), "was revoked"),
        (Some((since.as_str().into(), server.ca_hash())), "was revoked"),
    ] {
        let error = enroll(&tunnel_pki::enrol::EnrollConfig { token, ..config.clone() }).await.unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
    }

    // In the same second: the old certificate stays out, and the new one counts as newer.
    publish(&server.revocations, revoked.readmit(Timestamp::now()).unwrap());
    let refused = renew(&server, &copy, csr()).await.unwrap_err();
    assert!(refused.message().contains("older than its readmission"), "{refused}");
    let error = enroll(&server.agent("edge-1", "thief", Some(&unused))).await.unwrap_err();
    assert!(error.to_string().contains("void"), "{error}");
    let identity = enroll(&server.agent("edge-1", "new", Some(&since))).await.unwrap();
    renew(&server, &identity, csr()).await.unwrap();
    assert!(renew(&server, &copy, csr()).await.is_err());
    // A rotation of the CA changes nothing of that.
    server.ca.introduce().unwrap();
    let hash = server.ca.activate().unwrap();
    let mut state = server.certificate.ca.clone();
    tokio::time::timeout(crate::harness::DEADLINE, state.wait_for(|state| state.hash() == hash))
        .await
        .unwrap()
        .unwrap();
    assert!(renew(&server, &copy, csr()).await.is_err());
    renew(&server, &identity, csr()).await.unwrap();
    assert_eq!(server.metrics.enrollments("renew", "superseded"), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewal_asks_the_inventory() {
    let server = TestServer::start().await;
    let (_, identity) = server.enrolled("edge-1").await;
    renew(&server, &identity, csr()).await.unwrap();
    server.nodes.send_replace(known("edge-2"));
    let refused = renew(&server, &identity, csr()).await.unwrap_err();
    assert!(refused.message().contains("not in the server's inventory"), "{refused}");
    server.nodes.send_replace(known("edge-1"));
    renew(&server, &identity, csr()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewal_may_name_no_other_node_and_ask_for_nothing() {
    let server = TestServer::start().await;
    let (_, identity) = server.enrolled("edge-1").await;
    let request = |subject: DistinguishedName, names: &[&str]| {
        let names = names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let mut params = CertificateParams::new(names).unwrap();
        params.distinguished_name = subject;
        params.serialize_request(&KeyPair::generate().unwrap()).unwrap().der().to_vec()
    };
    let own = || Holder::Agent.distinguished_name(&node("edge-1"));
    let mut name_alone = DistinguishedName::new();
    name_alone.push(DnType::CommonName, "postern:node:edge-2");
    for (csr, reason) in [
        (request(name_alone, &[]), "postern:node:edge-2"),
        (
            request(Holder::Agent.distinguished_name(&node("edge-2")), &[]),
            "is for node edge-2, not for edge-1",
        ),
        (request(own(), &["cloud.example"]), "asks for extensions"),
        (request(DistinguishedName::new(), &["cloud.example"]), "asks for extensions"),
    ] {
        let refused = renew(&server, &identity, csr).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().contains(reason), "{refused}");
    }
    renew(&server, &identity, request(own(), &[])).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_enrol_nobody_where_they_are_off() {
    let server = TestServer::build(Lifetimes::default(), false).await;
    let error = enroll(&server.agent("edge-1", "edge-1", Some(&server.token("edge-1")))).await.unwrap_err();
    assert!(error.to_string().contains("--token-enrollment=on"), "{error}");
    assert_eq!(server.metrics.enrollments("enroll", "tokens_off"), 1);
}
