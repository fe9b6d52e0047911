//! The identity that a revocation is about.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tunnel_runtime::{NodeName, NodeNameError};

/// Prefix of a server's records. No node's name has an underscore, so versions that know no such records skip them.
const SERVER: &str = "server_";
/// Length of the random number in a server's ID, in hexadecimal digits.
const RANDOM: usize = 8;

/// A node, whose agent or redirector is meant, or a server. As text it is the name of its record.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Subject {
    Node(NodeName),
    /// By the name of its host, in lower case.
    Server(NodeName),
}

impl Subject {
    /// The server with this ID, which is its host's name, a hyphen and a random number. None if the host has no name that can
    /// be revoked.
    pub fn of_server(id: &str) -> Option<Self> {
        let host = match id.rsplit_once('-') {
            Some((host, random))
                if random.len() == RANDOM && random.bytes().all(|byte| byte.is_ascii_hexdigit()) =>
            {
                host
            }
            _ => id,
        };
        host.to_ascii_lowercase().parse().map(Self::Server).ok()
    }

    /// The arguments of the commands about it.
    pub fn arguments(&self) -> String {
        match self {
            Self::Node(node) => node.to_string(),
            Self::Server(host) => format!("--server {host}"),
        }
    }

    /// As in a sentence.
    pub fn named(&self) -> String {
        match self {
            Self::Node(node) => format!("node {node}"),
            Self::Server(host) => format!("server {host}"),
        }
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(node) => write!(f, "{node}"),
            Self::Server(host) => write!(f, "{SERVER}{host}"),
        }
    }
}

impl FromStr for Subject {
    type Err = NodeNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.strip_prefix(SERVER) {
            Some(host) => host.parse().map(Self::Server),
            None => text.parse().map(Self::Node),
        }
    }
}

impl TryFrom<String> for Subject {
    type Error = NodeNameError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Subject> for String {
    fn from(subject: Subject) -> Self {
        subject.to_string()
    }
}

impl From<&NodeName> for Subject {
    fn from(node: &NodeName) -> Self {
        Self::Node(node.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_named_by_its_host() {
        let host = |name: &str| Some(Subject::Server(name.parse().unwrap()));
        assert_eq!(Subject::of_server("cloud-1-0a1b2c3d"), host("cloud-1"));
        assert_eq!(Subject::of_server("Cloud-1-0a1b2c3d"), host("cloud-1"));
        assert_eq!(Subject::of_server("cloud-1"), host("cloud-1"), "not an ID of this version");
        assert_eq!(Subject::of_server("my_host-0a1b2c3d"), None);
    }

    #[test]
    fn texts_of_nodes_and_servers_differ() {
        for (text, named, arguments) in [
            ("edge-1", "node edge-1", "edge-1"),
            ("server_cloud-1", "server cloud-1", "--server cloud-1"),
            ("server-cloud-1", "node server-cloud-1", "server-cloud-1"),
        ] {
            let subject: Subject = text.parse().unwrap();
            assert_eq!((subject.named().as_str(), subject.arguments().as_str()), (named, arguments));
            assert_eq!(subject.to_string(), text);
        }
        assert!("server_".parse::<Subject>().is_err() && "server_a_b".parse::<Subject>().is_err());
    }
}
