//! The DNS records.

use std::time::{Duration, Instant};

use postern_fake_kube::{Fault, eventually};
use prometheus_client::metrics::gauge::Gauge;
use serde_json::json;
use tunnel_server::kube::write::dns;

use crate::fixture::{Fixture, INTERNAL, SERVICES, inventory};

const CONFIGMAPS: &str = "/api/v1/namespaces/kube-system/configmaps";
const NAME: &str = "tunnel-nodes";

impl Fixture {
    fn records(&self) -> Option<String> {
        let configmap = self.api.get(CONFIGMAPS, NAME)?;
        Some(configmap["data"]["tunnel-nodes"].as_str()?.to_owned())
    }

    async fn has_records(&self, expected: &str) {
        eventually(&format!("the records {expected:?}"), || {
            (self.records().as_deref() == Some(expected)).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn records_follow_the_nodes_and_each_state_is_written_once() {
    let fixture = Fixture::new(true).await;
    fixture.internal_service("10.96.0.9", &json!([]));
    tokio::spawn(dns::run(fixture.context.clone(), fixture.events.clone(), Vec::new(), Gauge::default()));
    fixture.nodes(&["edge-2", "edge-1"], &["cloud-1"]);
    fixture.has_records("10.0.0.1\tcloud-1\n10.96.0.9\tedge-1\n10.96.0.9\tedge-2").await;
    // The same nodes again, then others: only the second is a write.
    fixture.nodes(&["edge-2", "edge-1"], &["cloud-1"]);
    fixture.nodes(&["edge-2"], &["cloud-1"]);
    fixture.has_records("10.0.0.1\tcloud-1\n10.96.0.9\tedge-2").await;
    fixture.nodes(&[], &[]);
    fixture.has_records("").await;
    assert_eq!(fixture.api.writes(NAME), 3, "{:?}", fixture.api.all_requests());
}

#[tokio::test]
async fn a_restart_does_not_empty_the_records() {
    let fixture = Fixture::new(true).await;
    fixture.internal_service("10.96.0.9", &json!([]));
    let before = "10.96.0.9\tedge-1";
    fixture.api.put(CONFIGMAPS, json!({"metadata": {"name": NAME}, "data": {"tunnel-nodes": before}}));
    tokio::spawn(dns::run(fixture.context.clone(), fixture.events.clone(), Vec::new(), Gauge::default()));
    eventually("both watches", || {
        let open = [CONFIGMAPS, SERVICES].iter().all(|path| fixture.api.open_watches(path) > 0);
        open.then_some(())
    })
    .await;
    fixture.nodes(&["edge-1"], &[]);
    fixture.nodes(&["edge-1", "edge-2"], &[]);
    fixture.has_records("10.96.0.9\tedge-1\n10.96.0.9\tedge-2").await;
    assert_eq!(fixture.api.writes(NAME), 1, "{:?}", fixture.api.all_requests());
}

#[tokio::test]
async fn changes_of_other_writers_are_reverted_and_other_keys_stay() {
    let fixture = Fixture::new(true).await;
    fixture.internal_service("10.96.0.9", &json!([]));
    fixture.api.put(CONFIGMAPS, json!({"metadata": {"name": NAME}, "data": {"theirs": "kept"}}));
    tokio::spawn(dns::run(fixture.context.clone(), fixture.events.clone(), Vec::new(), Gauge::default()));
    fixture.nodes(&["edge-1"], &[]);
    fixture.has_records("10.96.0.9\tedge-1").await;
    fixture
        .api
        .edit(CONFIGMAPS, NAME, |configmap| configmap["data"]["tunnel-nodes"] = json!("192.0.2.1\tevil"));
    fixture.has_records("10.96.0.9\tedge-1").await;
    assert_eq!(fixture.api.get(CONFIGMAPS, NAME).unwrap()["data"]["theirs"], "kept");
    fixture.api.remove(CONFIGMAPS, NAME);
    fixture.has_records("10.96.0.9\tedge-1").await;
}

#[tokio::test]
async fn only_the_leader_writes() {
    let fixture = Fixture::new(true).await;
    fixture.internal_service("10.96.0.9", &json!([]));
    // Another server with other nodes, which sees every write.
    let (other, theirs) = fixture.other().await;
    theirs.inventory.send_replace(inventory(&["edge-9"], &[]));
    tokio::spawn(dns::run(other, fixture.events.clone(), Vec::new(), Gauge::default()));
    tokio::spawn(dns::run(fixture.context.clone(), fixture.events.clone(), Vec::new(), Gauge::default()));
    for edge in ["edge-1", "edge-2", "edge-3"] {
        fixture.nodes(&[edge], &[]);
        fixture.has_records(&format!("10.96.0.9\t{edge}")).await;
    }
    assert_eq!(fixture.api.writes(NAME), 3, "{:?}", fixture.api.all_requests());
    fixture.inputs.leader.send_replace(false);
    theirs.leader.send_replace(true);
    fixture.has_records("10.96.0.9\tedge-9").await;
}

#[tokio::test]
async fn edge_nodes_have_no_record_while_the_service_has_no_address() {
    let fixture = Fixture::new(true).await;
    tokio::spawn(dns::run(fixture.context.clone(), fixture.events.clone(), Vec::new(), Gauge::default()));
    fixture.nodes(&["edge-1"], &["cloud-1"]);
    fixture.has_records("10.0.0.1\tcloud-1").await;
    let count = |text: &str| {
        let events = fixture.notes("kube-system", "NoClusterIP", INTERNAL);
        events.iter().filter(|note| note.contains(text)).count()
    };
    eventually("an Event that there is no Service", || (count("there is no Service") == 1).then_some(()))
        .await;
    fixture.internal_service("None", &json!([]));
    eventually("an Event that it is headless", || (count("has no clusterIP") == 1).then_some(())).await;
    fixture.internal_service("fd00:96::9", &json!([]));
    fixture.has_records("10.0.0.1\tcloud-1\nfd00:96::9\tedge-1").await;
    assert_eq!((count("there is no Service"), count("has no clusterIP")), (1, 1));
}

#[tokio::test]
async fn failed_writes_are_repeated() {
    let fixture = Fixture::new(true).await;
    fixture.internal_service("10.96.0.9", &json!([]));
    for fault in [Fault::Status(403), Fault::Status(500), Fault::TooManyRequests { retry_after: 1 }] {
        fixture.api.inject("patch", "configmaps", fault, 1);
    }
    tokio::spawn(dns::run(fixture.context.clone(), fixture.events.clone(), Vec::new(), Gauge::default()));
    fixture.nodes(&["edge-1"], &[]);
    fixture.has_records("10.96.0.9\tedge-1").await;
    assert!(fixture.api.faults_are_spent());
    // Changes during an outage are written when it is over.
    fixture.api.down();
    fixture.nodes(&["edge-2"], &[]);
    fixture.api.up();
    fixture.has_records("10.96.0.9\tedge-2").await;
}

#[tokio::test]
async fn changes_without_end_are_few_writes() {
    let fixture = Fixture::new(true).await;
    fixture.internal_service("10.96.0.9", &json!([]));
    tokio::spawn(dns::run(fixture.context.clone(), fixture.events.clone(), Vec::new(), Gauge::default()));
    let (began, mut tick) = (Instant::now(), tokio::time::interval(Duration::from_millis(10)));
    for n in 0..400 {
        tick.tick().await;
        fixture.nodes(&["edge-1", &format!("edge-{n}")], &[]);
    }
    fixture.has_records("10.96.0.9\tedge-1\n10.96.0.9\tedge-399").await;
    // One a second, and the first.
    let most = 2 + usize::try_from(began.elapsed().as_secs()).unwrap();
    let writes = fixture.api.writes(NAME);
    assert!((2..=most).contains(&writes), "{writes} writes in {:?}", began.elapsed());
}

#[tokio::test]
async fn large_records_are_written_seldom_and_what_does_not_fit_is_told() {
    let fixture = Fixture::new(true).await;
    fixture.internal_service("10.96.0.9", &json!([]));
    let left_out = Gauge::default();
    tokio::spawn(dns::run(fixture.context.clone(), fixture.events.clone(), Vec::new(), left_out.clone()));
    let names: Vec<_> = (0..100_000).map(|n| format!("edge-{n:010}")).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    fixture.nodes(&names, &["cloud-1"]);
    let records = eventually("the records", || fixture.records()).await;
    assert!(
        records.len() <= 1_000_000
            && records.starts_with("10.0.0.1\tcloud-1\n10.96.0.9\tedge-0000000000 edge-")
    );
    assert!(left_out.get() > 30_000, "{} left out", left_out.get());
    eventually("an Event", || fixture.notes("kube-system", "RecordsLeftOut", NAME).pop()).await;
    // A megabyte is followed by a pause of a quarter of a minute.
    let began = Instant::now();
    fixture.nodes(&names[..2], &[]);
    fixture.has_records("10.96.0.9\tedge-0000000000\n10.96.0.9\tedge-0000000001").await;
    assert!(began.elapsed() >= Duration::from_secs(10), "{:?}", began.elapsed());
    assert_eq!((fixture.api.writes(NAME), left_out.get()), (2, 0), "{:?}", fixture.api.all_requests());
}
