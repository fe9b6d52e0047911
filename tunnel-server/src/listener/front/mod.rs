//! Listeners that speak HTTP themselves: each request names its own node, and gets its own connection there.
//!
//! hyper reads and writes both sides, so the end of a message is determined once and written anew for the target.
//! A proxy's clients are served the same way, and may also CONNECT.
//! Headers that concern one connection only (RFC 9110 section 7.6.1) are never forwarded, whoever named them. An
//! upgraded connection is relayed as bytes.

mod admitted;
mod answer;
mod backend;
mod body;
mod destination;
mod expect;
mod headers;
mod kinds;
mod metrics;
mod permit;
mod pods;
mod proxy;
mod request;
mod requests;
mod serve;
mod served;
mod target_tls;
#[cfg(test)]
mod tokens_tests;
mod tunnel;
mod upgrade;

#[cfg(test)]
pub(super) use admitted::tests::reached_over_http;
pub use destination::{RequestTarget, parse_destination};
pub use headers::target_head;
pub(crate) use kinds::{Admission, Front};
pub(crate) use metrics::MetricsPage;
pub(crate) use pods::Pods;
pub(crate) use target_tls::{Material, TargetTls};
