//! The election of the server that writes.

use std::time::{Duration, Instant};

use postern_fake_kube::{ApiServer, Fault, eventually};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tunnel_server::kube::write::lease;

use crate::fixture::client;

const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases";
const LEASE: &str = "tunnel-server";

async fn start(api: &ApiServer, identity: &str, stop: &CancellationToken) -> watch::Receiver<bool> {
    // A sender that is dropped changes nothing any more.
    let (_, eligible) = watch::channel(true);
    start_while(api, identity, eligible, stop).await
}

async fn start_while(
    api: &ApiServer,
    identity: &str,
    eligible: watch::Receiver<bool>,
    stop: &CancellationToken,
) -> watch::Receiver<bool> {
    lease::start(client(api).await, "kube-system", LEASE, identity, eligible, stop.clone())
}

fn lease(api: &ApiServer) -> Option<Value> {
    Some(api.get(LEASES, LEASE)?["spec"].take())
}

/// Waits until the server leads, or no longer does. A lease takes 15 s to end and 10 s to be given up.
async fn becomes(leader: &mut watch::Receiver<bool>, leads: bool) {
    tokio::time::timeout(Duration::from_secs(60), leader.wait_for(|now| *now == leads))
        .await
        .unwrap_or_else(|_| panic!("leading is not {leads} within 60 s"))
        .expect("the election has ended");
}

#[tokio::test]
async fn one_leads_and_gives_the_lease_back_when_it_stops() {
    let api = ApiServer::start();
    let stop = CancellationToken::new();
    let began = Instant::now();
    let mut first = start(&api, "server-a", &stop).await;
    becomes(&mut first, true).await;
    let held = lease(&api).unwrap();
    assert_eq!((&held["holderIdentity"], &held["leaseDurationSeconds"]), (&json!("server-a"), &json!(15)));
    // It is renewed long before it ends.
    for _ in 0..2 {
        let before = lease(&api).unwrap();
        eventually("a renewal", || (lease(&api)?["renewTime"] != before["renewTime"]).then_some(())).await;
    }
    becomes(&mut first, true).await;
    // One to take it, and one for each renewal, of which there is one in two seconds.
    let writes = api.writes("leases");
    let most = 2 + began.elapsed().as_secs() as usize;
    assert!((3..=most).contains(&writes), "{writes} writes of the Lease in {:?}", began.elapsed());

    // Another server waits, and gets the Lease long before it would have ended.
    let other = CancellationToken::new();
    let mut second = start(&api, "server-b", &other).await;
    let path = format!("{LEASES}/{LEASE}");
    let checked = api.requests("get", &path);
    eventually("the second checks the Lease", || (api.requests("get", &path) >= checked + 2).then_some(()))
        .await;
    assert!(!*second.borrow());
    stop.cancel();
    lease::released(first).await;
    let given_back = lease(&api).unwrap();
    assert!(given_back["holderIdentity"] != "server-a", "{given_back}");
    becomes(&mut second, true).await;
    assert_eq!(lease(&api).unwrap()["holderIdentity"], "server-b");
    other.cancel();
    lease::released(second).await;
    assert_eq!(lease(&api).unwrap()["holderIdentity"], Value::Null);
}

#[tokio::test]
async fn a_server_leads_again_once_its_successor_is_dead() {
    let api = ApiServer::start();
    let stop = CancellationToken::new();
    let (eligible, eligible_now) = watch::channel(true);
    let mut first = start_while(&api, "server-a", eligible_now, &stop).await;
    becomes(&mut first, true).await;
    // A successor has taken over: it gets the Lease at once.
    eligible.send_replace(false);
    becomes(&mut first, false).await;
    let other = CancellationToken::new();
    let mut second = start(&api, "server-b", &other).await;
    becomes(&mut second, true).await;
    assert!(!*first.borrow());
    // It ends, and this one goes on.
    other.cancel();
    lease::released(second).await;
    eligible.send_replace(true);
    becomes(&mut first, true).await;
    assert_eq!(lease(&api).unwrap()["holderIdentity"], "server-a");
    stop.cancel();
    lease::released(first).await;
    assert_eq!(lease(&api).unwrap()["holderIdentity"], Value::Null);
}

