//! A Node without what the tunnel does not look at: conditions, images, managed fields and the like are skipped while
//! reading, so that a heartbeat costs little.

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use kube::core::ClusterResourceScope;
use serde::Deserialize;

/// A Node as far as the tunnel is concerned. Of its metadata there are the name, the version and the labels.
#[derive(Clone, Debug, Deserialize)]
#[serde(from = "Wire")]
pub struct SlimNode {
    metadata: ObjectMeta,
    pub pod_cidrs: Vec<String>,
    pub addresses: Vec<Address>,
    /// Any number that the API server lets pass.
    pub kubelet_port: Option<i64>,
}

/// An address of a Node.
#[derive(Clone, Debug, Deserialize)]
pub struct Address {
    /// Such as `InternalIP`.
    pub r#type: String,
    pub address: String,
}

impl SlimNode {
    pub fn name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or_default()
    }

    pub fn labels(&self) -> &BTreeMap<String, String> {
        const NONE: &BTreeMap<String, String> = &BTreeMap::new();
        self.metadata.labels.as_ref().unwrap_or(NONE)
    }
}

impl Resource for SlimNode {
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

#[derive(Deserialize)]
struct Wire {
    metadata: WireMetadata,
    spec: Option<WireSpec>,
    status: Option<WireStatus>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireMetadata {
    name: Option<String>,
    resource_version: Option<String>,
    labels: Option<BTreeMap<String, String>>,
}

#[derive(Default, Deserialize)]
struct WireSpec {
    #[serde(rename = "podCIDR")]
    pod_cidr: Option<String>,
    #[serde(rename = "podCIDRs")]
    pod_cidrs: Option<Vec<String>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireStatus {
    addresses: Option<Vec<Address>>,
    daemon_endpoints: Option<WireEndpoints>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireEndpoints {
    kubelet_endpoint: Option<WireEndpoint>,
}

#[derive(Deserialize)]
struct WireEndpoint {
    #[serde(rename = "Port")]
    port: Option<i64>,
}

impl From<Wire> for SlimNode {
    fn from(wire: Wire) -> Self {
        let spec = wire.spec.unwrap_or_default();
        let status = wire.status.unwrap_or_default();
        let endpoint = status.daemon_endpoints.and_then(|endpoints| endpoints.kubelet_endpoint);
        let many = spec.pod_cidrs.unwrap_or_default();
        Self {
            metadata: ObjectMeta {
                name: wire.metadata.name,
                resource_version: wire.metadata.resource_version,
                labels: wire.metadata.labels,
                ..ObjectMeta::default()
            },
            // podCIDR repeats the first of podCIDRs.
            pod_cidrs: if many.is_empty() { spec.pod_cidr.into_iter().collect() } else { many },
            addresses: status.addresses.unwrap_or_default(),
            kubelet_port: endpoint.and_then(|endpoint| endpoint.port),
        }
    }
}
