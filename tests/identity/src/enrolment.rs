//! Enrolment, its refusals, its files, and renewal.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use jiff::{SignedDuration, Timestamp};
use tonic::Code;
use tunnel_link::proto::{EnrollRequest, RenewRequest};
use tunnel_pki::enrol::{EnrollConfig, EnrollError, IdentityKeeper, IdentityMetrics, Recovery};
use tunnel_pki::{ALPN_GRPC, Holder, PrivateKey, agent_tls, create_csr, pinned_tls};
use tunnel_runtime::clock::Clock;
use tunnel_runtime::files::write_atomically;
use tunnel_server::pki::Lifetimes;

use crate::harness::{DEADLINE, Session, TestServer, client, enroll, eventually, log, mode, node};

fn seconds(agent: u64) -> Lifetimes {
    Lifetimes { agent: Duration::from_secs(agent), ..Lifetimes::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_enrols_once_and_then_lives_on_its_files() {
    let server = TestServer::start().await;
    let token = server.token("edge-1");
    let config = server.agent("edge-1", "agent", Some(&token));
    let identity = enroll(&config).await.unwrap();
    assert_eq!(identity.node, node("edge-1"));
    Session::open(&server.address, &identity).await.unwrap();
    let file = |name: &str| config.state_dir.join(name);
    assert_eq!([mode(&config.state_dir), mode(&file("agent.key"))], [0o700, 0o600]);
    assert!(!file("agent.key.next").exists());
    assert_eq!(server.metrics.enrollments("enroll", "issued"), 1);

    // Without a token or a reachable server.
    let again = EnrollConfig { servers: vec!["127.0.0.1:1".into()], token: None, ..config.clone() };
    assert_eq!(enroll(&again).await.unwrap().chain, identity.chain);
    // Even with a wrong token, which is not used.
    let again = EnrollConfig { token: Some(("x".into(), server.ca_hash())), ..again };
    assert_eq!(enroll(&again).await.unwrap().chain, identity.chain);

    let other = EnrollConfig { node: node("edge-2"), ..again };
    let error = enroll(&other).await.unwrap_err().to_string();
    assert!(error.contains("edge-1") && error.contains("edge-2") && error.contains("--node-name"), "{error}");

    let log = log();
    assert!(log.contains("certificate issued") && log.contains("edge-1"));
    assert!(!log.contains(&token[7..]), "the token is in the log");
    assert!(!format!("{config:?}").contains(&token[7..]));
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_refused_with_the_reason() {
    let server = TestServer::start().await;
    let hours_ago = Timestamp::now() - SignedDuration::from_hours(2);
    let expired = server
        .tokens()
        .create((Holder::Agent, &node("edge-1")), Duration::from_secs(3600), hours_ago)
        .unwrap()
        .0
        .expose();
    let revoked = server.token("edge-1");
    server.tokens().revoke(&revoked).unwrap();
    let used = server.token("edge-1");
    enroll(&server.agent("edge-1", "first", Some(&used))).await.unwrap();
    let others = server.token("edge-2");
    let valid = server.token("edge-1");
    let guessed = format!("{}.{}", &valid[..6], "a".repeat(26));
    for (state, token, reason, outcome) in [
        ("a", &expired, "expired", "expired_token"),
        ("b", &revoked, "unknown token", "unknown_token"),
        ("c", &used, "already used", "used_token"),
        ("d", &others, "for node edge-2, not for edge-1", "other_node"),
        ("e", &guessed, "unknown token", "unknown_token"),
        ("f", &"nonsense".to_owned(), "unknown token", "unknown_token"),
    ] {
        let before = server.metrics.enrollments("enroll", outcome);
        let config = server.agent("edge-1", state, Some(token));
        let error = enroll(&config).await.unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, EnrollError::Refused { .. }), "{text}");
        assert!(text.contains(reason) && text.contains("token create --node edge-1"), "{token}: {text}");
        assert_eq!(server.metrics.enrollments("enroll", outcome), before + 1, "{outcome}");
        assert!(!config.state_dir.join("agent.crt").exists());
    }
    let log = log();
    for token in [&expired, &revoked, &used, &others, &valid, &guessed] {
        assert!(!log.contains(&token[7..]), "a token is in the log");
    }
    enroll(&server.agent("edge-1", "last", Some(&valid))).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_missing_is_named() {
    let server = TestServer::start().await;
    let config = server.agent("edge-1", "agent", None);
    let error = enroll(&config).await.unwrap_err().to_string();
    assert!(error.contains("token create --node edge-1") && error.contains("--ca-hash"), "{error}");
    let token = Some((server.token("edge-1").into(), "sha256:12".into()));
    let error = enroll(&EnrollConfig { token, ..config }).await.unwrap_err().to_string();
    assert!(error.contains("64 hexadecimal digits"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_is_asked_for_again_with_the_same_key() {
    let server = TestServer::start().await;
    let token = server.token("edge-1");
    server.lose_answers.store(2, Ordering::SeqCst);
    enroll(&server.agent("edge-1", "agent", Some(&token))).await.unwrap();
    assert_eq!(server.metrics.enrollments("enroll", "issued"), 3);

    // The agent crashes while it waits; the next start still has the key, and no other agent can use the token.
    let token = server.token("edge-1");
    server.lose_answers.store(usize::MAX, Ordering::SeqCst);
    let config = server.agent("edge-1", "restarted", Some(&token));
    let first = tokio::spawn({
        let config = config.clone();
        async move { enroll(&config).await.map(|_| ()) }
    });
    eventually("the token is used", async || {
        server
            .tokens()
            .list()
            .unwrap()
            .0
            .iter()
            .any(|record| token.starts_with(&record.id) && record.used_by.is_some())
            .then_some(())
    })
    .await;
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    server.lose_answers.store(0, Ordering::SeqCst);
    let thief = server.agent("edge-1", "thief", Some(&token));
    assert!(enroll(&thief).await.unwrap_err().to_string().contains("already used"));
    assert_eq!(mode(&config.state_dir.join("agent.key.next")), 0o600);
    enroll(&config).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_server_is_tried_again_and_another_is_used() {
    let server = TestServer::start().await;
    let token = server.token("edge-1");
    let mut config = server.agent("edge-1", "agent", Some(&token));
    config.servers.insert(0, "127.0.0.1:1".into());
    enroll(&config).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ended_certificate_needs_a_token_again() {
    let server = TestServer::with(seconds(1)).await;
    let (config, identity) = server.enrolled("edge-1").await;
    eventually("the certificate ends", async || identity.validity.is_over(SystemTime::now()).then_some(()))
        .await;
    // Certificates are exact to the second.
    eventually("the server refuses the ended certificate", async || {
        Session::open(&server.address, &identity).await.is_err().then_some(())
    })
    .await;
    let without = EnrollConfig { token: None, ..config.clone() };
    // It is kept: this node's clock may be wrong.
    assert_eq!(enroll(&without).await.unwrap().chain, identity.chain);
    assert!(log().contains("tunnel-server token create --node edge-1"));
    // The used token is bound to the first key.
    assert!(enroll(&config).await.unwrap_err().to_string().contains("already used"));
    let token = server.token("edge-1");
    let again = EnrollConfig { token: Some((token.into(), server.ca_hash())), ..config };
    assert_ne!(enroll(&again).await.unwrap().chain, identity.chain);
}

#[tokio::test(flavor = "multi_thread")]
async fn broken_files_are_named_and_kept() {
    let server = TestServer::start().await;
    let other_key = PrivateKey::generate().unwrap().to_pem();
    for (file, content, reason) in [
        ("agent.crt", "", "no certificate"),
        ("agent.crt", "-----BEGIN CERTIFICATE-----\nMII", "not PEM"),
        ("agent.key", "garbage", "not PEM"),
        ("agent.key", other_key.as_str(), "not the certificate's key"),
        ("ca.crt", "garbage", "no certificate"),
    ] {
        let (config, _) = server.enrolled("edge-1").await;
        let path = config.state_dir.join(file);
        write_atomically(&path, content.as_bytes(), 0o600).unwrap();
        let token = server.token("edge-1");
        let with_token = EnrollConfig { token: Some((token.into(), server.ca_hash())), ..config.clone() };
        let error = enroll(&with_token).await.unwrap_err().to_string();
        let parts = [path.to_str().unwrap(), reason, "tunnel-server token create"];
        assert!(parts.iter().all(|part| error.contains(part)), "{file}: {error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), content);
        fs::remove_dir_all(&config.state_dir).unwrap();
    }
    let (config, _) = server.enrolled("edge-1").await;
    fs::set_permissions(config.state_dir.join("agent.key"), fs::Permissions::from_mode(0o644)).unwrap();
    assert!(enroll(&config).await.unwrap_err().to_string().contains("chmod 600"));
    fs::remove_file(config.state_dir.join("ca.crt")).unwrap();
    assert!(enroll(&config).await.unwrap_err().to_string().contains("ca.crt: there is no such file"));
}

/// A crash between writing the certificate and renaming its key.
#[tokio::test(flavor = "multi_thread")]
async fn an_unfinished_renewal_is_finished_at_the_next_start() {
    let server = TestServer::start().await;
    let (config, identity) = server.enrolled("edge-1").await;
    let (key, next) = (config.state_dir.join("agent.key"), config.state_dir.join("agent.key.next"));
    fs::rename(&key, &next).unwrap();
    write_atomically(&key, PrivateKey::generate().unwrap().to_pem().as_bytes(), 0o600).unwrap();
    let without = EnrollConfig { token: None, ..config };
    assert_eq!(enroll(&without).await.unwrap().chain, identity.chain);
    assert!(key.exists() && !next.exists());
    // One that cannot be used is as none.
    fs::write(&next, [0xff]).unwrap();
    assert_eq!(enroll(&without).await.unwrap().chain, identity.chain);
}

#[tokio::test(flavor = "multi_thread")]
async fn guessing_is_slowed_down() {
    let server = TestServer::start().await;
    let mut client = client(&server.address, pinned_tls(&server.ca_hash()).unwrap()).await;
    let csr = create_csr(&PrivateKey::generate().unwrap()).unwrap();
    let mut guess = async |token: String| {
        let request = EnrollRequest { node: "edge-1".into(), token, csr: csr.clone() };
        client.enroll(request).await.map(|_| ()).map_err(|status| status.code())
    };
    let mut refused = 0;
    while guess(format!("abcdef.{}", "0".repeat(26))).await != Err(Code::ResourceExhausted) {
        refused += 1;
        assert!(refused < 1000, "nothing slows the guessing down");
    }
    assert!(
        refused >= 10,
        "slowed down after {refused} failures, which neighbours behind a NAT may well make"
    );
    assert_eq!(server.metrics.enrollments("enroll", "unknown_token"), refused);
    assert!(server.metrics.enrollments("enroll", "rate_limited") >= 1);
    // An honest agent at the same address is served immediately: it enrols, and renews.
    let limited = server.metrics.enrollments("enroll", "rate_limited");
    let identity = enroll(&server.agent("edge-1", "agent", Some(&server.token("edge-1")))).await.unwrap();
    assert_eq!(server.metrics.enrollments("enroll", "rate_limited"), limited, "it was delayed");
    let tls = agent_tls(&identity, ALPN_GRPC).unwrap();
    let mut honest = crate::harness::client(&server.address, tls).await;
    honest.renew(RenewRequest { csr: create_csr(&PrivateKey::generate().unwrap()).unwrap() }).await.unwrap();
    assert_eq!(server.metrics.enrollments("renew", "issued"), 1);
    // That has not lifted the limit: it only allows as many more as the time since then is worth.
    let mut more = 0;
    while guess(format!("abcdef.{}", "0".repeat(26))).await != Err(Code::ResourceExhausted) {
        more += 1;
        assert!(more < 10, "the limit was lifted");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_requests_are_invalid_arguments() {
    let server = TestServer::start().await;
    let mut client = client(&server.address, pinned_tls(&server.ca_hash()).unwrap()).await;
    let token = server.token("edge-1");
    let csr = create_csr(&PrivateKey::generate().unwrap()).unwrap();
    let mut unsigned = csr.clone();
    *unsigned.last_mut().unwrap() ^= 1;
    for (node, csr) in [("Edge", &csr), ("edge-1", &Vec::new()), ("edge-1", &unsigned)] {
        let request = EnrollRequest { node: node.into(), token: token.clone(), csr: csr.clone() };
        let status = client.enroll(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    }
    let huge = EnrollRequest { node: "edge-1".into(), token, csr: vec![0; 1 << 20] };
    assert_eq!(client.enroll(huge).await.unwrap_err().code(), Code::OutOfRange);
    let status = client.renew(RenewRequest { csr }).await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated, "{status}");
    assert_eq!(server.metrics.enrollments("renew", "bad_certificate"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_is_renewed_without_dropping_the_session() {
    let server = TestServer::with(seconds(20)).await;
    let (config, identity) = server.enrolled("edge-1").await;
    let mut session = Session::open(&server.address, &identity).await.unwrap();
    let (old_chain, old_key, not_after) = (
        identity.chain.clone(),
        fs::read(config.state_dir.join("agent.key")).unwrap(),
        identity.validity.not_after,
    );
    // An earlier renewal has left a file that a crash has damaged.
    write_atomically(&config.state_dir.join("agent.key.next"), b"garbage", 0o600).unwrap();
    let keeper = IdentityKeeper::start(config.clone(), identity, IdentityMetrics::default(), Recovery::Token);
    // The first answer gets lost, and the first server of the list is not there.
    keeper.set_servers(vec!["127.0.0.1:1".into(), server.address.clone()]);
    server.lose_answers.store(1, Ordering::SeqCst);
    let mut published = keeper.subscribe();
    published.borrow_and_update();
    tokio::time::timeout(DEADLINE, published.changed()).await.unwrap().unwrap();
    assert!(SystemTime::now() < not_after, "renewed before the end");
    let renewed = keeper.current();
    drop(tokio::time::timeout(DEADLINE, keeper.hold_pending_key()).await.expect("it is stored"));
    assert_ne!(renewed.chain, old_chain);
    assert_eq!(renewed.node, node("edge-1"));
    assert_ne!(fs::read(config.state_dir.join("agent.key")).unwrap(), old_key, "a new key");
    assert_eq!(mode(&config.state_dir.join("agent.key")), 0o600);
    session.echo().await.unwrap();
    Session::open(&server.address, &renewed).await.unwrap();
    let without = EnrollConfig { token: None, ..config };
    assert_eq!(enroll(&without).await.unwrap().chain, renewed.chain, "it is on disk");
}

/// The agent has enrolled again while a renewal of its expired certificate waited for the pending key.
#[tokio::test]
async fn the_certificate_of_a_new_enrolment_is_not_renewed_at_once() {
    let server = TestServer::start().await;
    let (config, expired) = server.enrolled("edge-1").await;
    let config = EnrollConfig { clock: Clock::of(0), ..config };
    config.clock.set(expired.validity.not_after);
    let again = enroll(&server.agent("edge-1", "again", Some(&server.token("edge-1")))).await.unwrap();
    let chain = again.chain.clone();
    let keeper = IdentityKeeper::start(config, expired, IdentityMetrics::default(), Recovery::ApiServer);
    let pending_key = keeper.hold_pending_key().await;
    // The renewal begins, and waits in front of those that come later.
    tokio::time::sleep(Duration::from_millis(100)).await;
    keeper.replace(again).await;
    drop(pending_key);
    drop(tokio::time::timeout(DEADLINE, keeper.hold_pending_key()).await.expect("the renewal ends"));
    assert!(keeper.current().chain == chain, "it was renewed");
    assert_eq!(server.metrics.enrollments("renew", "issued"), 0);
}

/// The certificate that renews decides the node, and the request may name no other.
#[tokio::test(flavor = "multi_thread")]
async fn a_renewal_is_for_the_same_node() {
    let server = TestServer::start().await;
    let (_, identity) = server.enrolled("edge-1").await;
    let mut client = client(&server.address, agent_tls(&Arc::new(identity), ALPN_GRPC).unwrap()).await;
    let key = PrivateKey::generate().unwrap();
    let mut params = rcgen::CertificateParams::default();
    params.distinguished_name.push(rcgen::DnType::CommonName, "postern:node:edge-2");
    let csr = params.serialize_request(&key).unwrap().der().to_vec();
    let refused = client.renew(RenewRequest { csr }).await.unwrap_err();
    assert!(refused.message().contains("postern:node:edge-2"), "{refused}");
    let csr = create_csr(&key).unwrap();
    let answer = client.renew(RenewRequest { csr }).await.unwrap().into_inner();
    let bundle = tunnel_pki::TrustBundle::from_pem(&answer.trust_bundle).unwrap();
    let renewed = tunnel_pki::AgentIdentity::from_pem(&answer.certificate_chain, &key.to_pem(), bundle);
    assert_eq!(renewed.unwrap().node, node("edge-1"));
}
