//! What is known about the running redirect.

use std::time::Instant;

/// State of the redirect as of its last verification.
#[derive(Clone, Debug, Default)]
pub struct Health {
    /// What does not work, if anything.
    pub problem: Option<String>,
    /// Why the kernel's routes are not the current ones, if so.
    pub stale: Option<String>,
    /// When it last worked.
    pub verified: Option<Instant>,
    /// How often something lost had to be restored.
    pub restored: u64,
}
