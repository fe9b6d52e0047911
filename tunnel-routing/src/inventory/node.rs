//! The fields of a Node as Kubernetes writes them, and the inventory node made of them. Used for the inventory file and
//! for the watch of the Nodes, which treat unusable fields differently.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::SystemTime;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_saphyr::Spanned;
use tunnel_runtime::NodeName;

/// The properties of a node that the tunnel needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InventoryNode {
    pub name: NodeName,
    /// True if the node is reached through the tunnel; others are never redirected.
    pub edge: bool,
    /// InternalIPs first, then ExternalIPs; IPv4 never as v4-mapped IPv6. At most [`MAX_ADDRESSES`].
    pub addresses: Vec<IpAddr>,
    /// Number of further addresses that were left out.
    pub left_out: usize,
    pub kubelet_port: u16,
    pub pod_cidrs: Vec<IpNet>,
    /// Creation time of the Node: one created again under the same name is a different node. None if it is not certain,
    /// as in a file.
    pub created: Option<SystemTime>,
    /// True for a cloud node whose Node was an edge node's before: a kubelet can drop that label of its own Node.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub was_edge: bool,
    /// Labels of an edge node, if they are needed (see [`Selector::keep_labels`](super::Selector::keep_labels)).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

impl InventoryNode {
    /// A cloud node without addresses.
    pub fn new(name: NodeName) -> Self {
        Self {
            name,
            edge: false,
            addresses: Vec::new(),
            left_out: 0,
            kubelet_port: DEFAULT_KUBELET_PORT,
            pod_cidrs: Vec::new(),
            created: None,
            was_edge: false,
            labels: BTreeMap::new(),
        }
    }
}

impl InventoryNode {
    /// Remembers from what was known `before` that the same Node was an edge node's.
    pub fn following(self, before: Option<&Self>) -> Self {
        let was =
            before.is_some_and(|before| (before.edge || before.was_edge) && before.created == self.created);
        Self { was_edge: was && !self.edge, ..self }
    }

    /// True for a cloud node that never was an edge node.
    pub fn always_cloud(&self) -> bool {
        !self.edge && !self.was_edge
    }
}

/// The kubelet's default port.
pub const DEFAULT_KUBELET_PORT: u16 = 10250;
/// The kubelet's port without TLS.
pub const READ_ONLY_KUBELET_PORT: u16 = 10255;

/// Maximum number of a node's addresses in use: a kubelet may report any number.
pub const MAX_ADDRESSES: usize = 16;
/// Maximum number of a node's pod ranges; Kubernetes allows one per family.
const MAX_POD_CIDRS: usize = 4;

/// Address types in use, the preferred one first. Host names are not routed.
const ROUTED: [&str; 2] = ["InternalIP", "ExternalIP"];

/// A text and its line in a file.
pub trait Text {
    fn text(&self) -> &str;

    /// Line number from 1; None outside a file.
    fn line(&self) -> Option<u64> {
        None
    }
}

impl Text for String {
    fn text(&self) -> &str {
        self
    }
}

impl Text for Spanned<String> {
    fn text(&self) -> &str {
        &self.value
    }

    fn line(&self) -> Option<u64> {
        Some(self.referenced.line()).filter(|line| *line > 0)
    }
}

#[derive(Clone, Debug, Deserialize)]
pub struct NodeSpec<T> {
    #[serde(rename = "podCIDR")]
    pod_cidr: Option<T>,
    #[serde(rename = "podCIDRs")]
    pod_cidrs: Option<Vec<T>>,
}

/// `P` is the type of ports: 16 bits in the file, any number in the API.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus<T, P> {
    addresses: Option<Vec<NodeAddress<T>>>,
    daemon_endpoints: Option<DaemonEndpoints<P>>,
}

