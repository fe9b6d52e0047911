//! Events: the place where they are found, the count of repetitions, and the limit of their number.

use std::time::Instant;

use kube::runtime::events::EventType;
use postern_fake_kube::{Fault, eventually};
use tunnel_server::kube::write::events::{node, object};

use crate::fixture::Fixture;

const DEFAULT: &str = "/apis/events.k8s.io/v1/namespaces/default/events";

#[tokio::test]
async fn an_event_of_a_node_is_where_kubectl_describe_looks() {
    let fixture = Fixture::new(false).await;
    fixture.events.publish(node("edge-1"), EventType::Warning, "TunnelDown", "it ended".into());
    let event = eventually("the Event", || fixture.api.list(DEFAULT).pop()).await;
    // `kubectl describe node` searches by the name in place of the UID, and without a namespace.
    assert_eq!((&event["regarding"]["kind"], &event["regarding"]["uid"]), (&"Node".into(), &"edge-1".into()));
    assert!(event["regarding"]["namespace"].is_null(), "{event}");
    assert_eq!((&event["type"], &event["note"]), (&"Warning".into(), &"it ended".into()));
    let reporter = (&event["reportingController"], &event["reportingInstance"]);
    assert_eq!(reporter, (&"postern".into(), &"server-a".into()));
}

#[tokio::test]
async fn repetitions_are_counted_by_note() {
    let fixture = Fixture::new(false).await;
    let publish = |note: &str| {
        let configmap = object("ConfigMap", "kube-system", "tunnel-server-cfg");
        fixture.events.publish(configmap, EventType::Warning, "InvalidPort", note.into());
    };
    publish("a is no port");
    publish("b is no port");
    publish("a is no port");
    let path = "/apis/events.k8s.io/v1/namespaces/kube-system/events";
    let events = eventually("a counted Event", || {
        let events = fixture.api.list(path);
        events.iter().any(|event| event["series"]["count"] == 2).then_some(events)
    })
    .await;
    let mut notes: Vec<_> = events.iter().map(|event| event["note"].as_str().unwrap()).collect();
    notes.sort_unstable();
    assert_eq!(notes, ["a is no port", "b is no port"]);
    // The count of one that was deleted starts over.
    for event in &events {
        fixture.api.remove(path, event["metadata"]["name"].as_str().unwrap());
    }
    publish("a is no port");
    let event = eventually("a new Event", || fixture.api.list(path).pop()).await;
    assert!(event["series"].is_null(), "{event}");
}

#[tokio::test]
async fn an_event_waits_for_the_api_server_and_publishing_does_not_block() {
    let began = Instant::now();
    let fixture = Fixture::new(false).await;
    fixture.api.down();
    for n in 0..10_000 {
        fixture.events.publish(node("edge-1"), EventType::Normal, "TunnelUp", format!("note {n}"));
    }
    fixture.api.inject("create", "events", Fault::Status(503), 1);
    fixture.api.up();
    let events = eventually("the Events", || {
        let events = fixture.api.list(DEFAULT);
        (events.len() >= 10).then_some(events)
    })
    .await;
    // Five a second while the loop ran.
    let most = 5 * (began.elapsed().as_secs() as usize + 1);
    assert!(events.len() <= most, "{} Events of 10,000, not {most}", events.len());
}

#[tokio::test]
async fn a_refused_event_does_not_delay_the_next() {
    let fixture = Fixture::new(false).await;
    fixture.api.inject("create", "events", Fault::Status(403), 1);
    fixture.events.publish(node("edge-1"), EventType::Normal, "TunnelUp", "refused".into());
    fixture.events.publish(node("edge-2"), EventType::Normal, "TunnelUp", "taken".into());
    let event = eventually("the second Event", || fixture.api.list(DEFAULT).pop()).await;
    assert_eq!(event["note"], "taken");
    assert_eq!(fixture.api.list(DEFAULT).len(), 1);
}
