//! A ledger of issued certificates: one file per node, and one named `<node>~r` for its redirector.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use jiff::{SignedDuration, Timestamp};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tunnel_pki::Holder;
use tunnel_runtime::NodeName;
use tunnel_runtime::files;

use super::ca::cluster_of;
use super::ca_state::IssuedCertificate;
use super::error::PkiError;
use super::records::Records;

/// Time for which the entry of an expired certificate is kept.
const KEEP_EXPIRED: SignedDuration = SignedDuration::from_hours(7 * 24);
/// Minimum time between two searches for entries to remove.
const SEARCH: Duration = Duration::from_secs(24 * 3600);
/// Advice about an unusable entry.
const FIX: &str = "remove it; it is written again when the node's certificate is renewed";

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
    records: Records,
    /// Time of the last search for entries to remove.
    searched: Arc<Mutex<Option<Instant>>>,
}

impl IssuedLedger {
    /// The ledger of a state directory; created by the first entry.
    pub fn new(state_dir: &Path) -> Self {
        Self { records: Records::new(state_dir, "issued"), searched: Arc::default() }
    }

    /// True if roots are retired by the entries. Not in a cluster, where that goes by time.
    pub(super) fn is_needed(&self) -> bool {
        !matches!(cluster_of(self.records.state_dir()), Ok(Some(_)))
    }

    /// Records a certificate. Must be called before the agent receives it. With the first entry of a node, but not more
    /// often than once a day, also removes those of certificates that expired more than a week ago.
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
        // The certificate does not depend on the removal.
        if !self.records.path(&name).exists()
            && self.search_is_due()
            && let Err(error) = self.remove_expired(Timestamp::now())
        {
            tracing::warn!(%error, "failed to remove the records of expired certificates");
        }
        self.records.write(&name, &entry)
    }

    fn search_is_due(&self) -> bool {
        let mut searched = self.searched.lock();
        let due = searched.is_none_or(|at| at.elapsed() >= SEARCH);
        if due {
            *searched = Some(Instant::now());
        }
        due
    }

    /// Removes the entries of certificates that expired long ago. Leaves unusable ones, which [`IssuedLedger::entries`] reports.
    ///
    /// An agent that enrols again in that very moment may lose its entry until its next renewal: with a lock all enrolments
    /// of a new site would wait for each other.
    fn remove_expired(&self, now: Timestamp) -> Result<(), PkiError> {
        for name in self.records.names()? {
            let Ok(Some(issued)) = self.records.read::<Issued>(&name, FIX) else { continue };
            if now.duration_since(issued.not_after) > KEEP_EXPIRED {
                files::remove_if_present(&self.records.path(&name))?;
            }
        }
        Ok(())
    }

    /// Returns every node's latest certificate, including those that expired recently.
    pub fn entries(&self) -> Result<Vec<Issued>, PkiError> {
        let mut found = Vec::new();
        for name in self.records.names()? {
            found.extend(self.records.read::<Issued>(&name, FIX)?);
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