#[derive(Clone, Debug, Deserialize)]
struct NodeAddress<T> {
    r#type: String,
    address: T,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct DaemonEndpoints<P> {
    kubelet_endpoint: Option<DaemonEndpoint<P>>,
}

#[derive(Clone, Debug, Deserialize)]
struct DaemonEndpoint<P> {
    #[serde(rename = "Port")]
    port: Option<P>,
}

/// A field that cannot be used.
#[derive(Debug)]
pub struct InvalidField {
    pub field: NodeField,
    pub value: String,
    /// Line in the file.
    pub line: Option<u64>,
    pub reason: &'static str,
}

impl InvalidField {
    fn new(field: NodeField, text: &impl Text, reason: &'static str) -> Self {
        Self { field, value: text.text().to_owned(), line: text.line(), reason }
    }
}

#[derive(Clone, Copy, Debug)]
pub enum NodeField {
    Address(usize),
    KubeletPort,
    PodCidr,
    PodCidrs(usize),
}

impl NodeField {
    /// The field's key, or that of its list.
    pub fn key(self) -> &'static str {
        match self {
            Self::Address(_) => "status.addresses",
            Self::KubeletPort => "status.daemonEndpoints.kubeletEndpoint.Port",
            Self::PodCidr | Self::PodCidrs(_) => "spec.podCIDRs",
        }
    }

    /// The field's path, with its index in a list.
    pub fn path(self) -> String {
        match self {
            Self::Address(index) => format!("status.addresses[{index}].address"),
            Self::KubeletPort => self.key().to_owned(),
            Self::PodCidr => "spec.podCIDR".to_owned(),
            Self::PodCidrs(index) => format!("spec.podCIDRs[{index}]"),
        }
    }
}

/// Reads a Node. Calls `invalid` for each unusable field; unless it fails, the field is left out.
///
/// # Errors
/// The errors of `invalid`.
pub fn read_node<T: Text, P: Copy + Into<i64>, E>(
    name: NodeName,
    edge: bool,
    spec: Option<&NodeSpec<T>>,
    status: Option<&NodeStatus<T, P>>,
    mut invalid: impl FnMut(InvalidField) -> Result<(), E>,
) -> Result<InventoryNode, E> {
    let mut addresses: Vec<IpAddr> = Vec::new();
    let mut left_out = 0;
    let listed = status.and_then(|status| status.addresses.as_deref()).unwrap_or_default();
    for wanted in ROUTED {
        for (index, entry) in listed.iter().enumerate().filter(|(_, entry)| entry.r#type == wanted) {
            match entry.address.text().parse::<IpAddr>().map(|address| address.to_canonical()) {
                Ok(address) if addresses.contains(&address) => {}
                Ok(_) if addresses.len() == MAX_ADDRESSES => left_out += 1,
                Ok(address) => addresses.push(address),
                Err(_) => {
                    let field = NodeField::Address(index);
                    invalid(InvalidField::new(field, &entry.address, "not an IP address"))?;
                }
            }
        }
    }
    let endpoints = status.and_then(|status| status.daemon_endpoints.as_ref());
    let port = endpoints.and_then(|endpoints| endpoints.kubelet_endpoint.as_ref()?.port);
    let kubelet_port = match port.map_or(0, Into::into) {
        // Kubernetes uses 0 for unknown.
        0 => DEFAULT_KUBELET_PORT,
        port => match u16::try_from(port) {
            Ok(port) => port,
            Err(_) => {
                let (field, value) = (NodeField::KubeletPort, port.to_string());
                invalid(InvalidField { field, value, line: None, reason: "not a port" })?;
                DEFAULT_KUBELET_PORT
            }
        },
    };
    let mut pod_cidrs = Vec::new();
    let many = spec.and_then(|spec| spec.pod_cidrs.as_deref()).unwrap_or_default();
    // podCIDR repeats the first of podCIDRs.
    let single = spec.and_then(|spec| spec.pod_cidr.as_ref()).filter(|_| many.is_empty());
    let many = many.iter().enumerate().map(|(index, cidr)| (NodeField::PodCidrs(index), cidr));
    for (field, cidr) in single.map(|cidr| (NodeField::PodCidr, cidr)).into_iter().chain(many) {
        match cidr.text().parse::<IpNet>() {
            Ok(_) if pod_cidrs.len() == MAX_POD_CIDRS => {
                invalid(InvalidField::new(field, cidr, "one range too many"))?;
            }
            Ok(net) => pod_cidrs.push(net.trunc()),
            Err(_) if cidr.text().is_empty() => {}
            Err(_) => invalid(InvalidField::new(field, cidr, "not an address range"))?,
        }
    }
    let labels = BTreeMap::new();
    let (created, was_edge) = (None, false);
    Ok(InventoryNode { name, edge, addresses, left_out, kubelet_port, pod_cidrs, created, was_edge, labels })
}
