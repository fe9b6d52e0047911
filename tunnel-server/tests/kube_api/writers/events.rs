//! Events in the cluster.

use std::time::Instant;

use kube::runtime::events::EventType;
use tunnel_server::kube::events::{node, object};

use super::Fixture;
use crate::scripted::{Fault, eventually};

const DEFAULT: &str = "/apis/events.k8s.io/v1/namespaces/default/events";

#[tokio::test]
async fn an_event_of_a_node_is_where_kubectl_describe_looks() {
    let fixture = Fixture::new(false).await;
    fixture.cluster.events.publish(node("edge-1"), EventType::Warning, "TunnelDown", "it ended".into());
    let event = eventually("the Event", || fixture.api.list(DEFAULT).pop()).await;
    // `kubectl describe node` asks for the name in place of the UID, and for no namespace.
    assert_eq!((&event["regarding"]["kind"], &event["regarding"]["uid"]), (&"Node".into(), &"edge-1".into()));
    assert!(event["regarding"]["namespace"].is_null(), "{event}");
    assert_eq!((&event["type"], &event["note"]), (&"Warning".into(), &"it ended".into()));
    let reporter = (&event["reportingController"], &event["reportingInstance"]);
    assert_eq!(reporter, (&"postern".into(), &"server-a".into()));
}

#[tokio::test]
async fn repetitions_are_counted_and_other_notes_are_other_events() {
    let fixture = Fixture::new(false).await;
    let publish = |note: &str| {
        let configmap = object("ConfigMap", "kube-system", "tunnel-server-cfg");
        fixture.cluster.events.publish(configmap, EventType::Warning, "InvalidPort", note.into());
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
    // One that was deleted begins anew.
    for event in &events {
        fixture.api.remove(path, event["metadata"]["name"].as_str().unwrap());
    }
    publish("a is no port");
    let event = eventually("a new Event", || fixture.api.list(path).pop()).await;
    assert!(event["series"].is_null(), "{event}");
}

#[tokio::test]
async fn an_event_waits_for_the_api_server_and_nobody_waits_for_an_event() {
    let began = Instant::now();
    let fixture = Fixture::new(false).await;
    fixture.api.down();
    for n in 0..10_000 {
        fixture.cluster.events.publish(node("edge-1"), EventType::Normal, "TunnelUp", format!("note {n}"));
    }
    fixture.api.inject("create", "events", Fault::Status(503), 1);
    fixture.api.up();
    let events = eventually("the Events", || {
        let events = fixture.api.list(DEFAULT);
        (events.len() >= 50).then_some(events)
    })
    .await;
    // What a burst may be, and five a second while the loop ran.
    let most = 50 + 5 * (began.elapsed().as_secs() as usize + 1);
    assert!(events.len() <= most, "{} Events of 10,000, not {most}", events.len());
}

#[tokio::test]
async fn what_is_refused_holds_up_nothing() {
    let fixture = Fixture::new(false).await;
    fixture.api.inject("create", "events", Fault::Status(403), 1);
    fixture.cluster.events.publish(node("edge-1"), EventType::Normal, "TunnelUp", "refused".into());
    fixture.cluster.events.publish(node("edge-2"), EventType::Normal, "TunnelUp", "taken".into());
    let event = eventually("the second Event", || fixture.api.list(DEFAULT).pop()).await;
    assert_eq!(event["note"], "taken");
    assert_eq!(fixture.api.list(DEFAULT).len(), 1);
}
