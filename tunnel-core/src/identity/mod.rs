//! Who is who on the tunnel: node names, the shape of certificates, the roots that are trusted, and the TLS
//! settings made of them.
//!
//! An agent's certificate names exactly one node (Subject `O=postern:agents`, `CN=postern:node:<name>`, usage client
//! authentication only). A server's certificate carries [`SERVER_NAME`] and has the usage server authentication only.
//! Both are signed by the private CA of the installation; the first root of a [`TrustBundle`] is the one that signs
//! at present, the others are trusted besides it while the CA is being rotated.

mod agent;
mod bundle;
mod certificate;
mod error;
pub mod files;
mod name;
mod request;
mod secret;
mod tls;
mod verify;

pub use agent::{AgentIdentity, agent_distinguished_name};
pub use bundle::TrustBundle;
pub use certificate::{
    Validity, ca_hash, is_ca, node_of_certificate, parse_ca_hash, pem_of_certificates, public_key_hash,
    server_names_of_certificate, validity,
};
pub use error::IdentityError;
pub use files::write_atomically;
pub use name::NodeName;
pub use request::{CsrKey, create_csr, generate_key, public_key_of_csr};
pub use secret::Secret;
pub use tls::{ServerTls, agent_tls, anonymous_tls, pinned_tls, refusal, server_name};

use std::time::Duration;

/// DNS name in every tunnel-server's certificate. Agents verify this name whatever address they dialled: the CA is
/// private, so an address behind NAT, a load balancer or a port mapping works without being in the certificate.
pub const SERVER_NAME: &str = "tunnel-server.postern.internal";

/// ALPN protocol (RFC 7301) of the tunnel: the agent serves gRPC on the connection that it dialled.
pub const ALPN_TUNNEL: &[u8] = b"postern/1";

/// ALPN protocol of ordinary gRPC on the same port.
pub const ALPN_GRPC: &[u8] = b"h2";

/// Subject organisation of every agent's certificate.
pub const AGENT_ORGANIZATION: &str = "postern:agents";

/// What precedes the node's name in the common name of an agent's certificate.
pub const AGENT_COMMON_NAME_PREFIX: &str = "postern:node:";

/// How far `notBefore` lies before the moment of issue: an edge's clock may be that much behind. It does not count
/// as life, so 80 % of a certificate's life is reckoned from the moment of issue.
pub const BACKDATE: Duration = Duration::from_secs(300);
