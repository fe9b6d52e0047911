//! Tests of the CA's files and its rotation.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::server::WebPkiClientVerifier;
use rustls_pki_types::{ServerName, UnixTime};
use tunnel_pki::{
    Client, Holder, IdentityError, PrivateKey, SERVER_NAME, client_of_certificate, create_csr,
    public_key_of_csr, server_names_of_certificate, validity,
};
use tunnel_runtime::NodeName;

use super::{Ca, IssuedLedger, Lifetimes, PkiError, Role, cluster_of};

fn node(name: &str) -> NodeName {
    name.parse().unwrap()
}

fn new_ca() -> (tempfile::TempDir, PathBuf, Ca) {
    let directory = tempfile::tempdir().unwrap();
    let state_dir = directory.path().join("server");
    let ca = Ca::load_or_create(&state_dir, Lifetimes::default()).unwrap();
    (directory, state_dir, ca)
}

fn only_key(state_dir: &Path) -> PathBuf {
    let keys: Vec<_> = fs::read_dir(state_dir.join("ca"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "key"))
        .collect();
    assert_eq!(keys.len(), 1, "{keys:?}");
    keys[0].clone()
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o777
}

fn issue(ca: &Ca, name: &str) -> super::IssuedCertificate {
    let key = public_key_of_csr(&create_csr(&PrivateKey::generate().unwrap()).unwrap()).unwrap();
    let issued = ca.state().unwrap().issue_agent(&node(name), &key).unwrap();
    IssuedLedger::new(ca.state_dir()).record((Holder::Agent, &node(name)), &issued).unwrap();
    issued
}

#[test]
fn a_new_ca_is_private_and_stays_the_same() {
    let (_directory, state_dir, ca) = new_ca();
    let hash = ca.state().unwrap().hash().to_owned();
    assert_eq!(mode(&state_dir), 0o700);
    assert_eq!(mode(&state_dir.join("ca")), 0o700);
    assert_eq!(mode(&only_key(&state_dir)), 0o600);
    let unfinished = state_dir.join(".ca-x");
    fs::create_dir(&unfinished).unwrap();
    fs::write(unfinished.join("x.key"), "").unwrap();
    let again = Ca::load_or_create(&state_dir, Lifetimes::default()).unwrap();
    assert!(!unfinished.exists(), "a key stays that nobody removes");
    assert_eq!(again.state().unwrap().hash(), hash);
    let left: Vec<_> = fs::read_dir(&state_dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "only `ca` and `lock`: {left:?}");
}

#[test]
fn concurrent_starts_create_one_ca() {
    let directory = tempfile::tempdir().unwrap();
    let state_dir = directory.path().join("server");
    let hashes: std::collections::BTreeSet<_> = std::thread::scope(|scope| {
        let starts: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    let ca = Ca::load_or_create(&state_dir, Lifetimes::default()).unwrap();
                    ca.state().unwrap().hash().to_owned()
                })
            })
            .collect();
        starts.into_iter().map(|start| start.join().unwrap()).collect()
    });
    assert_eq!(hashes.len(), 1);
}

/// Each broken state is refused with the file, the reason and the fix, and nothing is overwritten.
#[test]
fn a_broken_ca_is_never_replaced() {
    type Break = fn(&Path, &Path);
    let cases: [(Break, &str, &str); 8] = [
        (|roots, _| fs::write(roots, "").unwrap(), "ca.crt", "no certificate"),
        (|roots, _| fs::write(roots, "-----BEGIN CERTIFICATE-----\nMIIB").unwrap(), "ca.crt", "not PEM"),
        (|roots, _| fs::write(roots, [0xff, 0xfe]).unwrap(), "ca.crt", "not text"),
        (|roots, _| fs::remove_file(roots).unwrap(), "ca.crt", "no such file"),
        (|_, key| fs::remove_file(key).unwrap(), ".key", "key is missing"),
        (|_, key| fs::write(key, "garbage").unwrap(), ".key", ""),
        (
            |_, key| fs::write(key, PrivateKey::generate().unwrap().to_pem()).unwrap(),
            ".key",
            "not the key of",
        ),
        (|_, key| fs::set_permissions(key, fs::Permissions::from_mode(0o644)).unwrap(), ".key", "chmod 600"),
    ];
    for (index, (damage, file, reason)) in cases.into_iter().enumerate() {
        let (_directory, state_dir, _) = new_ca();
        let (roots, key) = (state_dir.join("ca/ca.crt"), only_key(&state_dir));
        damage(&roots, &key);
        let before = (fs::read(&roots).ok(), fs::read(&key).ok());
        let error = Ca::load_or_create(&state_dir, Lifetimes::default()).unwrap_err().to_string();
        assert!(error.contains(file) && error.contains(reason), "case {index}: {error}");
        assert!(error.contains("backup") || error.contains("chmod"), "case {index} names no fix: {error}");
        assert_eq!((fs::read(&roots).ok(), fs::read(&key).ok()), before, "case {index}");
    }
}

