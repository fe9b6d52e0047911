//! The server's side of identity without Kubernetes: the CA, the tokens by which agents enrol, the Enrollment
//! service, and the server's own certificate.
//!
//! Everything lives under the state directory, and the command line and a running server share it: a lock file
//! orders their writes, every write is atomic, and the server follows what the command line changes.
//!
//! | path | mode | |
//! |---|---|---|
//! | `ca/ca.crt` | 0644 | the roots, the one that signs first; its replacement is the one step of every change |
//! | `ca/<16 hex>.key` | 0600 | the key of the root whose hash begins so |
//! | `ca/secret` | 0644 | in a cluster: the Secret that this directory is a copy of |
//! | `tokens/<id>.json` | 0600 | a token: hash, node, dates, the key that it was used by |
//! | `issued/<node>` | 0600 | root and end of the node's latest certificate, so that no root is retired too early |
//! | `server.json` | 0644 | where agents reach the running server |
//! | `lock` | 0600 | the lock of the writers |
//!
//! # Rotating the CA
//!
//! 1. `tunnel-server ca introduce`: a new root is trusted besides the one that signs. A running server sees it
//!    within seconds and tells the agents that are connected.
//! 2. `tunnel-server ca activate`: the new root signs. The server's certificate is issued anew; its chain also has
//!    the new root as signed by the old one, so agents that were away and tokens that were handed out before still
//!    work. Agents that learn that the first root of the bundle did not sign their certificate renew early.
//! 3. `tunnel-server ca retire`, once `ca status` counts no node on the old root (before, it refuses): the old root
//!    is trusted no longer and its key is removed.
//!
//! Open sessions go on through all of it: TLS is verified when a connection is made.

mod authority;
mod bundle;
mod ca;
mod enroll;
mod error;
mod issued;
mod keeper;
mod limit;
mod material;
mod metrics;
mod server_file;
mod store;
#[cfg(test)]
mod tests;
mod token;

pub use authority::{CaState, IssuedCertificate, Lifetimes, Role, Root};
pub use bundle::follow_bundle;
pub use ca::Ca;
pub use enroll::{EnrollService, PeerAddress, PeerCertificate};
pub use error::PkiError;
pub use issued::{Issued, IssuedLedger};
pub use keeper::{ServerCertificate, ServerNames};
pub use material::CaMaterial;
pub(crate) use material::{KEY_SUFFIX, ROOTS};
pub use metrics::PkiMetrics;
pub use server_file::{ServerFile, agent_addresses};
pub use store::{Refusal, TokenRecord, TokenState, TokenStore};
pub use token::{Token, parse_ttl};

/// Where the server keeps its state unless told otherwise.
pub const DEFAULT_STATE_DIR: &str = "/var/lib/postern/server";

const LOCK: &str = "lock";
