//! A ledger of issued certificates: one file per node, and one named `<node>~r` for its redirector.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tunnel_core::identity::files::{self, PRIVATE_FILE};
use tunnel_core::identity::{Holder, NodeName};

use super::ca_state::IssuedCertificate;
use super::error::PkiError;

/// The latest certificate of a node's agent, or of its redirector.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Issued {
    pub node: NodeName,
    /// Hash of the root that signed it.
    pub root: String,
    pub not_after: Timestamp,
}

/// The root that signed each node's latest certificate; tells if a root can be retired.
#[derive(Clone, Debug)]
pub struct IssuedLedger {
    directory: PathBuf,
}

impl IssuedLedger {
    /// The ledger of a state directory; created by the first entry.
    pub fn new(state_dir: &Path) -> Self {
        Self { directory: state_dir.join("issued") }
    }

    /// Records a certificate. Must be called before the agent receives it.
    pub fn record(
        &self,
        (holder, node): (Holder, &NodeName),
        certificate: &IssuedCertificate,
    ) -> Result<(), PkiError> {
        // A node name is a valid file name: at most 253 characters of [a-z0-9.-], and never "." or "..".
        let path = match holder {
            Holder::Agent => self.directory.join(node.as_str()),
            Holder::Redirector => self.directory.join(format!("{node}~r")),
        };
        let not_after = Timestamp::try_from(certificate.not_after)
            .map_err(|error| PkiError::Sign(format!("its end is out of range: {error}")))?;
        let entry = Issued { node: node.clone(), root: certificate.root.clone(), not_after };
        let json =
            serde_json::to_vec(&entry).map_err(|error| PkiError::file(&path, &error, "report this"))?;
        files::create_private_directory(&self.directory)?;
        Ok(files::replace(&path, &json, PRIVATE_FILE)?)
    }

    /// Returns every node's latest certificate, including expired ones.
    pub fn entries(&self) -> Result<Vec<Issued>, PkiError> {
        let names = match fs::read_dir(&self.directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(PkiError::io(&self.directory, error)),
        };
        let mut found = Vec::new();
        for entry in names {
            let path = entry.map_err(|error| PkiError::io(&self.directory, error))?.path();
            let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
            // A temporary file of a write in progress. So was a file that vanishes meanwhile.
            if hidden {
                continue;
            }
            let Some(text) = files::read_optional(&path)? else { continue };
            let issued = serde_json::from_str(&text).map_err(|error| {
                PkiError::file(
                    &path,
                    &error,
                    "remove it; it is written again when the node's certificate is renewed",
                )
            })?;
            found.push(issued);
        }
        found.sort_by(|a: &Issued, b| a.node.cmp(&b.node));
        Ok(found)
    }

    /// Returns the unexpired certificates of this root.
    pub fn live_of_root(&self, root: &str) -> Result<Vec<Issued>, PkiError> {
        let now = SystemTime::now();
        let mut entries = self.entries()?;
        entries.retain(|issued| issued.root == root && SystemTime::from(issued.not_after) >= now);
        Ok(entries)
    }
}
