//! The role of this process: server or redirector.

use std::fmt;

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serde::{Deserialize, Serialize};

/// The role of this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    #[default]
    Server,
    /// Redirects connections, and has servers forward them.
    Redirector,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Server => "server",
            Self::Redirector => "redirector",
        })
    }
}

/// Registers `postern_role`; `registry` has the prefix `postern` already.
pub(crate) fn register_role(registry: &mut Registry, role: Role) {
    let family = Family::<[(&'static str, String); 1], Gauge>::default();
    family.get_or_create(&[("role", role.to_string())]).set(1);
    registry.register("role", "What this process is, server or redirector: always 1", family);
}