#[tokio::test]
async fn a_lease_of_another_server_is_taken_when_it_ends() {
    let api = ApiServer::start();
    let now = jiff::Timestamp::now();
    let spec = json!({
        "holderIdentity": "server-z",
        "leaseDurationSeconds": 3,
        "acquireTime": format!("{now:.6}"),
        "renewTime": format!("{now:.6}"),
    });
    api.put(LEASES, json!({"metadata": {"name": LEASE}, "spec": spec}));
    let stop = CancellationToken::new();
    let mut leader = start(&api, "server-a", &stop).await;
    becomes(&mut leader, true).await;
    assert!(now.duration_until(jiff::Timestamp::now()).as_secs() >= 3, "it was taken while it was held");
    assert_eq!(lease(&api).unwrap()["holderIdentity"], "server-a");
    // Another server that takes it anyway has it.
    api.edit(LEASES, LEASE, |lease| {
        lease["spec"]["holderIdentity"] = json!("server-z");
        lease["spec"]["leaseDurationSeconds"] = json!(3600);
    });
    becomes(&mut leader, false).await;
    stop.cancel();
    lease::released(leader).await;
    assert_eq!(lease(&api).unwrap()["holderIdentity"], "server-z");
}

#[tokio::test]
async fn a_holder_is_judged_by_what_it_renews_and_not_by_its_clock() {
    // By a clock that is behind, the Lease seems to have ended; by one that is ahead, it would never end.
    tokio::join!(judge_a_clock_that_is_off_by(-1), judge_a_clock_that_is_off_by(1));
}

async fn judge_a_clock_that_is_off_by(hours: i64) {
    let api = ApiServer::start();
    let its_time = || {
        let time = jiff::Timestamp::now() + jiff::SignedDuration::from_hours(hours);
        json!(format!("{time:.6}"))
    };
    let spec = json!({
        "holderIdentity": "server-z",
        "leaseDurationSeconds": 5,
        "acquireTime": its_time(),
        "renewTime": its_time(),
    });
    api.put(LEASES, json!({"metadata": {"name": LEASE}, "spec": spec}));
    let stop = CancellationToken::new();
    let mut leader = start(&api, "server-a", &stop).await;
    // Four checks take longer than the Lease is valid.
    let path = format!("{LEASES}/{LEASE}");
    eventually("four checks", || {
        api.edit(LEASES, LEASE, |lease| lease["spec"]["renewTime"] = its_time());
        (api.requests("get", &path) >= 4).then_some(())
    })
    .await;
    assert!(!*leader.borrow(), "{hours}");
    assert_eq!(lease(&api).unwrap()["holderIdentity"], "server-z", "{hours}");
    // Then it is dead.
    becomes(&mut leader, true).await;
    assert_eq!(lease(&api).unwrap()["holderIdentity"], "server-a", "{hours}");
    stop.cancel();
    lease::released(leader).await;
}

#[tokio::test]
async fn without_the_api_server_no_server_leads_and_a_stop_does_not_hang() {
    let api = ApiServer::start();
    api.inject("*", "leases", Fault::Status(403), 1);
    let stop = CancellationToken::new();
    let mut leader = start(&api, "server-a", &stop).await;
    becomes(&mut leader, true).await;
    api.down();
    becomes(&mut leader, false).await;
    api.up();
    becomes(&mut leader, true).await;
    // A stop while it is away does not wait for it.
    api.down();
    stop.cancel();
    tokio::time::timeout(Duration::from_secs(60), lease::released(leader)).await.expect("the stop hangs");
}

/// The answer comes after the stop, or never.
#[tokio::test]
async fn a_lease_that_is_taken_during_the_stop_is_given_back() {
    for fault in [Fault::Delay(Duration::from_millis(300)), Fault::Truncate] {
        let api = ApiServer::start();
        let lost = matches!(fault, Fault::Truncate);
        api.inject("create", "leases", fault, 1);
        let stop = CancellationToken::new();
        let leader = start(&api, "server-a", &stop).await;
        eventually("the Lease is created", || (api.requests("create", LEASES) > 0).then_some(())).await;
        if lost {
            // Nor can the server see by now that it has it.
            api.inject("get", "leases", Fault::Status(503), usize::MAX);
            let read = api.requests("get", &format!("{LEASES}/{LEASE}"));
            eventually("it looks again", || {
                (api.requests("get", &format!("{LEASES}/{LEASE}")) > read).then_some(())
            })
            .await;
            api.heal();
        }
        stop.cancel();
        lease::released(leader).await;
        assert_eq!(lease(&api).expect("it was created")["holderIdentity"], Value::Null, "{lost}");
    }
}

#[tokio::test]
async fn a_lease_that_is_deleted_is_made_again() {
    let api = ApiServer::start();
    let stop = CancellationToken::new();
    let mut leader = start(&api, "server-a", &stop).await;
    becomes(&mut leader, true).await;
    api.remove(LEASES, LEASE);
    eventually("a new Lease", || (lease(&api)?["holderIdentity"] == "server-a").then_some(())).await;
    becomes(&mut leader, true).await;
    stop.cancel();
    lease::released(leader).await;
}
