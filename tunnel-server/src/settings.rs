//! Ports that a cluster configures while the server runs.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// The tunnelled ports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// TCP ports that are tunnelled in addition to --redirect-ports.
    pub tunnelled: BTreeSet<u16>,
    /// Those that the agent dials on its node's loopback.
    pub loopback: BTreeSet<u16>,
    /// Ports of the internal Service, and the door that each leads to.
    pub internal: BTreeMap<u16, InternalDoor>,
}

/// A door that the internal Service leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InternalDoor {
    Https,
    Http,
}

/// The ports of the two doors; 0: the door is off, and no port of the internal Service leads there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Doors {
    pub https: u16,
    /// By ports of nodes, further ports of the https door, which lead there instead of to the kubelet.
    pub secure: BTreeMap<u16, u16>,
    /// The plain door.
    pub http: u16,
    /// What the pairs of the ConfigMap's lists name: the http door's port, as in YurtTunnel's lists.
    pub pairs: u16,
}