#[test]
fn certificates_have_the_expected_contents() {
    let (_directory, _, ca) = new_ca();
    let issued = issue(&ca, "edge-1");
    let leaf = &issued.chain[0];
    assert_eq!(client_of_certificate(leaf).unwrap(), Client::Agent(node("edge-1")));
    assert!(matches!(server_names_of_certificate(leaf), Err(IdentityError::NotServer(_))));
    let life = validity(leaf).unwrap().life();
    assert_eq!(life, Duration::from_secs(30 * 86_400));
    assert!(validity(leaf).unwrap().not_before < SystemTime::now() - Duration::from_secs(290));

    let dns = ["cloud.example".to_owned(), "*.cloud.example".to_owned(), SERVER_NAME.to_owned()];
    let addresses: [IpAddr; 2] = ["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()];
    let state = ca.state().unwrap();
    let (server, _) = state.issue_server(&dns, &addresses).unwrap();
    assert_eq!(
        server_names_of_certificate(&server.chain[0]).unwrap(),
        [SERVER_NAME, "cloud.example", "*.cloud.example", "10.0.0.1", "fd00::1"]
    );
    assert!(client_of_certificate(&server.chain[0]).is_err());
    state.bundle().verify_server(&server.chain, SystemTime::now()).unwrap();
    state.bundle().verify_server(&issued.chain, SystemTime::now()).unwrap_err();
    for bad in ["", "a b", "é.example", "a..b", &"a".repeat(300)] {
        let error = state.issue_server(&[bad.to_owned()], &[]).map(|_| ()).unwrap_err();
        assert!(matches!(error, PkiError::Name { .. }), "{bad}: {error}");
    }
}

#[test]
fn clocks_may_differ_by_an_hour() {
    let (_directory, _, ca) = new_ca();
    let state = ca.state().unwrap();
    let (server, _) = state.issue_server(&[], &[]).unwrap();
    let (peer, _) = state.issue_peer("cloud-1").unwrap();
    let mut roots = rustls::RootCertStore::empty();
    roots.add(state.roots()[0].certificate.clone()).unwrap();
    let (roots, provider) = (Arc::new(roots), Arc::new(rustls::crypto::aws_lc_rs::default_provider()));
    let servers =
        WebPkiServerVerifier::builder_with_provider(roots.clone(), provider.clone()).build().unwrap();
    let clients = WebPkiClientVerifier::builder_with_provider(roots, provider).build().unwrap();
    let name = ServerName::try_from(SERVER_NAME).unwrap();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let hour = Duration::from_secs(3600);
    // Right after the issue, by a clock that is behind, and by one that is ahead.
    for clock in [now - hour, now, now + hour] {
        let clock = UnixTime::since_unix_epoch(clock);
        servers.verify_server_cert(&server.chain[0], &server.chain[1..], &name, &[], clock).unwrap();
        clients.verify_client_cert(&peer.chain[0], &peer.chain[1..], clock).unwrap();
    }
    let days = UnixTime::since_unix_epoch(now - 48 * hour);
    assert!(servers.verify_server_cert(&server.chain[0], &server.chain[1..], &name, &[], days).is_err());
    // An agent's own clock does not matter for its certificate. The servers' clocks may differ by five minutes.
    let agent = validity(&issue(&ca, "edge-1").chain[0]).unwrap();
    let early = SystemTime::now().duration_since(agent.not_before).unwrap();
    assert!((Duration::from_secs(290)..Duration::from_secs(310)).contains(&early), "{early:?}");
}

#[test]
fn lifetimes_come_from_the_environment() {
    let agent = |text: &'static str| {
        Lifetimes::from_lookup(move |key| (key == "POSTERN_AGENT_CERTIFICATE_LIFE").then(|| text.to_owned()))
    };
    let lifetimes = agent("90s").unwrap();
    assert_eq!((lifetimes.agent, lifetimes.server), (Duration::from_secs(90), Lifetimes::default().server));
    let error = agent("soon").unwrap_err().to_string();
    assert!(error.contains("POSTERN_AGENT_CERTIFICATE_LIFE=soon"), "{error}");
}

