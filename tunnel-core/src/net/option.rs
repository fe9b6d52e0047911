//! Socket options that a connection works without.

use std::collections::BTreeSet;
use std::io;

use parking_lot::Mutex;

/// The options that could not be set.
static MISSING: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());

/// What came of setting an option that makes connections faster, or shows their end sooner. Old kernels and sandboxes lack some,
/// which must not cost the connection. Each is logged once in a process.
pub fn refine(option: &'static str, set: io::Result<()>) {
    if let Err(error) = set
        && MISSING.lock().insert(option)
    {
        tracing::warn!(option, %error, "failed to set a socket option; connections do without it");
    }
}
