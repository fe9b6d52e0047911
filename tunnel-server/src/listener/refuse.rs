//! Resets the connections that are led here while a server stops.

use std::os::fd::OwnedFd;

use tokio_util::task::AbortOnDropHandle;
use tunnel_runtime::accept::reset_all;

use super::redirect::REDIRECT;

/// Resets every connection to this listening socket until the result is dropped. While a server drains, its routing rules stay
/// for open connections, and route new ones here too. Without a listener an IPv4 client would get no answer: the kernel sends no
/// RST from an address that is not local.
pub(crate) fn refuse(socket: OwnedFd) -> AbortOnDropHandle<()> {
    AbortOnDropHandle::new(tokio::spawn(reset_all(socket, REDIRECT)))
}
