//! Contradictions in an inventory, as text and as a metric's label.

use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use tunnel_runtime::NodeName;

/// A contradiction in the inventory. The rest of the inventory is routed normally.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Conflict {
    pub kind: ConflictKind,
    /// None for [`ConflictKind::NoAddress`] and [`ConflictKind::TooMany`].
    pub address: Option<IpAddr>,
    /// Sorted; for [`ConflictKind::CloudAndEdge`] the edge nodes.
    pub nodes: Vec<NodeName>,
    /// The node that keeps the address; only for [`ConflictKind::Taken`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<NodeName>,
}

/// Kind of contradiction; also the metric's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ConflictKind {
    /// Several edge nodes had the address from the start: connects to it fail, each node is reachable by name.
    Ambiguous,
    /// An edge node had the address before these nodes and keeps it.
    Taken,
    /// A cloud node has the address too: it is not redirected.
    CloudAndEdge,
    /// The operator excluded the address: it is never redirected.
    Excluded,
    /// Not the address of a host on a network (loopback, multicast, link-local, …), or one of the redirect range.
    Unroutable,
    /// The operator did not give the address to edge nodes: it is never redirected.
    NotEdge,
    /// The address belongs to this host, the API server, a Service or another node's pod: it leads to no edge node.
    Foreign,
    /// The address lies in a network of this host or around a cloud node's address: it leads to no edge node.
    CloudNetwork,
    /// An edge node without any address.
    NoAddress,
    /// A node with more addresses than are used.
    TooMany,
    /// The redirect range, or the node's share of it, is used up: connects to the address fail.
    NoVirtualAddress,
    /// A pod range that overlaps another node's or the redirect range, has an address of this host, the API server or a
    /// Service, is excluded, or lies outside the ranges that the operator gave to pods: it is not redirected.
    PodRange,
    /// The redirect range has no room for a pod range: it is not redirected.
    NoVirtualRange,
    /// The kernel's route table is full: it is not redirected.
    NoRoom,
}

impl ConflictKind {
    pub const ALL: [Self; 14] = [
        Self::Ambiguous,
        Self::Taken,
        Self::CloudAndEdge,
        Self::Excluded,
        Self::Unroutable,
        Self::NotEdge,
        Self::Foreign,
        Self::CloudNetwork,
        Self::NoAddress,
        Self::TooMany,
        Self::NoVirtualAddress,
        Self::PodRange,
        Self::NoVirtualRange,
        Self::NoRoom,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ambiguous => "ambiguous",
            Self::Taken => "taken",
            Self::CloudAndEdge => "cloud_and_edge",
            Self::Excluded => "excluded",
            Self::Unroutable => "unroutable",
            Self::NotEdge => "not_edge",
            Self::Foreign => "foreign",
            Self::CloudNetwork => "cloud_network",
            Self::NoAddress => "no_address",
            Self::TooMany => "too_many",
            Self::NoVirtualAddress => "no_virtual_address",
            Self::PodRange => "pod_range",
            Self::NoVirtualRange => "no_virtual_range",
            Self::NoRoom => "no_room",
        }
    }
}

/// Maximum number of nodes that the text of a conflict names.
const NAMED: usize = 5;

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(address) = self.address {
            write!(f, "address {address} of ")?;
        }
        for (i, node) in self.nodes.iter().take(NAMED).enumerate() {
            write!(f, "{}{node}", if i == 0 { "" } else { ", " })?;
        }
        if self.nodes.len() > NAMED {
            write!(f, " and {} more", self.nodes.len() - NAMED)?;
        }
        if let Some(holder) = &self.holder {
            write!(f, ": {holder} named it first and keeps it; reach the others by name")?;
        }
        f.write_str(match self.kind {
            // The text of the holder above is enough.
            ConflictKind::Taken => "",
            ConflictKind::Ambiguous => {
                ": several edge nodes have it; connections to it fail, use their names"
            }
            ConflictKind::CloudAndEdge => ": a cloud node has it too; it is not redirected",
            ConflictKind::Excluded => ": it lies in --exclude; it is not redirected",
            ConflictKind::Unroutable => {
                ": it is not the address of a host on a network; it is not redirected"
            }
            ConflictKind::NotEdge => ": it lies outside of --edge-addresses; it is not redirected",
            ConflictKind::Foreign => {
                ": it belongs to this host, the API server, a Service or another node's pods; it is not used for the node"
            }
            ConflictKind::CloudNetwork => {
                ": it lies in a network of this host, or in the /24 (/64) of a cloud node; it is not used for the node (if it \
                 is the node's, name the edge nodes' networks with --edge-addresses)"
            }
            ConflictKind::NoAddress => ": the node reports no IP address: its ports cannot be reached by one",
            ConflictKind::TooMany => {
                ": the node has more than 16 addresses; the rest is not used (InternalIPs are used first)"
            }
            ConflictKind::NoVirtualAddress => {
                ": the redirect range, or the node's share of it, is used up; connections to it fail until virtual addresses of \
                 addresses that left are free again, ten minutes later (or widen --redirect-range, for IPv6 \
                 --redirect-range-v6)"
            }
            ConflictKind::PodRange => {
                ": the pod range that begins there overlaps another node's or the redirect range, has an address of this \
                 host, the API server or a Service, lies in --exclude, or outside of --edge-pod-routes; \
                 it is not redirected"
            }
            ConflictKind::NoVirtualRange => {
                ": the redirect range has no room for the pod range that begins there; it is not redirected (widen \
                 --redirect-range, or --redirect-range-v6 up to a /64: a block of virtual addresses is as large as the range)"
            }
            ConflictKind::NoRoom => {
                ": the kernel's table of routes is full; it is not redirected, use the node's name"
            }
        })
    }
}