#[test]
fn a_rotation_takes_three_steps() {
    let (_directory, state_dir, ca) = new_ca();
    let old = ca.state().unwrap().hash().to_owned();
    let before = issue(&ca, "edge-1");
    assert!(matches!(ca.activate(), Err(PkiError::Rotation(_))));
    assert!(matches!(ca.retire(true), Err(PkiError::Rotation(_))));

    let new = ca.introduce().unwrap();
    let state = ca.state().unwrap();
    assert_eq!((state.hash(), state.roots().len()), (old.as_str(), 2));
    assert_eq!(state.role(&state.roots()[1]), Role::Introduced);
    assert!(ca.introduce().unwrap_err().to_string().contains("ca activate"));
    assert!(matches!(ca.retire(true), Err(PkiError::Rotation(_))));

    assert_eq!(ca.activate().unwrap(), new);
    let state = ca.state().unwrap();
    assert_eq!(state.hash(), new);
    assert_eq!(state.role(&state.roots()[1]), Role::Retiring);
    assert!(matches!(ca.activate(), Err(PkiError::Rotation(_))), "activation cannot be undone");
    assert!(ca.introduce().unwrap_err().to_string().contains("ca retire"));
    // An agent that knows only the old root still accepts the server.
    let (server, _) = state.issue_server(&[], &[]).unwrap();
    let old_only = tunnel_pki::TrustBundle::new(vec![state.roots()[1].certificate.clone()]).unwrap();
    old_only.verify_server(&server.chain, SystemTime::now()).unwrap();
    assert_eq!(state.bundle().issuer_of(&before.chain[0]), Some(1));

    let error = ca.retire(false).unwrap_err().to_string();
    assert!(error.contains("edge-1") && error.contains("--force"), "{error}");
    assert_eq!(state.bundle().issuer_of(&issue(&ca, "edge-1").chain[0]), Some(0));
    assert_eq!(ca.retire(false).unwrap(), old);
    let state = ca.state().unwrap();
    assert_eq!((state.hash(), state.roots().len()), (new.as_str(), 1));
    assert_eq!(state.roots()[0].generation, 2);
    only_key(&state_dir);
    old_only.verify_server(&state.issue_server(&[], &[]).unwrap().0.chain, SystemTime::now()).unwrap_err();
}

#[test]
fn an_old_root_can_be_retired_by_force() {
    let (_directory, _, ca) = new_ca();
    issue(&ca, "edge-1");
    ca.introduce().unwrap();
    ca.activate().unwrap();
    ca.retire(false).unwrap_err();
    ca.retire(true).unwrap();
    assert_eq!(ca.state().unwrap().roots().len(), 1);
}

/// The directories of CAs that were set aside.
fn set_aside(state_dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(state_dir).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.to_str().unwrap().contains("ca.replaced-")).collect()
}

