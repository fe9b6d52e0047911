//! The servers that were found last, so that a restart while the API server is away finds them too.

use std::path::{Path, PathBuf};

use tunnel_core::config::HostPort;
use tunnel_core::identity::IdentityError;
use tunnel_core::identity::files::{self, PUBLIC_FILE};

/// The file `servers` of the state directory: one `HOST:PORT` a line.
#[derive(Clone, Debug)]
pub(super) struct Remembered {
    path: PathBuf,
}

impl Remembered {
    pub(super) fn new(state_dir: &Path) -> Self {
        Self { path: state_dir.join("servers") }
    }

    /// Lines that cannot be understood are left out: the API server knows better anyway.
    pub(super) fn read(&self) -> Vec<HostPort> {
        let text = match files::read_optional(&self.path) {
            Ok(text) => text.unwrap_or_default(),
            Err(error) => {
                tracing::warn!(%error, "the servers that were found last are not known");
                return Vec::new();
            }
        };
        let mut servers: Vec<HostPort> = Vec::new();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            match line.parse() {
                Ok(server) if !servers.contains(&server) => servers.push(server),
                Ok(_) => {}
                Err(reason) => {
                    tracing::warn!(path = %self.path.display(), line, reason, "a server is left out");
                }
            }
        }
        servers
    }

    pub(super) fn write(&self, servers: &[HostPort]) -> Result<(), IdentityError> {
        let text: String = servers.iter().map(|server| format!("{server}\n")).collect();
        if let Some(directory) = self.path.parent() {
            files::create_private_directory(directory)?;
        }
        files::replace(&self.path, text.as_bytes(), PUBLIC_FILE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_broken_lines_are_left_out() {
        let directory = tempfile::tempdir().unwrap();
        let file = Remembered::new(&directory.path().join("agent"));
        assert!(file.read().is_empty());
        let servers: Vec<HostPort> =
            ["a.example:1", "[fd00::1]:2"].iter().map(|text| text.parse().unwrap()).collect();
        file.write(&servers).unwrap();
        assert_eq!(file.read(), servers);
        std::fs::write(&file.path, "a.example:1\nnonsense\n\na.example:1\n[fd00::1]:2\n").unwrap();
        assert_eq!(file.read(), servers);
        std::fs::write(&file.path, [0xff]).unwrap();
        assert!(file.read().is_empty());
    }
}
