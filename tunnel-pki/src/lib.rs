//! Identities on the tunnel: node names, the format of certificates, the trusted roots, and the TLS settings made of
//! them.
//!
//! An agent's certificate names exactly one node (Subject `O=postern:agents`, `CN=postern:node:<name>`, usage client
//! authentication only). A server's certificate names [`SERVER_NAME`] and has the usage server authentication only.
//! To each other, servers present a certificate of an agent's format, with `O=postern:servers`,
//! `CN=postern:server:<id>`. A redirector's has that format too, with `O=postern:redirectors`,
//! `CN=postern:redirector:<name of its node>`. All are signed by the installation's private CA. The first root of a
//! [`TrustBundle`] signs new certificates; the others are also trusted while the CA is being rotated.
#![forbid(unsafe_code)]

mod agent;
mod bundle;
mod certificate;
pub mod enrol;
mod error;
mod holder;
mod inspect;
mod key;
mod request;
mod tickets;
mod tls;
mod verify;

pub use agent::AgentIdentity;
pub use bundle::TrustBundle;
pub use certificate::{
    BACKDATE, Client, PEER_COMMON_NAME_PREFIX, PEER_ORGANIZATION, SERVER_NAME, Validity, ca_hash,
    client_of_certificate, holder_of_certificate, is_ca, parse_ca_hash, pem_of_certificates, public_key_hash,
    server_names_of_certificate, validity,
};
pub use error::IdentityError;
pub use holder::{
    AGENT_COMMON_NAME_PREFIX, AGENT_ORGANIZATION, Holder, REDIRECTOR_COMMON_NAME_PREFIX,
    REDIRECTOR_ORGANIZATION,
};
pub use inspect::{HttpsAnswer, ask_https, describe_certificate, names_a_tunnel_server, presented_chain};
pub use key::PrivateKey;
pub use request::{CsrKey, create_csr, create_named_csr, public_key_of_csr};
pub use secrecy::{ExposeSecret, SecretString};
pub use tickets::Tickets;
pub use tls::{
    ALPN_EDGE, ALPN_GRPC, ALPN_PEER, ALPN_TUNNEL, ServerTls, agent_tls, caller_config, caller_verifier,
    certified, certified_pem, concerns_certificates, foreign_tls, peer_tls, pinned_tls, refusal, server_name,
};
pub use verify::{client_verifier, server_verifier};
pub use zeroize::Zeroizing;
