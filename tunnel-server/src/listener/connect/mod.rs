//! The rights of callers of the connect listener: an HTTP proxy whose callers authenticate, and may reach what the policy permits.
//!
//! `CONNECT node:port`, `address:port` or `service.namespace:port` opens a connection. A request with an absolute
//! `http://` URL, which is how clients ask a proxy for plain HTTP, is forwarded as at the http listener. The port takes
//! both TLS and plain HTTP, and tells them apart by a client's first byte. A client may show a token only over TLS, or
//! from this host.
//!
//! Workloads on edge nodes use the same protocol through their agent.

mod gatekeeper;
mod reception;
mod request;

#[cfg(test)]
pub(super) use gatekeeper::Denied;
pub(crate) use gatekeeper::{Gatekeeper, Services};
pub(crate) use reception::Reception;
pub(super) use request::{ProxyRequest, parse};
