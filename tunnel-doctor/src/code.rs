//! Kinds of faults.

use serde::Serialize;

/// Severity of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// It works, but not as it should or not for long.
    Warning,
    Broken,
}

/// A kind of fault, with a stable name that scripts and docs/operate/troubleshooting.md refer to.
#[derive(Debug, PartialEq, Eq)]
pub struct Code {
    /// Name, and anchor in docs/operate/troubleshooting.md.
    pub id: &'static str,
    pub severity: Severity,
    /// Consequence of the fault.
    pub meaning: &'static str,
}
