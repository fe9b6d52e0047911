//! Flags of the agent and of a redirector that name the node and enrol it.

use std::io;
use std::path::{Path, PathBuf};

use clap::Args;
use tunnel_runtime::NodeName;
use tunnel_runtime::config::{ConfigError, host_name};
use tunnel_runtime::text::without_bom;

use crate::enrol::files::has_certificate;
use crate::{ExposeSecret, Holder, SecretString, parse_ca_hash};

/// Flags that name this node and enrol it without the API server.
#[derive(Args, Clone, Debug)]
pub struct EnrolmentFlags {
    /// This node's name [default: the host name in lower case].
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    node_name: Option<NodeName>,
    /// Token of `tunnel-server token create`; for the first enrolment only.
    #[arg(long, value_name = "TOKEN")]
    token: Option<SecretString>,
    /// File with the token; it may be removed once this node has enrolled.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Hash of the server's CA, as `tunnel-server token create` prints it; for the first enrolment only.
    #[arg(long, value_name = "sha256:HEX")]
    ca_hash: Option<String>,
}

impl EnrolmentFlags {
    /// Returns `--node-name`, or the host name.
    ///
    /// # Errors
    /// The flag is not given, and the host name cannot be read or is not valid for a node.
    pub fn node(&self) -> Result<NodeName, ConfigError> {
        if let Some(name) = &self.node_name {
            return Ok(name.clone());
        }
        let missing = |reason: String| ConfigError::without_value("--node-name", format!("needed: {reason}"));
        let name = host_name().map_err(|error| missing(format!("the host name cannot be read: {error}")))?;
        name.parse().map_err(|error| missing(format!("the host name cannot be a node's: {error}")))
    }

    /// The first given flag that concerns tokens.
    pub fn by_token(&self) -> Option<&'static str> {
        let given = [
            ("--token", self.token.is_some()),
            ("--token-file", self.token_file.is_some()),
            ("--ca-hash", self.ca_hash.is_some()),
        ];
        given.into_iter().find(|(_, given)| *given).map(|(flag, _)| flag)
    }

    /// Returns the token, and the CA hash that it needs, in lower case.
    ///
    /// # Errors
    /// Name the flag, its value and the reason.
    pub fn token(
        &self,
        state_dir: &Path,
        holder: Holder,
    ) -> Result<(Option<SecretString>, Option<String>), ConfigError> {
        let parse = |hash: &String| {
            parse_ca_hash(hash).map_err(|error| ConfigError::new("--ca-hash", hash.trim(), error.to_string()))
        };
        let ca_hash = self.ca_hash.as_ref().map(parse).transpose()?;
        let token = self.read_token(state_dir, holder)?;
        if token.is_some() && ca_hash.is_none() {
            let reason = "needed with a token, or it could enrol with an impostor; `tunnel-server ca status` prints it";
            return Err(ConfigError::without_value("--ca-hash", reason));
        }
        Ok((token, ca_hash))
    }

    fn read_token(&self, state_dir: &Path, holder: Holder) -> Result<Option<SecretString>, ConfigError> {
        let (key, token) = match (&self.token, &self.token_file) {
            (Some(_), Some(path)) => {
                let reason = "--token is given too; use one of them";
                return Err(ConfigError::new("--token-file", path.to_string_lossy(), reason));
            }
            (Some(token), None) => ("--token", SecretString::from(token.expose_secret().trim())),
            (None, Some(path)) => match std::fs::read_to_string(path) {
                Ok(text) => ("--token-file", without_bom(&text).trim().into()),
                // The token was for the first enrolment. The operator may have removed the file since.
                Err(error)
                    if error.kind() == io::ErrorKind::NotFound && has_certificate(state_dir, holder) =>
                {
                    return Ok(None);
                }
                Err(error) => {
                    return Err(ConfigError::new("--token-file", path.to_string_lossy(), error.to_string()));
                }
            },
            (None, None) => return Ok(None),
        };
        let text = token.expose_secret();
        if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            let reason = "not a token: it is empty, or has blanks or characters that are not ASCII";
            return Err(ConfigError::without_value(key, reason));
        }
        Ok(Some(token))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_in_capitals_is_the_same_hash() {
        let ca_hash = Some(format!(" SHA256:{} ", "AB".repeat(32)));
        let flags = EnrolmentFlags { node_name: None, token: None, token_file: None, ca_hash };
        let (_, hash) = flags.token(Path::new("/nowhere"), Holder::Agent).unwrap();
        assert_eq!(hash.unwrap(), format!("sha256:{}", "ab".repeat(32)));
    }
}
