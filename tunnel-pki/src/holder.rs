//! Holders of enrolled certificates, which name the holder's node.

use std::fmt;

use rcgen::{DistinguishedName, DnType};
use serde::{Deserialize, Serialize};
use tunnel_runtime::NodeName;

/// Subject organisation of every agent's certificate.
pub const AGENT_ORGANIZATION: &str = "postern:agents";
/// Prefix of the node's name in the common name of an agent's certificate.
pub const AGENT_COMMON_NAME_PREFIX: &str = "postern:node:";
/// Subject organisation of every redirector's certificate.
pub const REDIRECTOR_ORGANIZATION: &str = "postern:redirectors";
/// Prefix of the node's name in the common name of a redirector's certificate.
pub const REDIRECTOR_COMMON_NAME_PREFIX: &str = "postern:redirector:";

/// A program that enrols, and holds a certificate that names its node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Holder {
    /// Has the sessions of its node.
    #[default]
    Agent,
    /// May only have servers forward connections.
    Redirector,
}

impl Holder {
    /// Returns the organisation in the subject.
    pub const fn organization(self) -> &'static str {
        match self {
            Self::Agent => AGENT_ORGANIZATION,
            Self::Redirector => REDIRECTOR_ORGANIZATION,
        }
    }

    /// Returns the prefix of the node's name in the subject's common name.
    pub const fn common_name_prefix(self) -> &'static str {
        match self {
            Self::Agent => AGENT_COMMON_NAME_PREFIX,
            Self::Redirector => REDIRECTOR_COMMON_NAME_PREFIX,
        }
    }

    /// Returns the flag of `tunnel-server token create` that names the node.
    pub const fn token_flag(self) -> &'static str {
        match self {
            Self::Agent => "--node",
            Self::Redirector => "--redirector",
        }
    }

    /// Returns the subject of the holder's certificate for this node.
    pub fn distinguished_name(self, node: &NodeName) -> DistinguishedName {
        let mut name = DistinguishedName::new();
        name.push(DnType::OrganizationName, self.organization());
        name.push(DnType::CommonName, format!("{}{node}", self.common_name_prefix()));
        name
    }
}

/// `agent` or `redirector`.
impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Agent => "agent",
            Self::Redirector => "redirector",
        })
    }
}
