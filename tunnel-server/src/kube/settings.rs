//! The port lists of the ConfigMap.

use std::collections::{BTreeMap, BTreeSet};

/// What the ConfigMap says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// TCP ports that are tunnelled besides --redirect-ports.
    pub tunnelled: BTreeSet<u16>,
    /// Those that the agent dials on its node's loopback.
    pub loopback: BTreeSet<u16>,
    /// Ports of the internal Service, and the door that each leads to.
    pub internal: BTreeMap<u16, InternalDoor>,
}

/// A door that the internal Service leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InternalDoor {
    Https,
    Http,
}
