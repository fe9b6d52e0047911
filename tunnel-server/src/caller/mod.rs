//! Identifies callers, by the client certificate of the TLS connection or by a token that a file or the cluster knows.
//! Also decides what they may do, by the cluster's rules for access to nodes, as the kubelet asks for them.
//!
//! Nothing here depends on a listener, so every listener that authenticates can use it.

mod access;
mod audiences;
mod authenticator;
mod bearer;
mod certificate;
mod certified;
mod identity;
mod questions;
mod review;
mod roots;
mod shown;
mod tls;
mod tokens;
pub(crate) mod verdict_cache;

pub use access::{Access, kubelet_accesses, other_accesses};
pub use audiences::{Audiences, DEFAULT_AUDIENCES, parse_audiences};
pub(crate) use authenticator::{Authenticator, ShownToken};
pub use bearer::bearer_token;
pub use certificate::caller_of_certificate;
pub(crate) use certified::Certified;
#[cfg(test)]
pub(crate) use certified::tests::CallersCa;
pub use identity::{Caller, Refusal};
#[cfg(test)]
pub(crate) use identity::{NODE_NAME, POD_NAME};
pub(crate) use identity::{node_of_pod, service_account, service_account_user};
pub(crate) use questions::{Asker, Questions};
pub use review::Reviewer;
pub use roots::ClientRoots;
pub(crate) use roots::{ROOTS_CONFIGMAP, ROOTS_NAMESPACE};
pub(crate) use shown::{BearerToken, Shown};
pub use tls::CallerTls;
pub use tokens::Tokens;
