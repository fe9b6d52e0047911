//! Errors for the operator when there is no identity.

use std::path::PathBuf;

use tunnel_runtime::NodeName;

use crate::{Holder, IdentityError};

/// Tells the operator how to enrol by token.
pub(crate) fn enrol_by_token(holder: Holder, node: &NodeName) -> String {
    format!(
        "start the {holder} once with the --token and --ca-hash that `tunnel-server token create {} {node}` prints",
        holder.token_flag()
    )
}

/// Reasons for having no identity where a retry would not help.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnrollError {
    /// A certificate, a key, a CA hash or a file is wrong.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// There is no identity on disk, and no token.
    #[error(
        "no identity in {dir} and no --token to enrol with: {fix}",
        dir = .state_dir.display(), fix = enrol_by_token(*.holder, .node)
    )]
    NoToken { state_dir: PathBuf, holder: Holder, node: NodeName },
    /// The identity on disk is another node's.
    #[error(
        "{path}: the identity is node {found}'s, but this is for node {expected}: fix --node-name, or give \
         another --state-dir",
        path = .path.display()
    )]
    OtherNode { path: PathBuf, found: NodeName, expected: NodeName },
    /// A server refused, or this agent refused the server. A retry would not change it.
    #[error(
        "{server} refused the enrolment: {reason} (`tunnel-server token create {flag} {node}` makes a new token and \
         prints the CA hash)",
        flag = .holder.token_flag()
    )]
    Refused { server: String, reason: String, holder: Holder, node: NodeName },
}
