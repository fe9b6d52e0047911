//! Errors of the CA, of enrolment tokens and of certificates.

use std::path::Path;

use tunnel_pki::IdentityError;
use tunnel_runtime::files::FileError;

/// Error of an operation on the CA, a token or a certificate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PkiError {
    /// An error of a certificate or a name.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    File(#[from] FileError),
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
    #[error("{0} is not revoked; `tunnel-server agent list` shows those that are")]
    NotRevoked(String),
    #[error("{text}: {reason}")]
    Duration { text: String, reason: String },
    /// An unusable text of the CA; [`Ca`](super::Ca) adds the path and the fix.
    #[error("{name}: {reason}")]
    Material {
        /// `ca.crt`, or the name of a key.
        name: String,
        reason: String,
    },
}

impl PkiError {
    pub(super) fn material(name: &str, reason: &dyn std::fmt::Display) -> Self {
        Self::Material { name: name.to_owned(), reason: reason.to_string() }
    }

    pub(super) fn file(path: &Path, reason: &dyn std::fmt::Display, fix: impl Into<String>) -> Self {
        IdentityError::file(path, reason, fix).into()
    }

    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        IdentityError::io(path, source).into()
    }

    /// True if a file may be as good as ever, but could not be read or written just now.
    pub(super) fn is_io(&self) -> bool {
        let (Self::File(error) | Self::Identity(IdentityError::File(error))) = self else { return false };
        matches!(error, FileError::Io { .. })
    }

    pub(super) fn sign(error: &rcgen::Error) -> Self {
        Self::Sign(error.to_string())
    }
}
