//! The server's side of identity without Kubernetes: the CA, the enrolment tokens, the Enrollment service, and the
//! server's own certificate.
//!
//! Everything is kept in the state directory, which the command line and a running server share: a lock file orders
//! their writes, every write is atomic, and the server follows the command line's changes.
//!
//! | path | mode | |
//! |---|---|---|
//! | `ca/ca.crt` | 0644 | the roots, the signing one first; every change takes effect by replacing this file |
//! | `ca/<16 hex>.key` | 0600 | the key of the root whose hash starts with these digits |
//! | `ca/secret` | 0644 | in a cluster: name of the Secret that this directory is a copy of |
//! | `tokens/<id>.json` | 0600 | an enrolment token: hash, node, dates, hash of the key that used it |
//! | `issued/<node>` | 0600 | root and expiry of the node's latest certificate, so that no root is retired too early |
//! | `revoked/<node>`, `revoked/server_<host>` | 0600 | a revoked node or server, and the time of its readmission |
//! | `server.json` | 0644 | addresses at which agents reach the running server |
//! | `lock` | 0600 | the writers' lock |
//!
//! # Rotating the CA
//!
//! 1. `tunnel-server ca introduce`: a new root is trusted besides the signing one. A running server notices it within
//!    seconds and sends it to the connected agents.
//! 2. `tunnel-server ca activate`: the new root signs. The server's certificate is reissued; its chain also has the new
//!    root signed by the old one, so agents that were away and tokens handed out before still work. Agents renew early
//!    when they learn that the first root of the bundle did not sign their certificate.
//! 3. `tunnel-server ca retire`, once `ca status` counts no node on the old root (it refuses before): the old root is
//!    no longer trusted and its key is removed.
//!
//! TLS verifies certificates only when a connection is made, so links are judged again: see [`Credential`].

mod ca;
mod ca_state;
mod credential;
mod enroll;
mod error;
mod issued;
mod material;
mod metrics;
mod records;
mod request;
mod revocations;
mod server_certificate;
mod server_file;
mod standing;
mod subject;
#[cfg(test)]
mod tests;
mod token;
mod token_store;

pub use ca::{Ca, cluster_of};
pub use ca_state::{CaState, IssuedCertificate, Lifetimes, Role, Root};
pub use credential::Credential;
pub use enroll::{EnrollPolicy, EnrollService, ForClient};
pub use error::PkiError;
pub use issued::{Issued, IssuedLedger};
pub use material::CaMaterial;
pub(crate) use material::{KEY_SUFFIX, ROOTS};
pub use metrics::PkiMetrics;
pub(crate) use request::{Denial, examine_request, subject_of};
pub use revocations::{Revocation, RevocationStore, Revocations};
pub use server_certificate::{ServerCertificate, ServerNames};
pub use server_file::{ServerFile, agent_addresses};
pub use standing::{KnownNodes, Refusal, Standing};
pub use subject::Subject;
pub use token::{Token, parse_ttl};
pub use token_store::{TokenRecord, TokenRefusal, TokenState, TokenStore};

pub const DEFAULT_STATE_DIR: &str = "/var/lib/postern/server";

const LOCK: &str = "lock";
