//! The CA in a Secret, and its copies in the state directories.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use postern_fake_kube::{ApiServer, Fault, eventually};
use serde_json::{Value, json};
use tokio::sync::Barrier;
use tokio_util::sync::CancellationToken;
use tunnel_pki::{PrivateKey, create_csr, public_key_of_csr};
use tunnel_server::kube::ClusterError;
use tunnel_server::kube::read::authority::{ACTIVATED, follow, obtain};
use tunnel_server::pki::{Ca, CaMaterial, Lifetimes};

use crate::fixture::{client, context};

const SECRETS: &str = "/api/v1/namespaces/kube-system/secrets";
const SECRET: &str = "/api/v1/namespaces/kube-system/secrets/tunnel-server-ca";
const NAME: &str = "tunnel-server-ca";

async fn start(server: &ApiServer, state_dir: &Path) -> Result<Ca, ClusterError> {
    let stop = CancellationToken::new();
    obtain(client(server).await, "kube-system", NAME, state_dir, Lifetimes::default(), &stop).await
}

fn hash(ca: &Ca) -> String {
    ca.state().unwrap().hash().to_owned()
}

/// The hashes of the roots in the Secret.
fn roots(server: &ApiServer) -> Vec<String> {
    let secret: Secret = serde_json::from_value(server.get(SECRETS, NAME).expect("the Secret")).unwrap();
    let pem = String::from_utf8(secret.data.unwrap()["ca.crt"].0.clone()).unwrap();
    tunnel_pki::TrustBundle::from_pem(&pem).unwrap().hashes()
}

fn state_dir(server: &ApiServer, name: &str) -> PathBuf {
    server.dir().join(name)
}

/// Keeps the files from being written, like a full disk, but it stops root too. It ends once the returned directory is
/// removed.
fn fill(state_dir: &Path) -> PathBuf {
    let lock = state_dir.join("lock");
    std::fs::remove_file(&lock).unwrap();
    std::fs::create_dir(&lock).unwrap();
    lock
}

#[tokio::test]
async fn servers_that_start_concurrently_agree_on_one_ca() {
    let server = ApiServer::start();
    // All of them see that there is none before one makes it.
    server.inject("patch", "secrets", Fault::Together(Arc::new(Barrier::new(4))), 4);
    let starts = (0..4).map(|number| {
        let directory = state_dir(&server, &format!("server-{number}"));
        let server = &server;
        async move { hash(&start(server, &directory).await.unwrap()) }
    });
    let hashes: BTreeSet<_> = futures_util::future::join_all(starts).await.into_iter().collect();
    assert_eq!(hashes.len(), 1, "{hashes:?}");
    assert_eq!(roots(&server), Vec::from_iter(hashes));
    let requests = server.all_requests();
    assert_eq!(server.requests("patch", SECRET), 4, "three lost the race: {requests:?}");
    assert_eq!(server.requests("create", SECRETS), 0, "RBAC cannot narrow a create: {requests:?}");
    // They have the same key: what one signs, another verifies.
    let states: Vec<_> = (0..4)
        .map(|number| Ca::open(&state_dir(&server, &format!("server-{number}")), Lifetimes::default()))
        .map(|ca| ca.unwrap().state().unwrap())
        .collect();
    let key = public_key_of_csr(&create_csr(&PrivateKey::generate().unwrap()).unwrap()).unwrap();
    let issued = states[3].issue_agent(&"edge-1".parse().unwrap(), &key).unwrap();
    assert_eq!(states[0].bundle().issuer_of(&issued.chain[0]), Some(0));
}

#[tokio::test]
async fn a_secret_restored_during_a_start_is_kept() {
    let server = ApiServer::start();
    let first = hash(&start(&server, &state_dir(&server, "first")).await.unwrap());
    let backup = server.get(SECRETS, NAME).unwrap();
    server.remove(SECRETS, NAME);
    let barrier = Arc::new(Barrier::new(2));
    server.inject("patch", "secrets", Fault::Together(barrier.clone()), 1);
    let directory = state_dir(&server, "second");
    let restored = async {
        // The server has seen no Secret, and has made a CA.
        eventually("the apply", || (server.requests("patch", SECRET) == 2).then_some(())).await;
        server.put(SECRETS, backup);
        barrier.wait().await;
    };
    let (second, ()) = tokio::join!(start(&server, &directory), restored);
    assert_eq!(hash(&second.unwrap()), first);
    assert_eq!(roots(&server), [first]);
}

