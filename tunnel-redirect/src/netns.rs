//! The network namespace of this process.

use std::fs::File;

use super::error::RedirectError;

pub(super) fn this_netns() -> Result<File, RedirectError> {
    let path = "/proc/thread-self/ns/net";
    File::open(path).map_err(|source| RedirectError::Io { what: format!("cannot open {path}"), source })
}
