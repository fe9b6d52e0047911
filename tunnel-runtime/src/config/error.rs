//! Errors that name the flag.

use std::io;
use std::net::SocketAddr;

/// A flag, environment variable or key with a value that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key}{}: {reason}", .value.as_deref().map(|v| format!("={v}")).unwrap_or_default())]
pub struct ConfigError {
    /// Name as the user writes it, such as `--agent-port` or `$NODE_IP`.
    pub key: String,
    /// `None` if the key is missing or the value is secret.
    pub value: Option<String>,
    pub reason: String,
}

impl ConfigError {
    pub fn new(key: impl Into<String>, value: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { key: key.into(), value: Some(value.into()), reason: reason.into() }
    }

    /// Creates an error for a key that is missing, or whose value must not be printed.
    pub fn without_value(key: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { key: key.into(), value: None, reason: reason.into() }
    }
}

/// Checks two flags that require each other, such as a certificate and its key.
///
/// # Errors
/// Names the missing one.
pub fn pair<T: Clone>(
    (key, value): (&str, &Option<T>),
    (other_key, other): (&str, &Option<T>),
) -> Result<Option<(T, T)>, ConfigError> {
    match (value, other) {
        (Some(value), Some(other)) => Ok(Some((value.clone(), other.clone()))),
        (None, None) => Ok(None),
        (Some(_), None) => Err(ConfigError::without_value(other_key, format!("needed with {key}"))),
        (None, Some(_)) => Err(ConfigError::without_value(key, format!("needed with {other_key}"))),
    }
}

/// An address that cannot be listened on. Not a [`ConfigError`]: the same flags may work a minute later.
#[derive(Debug, thiserror::Error)]
#[error("{key}: cannot listen on {address}: {}", bind_reason(.source))]
pub struct BindError {
    /// The flag that gives the address.
    pub key: &'static str,
    pub address: SocketAddr,
    pub source: io::Error,
}

impl BindError {
    pub fn new(key: &'static str, address: SocketAddr, source: io::Error) -> Self {
        Self { key, address, source }
    }
}

fn bind_reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "address in use: another process listens there; stop it or choose another port".to_owned()
        }
        io::ErrorKind::AddrNotAvailable => "this host does not have that address".to_owned(),
        io::ErrorKind::PermissionDenied => {
            "permission denied: a port below 1024 needs CAP_NET_BIND_SERVICE, which the manifests and units do not give: add it there, \
             or choose another port"
                .to_owned()
        }
        _ => error.to_string(),
    }
}