#[tokio::test]
async fn a_ca_from_before_the_cluster_is_kept() {
    let server = ApiServer::start();
    let directory = state_dir(&server, "server");
    let before = hash(&Ca::load_or_create(&directory, Lifetimes::default()).unwrap());
    assert_eq!(hash(&start(&server, &directory).await.unwrap()), before);
    assert_eq!(roots(&server), std::slice::from_ref(&before));
    // Another server that has a CA takes the Secret's.
    let other = state_dir(&server, "other");
    Ca::load_or_create(&other, Lifetimes::default()).unwrap();
    assert_eq!(hash(&start(&server, &other).await.unwrap()), before);
}

#[tokio::test]
async fn without_a_copy_the_start_waits_for_the_api_server() {
    let server = ApiServer::start();
    let (known, new) = (state_dir(&server, "known"), state_dir(&server, "new"));
    let first = hash(&start(&server, &known).await.unwrap());
    server.down();
    assert_eq!(hash(&start(&server, &known).await.unwrap()), first);
    server.up();
    // Neither a failure nor a refusal makes a second CA.
    server.inject("get", "secrets", Fault::Status(500), 1);
    server.inject("get", "secrets", Fault::Status(403), 1);
    assert_eq!(hash(&start(&server, &new).await.unwrap()), first);
    assert!(server.faults_are_spent());
    let another = state_dir(&server, "another");
    server.inject("get", "secrets", Fault::Status(403), 1);
    assert_eq!(hash(&start(&server, &another).await.unwrap()), first);
    assert!(server.faults_are_spent());
    assert_eq!(roots(&server), std::slice::from_ref(&first));
    assert_eq!(server.writes(SECRETS), 1, "{:?}", server.all_requests());
    // Nor does an API server that is away; a stop ends the wait.
    server.down();
    let stop = CancellationToken::new();
    stop.cancel();
    let client = client(&server).await;
    let empty = state_dir(&server, "empty");
    let stopped = obtain(client, "kube-system", NAME, &empty, Lifetimes::default(), &stop).await;
    assert!(matches!(stopped, Err(ClusterError::Stopped(_))));
    assert!(!empty.join("ca").exists(), "a CA out of nothing");
}

#[tokio::test]
async fn an_invalid_secret_is_reported_and_never_replaced() {
    let server = ApiServer::start();
    let good = state_dir(&server, "good");
    let first = hash(&start(&server, &good).await.unwrap());
    let whole = server.get(SECRETS, NAME).unwrap();
    let key = whole["data"].as_object().unwrap().keys().find(|name| name.ends_with(".key")).unwrap().clone();
    type Damage = fn(&mut Value, &str);
    let broken: [(&str, Damage); 4] = [
        ("ca.crt: missing", |secret, _| drop(secret["data"].as_object_mut().unwrap().remove("ca.crt"))),
        ("no certificate", |secret, _| secret["data"]["ca.crt"] = json!("aGVsbG8=")),
        ("key is missing", |secret, key| drop(secret["data"].as_object_mut().unwrap().remove(key))),
        ("not text", |secret, key| secret["data"][key] = json!("/w==")),
    ];
    for (index, (reason, damage)) in broken.into_iter().enumerate() {
        server.put(SECRETS, whole.clone());
        server.edit(SECRETS, NAME, |secret| damage(secret, &key));
        let before = server.get(SECRETS, NAME);
        let error =
            start(&server, &state_dir(&server, &format!("new-{index}"))).await.unwrap_err().to_string();
        assert!(
            error.contains("kube-system/tunnel-server-ca") && error.contains(reason),
            "{reason}: {error}"
        );
        assert!(error.contains("backup"), "{error}");
        assert_eq!(hash(&start(&server, &good).await.unwrap()), first, "the good copy is used");
        assert_eq!(server.get(SECRETS, NAME), before);
    }
}

