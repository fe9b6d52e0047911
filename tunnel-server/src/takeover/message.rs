//! The messages between the two servers.

use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// Identity and state of the first server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub(crate) server_id: String,
    /// Directory of its pins.
    pub(crate) pins: Option<PathBuf>,
    /// Ranges that it redirects, and the first virtual address of each.
    pub(crate) virtual_addresses: Vec<(IpNet, IpAddr)>,
    /// The nodes of the other servers.
    pub(crate) fleet: Vec<String>,
}

/// A request of the second server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Ask {
    Agents,
    Listeners,
    /// The first server is to accept agents again; the second one was told to stop.
    Back,
    /// The first server is to resume everything.
    Resume,
}

/// The first server's answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    /// The nodes whose agents were told.
    Told(Vec<String>),
    Released,
    /// The nodes whose agents are attached to the first server by now.
    Attached(Vec<String>),
    Resumed,
}
