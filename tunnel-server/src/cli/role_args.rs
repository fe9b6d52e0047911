//! The flags of the role, and which flags mean nothing with it.

use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, FromArgMatches};
use tunnel_core::config::{ConfigError, parse_with};
use tunnel_core::identity::{Holder, SecretString};
use tunnel_identity::{enrolment, node_of_host};

use crate::config::{OF_METRICS, OF_SERVERS, RedirectorConfig};
use crate::role::Role;

const OF_REDIRECTORS: &[&str] = &["node-name", "token", "token-file", "ca-hash"];
/// How a redirector enrols without Kubernetes.
const STANDALONE: &[&str] = &["token", "token-file", "ca-hash"];

/// The role, and what only a redirector needs.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Role")]
pub struct RoleArgs {
    /// server; or redirector, for a cloud host without agents and without a CA: it redirects, and has the servers pass every
    /// connection on. Its certificate comes by CertificateSigningRequest or, with --inventory, by token.
    #[arg(long, value_name = "ROLE", default_value = "server")]
    pub role: String,
    /// Of a redirector: this node's name [default: the host name in lower case].
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    pub node_name: Option<String>,
    /// Of a redirector: token of `tunnel-server token create --redirector`; for the first enrolment only.
    #[arg(long, value_name = "TOKEN")]
    pub token: Option<SecretString>,
    /// Of a redirector: file with the token; it may be removed once it has enrolled.
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Of a redirector: hash of the servers' CA, as `tunnel-server token create` prints it; for the first enrolment only.
    #[arg(long, value_name = "sha256:HEX")]
    pub ca_hash: Option<String>,
}

impl RoleArgs {
    /// What a redirector is configured with; None for a server. `metrics`: its metrics have a port.
    ///
    /// # Errors
    /// Names the flag that means nothing with the role, or is wrong.
    pub(super) fn redirector(
        &self,
        given: &Given,
        state_dir: &std::path::Path,
        standalone: bool,
        metrics: bool,
    ) -> Result<Option<RedirectorConfig>, ConfigError> {
        let role: Role = parse_with("--role", &self.role)?;
        let refuse = |flags: &[&str], reason: &str| match given.first_of(flags) {
            Some(flag) => Err(ConfigError::without_value(format!("--{flag}"), reason)),
            None => Ok(()),
        };
        if role == Role::Server {
            refuse(OF_REDIRECTORS, "only with --role=redirector; leave it out")?;
            return Ok(None);
        }
        refuse(OF_SERVERS, "means nothing with --role=redirector; leave it out")?;
        if !metrics {
            refuse(OF_METRICS, "means nothing with --role=redirector without --metrics-port; leave it out")?;
        }
        if !standalone {
            refuse(
                STANDALONE,
                "not in a cluster, where a redirector enrols through the API server; leave it out",
            )?;
        }
        let enrolled = (state_dir, Holder::Redirector);
        let (token, ca_hash) =
            enrolment(self.token.as_ref(), self.token_file.as_deref(), self.ca_hash.as_deref(), enrolled)?;
        let node = match &self.node_name {
            Some(name) => parse_with("--node-name", name)?,
            None => node_of_host()?,
        };
        Ok(Some(RedirectorConfig { node, token, ca_hash }))
    }
}

/// The flags of one role on the command line. The first field of what has them: others take their values away.
#[derive(Clone, Debug, Default)]
pub struct Given(Vec<&'static str>);

impl Given {
    fn first_of<'a>(&self, flags: &[&'a str]) -> Option<&'a str> {
        flags.iter().find(|flag| self.0.contains(flag)).copied()
    }
}

impl FromArgMatches for Given {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given =
            |flag: &&&str| matches.value_source(&flag.replace('-', "_")) == Some(ValueSource::CommandLine);
        Ok(Self(OF_SERVERS.iter().chain(OF_METRICS).chain(OF_REDIRECTORS).filter(given).copied().collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// It has no flags of its own.
impl Args for Given {
    fn augment_args(command: clap::Command) -> clap::Command {
        command
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        command
    }
}
