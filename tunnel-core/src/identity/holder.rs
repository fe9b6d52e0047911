//! Who enrols, and holds a certificate that names its node.

use std::fmt;

use rcgen::{DistinguishedName, DnType};
use serde::{Deserialize, Serialize};

use super::name::NodeName;

/// Subject organisation of every agent's certificate.
pub const AGENT_ORGANIZATION: &str = "postern:agents";
/// Precedes the node's name in the common name of an agent's certificate.
pub const AGENT_COMMON_NAME_PREFIX: &str = "postern:node:";
/// Subject organisation of every redirector's certificate.
pub const REDIRECTOR_ORGANIZATION: &str = "postern:redirectors";
/// Precedes the node's name in the common name of a redirector's certificate.
pub const REDIRECTOR_COMMON_NAME_PREFIX: &str = "postern:redirector:";

/// Who enrols, and holds a certificate that names its node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Holder {
    /// It has the sessions of its node.
    #[default]
    Agent,
    /// It has servers pass connections on, and nothing else.
    Redirector,
}

impl Holder {
    /// The organisation in the subject.
    pub const fn organization(self) -> &'static str {
        match self {
            Self::Agent => AGENT_ORGANIZATION,
            Self::Redirector => REDIRECTOR_ORGANIZATION,
        }
    }

    /// Precedes the node's name in the subject's common name.
    pub const fn common_name_prefix(self) -> &'static str {
        match self {
            Self::Agent => AGENT_COMMON_NAME_PREFIX,
            Self::Redirector => REDIRECTOR_COMMON_NAME_PREFIX,
        }
    }

    /// The flag of `tunnel-server token create` that names the node.
    pub const fn token_flag(self) -> &'static str {
        match self {
            Self::Agent => "--node",
            Self::Redirector => "--redirector",
        }
    }

    /// The subject of its certificate for this node.
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