#[tokio::test]
async fn the_copy_follows_the_secret_and_survives_its_removal() {
    let server = ApiServer::start();
    let directory = state_dir(&server, "server");
    let copy = start(&server, &directory).await.unwrap();
    let first = hash(&copy);
    let (context, inputs) = context(&server, false).await;
    let following = tokio::spawn(follow(context.clone(), directory.clone()));
    eventually("it watches", || (server.open_watches(SECRETS) == 1).then_some(())).await;

    let whole = server.get(SECRETS, NAME).unwrap();
    server.edit(SECRETS, NAME, |secret| secret["data"]["ca.crt"] = json!("aGVsbG8="));
    let other = CaMaterial::generate().unwrap();
    server.remove(SECRETS, NAME);
    // It has seen both once it makes the Secret again, which only the leader does.
    assert_eq!((hash(&copy), server.requests("patch", SECRET)), (first.clone(), 1));
    inputs.leader.send_replace(true);
    eventually("the leader makes it again", || server.get(SECRETS, NAME)).await;
    assert_eq!((roots(&server), hash(&copy)), (vec![first.clone()], first.clone()));

    // Another CA is taken over, and the old one set aside.
    let mut foreign = whole.clone();
    let base64 = |text: &str| json!(k8s_openapi::ByteString(text.as_bytes().to_vec()));
    foreign["data"] = json!({"ca.crt": base64(other.roots())});
    for (name, key) in other.keys() {
        foreign["data"][name] = base64(key);
    }
    let before = copy.material().unwrap();
    server.put(SECRETS, foreign);
    eventually("the other CA", || (copy.material().ok()? == other).then_some(())).await;
    let aside = std::fs::read_dir(&directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.to_str().unwrap().contains("ca.replaced-"))
        .expect("the old CA is set aside");
    assert_eq!(before.keys().len(), 1);
    for (name, key) in before.keys() {
        assert_eq!(std::fs::read_to_string(aside.join(name)).unwrap(), **key);
    }

    context.stop.cancel();
    following.await.unwrap();
}

#[tokio::test]
async fn a_copy_that_could_not_be_written_is_written_later() {
    let server = ApiServer::start();
    let (full, other) = (state_dir(&server, "full"), state_dir(&server, "other"));
    let copy = start(&server, &full).await.unwrap();
    let other_copy = start(&server, &other).await.unwrap();
    let (first, _inputs) = context(&server, false).await;
    let (second, _others) = context(&server, false).await;
    tokio::spawn(follow(first.clone(), full.clone()));
    tokio::spawn(follow(second.clone(), other));
    eventually("both watch", || (server.open_watches(SECRETS) == 2).then_some(())).await;
    let lock = fill(&full);
    run(&server, &["introduce"]).unwrap();
    let both = |copy: &Ca| (copy.state().ok()?.roots().len() == 2).then_some(());
    eventually("the other server's copy", || both(&other_copy)).await;
    std::fs::remove_dir(&lock).unwrap();
    eventually("the copy", || both(&copy)).await;
    first.stop.cancel();
    second.stop.cancel();
}

#[tokio::test]
async fn a_server_whose_disk_is_full_starts_with_its_copy() {
    let server = ApiServer::start();
    let (full, other) = (state_dir(&server, "full"), state_dir(&server, "other"));
    let first = hash(&start(&server, &full).await.unwrap());
    fill(&full);
    assert_eq!(hash(&start(&server, &full).await.unwrap()), first);
    // A step of a rotation is missed.
    run(&server, &["introduce"]).unwrap();
    let copy = start(&server, &full).await.unwrap();
    assert_eq!(
        (hash(&copy), copy.state().unwrap().roots().len(), roots(&server).len()),
        (first.clone(), 1, 2)
    );
    // With another CA than the Secret's it would be of no use to anyone.
    server.remove(SECRETS, NAME);
    assert_ne!(hash(&start(&server, &other).await.unwrap()), first);
    let error = start(&server, &full).await.unwrap_err().to_string();
    assert!(error.contains("full/lock: "), "{error}");
    assert_eq!(hash(&Ca::open(&full, Lifetimes::default()).unwrap()), first, "it is kept");
}

/// The election ends with the drain, and the task that follows the Secret with the stop.
#[tokio::test]
async fn while_a_server_drains_a_secret_that_is_gone_costs_nothing() {
    let server = ApiServer::start();
    let directory = state_dir(&server, "server");
    let first = hash(&start(&server, &directory).await.unwrap());
    let (context, inputs) = context(&server, false).await;
    let polls = Arc::new(AtomicUsize::new(0));
    let following = tokio::spawn({
        let (polls, mut following) = (polls.clone(), Box::pin(follow(context.clone(), directory)));
        std::future::poll_fn(move |task| {
            polls.fetch_add(1, Ordering::Relaxed);
            following.as_mut().poll(task)
        })
    });
    eventually("it watches", || (server.open_watches(SECRETS) == 1).then_some(())).await;
    drop(inputs.leader);
    // There is a second between the list that shows it and the watch after that.
    server.inject("watch", "secrets", Fault::Delay(Duration::from_secs(1)), usize::MAX);
    let lists = server.requests("list", SECRETS);
    server.down();
    server.remove(SECRETS, NAME);
    server.compact();
    server.up();
    eventually("the list", || (server.requests("list", SECRETS) > lists).then_some(())).await;
    eventually("the watch", || (server.open_watches(SECRETS) == 1).then_some(())).await;
    let polls = polls.load(Ordering::Relaxed);
    assert!(polls < 1000, "it was polled {polls} times");
    assert_eq!(server.requests("patch", SECRET), 1, "only the leader makes it again");
    context.stop.cancel();
    following.await.unwrap();
    assert_eq!(hash(&Ca::open(&state_dir(&server, "server"), Lifetimes::default()).unwrap()), first);
}

