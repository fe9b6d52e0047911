//! Objects of which only some fields are parsed: conditions, images, managed fields and the like are skipped, so that a
//! heartbeat costs little.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::time::SystemTime;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::Resource;
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};

/// An object of kind `K`. Its metadata has the name, the namespace, the resource version, the labels and the creation
/// time only.
#[derive(Clone, Debug, Deserialize)]
#[serde(bound(deserialize = "Spec: Deserialize<'de>, Status: Deserialize<'de>"))]
pub struct Partial<K, Spec, Status = IgnoredAny> {
    #[serde(deserialize_with = "partial_metadata")]
    metadata: ObjectMeta,
    pub spec: Option<Spec>,
    pub status: Option<Status>,
    #[serde(skip)]
    kind: PhantomData<fn() -> K>,
}

impl<K, Spec, Status> Partial<K, Spec, Status> {
    pub fn name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or_default()
    }

    pub fn namespace(&self) -> &str {
        self.metadata.namespace.as_deref().unwrap_or_default()
    }

    pub fn labels(&self) -> &BTreeMap<String, String> {
        const NONE: &BTreeMap<String, String> = &BTreeMap::new();
        self.metadata.labels.as_ref().unwrap_or(NONE)
    }

    pub fn created(&self) -> Option<SystemTime> {
        self.metadata.creation_timestamp.as_ref().map(|created| created.0.into())
    }
}

impl<K: Resource<DynamicType = ()>, Spec, Status> Resource for Partial<K, Spec, Status> {
    type DynamicType = ();
    type Scope = K::Scope;

    fn kind(kind: &()) -> Cow<'_, str> {
        K::kind(kind)
    }

    fn group(kind: &()) -> Cow<'_, str> {
        K::group(kind)
    }

    fn version(kind: &()) -> Cow<'_, str> {
        K::version(kind)
    }

    fn plural(kind: &()) -> Cow<'_, str> {
        K::plural(kind)
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

fn partial_metadata<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ObjectMeta, D::Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Metadata {
        name: Option<String>,
        namespace: Option<String>,
        resource_version: Option<String>,
        labels: Option<BTreeMap<String, String>>,
        creation_timestamp: Option<Time>,
    }
    let Metadata { name, namespace, resource_version, labels, creation_timestamp } =
        Metadata::deserialize(deserializer)?;
    Ok(ObjectMeta { name, namespace, resource_version, labels, creation_timestamp, ..ObjectMeta::default() })
}
