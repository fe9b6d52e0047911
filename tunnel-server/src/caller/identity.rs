//! A caller's identity, as Kubernetes sees it.

use std::collections::BTreeMap;
use std::fmt;

use tunnel_runtime::text::printable;

/// The group of every authenticated caller.
pub(super) const AUTHENTICATED: &str = "system:authenticated";

/// The sender of a request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Caller {
    pub name: String,
    pub groups: Vec<String>,
    /// Set for tokens only.
    pub uid: Option<String>,
    /// Further attributes from the authenticator, for the authoriser.
    pub extra: BTreeMap<String, Vec<String>>,
}

impl Caller {
    pub(crate) fn new(name: String, groups: Vec<String>) -> Self {
        Self { name, groups, uid: None, extra: BTreeMap::new() }
    }
}

/// Writes the name, for logs.
impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&printable(&self.name, 200))
    }
}

/// Reason for which a caller is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The caller's identity is not known.
    #[error("{0}")]
    Unauthenticated(String),
    /// The caller is known, but not allowed.
    #[error("{0}")]
    Forbidden(String),
    /// The question cannot be answered now.
    #[error("{0}")]
    Unavailable(String),
}
