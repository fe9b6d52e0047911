//! Socket options that are not essential.

use std::collections::BTreeSet;
use std::io;

use parking_lot::Mutex;

/// Options that could not be set.
static MISSING: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());

/// Logs the failure to set an option that makes connections faster or shows their end sooner, once per option and
/// process. Old kernels and sandboxes lack some options; the connection must not fail for that.
pub fn refine(option: &'static str, set: io::Result<()>) {
    if let Err(error) = set
        && MISSING.lock().insert(option)
    {
        tracing::warn!(option, %error, "failed to set a socket option");
    }
}
