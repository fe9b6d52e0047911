use std::path::Path;

use serde::{Deserialize, Serialize};
use tunnel_core::identity::files::{self, PUBLIC_FILE};

use super::PkiError;

/// What a running server tells the command line, in `server.json` of the state directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerFile {
    /// `host:port` of each address that agents can dial, the best first.
    pub agent_addresses: Vec<String>,
}

impl ServerFile {
    const NAME: &str = "server.json";

    /// Replaces the file.
    pub fn write(&self, state_dir: &Path) -> Result<(), PkiError> {
        let path = state_dir.join(Self::NAME);
        let json = serde_json::to_vec(self).map_err(|error| PkiError::file(&path, &error, "report this"))?;
        files::create_private_directory(state_dir)?;
        Ok(files::replace(&path, &json, PUBLIC_FILE)?)
    }

    /// Reads the file; `None` when no server has run yet.
    pub fn read(state_dir: &Path) -> Result<Option<Self>, PkiError> {
        let path = state_dir.join(Self::NAME);
        let Some(text) = files::read_optional(&path)? else { return Ok(None) };
        serde_json::from_str(&text).map(Some).map_err(|error| {
            PkiError::file(&path, &error, "remove it; a running server writes it at its start")
        })
    }
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
