//! A caller's identity, as Kubernetes sees it.

use std::collections::BTreeMap;
use std::fmt;

use tunnel_core::text::printable;

/// The group which every authenticated caller is in.
pub(super) const AUTHENTICATED: &str = "system:authenticated";

/// Who sends a request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Caller {
    pub name: String,
    pub groups: Vec<String>,
    /// Of tokens only.
    pub uid: Option<String>,
    /// What the authenticator says besides, for the authoriser.
    pub extra: BTreeMap<String, Vec<String>>,
}

impl Caller {
    pub(crate) fn new(name: String, groups: Vec<String>) -> Self {
        Self { name, groups, uid: None, extra: BTreeMap::new() }
    }
}

/// The name, for logs.
impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&printable(&self.name, 200))
    }
}

/// Why a caller gets nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Nobody knows who it is.
    #[error("{0}")]
    Unauthenticated(String),
    /// It is known, and may not.
    #[error("{0}")]
    Forbidden(String),
    /// Nobody can tell now.
    #[error("{0}")]
    Unavailable(String),
}
