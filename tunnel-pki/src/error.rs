//! Errors of identities.

use std::io;
use std::path::Path;

use tunnel_runtime::NodeNameError;
use tunnel_runtime::files::FileError;

/// A name, certificate, key or file of an identity that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IdentityError {
    #[error(transparent)]
    NodeName(#[from] NodeNameError),
    /// A certificate that cannot be parsed (RFC 5280).
    #[error("certificate cannot be parsed: {0}")]
    Parse(String),
    /// A certificate that parses but is neither an agent's nor another accepted client's.
    #[error("not an agent's certificate: {0}")]
    NotAgent(String),
    /// A certificate that parses but is not a tunnel-server's.
    #[error("not a tunnel-server's certificate: {0}")]
    NotServer(String),
    /// A bundle of roots that cannot be used.
    #[error("trust bundle: {0}")]
    Bundle(String),
    /// Text that is not `sha256:` and 64 hex digits.
    #[error(
        "CA hash {0:?}: want \"sha256:\" and 64 hexadecimal digits, as `tunnel-server token create` prints it"
    )]
    CaHash(String),
    /// The server did not present the CA that the enrolment expects.
    #[error(
        "the server's CA is not the expected one: it presented {presented}, expected {expected}; \
         either --ca-hash is not this installation's (see `tunnel-server ca status`) or something else answers there"
    )]
    CaMismatch {
        /// The expected hash.
        expected: String,
        /// The hashes of the presented CA certificates, or "no CA".
        presented: String,
    },
    /// A signing request that is malformed or does not prove possession of its key.
    #[error("certificate signing request: {0}")]
    Csr(String),
    /// A private key that cannot be used.
    #[error("private key: {0}")]
    Key(String),
    /// The TLS library refused the settings.
    #[error("TLS settings: {0}")]
    Tls(String),
    /// A certificate for another node than the requested one.
    #[error("the certificate is for node {found}, not for {expected}")]
    OtherNode {
        /// The requested node.
        expected: String,
        /// The node named by the certificate.
        found: String,
    },
    #[error(transparent)]
    File(#[from] FileError),
}

impl IdentityError {
    pub fn io(path: &Path, source: io::Error) -> Self {
        FileError::io(path, source).into()
    }

    /// Creates an error for an unusable file, with the reason and a fix.
    pub fn file(path: &Path, reason: &dyn std::fmt::Display, fix: impl Into<String>) -> Self {
        FileError::unusable(path, reason, fix).into()
    }
}
