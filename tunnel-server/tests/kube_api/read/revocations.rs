//! The revoked nodes.

use std::sync::Arc;

use jiff::Timestamp;
use postern_fake_kube::{ApiServer, eventually};
use serde_json::json;
use tokio_util::sync::DropGuard;
use tunnel_server::kube::ClusterError;
use tunnel_server::kube::read::revocations::{RevocationMap, follow};
use tunnel_server::pki::{PkiError, RevocationStore, Revocations, Subject};

use crate::fixture::{Inputs, client, context};

const CONFIGMAPS: &str = "/api/v1/namespaces/kube-system/configmaps";
const NAME: &str = "tunnel-revoked-agents";

fn node(name: &str) -> Subject {
    Subject::Node(name.parse().unwrap())
}

async fn map(api: &ApiServer) -> RevocationMap {
    RevocationMap::new(client(api).await, "kube-system", NAME)
}

/// A server's copy.
struct Copy {
    store: RevocationStore,
    _inputs: Inputs,
    _stop: DropGuard,
    _directory: Arc<tempfile::TempDir>,
}

impl Copy {
    async fn start(api: &ApiServer, directory: &Arc<tempfile::TempDir>) -> Self {
        let (context, inputs) = context(api, false).await;
        let (store, stop) = (RevocationStore::new(directory.path()), context.stop.clone().drop_guard());
        tokio::spawn(follow(context, store.clone()));
        Self { store, _inputs: inputs, _stop: stop, _directory: directory.clone() }
    }

    fn known(&self) -> Revocations {
        self.store.load().unwrap().0
    }

    async fn until(&self, what: &str, wanted: impl Fn(&Revocations) -> bool) {
        eventually(what, || wanted(&self.known()).then_some(())).await;
    }
}

fn directory() -> Arc<tempfile::TempDir> {
    Arc::new(tempfile::tempdir().unwrap())
}

#[tokio::test]
async fn every_server_keeps_a_copy_that_nothing_takes_away() {
    let api = ApiServer::start();
    let (map, kept) = (map(&api).await, directory());
    let (first, second) = (Copy::start(&api, &kept).await, Copy::start(&api, &directory()).await);
    let revoked = map.revoke(&node("edge-1"), Timestamp::now()).await.unwrap();
    for copy in [&first, &second] {
        copy.until("the copy", |known| known.records.get(&node("edge-1")) == Some(&revoked)).await;
    }
    // The object is deleted, and made anew with another node.
    api.remove(CONFIGMAPS, NAME);
    map.revoke(&node("edge-2"), Timestamp::now()).await.unwrap();
    for copy in [&first, &second] {
        copy.until("both", |known| known.revoked().count() == 2).await;
    }
    // The entry of edge-1 is gone, and the server starts again.
    drop(first);
    let again = Copy::start(&api, &kept).await;
    map.readmit(&node("edge-2"), Timestamp::now()).await.unwrap();
    again.until("the readmission", |known| known.records[&node("edge-2")].readmitted.is_some()).await;
    assert_eq!(again.known().records[&node("edge-1")], revoked);
    assert!(matches!(
        map.readmit(&node("edge-2"), Timestamp::now()).await,
        Err(ClusterError::Pki(PkiError::NotRevoked(_)))
    ));
}

#[tokio::test]
async fn an_entry_that_cannot_be_read_keeps_its_node_out() {
    let api = ApiServer::start();
    let data = json!({"edge-1": "{", "edge-2": r#"{"node":"edge-3","revoked":"2026-01-01T00:00:00Z"}"#});
    api.put(CONFIGMAPS, json!({"metadata": {"name": NAME}, "data": data}));
    let map = map(&api).await;
    let copy = Copy::start(&api, &directory()).await;
    copy.until("both are out", |known| known.revoked().count() == 2).await;
    let (records, errors) = map.list().await.unwrap();
    let errors: Vec<_> = errors.iter().map(ToString::to_string).collect();
    assert!(records.is_empty() && errors.len() == 2, "{errors:?}");
    assert!(errors[0].contains("key edge-1") && errors[0].contains("agent revoke edge-1"), "{errors:?}");
    assert!(errors[1].contains("about node edge-3"), "{errors:?}");
    assert!(map.readmit(&node("edge-1"), Timestamp::now()).await.is_err());
    map.revoke(&node("edge-1"), Timestamp::now()).await.unwrap();
    let readmitted = map.readmit(&node("edge-1"), Timestamp::now()).await.unwrap();
    copy.until("it is readmitted", |known| known.records.get(&node("edge-1")) == Some(&readmitted)).await;
}
