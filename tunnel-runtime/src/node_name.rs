//! Node names.

use std::borrow::Borrow;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Text that is no node's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("node name {name:?}: {reason}")]
pub struct NodeNameError {
    /// The given text.
    name: String,
    /// Reason for refusing it.
    reason: &'static str,
}

/// Name of a node: a DNS-1123 subdomain of at most 253 characters, as Kubernetes requires of a Node.
///
/// Cheap to clone: sessions, routes and log lines share one allocation.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct NodeName(Arc<str>);

/// Kubernetes' limit on a DNS-1123 subdomain.
const MAX_LENGTH: usize = 253;

impl NodeName {
    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

fn check(name: &str) -> Result<(), &'static str> {
    if name.is_empty() {
        return Err("it is empty");
    }
    if name.len() > MAX_LENGTH {
        return Err("it is longer than 253 characters");
    }
    for label in name.split('.') {
        let bytes = label.as_bytes();
        let (Some(first), Some(last)) = (bytes.first(), bytes.last()) else {
            return Err("it has an empty part between dots");
        };
        if let Some(other) = bytes.iter().find(|byte| !is_alphanumeric(**byte) && **byte != b'-') {
            return Err(if other.is_ascii_uppercase() {
                "it has an upper-case letter; a node's name is lower-case"
            } else {
                "only lower-case letters, digits, '-' and '.' are allowed"
            });
        }
        if !is_alphanumeric(*first) || !is_alphanumeric(*last) {
            return Err("each part between dots must begin and end with a letter or a digit");
        }
    }
    Ok(())
}

fn is_alphanumeric(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit()
}

impl FromStr for NodeName {
    type Err = NodeNameError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match check(name) {
            Ok(()) => Ok(Self(name.into())),
            // Truncated: an unauthenticated peer must not cause long log lines.
            Err(reason) => Err(NodeNameError { name: name.chars().take(MAX_LENGTH + 1).collect(), reason }),
        }
    }
}

impl TryFrom<String> for NodeName {
    type Error = NodeNameError;

    fn try_from(name: String) -> Result<Self, Self::Error> {
        name.parse()
    }
}

impl From<NodeName> for String {
    fn from(name: NodeName) -> Self {
        name.0.as_ref().to_owned()
    }
}

impl AsRef<str> for NodeName {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl Borrow<str> for NodeName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_that_kubernetes_accepts_are_accepted() {
        for name in ["edge-1", "a", "0", "node.example.com", "ip-10-0-0-1.eu-west-1.compute.internal"] {
            assert_eq!(name.parse::<NodeName>().unwrap().as_str(), name);
        }
        assert!("a".repeat(253).parse::<NodeName>().is_ok());
    }

    #[test]
    fn a_bad_name_is_refused_with_the_reason() {
        for (name, reason) in [
            ("", "empty"),
            ("Edge-1", "upper-case"),
            ("edge_1", "only lower-case"),
            ("edge/1", "only lower-case"),
            ("..", "empty part"),
            ("a..b", "empty part"),
            (".a", "empty part"),
            ("a.", "empty part"),
            ("-a", "begin and end"),
            ("a-", "begin and end"),
            ("a.-b", "begin and end"),
            ("é", "only lower-case"),
            ("a\n", "only lower-case"),
            ("a\0", "only lower-case"),
        ] {
            let error = name.parse::<NodeName>().unwrap_err().to_string();
            assert!(error.contains(reason), "{name:?}: {error}");
        }
        assert!("a".repeat(254).parse::<NodeName>().unwrap_err().to_string().contains("longer"));
    }

    #[test]
    fn serde_refuses_a_bad_name() {
        assert_eq!(serde_json::from_str::<NodeName>("\"edge-1\"").unwrap().as_str(), "edge-1");
        assert!(serde_json::from_str::<NodeName>("\"../edge\"").is_err());
    }

    proptest! {
        /// The parser agrees with the regular expression that Kubernetes publishes for DNS-1123 subdomains.
        #[test]
        fn agrees_with_the_published_pattern(name in "[a-c0-1A.\\-_]{0,12}") {
            let pattern = name.split('.').all(|label| {
                !label.is_empty()
                    && label.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
                    && !label.starts_with('-')
                    && !label.ends_with('-')
            });
            prop_assert_eq!(name.parse::<NodeName>().is_ok(), pattern);
        }

        /// Names are used in file names and log lines, so an accepted name must not leave its directory or its line.
        #[test]
        fn accepted_names_are_safe_in_paths_and_logs(name in any::<String>()) {
            if let Ok(name) = name.parse::<NodeName>() {
                prop_assert!(!name.as_str().contains(['/', '\\', '\0', '\n', ' ']));
                prop_assert!(name.as_str() != "." && name.as_str() != "..");
            }
        }
    }
}
