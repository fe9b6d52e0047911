use std::path::PathBuf;

use tunnel_core::identity::{IdentityError, NodeName};

/// Why an agent has no identity, where trying again would not help.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnrollError {
    /// A certificate, a key, a CA hash or a file.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// Nothing on disk and nothing to enrol with.
    #[error(
        "there is no identity in {dir} and no --token to enrol with: run `tunnel-server token create --node {node}` \
         on the server and start this agent once with the --token and --ca-hash that it prints",
        dir = .state_dir.display()
    )]
    NoToken {
        /// Where the identity would be.
        state_dir: PathBuf,
        /// The node.
        node: NodeName,
    },
    /// A token, but nothing to know the server by.
    #[error(
        "--token needs --ca-hash, without which the server cannot be known from an impostor: \
         `tunnel-server token create --node {node}` prints both"
    )]
    NoCaHash {
        /// The node.
        node: NodeName,
    },
    /// The certificate on disk has ended.
    #[error(
        "{path}: the certificate has ended: run `tunnel-server token create --node {node}` on the server and start \
         this agent once with the --token and --ca-hash that it prints (if this node's clock is wrong, mend that \
         instead)",
        path = .path.display()
    )]
    Expired {
        /// The certificate's file.
        path: PathBuf,
        /// The node.
        node: NodeName,
    },
    /// The identity on disk is another node's.
    #[error(
        "{path}: the identity is node {found}'s, but this agent is for node {expected}: mend --node-name, or give \
         another --state-dir",
        path = .path.display()
    )]
    OtherNode {
        /// The certificate's file.
        path: PathBuf,
        /// The node that it names.
        found: NodeName,
        /// The node that was asked for.
        expected: NodeName,
    },
    /// A server said no for good.
    #[error(
        "{server} refused the enrolment: {reason} (`tunnel-server token create --node {node}` makes a new token and \
         prints the CA hash)"
    )]
    Refused {
        /// `host:port` of the server.
        server: String,
        /// Its words, or our reason to refuse it.
        reason: String,
        /// The node.
        node: NodeName,
    },
    /// No server to enrol at.
    #[error("there is no server to enrol at; give --server HOST:PORT")]
    NoServers,
}
