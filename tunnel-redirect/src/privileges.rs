//! Gives up the capabilities that only the start needs, or only older kernels.

use std::io;

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

use super::config::RedirectConfig;
use super::{load, preflight};

/// Needed by some kernels only: PERFMON by the verifiers of older ones (6.1), SYS_RESOURCE to raise RLIMIT_MEMLOCK before 5.11.
const NOT_ALWAYS: [(&str, CapabilitySet); 2] =
    [("CAP_PERFMON", CapabilitySet::PERFMON), ("CAP_SYS_RESOURCE", CapabilitySet::SYS_RESOURCE)];

/// Gives up CAP_SYS_RESOURCE, after raising RLIMIT_MEMLOCK, and CAP_PERFMON unless the kernel takes the programs only with
/// it. Returns the names of those that were given up. `config` is None if the redirect is off.
///
/// To be called before this process has other threads, because each thread has capabilities of its own. Blocks for tens
/// of milliseconds.
///
/// # Errors
/// The capabilities can be neither read nor changed: a seccomp policy forbids it.
pub fn give_up_capabilities(config: Option<&RedirectConfig>) -> io::Result<Vec<&'static str>> {
    let has = capabilities(None)?;
    let mut given_up =
        NOT_ALWAYS.iter().fold(CapabilitySet::empty(), |all, (_, one)| all | *one) & has.permitted;
    if let Some(config) = config {
        preflight::raise_memlock();
        // The verifier asks for effective capabilities; permitted ones may become effective again.
        set_capabilities(None, CapabilitySets { effective: has.effective - given_up, ..has })?;
        if load::try_out(config).is_err() {
            // Also if they do not load with it, of which the start tells the reason.
            given_up -= CapabilitySet::PERFMON;
        }
    }
    let left = CapabilitySets {
        effective: has.effective - given_up,
        permitted: has.permitted - given_up,
        inheritable: has.inheritable - given_up,
    };
    set_capabilities(None, left)?;
    Ok(NOT_ALWAYS.iter().filter(|(_, one)| given_up.contains(*one)).map(|(name, _)| *name).collect())
}
