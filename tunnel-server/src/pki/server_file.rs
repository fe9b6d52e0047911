//! `server.json` in the state directory: the addresses at which agents reach this server.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;

use serde::{Deserialize, Serialize};
use tunnel_runtime::files::{self, PUBLIC_FILE};
use tunnel_runtime::net::source_address;

use super::{PkiError, ServerNames};

/// Documentation addresses (RFC 5737, RFC 3849): the route to them is the default route.
const DOCUMENTATION_ADDRESSES: [SocketAddr; 2] = [
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 9),
    SocketAddr::new(IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)), 9),
];

/// File written by a running server for the command line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerFile {
    /// Addresses for agents as `host:port`, the best first.
    pub agent_addresses: Vec<String>,
}

impl ServerFile {
    const NAME: &str = "server.json";

    pub fn write(&self, state_dir: &Path) -> Result<(), PkiError> {
        let path = state_dir.join(Self::NAME);
        let json = serde_json::to_vec(self).map_err(|error| PkiError::file(&path, &error, "report this"))?;
        files::create_private_directory(state_dir)?;
        Ok(files::replace(&path, &json, PUBLIC_FILE)?)
    }

    /// Reads the file; `None` if no server has run yet.
    pub fn read(state_dir: &Path) -> Result<Option<Self>, PkiError> {
        let path = state_dir.join(Self::NAME);
        let Some(text) = files::read_optional(&path)? else { return Ok(None) };
        serde_json::from_str(&text).map(Some).map_err(|error| {
            PkiError::file(&path, &error, "remove it; a running server writes it at its start")
        })
    }
}

/// Returns the addresses, as `host:port`, at which agents can dial a server listening at `listening`: the names and
/// addresses that the operator has given for its certificate, else the source address of the default route.
pub fn agent_addresses(names: &ServerNames, listening: SocketAddr) -> Vec<String> {
    let port = listening.port();
    let dns = names.dns.iter().filter(|name| !name.starts_with('*')).map(|name| format!("{name}:{port}"));
    let addresses = names.addresses.iter().map(|address| SocketAddr::new(*address, port).to_string());
    let given: Vec<_> = dns.chain(addresses).collect();
    if !given.is_empty() {
        return given;
    }
    let own = if listening.ip().is_unspecified() {
        DOCUMENTATION_ADDRESSES.into_iter().find_map(source_address)
    } else {
        Some(listening.ip())
    };
    own.map(|address| SocketAddr::new(address, port).to_string()).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips_and_names_a_broken_file() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(ServerFile::read(directory.path()).unwrap(), None);
        let file = ServerFile { agent_addresses: vec!["cloud.example:10262".into()] };
        file.write(directory.path()).unwrap();
        assert_eq!(ServerFile::read(directory.path()).unwrap(), Some(file));
        std::fs::write(directory.path().join("server.json"), "[").unwrap();
        assert!(ServerFile::read(directory.path()).unwrap_err().to_string().contains("server.json"));
    }
}
