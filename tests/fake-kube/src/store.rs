//! The objects, their versions and their history.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use serde_json::{Value, json};

use super::patch::Applied;

/// Number of changes that are kept: older ones are forgotten, as an API server forgets them.
const HISTORY: usize = 5000;

/// Objects of one kind, in one namespace or in all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Collection {
    /// Such as `/api/v1` or `/apis/apps/v1`.
    pub(crate) group: String,
    /// None for all, or for a kind without namespaces.
    pub(crate) namespace: Option<String>,
    pub(crate) resource: String,
}

impl Collection {
    /// Reads `/api/v1/nodes`, `/apis/apps/v1/namespaces/kube-system/daemonsets`, …
    pub(crate) fn parse(path: &str) -> Option<Self> {
        let (collection, rest) = Self::split(path)?;
        rest.is_empty().then_some(collection)
    }

    /// Also returns the rest: a name, and a subresource.
    pub(crate) fn split(path: &str) -> Option<(Self, Vec<&str>)> {
        let mut parts: VecDeque<&str> = path.trim_matches('/').split('/').collect();
        let group = match parts.pop_front()? {
            "api" => format!("/api/{}", parts.pop_front()?),
            "apis" => format!("/apis/{}/{}", parts.pop_front()?, parts.pop_front()?),
            _ => return None,
        };
        let namespace = if parts.len() >= 3 && parts[0] == "namespaces" {
            parts.pop_front();
            parts.pop_front().map(str::to_owned)
        } else {
            None
        };
        let resource = parts.pop_front()?.to_owned();
        Some((Self { group, namespace, resource }, parts.into()))
    }

    pub(crate) fn api_version(&self) -> String {
        self.group.trim_start_matches("/apis/").trim_start_matches("/api/").to_owned()
    }

    /// Good enough for the kinds that are used here.
    pub(crate) fn kind(&self) -> &'static str {
        match self.resource.as_str() {
            "nodes" => "Node",
            "configmaps" => "ConfigMap",
            "secrets" => "Secret",
            "services" => "Service",
            "events" => "Event",
            "leases" => "Lease",
            "endpointslices" => "EndpointSlice",
            "certificatesigningrequests" => "CertificateSigningRequest",
            "serviceaccounts" => "ServiceAccount",
            "pods" => "Pod",
            "servicecidrs" => "ServiceCIDR",
            other => panic!("the fake API server has no kind for {other}"),
        }
    }

    fn holds(&self, key: &Key) -> bool {
        self.group == key.0
            && self.resource == key.1
            && self.namespace.as_deref().is_none_or(|namespace| namespace == key.2)
    }

    fn key(&self, name: &str) -> Key {
        let namespace = self.namespace.clone().unwrap_or_default();
        Key(self.group.clone(), self.resource.clone(), namespace, name.to_owned())
    }
}

/// Group, resource, namespace, name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key(pub(crate) String, String, String, String);

impl Key {
    pub(crate) fn token(&self) -> String {
        format!("{}/{}", self.2, self.3)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Change {
    pub(crate) version: u64,
    pub(crate) key: Key,
    /// None if the change created it.
    pub(crate) before: Option<Arc<Value>>,
    /// The object after the change; if that deleted it, its last state.
    pub(crate) object: Arc<Value>,
    pub(crate) deleted: bool,
}

#[derive(Default)]
pub(crate) struct Store {
    objects: BTreeMap<Key, Arc<Value>>,
    version: u64,
    history: VecDeque<Change>,
    /// Changes up to here are forgotten.
    forgotten: u64,
    pub(crate) applied: Applied,
}

impl Store {
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    pub(crate) fn get(&self, collection: &Collection, name: &str) -> Option<Arc<Value>> {
        self.objects.get(&collection.key(name)).cloned()
    }

    pub(crate) fn list(&self, collection: &Collection) -> impl Iterator<Item = (&Key, &Arc<Value>)> {
        self.objects.iter().filter(|(key, _)| collection.holds(key))
    }

    /// Creates or replaces an object, which gets a new version unless it is the same.
    pub(crate) fn put(&mut self, collection: &Collection, mut object: Value) -> Value {
        let name = object["metadata"]["name"].as_str().expect("metadata.name").to_owned();
        let key = collection.key(&name);
        let before = self.objects.get(&key).cloned();
        let next = self.version + 1;
        object["apiVersion"] = json!(collection.api_version());
        object["kind"] = json!(collection.kind());
        let metadata = &mut object["metadata"];
        if let Some(namespace) = &collection.namespace {
            metadata["namespace"] = json!(namespace);
        }
        match &before {
            Some(before) => {
                for kept in ["uid", "creationTimestamp", "resourceVersion"] {
                    metadata[kept] = before["metadata"][kept].clone();
                }
                if object == **before {
                    return object;
                }
            }
            None => {
                metadata["uid"] = json!(format!("uid-{next}"));
                if metadata["creationTimestamp"].is_null() {
                    metadata["creationTimestamp"] = json!(format!("{:.0}", jiff::Timestamp::now()));
                }
            }
        }
        object["metadata"]["resourceVersion"] = json!(next.to_string());
        let stored = Arc::new(object.clone());
        self.objects.insert(key.clone(), stored.clone());
        self.record(Change { version: next, key, before, object: stored, deleted: false });
        object
    }

    pub(crate) fn remove(&mut self, collection: &Collection, name: &str) -> Option<Value> {
        let key = collection.key(name);
        let before = self.objects.remove(&key)?;
        let mut last = before.as_ref().clone();
        let version = self.version + 1;
        last["metadata"]["resourceVersion"] = json!(version.to_string());
        let change =
            Change { version, key, before: Some(before), object: Arc::new(last.clone()), deleted: true };
        self.record(change);
        Some(last)
    }

    fn record(&mut self, change: Change) {
        self.version = change.version;
        self.history.push_back(change);
        if self.history.len() > HISTORY
            && let Some(oldest) = self.history.pop_front()
        {
            self.forgotten = oldest.version;
        }
    }

    pub(crate) fn compact(&mut self) {
        self.history.clear();
        self.forgotten = self.version;
    }

    /// Changes after `version`; None when they are forgotten.
    pub(crate) fn since(&self, version: u64, collection: &Collection) -> Option<Vec<Change>> {
        if version < self.forgotten {
            return None;
        }
        let first = self.history.partition_point(|change| change.version <= version);
        Some(self.history.range(first..).filter(|change| collection.holds(&change.key)).cloned().collect())
    }
}
