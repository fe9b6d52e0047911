//! What the two servers say to each other.

use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// What the first server is, and what it has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) server_id: String,
    /// The folder of its pins.
    pub(super) pins: Option<PathBuf>,
    /// What it redirects, and the first token of each.
    pub(super) tokens: Vec<(IpNet, IpAddr)>,
}

/// What the second server asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Ask {
    Agents,
    Doors,
}

/// What the first one answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    /// The nodes whose agents were told.
    Told(Vec<String>),
    Released,
}
