//! Who a caller of a door is: by the client certificate of its TLS connection, or by its token, which a file or the cluster knows.
//! And what it may do by the cluster's rules for access to nodes, as the kubelet itself asks them.
//!
//! Nothing here knows a door, so that every door which authenticates can use it.

mod access;
mod bearer;
mod certificate;
mod identity;
mod questions;
mod review;
mod roots;
mod tls;
mod tokens;

pub use access::{Access, kubelet_accesses, other_accesses};
pub use bearer::bearer_token;
pub use certificate::caller_of_certificate;
pub use identity::{Caller, Refusal};
pub(crate) use questions::{Asker, Questions};
pub use review::Reviewer;
pub use roots::ClientRoots;
pub(crate) use roots::{ROOTS_CONFIGMAP, ROOTS_NAMESPACE};
pub use tls::CallerTls;
pub(crate) use tokens::Authenticator;
pub use tokens::Tokens;
