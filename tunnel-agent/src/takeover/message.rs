//! Messages between the two agents.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// First message of the first agent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The addresses at which it is attached.
    pub(super) attached: BTreeSet<String>,
}

/// Messages of the second agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Ask {
    /// The addresses at which it is attached.
    Attached(BTreeSet<String>),
    /// It has taken over.
    Finish,
}

/// Answer of the first agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    Done,
}
