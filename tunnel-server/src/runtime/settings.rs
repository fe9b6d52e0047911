//! Ports that are configured in a cluster while the server runs.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// The tunnelled ports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// TCP ports that are tunnelled in addition to --redirect-ports.
    pub tunnelled: BTreeSet<u16>,
    /// Ports that the agent dials on its node's loopback.
    pub loopback: BTreeSet<u16>,
    /// Ports of the internal Service, and the listener that each leads to.
    pub internal: BTreeMap<u16, InternalListener>,
}

/// A listener that the internal Service leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InternalListener {
    Https,
    Http,
}

/// The listeners' ports; 0 if the listener is off, so that no port of the internal Service leads there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listeners {
    pub https: u16,
    /// Further ports of the https listener, by the nodes' port that they lead to instead of the kubelet's.
    pub secure: BTreeMap<u16, u16>,
    /// The port of the plain listener.
    pub http: u16,
    /// The port for the pairs in the ConfigMap's lists: the http listener's, as in YurtTunnel's lists.
    pub pairs: u16,
}
