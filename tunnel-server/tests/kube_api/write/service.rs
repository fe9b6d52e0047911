//! The ports of the internal Service.

use std::collections::BTreeMap;
use std::sync::Arc;

use postern_fake_kube::{Fault, eventually};
use serde_json::{Value, json};
use tunnel_server::kube::read::configmap;
use tunnel_server::kube::write::service;
use tunnel_server::runtime::settings::{InternalListener, Listeners, Settings};

use crate::fixture::{Fixture, INTERNAL, SERVICES};

const LISTENERS: Listeners = Listeners { https: 10263, secure: BTreeMap::new(), http: 10268, pairs: 10264 };

fn port(name: &str, number: u16, target: u16) -> Value {
    json!({"name": name, "port": number, "protocol": "TCP", "targetPort": target})
}

impl Fixture {
    fn configured(&self, ports: &[(u16, InternalListener)]) {
        let internal = ports.iter().copied().collect();
        self.inputs.settings.send_replace(Arc::new(Settings { internal, ..Settings::default() }));
    }

    async fn has_ports(&self, expected: &Value) {
        eventually(&format!("the ports {expected}"), || {
            let service = self.api.get(SERVICES, INTERNAL)?;
            (service["spec"]["ports"] == *expected).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn ports_follow_the_settings_and_each_state_is_written_once() {
    let fixture = Fixture::new(true).await;
    let https = port("https", 10250, 10263);
    let metrics =
        json!({"name": "metrics", "port": 9100, "protocol": "TCP", "targetPort": 9100, "nodePort": 31000});
    let udp = json!({"name": "dnat-53", "port": 53, "protocol": "UDP", "targetPort": 53});
    fixture.internal_service("10.96.0.9", &json!([https, metrics, udp, port("dnat-9999", 9999, 10268)]));
    tokio::spawn(service::run(fixture.context.clone(), LISTENERS));
    fixture.configured(&[(9100, InternalListener::Http), (9443, InternalListener::Https)]);
    let mut rewritten = metrics.clone();
    rewritten["targetPort"] = json!(10268);
    fixture.has_ports(&json!([https, rewritten, udp, port("dnat-9443", 9443, 10263)])).await;
    // The same settings again cause no write.
    fixture.configured(&[(9100, InternalListener::Http), (9443, InternalListener::Https)]);
    fixture.configured(&[]);
    fixture.has_ports(&json!([https, rewritten, udp])).await;
    assert_eq!(fixture.api.writes(INTERNAL), 2, "{:?}", fixture.api.all_requests());
    let service = fixture.api.get(SERVICES, INTERNAL).unwrap();
    assert_eq!(service["spec"]["clusterIP"], "10.96.0.9");
}

#[tokio::test]
async fn nothing_is_removed_before_the_settings_are_known() {
    let fixture = Fixture::new(true).await;
    let before = json!([port("https", 10250, 10263), port("dnat-9100", 9100, 10268)]);
    fixture.internal_service("10.96.0.9", &before);
    tokio::spawn(service::run(fixture.context.clone(), LISTENERS));
    eventually("the watch", || (fixture.api.open_watches(SERVICES) > 0).then_some(())).await;
    // A change by another writer triggers a comparison; foreign ports are still there after the next one.
    fixture.api.edit(SERVICES, INTERNAL, |service| service["metadata"]["labels"] = json!({"a": "b"}));
    fixture.configured(&[(9100, InternalListener::Http), (9200, InternalListener::Http)]);
    let mut after = before.as_array().unwrap().clone();
    after.push(port("dnat-9200", 9200, 10268));
    fixture.has_ports(&json!(after)).await;
    assert_eq!(fixture.api.writes(INTERNAL), 1, "{:?}", fixture.api.all_requests());
}

#[tokio::test]
async fn ports_that_were_unconfigured_while_no_server_ran_are_removed() {
    let fixture = Fixture::new(true).await;
    let https = port("https", 10250, 10263);
    fixture.internal_service("10.96.0.9", &json!([https, port("dnat-9100", 9100, 10268)]));
    tokio::spawn(service::run(fixture.context.clone(), LISTENERS));
    // Without a ConfigMap the settings equal those assumed before they were known.
    tokio::spawn(configmap::run(
        fixture.context.clone(),
        Some(fixture.events.clone()),
        LISTENERS,
        fixture.inputs.settings.clone(),
    ));
    fixture.has_ports(&json!([https])).await;
}

#[tokio::test]
async fn only_the_leader_writes() {
    let fixture = Fixture::new(true).await;
    fixture.internal_service("10.96.0.9", &json!([port("https", 10250, 10263)]));
    // Another server with another ConfigMap, which sees every write.
    let (other, theirs) = fixture.other().await;
    theirs.settings.send_replace(Arc::new(Settings::default()));
    tokio::spawn(service::run(other, LISTENERS));
    tokio::spawn(service::run(fixture.context.clone(), LISTENERS));
    for number in [9100, 9200, 9300] {
        fixture.configured(&[(number, InternalListener::Http)]);
        let dnat = port(&format!("dnat-{number}"), number, 10268);
        fixture.has_ports(&json!([port("https", 10250, 10263), dnat])).await;
    }
    assert_eq!(fixture.api.writes(INTERNAL), 3, "{:?}", fixture.api.all_requests());
    fixture.inputs.leader.send_replace(false);
    theirs.leader.send_replace(true);
    fixture.has_ports(&json!([port("https", 10250, 10263)])).await;
}

#[tokio::test]
async fn ports_that_another_writer_removed_are_restored() {
    let fixture = Fixture::new(true).await;
    let https = port("https", 10250, 10263);
    fixture.internal_service("10.96.0.9", &json!([https]));
    tokio::spawn(service::run(fixture.context.clone(), LISTENERS));
    fixture.configured(&[(9100, InternalListener::Http)]);
    let both = json!([https, port("dnat-9100", 9100, 10268)]);
    fixture.has_ports(&both).await;
    fixture.api.edit(SERVICES, INTERNAL, |service| service["spec"]["ports"] = json!([https]));
    fixture.has_ports(&both).await;
}

#[tokio::test]
async fn a_service_that_is_missing_gets_its_ports_when_it_appears() {
    let fixture = Fixture::new(true).await;
    tokio::spawn(service::run(fixture.context.clone(), LISTENERS));
    fixture.configured(&[(9100, InternalListener::Http)]);
    eventually("the watch", || (fixture.api.open_watches(SERVICES) > 0).then_some(())).await;
    fixture.internal_service("10.96.0.9", &json!([port("https", 10250, 10263)]));
    fixture.has_ports(&json!([port("https", 10250, 10263), port("dnat-9100", 9100, 10268)])).await;
    assert_eq!(fixture.api.writes(SERVICES), 1, "{:?}", fixture.api.all_requests());
}

#[tokio::test]
async fn conflicting_and_failed_writes_are_repeated() {
    let fixture = Fixture::new(true).await;
    fixture.internal_service("10.96.0.9", &json!([port("https", 10250, 10263)]));
    for code in [409, 403, 500] {
        fixture.api.inject("patch", "services", Fault::Status(code), 1);
    }
    tokio::spawn(service::run(fixture.context.clone(), LISTENERS));
    fixture.configured(&[(9100, InternalListener::Http)]);
    // A port that another writer adds in between stays.
    eventually("a first write", || (fixture.api.writes(INTERNAL) > 0).then_some(())).await;
    fixture.api.edit(SERVICES, INTERNAL, |service| {
        service["spec"]["ports"].as_array_mut().unwrap().push(port("theirs", 8080, 8080));
    });
    let expected =
        json!([port("https", 10250, 10263), port("theirs", 8080, 8080), port("dnat-9100", 9100, 10268)]);
    fixture.has_ports(&expected).await;
    assert!(fixture.api.faults_are_spent());
}
