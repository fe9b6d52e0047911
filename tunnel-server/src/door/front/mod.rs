//! The doors that speak HTTP themselves: each request names its own node, and gets a connection of its own there.
//!
//! hyper reads and writes both sides, so that where a message ends is decided once, and written anew for the target. What only
//! concerns one connection (RFC 9110 section 7.6.1) is not passed on, whoever named it. An upgraded connection is carried as
//! bytes.

mod answer;
mod backend;
mod body;
mod destination;
mod expect;
mod headers;
mod kinds;
mod metrics;
mod pods;
mod request;
mod serve;
mod socket;
mod target_tls;
mod upgrade;

pub use destination::{Wanted, parse_destination};
pub use headers::target_head;
pub(super) use headers::wanted_upgrade;
pub(crate) use kinds::{Admission, Front};
pub(crate) use metrics::MetricsPage;
pub(crate) use pods::Pods;
#[cfg(test)]
pub(super) use request::tests::reached_over_http;
pub(crate) use target_tls::{TargetFiles, TargetTls};
