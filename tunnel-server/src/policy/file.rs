//! Parses a policy file.

use ipnet::IpNet;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use std::fmt;
use tunnel_runtime::NodeName;
use tunnel_runtime::config::{PortSet, value};

use tunnel_routing::inventory::Selector;

use crate::caller::{service_account, service_account_user};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    pub(super) rules: Vec<RuleEntry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RuleEntry {
    pub(super) name: String,
    pub(super) from: Vec<Who>,
    pub(super) to: Vec<What>,
}

/// All fields that are present must match.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub(super) struct Who {
    pub(super) cn: Option<String>,
    pub(super) organization: Option<String>,
    pub(super) user: Option<String>,
    pub(super) group: Option<String>,
    pub(super) service_account: Option<ServiceAccount>,
    pub(super) node: Option<NodeName>,
    pub(super) nodes: Option<Nodes>,
    pub(super) clients: Option<Ranges>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct What {
    pub(super) node: Option<NodeName>,
    pub(super) nodes: Option<Nodes>,
    pub(super) service: Option<ServiceName>,
    pub(super) addresses: Option<Ranges>,
    pub(super) ports: Option<Ports>,
}

/// A label selector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Nodes(pub(super) Selector);

impl<'de> Deserialize<'de> for Nodes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(Self).map_err(D::Error::custom)
    }
}

/// `NAMESPACE/NAME`, stored as the user in its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ServiceAccount(pub(super) String);

impl<'de> Deserialize<'de> for ServiceAccount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let account = service_account(&text);
        let account = account.map_err(|reason| D::Error::custom(format!("{text:?} is {reason}")))?;
        Ok(Self(service_account_user(&account)))
    }
}

/// `NAME.NAMESPACE`, stored in lower case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ServiceName(pub(super) String);

impl<'de> Deserialize<'de> for ServiceName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?.to_ascii_lowercase();
        match text.split_once('.') {
            Some((name, namespace))
                if !name.is_empty() && !namespace.is_empty() && !namespace.contains('.') =>
            {
                Ok(Self(text))
            }
            _ => Err(D::Error::custom(format!("{text:?} is not NAME.NAMESPACE of a Service"))),
        }
    }
}

/// A list of address ranges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ranges(pub(crate) Vec<IpNet>);

impl<'de> Deserialize<'de> for Ranges {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let list = Vec::<String>::deserialize(deserializer)?;
        if list.is_empty() {
            return Err(D::Error::custom("an empty list matches nothing; name ranges such as 10.0.0.0/8"));
        }
        let ranges = value::cidrs(&list.join(",")).map_err(D::Error::custom)?;
        Ok(Self(ranges))
    }
}

/// A list of ports, ranges such as `8000-8099`, or `*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ports(pub(super) PortSet);

impl<'de> Deserialize<'de> for Ports {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let entries = Vec::<Entry>::deserialize(deserializer)?;
        let text = entries.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        text.parse().map(Self).map_err(D::Error::custom)
    }
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "not a port, a range such as 8000-8099, or \"*\"")]
enum Entry {
    Port(i64),
    Text(String),
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Port(port) => port.fmt(f),
            Self::Text(text) => text.fmt(f),
        }
    }
}
