//! Errors of the CA, of enrolment tokens and of certificates.

use std::path::{Path, PathBuf};

use tunnel_core::identity::IdentityError;

/// Error of an operation on the CA, a token or a certificate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PkiError {
    /// An error of a certificate, a name or a file.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error("signing a certificate: {0}")]
    Sign(String),
    /// A name that cannot be in the server's certificate.
    #[error("{name:?} cannot be in the server's certificate: {reason}")]
    Name { name: String, reason: String },
    /// A rotation step that is not possible in the present state.
    #[error("{0}")]
    Rotation(String),
    #[error("not a token: want six characters, a dot and the secret, all of [a-z0-9]")]
    Token,
    #[error("no token with id {0:?}; `tunnel-server token list` shows those that there are")]
    NoSuchToken(String),
    #[error("node {0} is not revoked; `tunnel-server agent list` shows those that are")]
    NotRevoked(String),
    #[error("{text:?}: {reason}; want for example 24h, 90m or 2d")]
    Duration { text: String, reason: String },
    /// An unusable text of the CA; [`Ca`](super::Ca) turns it into [`PkiError::File`].
    #[error("{name}: {reason}")]
    Material {
        /// `ca.crt`, or the name of a key.
        name: String,
        reason: String,
    },
    /// A file that exists but is unusable. It is never overwritten.
    #[error("{path}: {reason}; {fix}", path = .path.display())]
    File { path: PathBuf, reason: String, fix: String },
    #[error("{path}: {source}", path = .path.display())]
    Io { path: PathBuf, source: std::io::Error },
}

impl PkiError {
    pub(super) fn material(name: &str, reason: &dyn std::fmt::Display) -> Self {
        Self::Material { name: name.to_owned(), reason: reason.to_string() }
    }

    pub(super) fn file(path: &Path, reason: &dyn std::fmt::Display, fix: impl Into<String>) -> Self {
        Self::File { path: path.to_owned(), reason: reason.to_string(), fix: fix.into() }
    }

    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    pub(super) fn sign(error: &rcgen::Error) -> Self {
        Self::Sign(error.to_string())
    }
}
