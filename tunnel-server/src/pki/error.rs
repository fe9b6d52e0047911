use std::path::{Path, PathBuf};

use tunnel_core::identity::IdentityError;

/// Why an operation on the CA, a token or a certificate failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PkiError {
    /// A certificate, a name or a file of the identity.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// Making or signing a certificate failed.
    #[error("signing a certificate: {0}")]
    Sign(String),
    /// A name that was to go into the server's certificate is none.
    #[error("{name:?} cannot be in the server's certificate: {reason}")]
    Name {
        /// The name that was given.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A step of a CA rotation that does not fit the present state.
    #[error("{0}")]
    Rotation(String),
    /// A text that is not a token.
    #[error("not a token: want six characters, a dot and the secret, all of [a-z0-9]")]
    Token,
    /// No token with this id.
    #[error("no token with id {0:?}; `tunnel-server token list` shows those that there are")]
    NoSuchToken(String),
    /// A duration that cannot be used.
    #[error("{text:?}: {reason}; want for example 24h, 90m or 2d")]
    Duration {
        /// The text that was given.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A text of the CA that cannot be used. Where it is kept is the caller's to say.
    #[error("{name}: {reason}")]
    Material {
        /// `ca.crt`, or the name of a key.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A file that exists but cannot be used. It is never overwritten.
    #[error("{path}: {reason}; {mend}", path = .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
        /// What the operator can do about it.
        mend: String,
    },
    /// Reading or writing a file failed.
    #[error("{path}: {source}", path = .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
}

impl PkiError {
    pub(super) fn material(name: &str, reason: &dyn std::fmt::Display) -> Self {
        Self::Material { name: name.to_owned(), reason: reason.to_string() }
    }

    pub(super) fn file(path: &Path, reason: &dyn std::fmt::Display, mend: impl Into<String>) -> Self {
        Self::File { path: path.to_owned(), reason: reason.to_string(), mend: mend.into() }
    }

    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    pub(super) fn sign(error: &rcgen::Error) -> Self {
        Self::Sign(error.to_string())
    }
}
