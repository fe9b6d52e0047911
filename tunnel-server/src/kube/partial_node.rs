//! A Node of which only some fields are read: conditions, images, managed fields and the like are skipped while parsing,
//! so that a heartbeat costs little.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::SystemTime;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::Resource;
use kube::core::ClusterResourceScope;
use serde::{Deserialize, Deserializer};

/// A Node. Of its metadata there are the name, the version, the labels and the time of its creation.
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

    pub fn labels(&self) -> &BTreeMap<String, String> {
        const NONE: &BTreeMap<String, String> = &BTreeMap::new();
        self.metadata.labels.as_ref().unwrap_or(NONE)
    }

    pub fn created(&self) -> Option<SystemTime> {
        self.metadata.creation_timestamp.as_ref().map(|created| created.0.into())
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
        labels: Option<BTreeMap<String, String>>,
        creation_timestamp: Option<Time>,
    }
    let Metadata { name, resource_version, labels, creation_timestamp } =
        Metadata::deserialize(deserializer)?;
    Ok(ObjectMeta { name, resource_version, labels, creation_timestamp, ..ObjectMeta::default() })
}
