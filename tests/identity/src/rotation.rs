//! Changing the CA under agents that are connected, down, or new.

use std::fs;
use std::process::Command;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::timeout;
use tunnel_pki::TrustBundle;
use tunnel_pki::enrol::{EnrollConfig, IdentityKeeper, IdentityMetrics, Recovery};
use tunnel_runtime::blocking::set_disk;
use tunnel_server::pki::Lifetimes;

use crate::harness::{DEADLINE, Session, TestServer, enroll, eventually, log};

/// Agents renew within a 20th of this after the activation.
const LIFE: Duration = Duration::from_secs(60);

async fn server_has(server: &TestServer, roots: usize, signs: &str) -> String {
    let mut ca = server.certificate.ca.clone();
    let state = ca.wait_for(|state| state.roots().len() == roots && state.hash() == signs);
    let state = tokio::time::timeout(DEADLINE, state).await.expect("the server follows its files").unwrap();
    state.bundle().to_pem()
}

async fn signed_by(keeper: &IdentityKeeper, root: &str) {
    let mut identities = keeper.subscribe();
    let moved = identities.wait_for(|identity| {
        identity.is_signed_by_newest_root()
            && identity.bundle.hashes().first().is_some_and(|hash| hash == root)
    });
    tokio::time::timeout(DEADLINE, moved).await.expect("the agent renews early").unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rotation_loses_no_agent() {
    let server = TestServer::with(Lifetimes { agent: LIFE, ..Lifetimes::default() }).await;
    let old = server.ca_hash();
    let (config, first) = server.enrolled("edge-1").await;
    let mut session = Session::open(&server.address, &first).await.unwrap();
    let before = first.with_bundle(first.bundle.clone());
    let awake = IdentityKeeper::start(config.clone(), first, IdentityMetrics::default(), Recovery::Token);
    let (sleepy_config, sleepy) = server.enrolled("edge-2").await;
    let early_token = server.token("edge-3");
    let early = server.agent("edge-3", "edge-3", Some(&early_token));

    // Introduced: the connected agent learns the new root; nothing else changes.
    let new = server.ca.introduce().unwrap();
    let pem = server_has(&server, 2, &old).await;
    assert!(awake.install_bundle(&pem, &session.server_chain).await.unwrap());
    assert!(!awake.install_bundle(&pem, &session.server_chain).await.unwrap(), "it has it already");
    assert_eq!(awake.current().bundle.hashes(), [old.clone(), new.clone()]);
    assert_eq!(TrustBundle::from_file(&config.state_dir.join("ca.crt")).unwrap(), awake.current().bundle);
    Session::open(&server.address, &awake.current()).await.unwrap();

    // Activated: the server is now certified by the new root.
    assert_eq!(server.ca.activate().unwrap(), new);
    let pem = server_has(&server, 2, &new).await;
    let fresh = Session::open(&server.address, &awake.current()).await.unwrap();
    assert!(awake.install_bundle(&pem, &fresh.server_chain).await.unwrap());
    signed_by(&awake, &new).await;
    // An agent that was down since before the introduction knows only the old root, and still connects.
    assert_eq!(sleepy.bundle.hashes(), std::slice::from_ref(&old));
    let woken = Session::open(&server.address, &sleepy).await.unwrap();
    // An early token has the old root's hash.
    assert_eq!(early.token.as_ref().unwrap().1, old);
    assert_eq!(enroll(&early).await.unwrap().bundle.hashes()[0], new);
    let error = server.ca.retire(false).unwrap_err().to_string();
    assert!(error.contains("edge-2") && !error.contains("edge-1") && !error.contains("edge-3"), "{error}");
    let sleepy = IdentityKeeper::start(sleepy_config, sleepy, IdentityMetrics::default(), Recovery::Token);
    assert!(sleepy.install_bundle(&pem, &woken.server_chain).await.unwrap());
    signed_by(&sleepy, &new).await;

    // Retired: no agent uses the old root.
    assert_eq!(server.ca.retire(false).unwrap(), old);
    let pem = server_has(&server, 1, &new).await;
    for keeper in [&awake, &sleepy] {
        let session = Session::open(&server.address, &keeper.current()).await.unwrap();
        assert!(keeper.install_bundle(&pem, &session.server_chain).await.unwrap());
        assert_eq!(keeper.current().bundle.hashes(), std::slice::from_ref(&new));
        Session::open(&server.address, &keeper.current()).await.unwrap();
    }
    // The old certificate is refused although it has not expired, and the first session never broke.
    let old_certificate = before.with_bundle(awake.current().bundle.clone());
    assert!(Session::open(&server.address, &old_certificate).await.is_err());
    session.echo().await.unwrap();
    enroll(&server.agent("edge-4", "edge-4", Some(&server.token("edge-4")))).await.unwrap();
}

/// As from half of a backup.
#[tokio::test(flavor = "multi_thread")]
async fn a_ca_that_cannot_be_read_any_more_stays_in_use_and_is_followed_again() {
    let server = TestServer::start().await;
    let (_, identity) = server.enrolled("edge-1").await;
    let (file, old) = (server.state_dir().join("ca/ca.crt"), server.ca_hash());
    let (good, path) = (fs::read(&file).unwrap(), file.display().to_string());
    let broken = b"-----BEGIN CERTIFICATE-----\nMIIB".as_slice();
    for (damaged, reason) in [(broken, "not PEM"), (b"\xff\xfe".as_slice(), "not text")] {
        fs::write(&file, damaged).unwrap();
        let said = |line: &str| {
            ["ERROR", "keeping the present ones", &path, reason].iter().all(|part| line.contains(part))
        };
        eventually(reason, async || log().lines().any(said).then_some(())).await;
        assert_eq!(server.certificate.ca.borrow().hash(), old);
        Session::open(&server.address, &identity).await.unwrap();
    }
    fs::write(&file, good).unwrap();
    eventually("an end of the failure", async || log().contains("CA up to date again").then_some(())).await;
    server.ca.introduce().unwrap();
    server_has(&server, 2, &old).await;
    Session::open(&server.address, &identity).await.unwrap();
}

/// The renewal reads the file of its key, which is a pipe here.
#[tokio::test]
async fn a_disk_that_does_not_answer_delays_only_the_renewal() {
    let server = TestServer::with(Lifetimes { agent: LIFE, ..Lifetimes::default() }).await;
    let (config, identity) = server.enrolled("edge-1").await;
    let mut session = Session::open(&server.address, &identity).await.unwrap();
    let keeper = IdentityKeeper::start(config.clone(), identity, IdentityMetrics::default(), Recovery::Token);
    let file = config.state_dir.join("agent.key.next");
    assert!(Command::new("mkfifo").args(["-m", "600"]).arg(&file).status().unwrap().success());
    let ((asked, is_asked), (answer, answers)) = (oneshot::channel(), mpsc::channel::<()>());
    let disk = std::thread::spawn(move || {
        // It is opened once somebody reads, who sees its end once it is closed.
        let pipe = fs::OpenOptions::new().write(true).open(file).unwrap();
        asked.send(()).unwrap();
        let told = answers.recv_timeout(DEADLINE);
        drop(pipe);
        told
    });
    let new = server.ca.introduce().unwrap();
    server.ca.activate().unwrap();
    let pem = server_has(&server, 2, &new).await;
    assert!(keeper.install_bundle(&pem, &session.server_chain).await.unwrap());
    timeout(DEADLINE, is_asked).await.expect("the agent renews early").unwrap();
    session.echo().await.unwrap();
    answer.send(()).expect("the agent's only thread waited for the disk");
    disk.join().unwrap().unwrap();
    signed_by(&keeper, &new).await;
}

#[tokio::test]
async fn new_roots_are_used_before_the_disk_has_them() {
    let server = TestServer::start().await;
    let (config, identity) = server.enrolled("edge-1").await;
    let session = Session::open(&server.address, &identity).await.unwrap();
    let keeper = IdentityKeeper::start(config.clone(), identity, IdentityMetrics::default(), Recovery::Token);
    let (keeper, old) = (Arc::new(keeper), server.ca_hash());
    server.ca.introduce().unwrap();
    let pem = server_has(&server, 2, &old).await;
    set_disk(|| Duration::from_secs(3600));
    let install = {
        let (keeper, pem) = (keeper.clone(), pem.clone());
        async move { keeper.install_bundle(&pem, &session.server_chain).await.unwrap() }
    };
    let installing = tokio::spawn(install);
    let mut identities = keeper.subscribe();
    let used = identities.wait_for(|identity| identity.bundle.hashes().len() == 2);
    timeout(DEADLINE, used).await.expect("the roots do not wait for the disk").unwrap();
    let again = timeout(DEADLINE, keeper.install_bundle(&pem, &[])).await;
    assert!(!again.expect("roots that are there wait for no disk").unwrap());
    assert!(!installing.is_finished(), "nothing is stored yet");
    installing.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pushed_bundle_must_verify_the_server_that_pushes_it() {
    let server = TestServer::start().await;
    let other = TestServer::start().await;
    let (config, identity) = server.enrolled("edge-1").await;
    let session = Session::open(&server.address, &identity).await.unwrap();
    let keeper = IdentityKeeper::start(config.clone(), identity, IdentityMetrics::default(), Recovery::Token);
    let before = fs::read(config.state_dir.join("ca.crt")).unwrap();
    let foreign = other.ca.state().unwrap().bundle().to_pem();
    for (pem, reason) in
        [(foreign.as_str(), "does not verify"), ("", "no certificate"), ("junk", "no certificate")]
    {
        let error = keeper.install_bundle(pem, &session.server_chain).await.unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
    let error = keeper.install_bundle(&foreign, &[]).await.unwrap_err().to_string();
    assert!(error.contains("empty chain"), "{error}");
    assert_eq!(fs::read(config.state_dir.join("ca.crt")).unwrap(), before);
    Session::open(&server.address, &keeper.current()).await.unwrap();
}

/// A connection that was made before the retirement must not outlive it by renewing.
#[tokio::test(flavor = "multi_thread")]
async fn a_retired_root_cannot_renew_on_an_old_connection() {
    use tunnel_pki::{ALPN_GRPC, PrivateKey, agent_tls, create_csr};
    let server = TestServer::start().await;
    let (_, identity) = server.enrolled("edge-1").await;
    let mut client = crate::harness::client(&server.address, agent_tls(&identity, ALPN_GRPC).unwrap()).await;
    let renew =
        || tunnel_link::proto::RenewRequest { csr: create_csr(&PrivateKey::generate().unwrap()).unwrap() };
    let new = server.ca.introduce().unwrap();
    server.ca.activate().unwrap();
    server.ca.retire(true).unwrap();
    server_has(&server, 1, &new).await;
    let status = client.renew(renew()).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::Unauthenticated);
    assert!(status.message().contains("no longer trusted"), "{status}");
    eventually("counted", async || {
        (server.metrics.enrollments("renew", "bad_certificate") == 1).then_some(())
    })
    .await;
}

/// The certificate on disk is valid for long, but no current server accepts it.
#[tokio::test(flavor = "multi_thread")]
async fn a_new_token_replaces_the_identity_of_a_ca_that_is_gone() {
    let server = TestServer::start().await;
    let (away, old) = server.enrolled("edge-1").await;
    let (attached, identity) = server.enrolled("edge-2").await;
    let session = Session::open(&server.address, &identity).await.unwrap();
    let keeper =
        IdentityKeeper::start(attached.clone(), identity, IdentityMetrics::default(), Recovery::Token);
    let new = server.ca.introduce().unwrap();
    server.ca.activate().unwrap();
    let pem = server_has(&server, 2, &new).await;
    assert!(keeper.install_bundle(&pem, &session.server_chain).await.unwrap());
    drop(keeper);
    server.ca.retire(true).unwrap();
    server_has(&server, 1, &new).await;
    eventually("the old certificate is refused", async || {
        Session::open(&server.address, &old).await.is_err().then_some(())
    })
    .await;
    let enrolls_anew = async |server: &TestServer, mut config: EnrollConfig| {
        config.servers = vec![server.address.clone()];
        config.token = Some((server.token(config.node.as_str()).into(), server.ca_hash()));
        let identity = enroll(&config).await.unwrap();
        assert_eq!(identity.bundle.hashes(), [server.ca_hash()]);
        Session::open(&server.address, &identity).await.unwrap();
        let without = EnrollConfig { token: None, ..config };
        assert_eq!(enroll(&without).await.unwrap().chain, identity.chain, "it is on disk");
    };
    enrolls_anew(&server, away.clone()).await;
    // An agent that was notified of its retired root already has the new hash.
    let only_new = server.certificate.ca.borrow().bundle().to_pem();
    fs::write(attached.state_dir.join("ca.crt"), only_new).unwrap();
    enrolls_anew(&server, attached).await;
    // The server has lost its CA and made another.
    enrolls_anew(&TestServer::start().await, away).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_left_in_a_unit_file_does_not_stop_an_agent_that_works() {
    let server = TestServer::start().await;
    let other = TestServer::start().await;
    let (config, identity) = server.enrolled("edge-1").await;
    let upper = server.ca_hash().to_uppercase().replace("SHA256:", "sha256:");
    let asked = || server.metrics.enrollments("enroll", "unknown_token");
    let token = |ca_hash: String| Some(("abcdef.00000000000000000000000000".into(), ca_hash));
    // Its own CA's hash: no server is asked, whatever the token.
    for ca_hash in [server.ca_hash(), upper] {
        let stale = EnrollConfig { token: token(ca_hash), ..config.clone() };
        assert_eq!(enroll(&stale).await.unwrap().chain, identity.chain);
    }
    assert_eq!(asked(), 0);
    // Another hash: the server's CA does not match it, refuses the token, or is away; or it is no hash at all.
    let elsewhere = vec![other.address.clone()];
    for (servers, ca_hash) in [
        (config.servers.clone(), other.ca_hash()),
        (elsewhere, other.ca_hash()),
        (vec!["127.0.0.1:1".into()], other.ca_hash()),
        (config.servers.clone(), "sha256:12".into()),
    ] {
        let stale = EnrollConfig { servers, token: token(ca_hash), ..config.clone() };
        assert_eq!(enroll(&stale).await.unwrap().chain, identity.chain);
    }
    assert_eq!(
        other.metrics.enrollments("enroll", "unknown_token"),
        1,
        "the one server that matched was asked"
    );
    let without = EnrollConfig { token: None, ..config };
    let kept = enroll(&without).await.unwrap();
    Session::open(&server.address, &kept).await.unwrap();
    assert!(log().contains("using the stored certificate"));
}
