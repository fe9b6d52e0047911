//! The ConfigMap with the port lists.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use postern_fake_kube::{ApiServer, Fault, eventually};
use serde_json::{Value, json};
use tokio::sync::watch;
use tunnel_kube::Health;
use tunnel_server::kube::read::configmap::run;
use tunnel_server::kube::write::events::Events;
use tunnel_server::runtime::settings::{InternalListener, Listeners, Settings};

use crate::fixture::{Inputs, context};

const CONFIGMAPS: &str = "/api/v1/namespaces/kube-system/configmaps";
const EVENTS: &str = "/apis/events.k8s.io/v1/namespaces/kube-system/events";

struct Following {
    settings: watch::Receiver<Arc<Settings>>,
    health: Health,
    _stop: tokio_util::sync::DropGuard,
}

impl Following {
    async fn start(server: &ApiServer) -> Self {
        let (context, Inputs { settings: publish, .. }) = context(server, false).await;
        let (settings, health, stop) = (publish.subscribe(), context.health.clone(), context.stop.clone());
        let events = Events::start(context.client.clone(), "server-1", stop.clone());
        tokio::spawn(run(
            context,
            Some(events),
            Listeners { https: 10263, secure: BTreeMap::new(), http: 10268, pairs: 10264 },
            publish,
        ));
        Self { settings, health, _stop: stop.drop_guard() }
    }

    async fn until(&self, what: &str, wanted: impl Fn(&Settings) -> bool) {
        eventually(what, || wanted(&self.settings.borrow()).then_some(())).await;
    }

    async fn synced(&self) {
        let synced = || self.health.report().iter().any(|watch| watch.synced).then_some(());
        eventually("the watch is in order", synced).await;
    }
}

fn configmap(name: &str, data: &[(&str, &str)]) -> Value {
    json!({"metadata": {"name": name}, "data": BTreeMap::from_iter(data.iter().copied())})
}

fn tunnelled(settings: &Settings, ports: &[u16]) -> bool {
    settings.tunnelled == BTreeSet::from_iter(ports.iter().copied())
}

fn notes(server: &ApiServer) -> Vec<String> {
    let mut notes: Vec<String> =
        server.list(EVENTS).iter().map(|event| event["note"].as_str().unwrap().to_owned()).collect();
    notes.sort();
    notes
}

#[tokio::test]
async fn only_the_named_configmap_is_followed() {
    let server = ApiServer::start();
    server.put(CONFIGMAPS, configmap("tunnel-nodes", &[("http-proxy-ports", "1")]));
    let following = Following::start(&server).await;
    following.synced().await;
    assert_eq!(**following.settings.borrow(), Settings::default(), "one that is missing is an empty one");

    // As YurtTunnel ships it, with ports.
    let shipped = [
        ("dnat-ports-pair", "9100=10264"),
        ("http-proxy-ports", "9445"),
        ("https-proxy-ports", "10259, 10257"),
        ("localhost-proxy-ports", "10266, 10267"),
    ];
    server.put(CONFIGMAPS, configmap("tunnel-server-cfg", &shipped));
    following.until("the ports", |s| tunnelled(s, &[9100, 9445, 10257, 10259, 10266, 10267])).await;
    let now = following.settings.borrow().clone();
    assert_eq!(now.loopback, BTreeSet::from([10266, 10267]));
    assert_eq!(
        now.internal,
        BTreeMap::from([
            (9100, InternalListener::Http),
            (9445, InternalListener::Http),
            (10257, InternalListener::Https),
            (10259, InternalListener::Https)
        ])
    );

    server.edit(CONFIGMAPS, "tunnel-server-cfg", |map| map["data"] = json!({"http-proxy-ports": "9445"}));
    following.until("fewer ports", |s| tunnelled(s, &[9445])).await;
    server.edit(CONFIGMAPS, "tunnel-server-cfg", |map| map["data"] = Value::Null);
    following.until("no data", |s| *s == Settings::default()).await;
    server.edit(CONFIGMAPS, "tunnel-server-cfg", |map| map["data"] = json!({"http-proxy-ports": "9446"}));
    following.until("ports again", |s| tunnelled(s, &[9446])).await;
    server.remove(CONFIGMAPS, "tunnel-server-cfg");
    following.until("the deletion", |s| *s == Settings::default()).await;
    assert_eq!(server.writes("configmaps"), 0, "it only reads");
    assert_eq!(notes(&server), Vec::<String>::new());
}

#[tokio::test]
async fn an_invalid_entry_is_reported_once_and_the_rest_applies() {
    let server = ApiServer::start();
    server.put(CONFIGMAPS, configmap("tunnel-server-cfg", &[("http-proxy-ports", "9100, http, 9200")]));
    let following = Following::start(&server).await;
    following.until("the rest", |s| tunnelled(s, &[9100, 9200])).await;
    let first = "left out: http-proxy-ports: \"http\" is not a number".to_owned();
    eventually("the Event", || (notes(&server) == [first.clone()]).then_some(())).await;
    let event = &server.list(EVENTS)[0];
    let about = &event["regarding"];
    assert_eq!(
        [&event["type"], &event["reason"], &about["kind"], &about["name"], &about["namespace"]],
        ["Warning", "InvalidPort", "ConfigMap", "tunnel-server-cfg", "kube-system"]
    );

    // The same entry in another version, or after a list, is not reported again; another entry is.
    server.edit(CONFIGMAPS, "tunnel-server-cfg", |map| map["data"]["http-proxy-ports"] = json!("http, 9300"));
    following.until("the next version", |s| tunnelled(s, &[9300])).await;
    server.inject("watch", "configmaps", Fault::Status(410), 1);
    server.end_watches();
    eventually("a second list", || (server.requests("list", CONFIGMAPS) == 2).then_some(())).await;
    server.edit(CONFIGMAPS, "tunnel-server-cfg", |map| {
        map["data"]["http-proxy-ports"] = json!("http, 9400");
        map["data"]["dnat-ports-pair"] = json!("9500=80");
    });
    following.until("the version after it", |s| tunnelled(s, &[9400])).await;
    let second = "left out: dnat-ports-pair: \"9500=80\" does not lead to the http listener; the second half has to be 10264";
    eventually("the second Event", || (notes(&server) == [second.to_owned(), first.clone()]).then_some(()))
        .await;
    assert!(server.list(EVENTS).iter().all(|event| event["series"].is_null()), "each was reported once");
}

#[tokio::test]
async fn the_last_ports_stay_while_the_api_server_is_away() {
    let server = ApiServer::start();
    server.put(CONFIGMAPS, configmap("tunnel-server-cfg", &[("http-proxy-ports", "9100")]));
    let following = Following::start(&server).await;
    following.until("the ports", |s| tunnelled(s, &[9100])).await;
    following.synced().await;
    server.down();
    eventually("the loss", || following.health.report().iter().any(|watch| !watch.synced).then_some(()))
        .await;
    assert!(tunnelled(&following.settings.borrow(), &[9100]));
    server.edit(CONFIGMAPS, "tunnel-server-cfg", |map| map["data"]["http-proxy-ports"] = json!("9200"));
    server.up();
    following.until("what changed meanwhile", |s| tunnelled(s, &[9200])).await;
}
