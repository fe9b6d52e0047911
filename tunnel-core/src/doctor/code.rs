//! A kind of fault.

use serde::Serialize;

/// How bad a fault is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// It works, but not as it should, or not for long.
    Warning,
    Broken,
}

/// A kind of fault, with a name that stays the same: scripts and docs/troubleshooting.md refer to it.
#[derive(Debug, PartialEq, Eq)]
pub struct Code {
    /// Also the anchor in docs/troubleshooting.md.
    pub id: &'static str,
    pub severity: Severity,
    /// What it leads to.
    pub meaning: &'static str,
}
