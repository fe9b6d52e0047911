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
    /// The nodes that the other servers have.
    #[serde(default)]
    pub(super) fleet: Vec<String>,
}

/// What the second server asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Ask {
    Agents,
    Doors,
    /// That the first server accepts agents again; the second one is told to stop.
    Back,
    /// That it does everything again.
    Resume,
}

/// What the first one answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    /// The nodes whose agents were told.
    Told(Vec<String>),
    Released,
    /// The nodes whose agents are with the first server by now.
    Attached(Vec<String>),
    Resumed,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_does_not_tell_of_the_others_is_understood() {
        let text = r#"{"server_id": "server-a", "pins": null, "tokens": [["192.0.2.1/32", "198.18.0.9"]]}"#;
        let hello: Hello = serde_json::from_str(text).unwrap();
        assert_eq!((hello.tokens.len(), hello.fleet), (1, Vec::new()));
    }
}
