//! A Node of which only some fields are read: conditions, images, managed fields and the like are skipped while parsing,
//! so that a heartbeat costs little.

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::Resource;
use kube::core::ClusterResourceScope;
use serde::{Deserialize, Deserializer};

/// A Node. Of its metadata there are the name, the version, the time of its creation and the labels.
#[derive(Clone, Debug, Deserialize)]
pub struct PartialNode<Spec, Status> {
    #[serde(deserialize_with = "partial_metadata")]
    metadata: ObjectMeta,
    pub spec: Option<Spec>,
    pub status: Option<Status>,
}

impl<Spec, Status> PartialNode<Spec, Status> {
    pub fn name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or_default()
    }

    /// In seconds since 1970.
    pub fn created(&self) -> Option<i64> {
        self.metadata.creation_timestamp.as_ref().map(|time| time.0.as_second())
    }

    pub fn labels(&self) -> &BTreeMap<String, String> {
        const NONE: &BTreeMap<String, String> = &BTreeMap::new();
        self.metadata.labels.as_ref().unwrap_or(NONE)
    }
}

impl<Spec, Status> Resource for PartialNode<Spec, Status> {
    type DynamicType = ();
    type Scope = ClusterResourceScope;

    fn kind(&(): &()) -> Cow<'_, str> {
        "Node".into()
    }

    fn group(&(): &()) -> Cow<'_, str> {
        "".into()
    }

    fn version(&(): &()) -> Cow<'_, str> {
        "v1".into()
    }

    fn plural(&(): &()) -> Cow<'_, str> {
        "nodes".into()
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
        resource_version: Option<String>,
        creation_timestamp: Option<Time>,
        labels: Option<BTreeMap<String, String>>,
    }
    let Metadata { name, resource_version, creation_timestamp, labels } =
        Metadata::deserialize(deserializer)?;
    Ok(ObjectMeta { name, resource_version, creation_timestamp, labels, ..ObjectMeta::default() })
}