#[test]
fn no_ca_that_was_set_aside_is_lost() {
    let (_directory, state_dir, first) = new_ca();
    let first = first.material().unwrap();
    let (grown, _) = first.introduce().unwrap();
    let other = super::CaMaterial::generate().unwrap();
    let install = |material| Ca::install(&state_dir, Lifetimes::default(), material, "secret").unwrap();
    // Twice a CA with the same signing root, then two broken ones.
    for material in [&other, &grown, &other] {
        install(material);
    }
    for _ in 0..2 {
        fs::write(state_dir.join("ca/ca.crt"), "broken").unwrap();
        install(&other);
    }
    let aside = set_aside(&state_dir);
    let roots: Vec<_> = aside.iter().map(|path| fs::read_to_string(path.join("ca.crt")).unwrap()).collect();
    assert_eq!(aside.len(), 5, "{aside:?}");
    for lost in [first.roots(), other.roots(), grown.roots()] {
        assert!(roots.iter().any(|kept| kept == lost), "{aside:?}");
    }
    assert_eq!(roots.iter().filter(|kept| *kept == "broken").count(), 2);
}

/// On a full or read-only disk a write would keep the server from starting.
#[test]
fn a_current_copy_of_a_secret_is_not_written_again() {
    let (_directory, state_dir, ca) = new_ca();
    let material = ca.material().unwrap();
    let install = |secret: &str| Ca::install(&state_dir, Lifetimes::default(), &material, secret).unwrap();
    // A file that is replaced has another inode.
    let files = || {
        let entries = fs::read_dir(state_dir.join("ca")).unwrap().map(|entry| entry.unwrap());
        let files = entries.map(|entry| (entry.file_name(), entry.metadata().unwrap().ino()));
        files.collect::<std::collections::BTreeMap<_, _>>()
    };
    install("kube-system/tunnel-server-ca");
    let before = files();
    assert_eq!(before.len(), 3, "{before:?}");
    install("kube-system/tunnel-server-ca");
    assert_eq!(files(), before);
    install("kube-system/another");
    assert_ne!(files(), before);
    assert_eq!(cluster_of(&state_dir).unwrap().as_deref(), Some("kube-system/another"));
}

#[test]
fn without_room_for_another_ca_the_present_one_stays() {
    let (_directory, state_dir, ca) = new_ca();
    let present = ca.material().unwrap();
    let other = super::CaMaterial::generate().unwrap();
    // Like a full disk, but it stops root too: a file in a directory that there is not.
    let mut keys = other.keys().clone();
    keys.insert("no/such.key".to_owned(), tunnel_pki::Zeroizing::new(String::new()));
    let unwritable = super::CaMaterial::new(other.roots().to_owned(), keys);
    Ca::install(&state_dir, Lifetimes::default(), &unwritable, "secret").unwrap_err();
    assert_eq!(ca.material().unwrap(), present);
    assert!(set_aside(&state_dir).is_empty());
}

#[test]
fn a_copy_of_a_secret_is_rotated_there() {
    let (_directory, state_dir, ca) = new_ca();
    let other = super::CaMaterial::generate().unwrap();
    let install =
        || Ca::install(&state_dir, Lifetimes::default(), &other, "kube-system/tunnel-server-ca").unwrap();
    let old = ca.material().unwrap();
    let (copy, changed) = install();
    assert!(changed && copy.material().unwrap() == other);
    assert_eq!(mode(&only_key(&state_dir)), 0o600);
    assert!(!install().1, "the same again");
    // The other CA is not lost.
    let aside = set_aside(&state_dir);
    assert_eq!(aside.len(), 1);
    for (name, key) in old.keys() {
        assert_eq!(fs::read_to_string(aside[0].join(name)).unwrap(), key.as_str());
    }
    let error = copy.introduce().unwrap_err().to_string();
    assert!(
        error.contains("Secret kube-system/tunnel-server-ca") && error.contains("--kubeconfig"),
        "{error}"
    );
    assert_eq!(copy.material().unwrap(), other);
    // A rotation of the Secret arrives step by step, and leaves no key behind.
    let (both, _) = other.introduce().unwrap();
    let (active, new) = both.activate().unwrap();
    let (last, _) = active.retire().unwrap();
    for step in [both, active, last] {
        let (copy, changed) =
            Ca::install(&state_dir, Lifetimes::default(), &step, "kube-system/tunnel-server-ca").unwrap();
        assert!(changed && copy.material().unwrap() == step);
    }
    assert_eq!(copy.state().unwrap().hash(), new);
    only_key(&state_dir);
}
