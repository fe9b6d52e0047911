//! What the two agents say to each other.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// What the first agent has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// The addresses at which it is attached.
    pub(super) attached: BTreeSet<String>,
}

/// What the second agent says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Ask {
    /// The addresses at which it is attached.
    Attached(BTreeSet<String>),
    /// It has taken over.
    Finish,
}

/// The first one's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    Done,
}
