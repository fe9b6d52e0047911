//! Errors about objects of the cluster, and about their copies on disk.

use tunnel_kube::RequestError;

use crate::pki::PkiError;

#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    #[error(transparent)]
    Pki(#[from] PkiError),
    /// After a conflict, the object has changed since it was read, or another server created it first.
    #[error("{}{}", .0, if .0.is_conflict() { "; it was changed at the same moment: repeat the command" } else { "" })]
    Request(#[from] RequestError),
    /// An object that exists and cannot be used.
    #[error("{object}: {reason}; {fix}")]
    Malformed { object: String, reason: String, fix: String },
    #[error(
        "there is no Secret {0}; the first tunnel-server to start makes it (or fix --namespace or --ca-secret)"
    )]
    Missing(String),
    /// The wait for the API server ended because the server stops.
    #[error("stopped before Secret {0} could be read")]
    Stopped(String),
}

impl ClusterError {
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Request(error) if error.is_conflict())
    }

    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Request(error) if error.is_not_found())
    }
}
