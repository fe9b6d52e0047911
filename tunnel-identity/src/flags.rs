//! The values of the flags by which a node is named and enrols.

use std::io;
use std::path::Path;

use tunnel_core::config::{ConfigError, host_name};
use tunnel_core::identity::{ExposeSecret, Holder, NodeName, SecretString, parse_ca_hash};

use crate::files::has_certificate;

/// The host's name as that of a node, for want of `--node-name`.
///
/// # Errors
/// It cannot be read, or be a node's.
pub fn node_of_host() -> Result<NodeName, ConfigError> {
    let missing = |reason: String| ConfigError::without_value("--node-name", format!("needed: {reason}"));
    let name = host_name().map_err(|error| missing(format!("the host name cannot be read: {error}")))?;
    name.parse().map_err(|error| missing(format!("the host name cannot be a node's: {error}")))
}

/// The token of `--token` or of the file of `--token-file`, and `--ca-hash`, which it needs, in lower case.
///
/// # Errors
/// Names the flag, its value and the reason.
pub fn enrolment(
    token: Option<&SecretString>,
    file: Option<&Path>,
    ca_hash: Option<&str>,
    enrolled: (&Path, Holder),
) -> Result<(Option<SecretString>, Option<String>), ConfigError> {
    let parse = |hash: &str| {
        parse_ca_hash(hash).map_err(|error| ConfigError::new("--ca-hash", hash.trim(), error.to_string()))
    };
    let ca_hash = ca_hash.map(parse).transpose()?;
    let token = read_token(token, file, enrolled)?;
    if token.is_some() && ca_hash.is_none() {
        let reason =
            "needed with a token, or it could enrol with an impostor; `tunnel-server ca status` prints it";
        return Err(ConfigError::without_value("--ca-hash", reason));
    }
    Ok((token, ca_hash))
}

fn read_token(
    token: Option<&SecretString>,
    file: Option<&Path>,
    (state_dir, holder): (&Path, Holder),
) -> Result<Option<SecretString>, ConfigError> {
    let (key, token) = match (token, file) {
        (Some(_), Some(path)) => {
            let reason = "--token is given too; use one of them";
            return Err(ConfigError::new("--token-file", path.to_string_lossy(), reason));
        }
        (Some(token), None) => ("--token", SecretString::from(token.expose_secret().trim())),
        (None, Some(path)) => match std::fs::read_to_string(path) {
            Ok(text) => ("--token-file", text.trim().into()),
            // The token was for the first enrolment; a tidy operator removes the file.
            Err(error) if error.kind() == io::ErrorKind::NotFound && has_certificate(state_dir, holder) => {
                return Ok(None);
            }
            Err(error) => {
                return Err(ConfigError::new("--token-file", path.to_string_lossy(), error.to_string()));
            }
        },
        (None, None) => return Ok(None),
    };
    if token.expose_secret().is_empty() || token.expose_secret().chars().any(char::is_whitespace) {
        return Err(ConfigError::without_value(key, "not a token: it is empty or contains blanks"));
    }
    Ok(Some(token))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_in_capitals_is_the_same_hash() {
        let hash = format!(" SHA256:{} ", "AB".repeat(32));
        let enrolled = (Path::new("/nowhere"), Holder::Agent);
        let (_, hash) = enrolment(None, None, Some(&hash), enrolled).unwrap();
        assert_eq!(hash.unwrap(), format!("sha256:{}", "ab".repeat(32)));
    }
}