/// Runs the real program against the Secret. Returns its output, or its error.
fn run(server: &ApiServer, args: &[&str]) -> Result<String, String> {
    let output = Command::new(env!("CARGO_BIN_EXE_tunnel-server"))
        .arg("ca")
        .args(args)
        .arg(format!("--kubeconfig={}", server.kubeconfig().display()))
        .env_remove("POD_NAMESPACE")
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

#[tokio::test]
async fn the_command_line_rotates_the_secret_and_the_servers_follow() {
    let server = ApiServer::start();
    let error = run(&server, &["status"]).unwrap_err();
    assert!(error.contains("there is no Secret kube-system/tunnel-server-ca"), "{error}");
    let directory = state_dir(&server, "server");
    let copy = start(&server, &directory).await.unwrap();
    let old = hash(&copy);
    server.edit(SECRETS, NAME, |secret| secret["data"]["notes"] = json!("aGVsbG8="));
    let (context, _inputs) = context(&server, false).await;
    tokio::spawn(follow(context.clone(), directory));
    let shown = run(&server, &["status"]).unwrap();
    assert!(shown.contains("Secret kube-system/tunnel-server-ca") && shown.contains(&old), "{shown}");

    assert!(run(&server, &["activate"]).unwrap_err().contains("ca introduce"));
    let printed = run(&server, &["introduce"]).unwrap();
    assert!(printed.contains("ca activate"), "{printed}");
    let known = |count: usize| {
        let copy = copy.clone();
        move || copy.state().ok().filter(|state| state.roots().len() == count)
    };
    eventually("the copy has both roots", known(2)).await;
    assert_eq!(hash(&copy), old);

    // Of two operators at the same moment one gets an error.
    server.inject("update", "secrets", Fault::Status(409), 1);
    let error = run(&server, &["activate"]).unwrap_err();
    assert!(error.contains("changed at the same moment"), "{error}");
    assert_eq!(roots(&server)[0], old);
    run(&server, &["activate"]).unwrap();
    let new = roots(&server)[0].clone();
    assert_ne!(new, old);
    eventually("the copy signs with the new root", || (hash(&copy) == new).then_some(())).await;

    let error = run(&server, &["retire"]).unwrap_err();
    assert!(error.contains("may be in use until") && error.contains("--force"), "{error}");
    let status: Value = serde_json::from_str(&run(&server, &["status", "-o", "json"]).unwrap()).unwrap();
    assert_eq!(status["roots"][1]["role"], "retiring");
    assert!(status["roots"][1]["retirable"].is_string(), "{status}");
    server.edit(SECRETS, NAME, |secret| drop(secret["metadata"]["annotations"].take()));
    assert!(run(&server, &["retire"]).unwrap_err().contains(ACTIVATED));
    // Long ago.
    server.edit(SECRETS, NAME, |secret| {
        secret["metadata"]["annotations"] = json!({ACTIVATED: "2020-01-01T00:00:00Z"});
    });
    assert!(run(&server, &["status"]).unwrap().contains("none of its certificates is in use"));
    run(&server, &["retire"]).unwrap();
    assert_eq!(roots(&server), std::slice::from_ref(&new));
    eventually("the copy has only the new root", known(1)).await;
    let secret = server.get(SECRETS, NAME).unwrap();
    assert!(secret["metadata"]["annotations"].get(ACTIVATED).is_none());
    let names: Vec<_> = secret["data"].as_object().unwrap().keys().cloned().collect();
    assert_eq!(names.len(), 3, "one key, the roots, and what was not ours: {names:?}");

    run(&server, &["introduce"]).unwrap();
    run(&server, &["activate"]).unwrap();
    run(&server, &["retire", "--force"]).unwrap();
    assert_eq!(roots(&server).len(), 1);
    assert_eq!(server.requests("update", SECRET), 7, "six changes and the one in conflict");
    server.down();
    let error = run(&server, &["status"]).unwrap_err();
    assert!(error.contains("reading Secret kube-system/tunnel-server-ca"), "{error}");
    context.stop.cancel();
}
