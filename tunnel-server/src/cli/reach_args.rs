//! Flags of the doors whose callers are asked who they are, and of static maps.

use std::path::PathBuf;

use clap::Args;
use tunnel_core::config::ConfigError;

use crate::maps::{Map, parse_flag};

#[derive(Args, Clone, Debug)]
pub struct ReachArgs {
    /// Port of the connect door, an HTTP proxy (CONNECT and http:// URLs; TLS or not) for what --policy permits; callers show a
    /// certificate, a token, or only their address; 0: off.
    #[arg(long, value_name = "PORT", default_value = "0")]
    pub connect_port: String,
    /// Who may reach what through --connect-port, and again when the file changes; see `policy check` [default: nobody].
    #[arg(long, value_name = "FILE")]
    pub policy: Option<PathBuf>,
    /// Callers' tokens, as kube-apiserver's flag of this name reads them (TOKEN,USER,UID,"GROUPS"), and again when the file
    /// changes; in a cluster besides those that the API server knows [default: none].
    #[arg(long, value_name = "FILE")]
    pub token_auth_file: Option<PathBuf>,
    /// LISTEN=NODE/TARGET[,CIDR…]: a listener that leads to a port, or an ADDRESS:PORT, on one node, for clients in these ranges
    /// (needed unless LISTEN is a loopback address). May be given several times.
    #[arg(long, value_name = "MAP")]
    pub map: Vec<String>,
    /// More of them in a file, and again when it changes.
    #[arg(long, value_name = "FILE")]
    pub maps: Option<PathBuf>,
}

impl ReachArgs {
    pub(super) fn maps(&self) -> Result<Vec<Map>, ConfigError> {
        let parse =
            |text: &String| parse_flag(text).map_err(|reason| ConfigError::new("--map", text, reason));
        self.map.iter().map(parse).collect()
    }
}
