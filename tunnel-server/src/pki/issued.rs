//! A ledger of issued certificates: one file per node, and one named `<node>~r` for its redirector.

use std::path::Path;
use std::time::SystemTime;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tunnel_pki::Holder;
use tunnel_runtime::NodeName;

use super::ca_state::IssuedCertificate;
use super::error::PkiError;
use super::records::Records;

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
pub struct IssuedLedger(Records);

impl IssuedLedger {
    /// The ledger of a state directory; created by the first entry.
    pub fn new(state_dir: &Path) -> Self {
        Self(Records::new(state_dir, "issued"))
    }

    /// Records a certificate. Must be called before the agent receives it.
    pub fn record(
        &self,
        (holder, node): (Holder, &NodeName),
        certificate: &IssuedCertificate,
    ) -> Result<(), PkiError> {
        // A node name is a valid file name: at most 253 characters of [a-z0-9.-], and never "." or "..".
        let name = match holder {
            Holder::Agent => node.to_string(),
            Holder::Redirector => format!("{node}~r"),
        };
        let not_after = Timestamp::try_from(certificate.not_after)
            .map_err(|error| PkiError::Sign(format!("its end is out of range: {error}")))?;
        let entry = Issued { node: node.clone(), root: certificate.root.clone(), not_after };
        self.0.write(&name, &entry)
    }

    /// Returns every node's latest certificate, including expired ones.
    pub fn entries(&self) -> Result<Vec<Issued>, PkiError> {
        let fix = "remove it; it is written again when the node's certificate is renewed";
        let mut found = Vec::new();
        for name in self.0.names()? {
            found.extend(self.0.read::<Issued>(&name, fix)?);
        }
        found.sort_by(|a, b| a.node.cmp(&b.node));
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
