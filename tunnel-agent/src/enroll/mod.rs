//! The agent's side of identity: the first enrolment by a token, the files, and the renewals. (In a cluster the first
//! enrolment is [`crate::kube::csr`]'s.)
//!
//! | file of the state directory | mode | |
//! |---|---|---|
//! | `agent.key` | 0600 | the private key, which never leaves the node |
//! | `agent.crt` | 0644 | the certificate |
//! | `ca.crt` | 0644 | the roots that a server must come from, the one that signs at present first |
//! | `agent.key.next` | 0600 | the key that a certificate is being asked for; written before the request, so a lost answer can be asked for again |

mod backoff;
mod client;
mod error;
mod files;
mod keeper;
mod metrics;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use rustls::ClientConfig;
use tunnel_core::identity::{
    ALPN_GRPC, AgentIdentity, ExposeSecret, NodeName, SecretString, TrustBundle, anonymous_tls, create_csr,
    pinned_tls,
};
use tunnel_core::proto::EnrollRequest;

pub(crate) use backoff::Backoff;
use client::{Connection, Failure};
pub use error::EnrollError;
pub(crate) use files::{IdentityFiles, Stored};
pub use keeper::{IdentityKeeper, Recovery};
pub use metrics::IdentityMetrics;

/// What an agent needs to get an identity and to keep it.
#[derive(Clone, Debug)]
pub struct EnrollConfig {
    /// `host:port` of each server.
    pub servers: Vec<String>,
    /// The node that this agent is for.
    pub node: NodeName,
    /// Where the identity is kept.
    pub state_dir: PathBuf,
    /// For the first enrolment, and for one at another CA.
    pub token: Option<SecretString>,
    /// `sha256:HEX` of the CA's key, for an enrolment.
    pub ca_hash: Option<String>,
}

/// The identity on disk when it is this node's and has not ended, without any token; else a new one by enrolling.
///
/// With a token, an identity that has not ended but is another CA's than the given one, or whose root is trusted no
/// longer, is replaced by enrolling if a server agrees; else it is used as it is, because a token and a hash that
/// were left in a unit file must not stop an agent that works.
///
/// Tries every server, again and again with growing pauses while none can be reached. The future may be dropped at
/// any time: the next call goes on with the same key.
///
/// # Errors
/// What only the operator can mend: unusable files, another node's identity, a token that is missing or that a
/// server refused, a server with another CA than the expected one.
pub async fn ensure_identity(config: &EnrollConfig) -> Result<AgentIdentity, EnrollError> {
    let files = IdentityFiles::new(&config.state_dir);
    let known = match files.load()? {
        Stored::Identity(identity) => {
            if identity.node != config.node {
                return Err(EnrollError::OtherNode {
                    path: files.certificate(),
                    found: identity.node,
                    expected: config.node.clone(),
                });
            }
            if !identity.validity().is_over(SystemTime::now()) {
                return Ok(match (&config.token, doubt(&identity, config.ca_hash.as_deref())) {
                    (Some(token), Some(doubt)) => {
                        replace_if_agreed(config, &files, token, *identity, doubt).await
                    }
                    _ => *identity,
                });
            }
            if config.token.is_none() {
                return Err(EnrollError::Expired { path: files.certificate(), node: config.node.clone() });
            }
            tracing::warn!(node = %config.node, "the certificate has ended; enrolling again");
            Some(identity.bundle)
        }
        Stored::Nothing => None,
    };
    let token = config.token.as_ref().ok_or_else(|| EnrollError::NoToken {
        state_dir: config.state_dir.clone(),
        node: config.node.clone(),
    })?;
    let mut backoff = Backoff::default();
    let round = Round::begin(config, &files, token, known.as_ref())?;
    loop {
        if let Some(identity) = round.run().await? {
            return Ok(identity);
        }
        tokio::time::sleep(backoff.next_delay()).await;
    }
}

/// Why the identity, which has not ended, may be of no use with the servers of today.
fn doubt(identity: &AgentIdentity, ca_hash: Option<&str>) -> Option<&'static str> {
    if identity.chain.first().is_none_or(|leaf| identity.bundle.issuer_of(leaf).is_none()) {
        return Some("the root that signed the certificate is trusted no longer");
    }
    let given = ca_hash?;
    let is_known = identity.bundle.hashes().iter().any(|hash| hash.eq_ignore_ascii_case(given));
    (!is_known).then_some("the certificate is another CA's than --ca-hash says")
}

/// One try to enrol at each server; the present identity when that brings nothing.
async fn replace_if_agreed(
    config: &EnrollConfig,
    files: &IdentityFiles,
    token: &SecretString,
    present: AgentIdentity,
    doubt: &str,
) -> AgentIdentity {
    tracing::info!(node = %config.node, reason = doubt, "enrolling again");
    let enrolled = async { Round::begin(config, files, token, Some(&present.bundle))?.run().await }.await;
    let reason = match enrolled {
        Ok(Some(identity)) => return identity,
        Ok(None) => "no server could be asked".to_owned(),
        Err(error) => error.to_string(),
    };
    tracing::warn!(
        node = %config.node,
        doubt,
        reason,
        "could not enrol again; going on with the stored certificate (if it works, remove --token and --ca-hash; if \
         it does not, start this agent with the ones that `tunnel-server token create --node {}` prints)",
        config.node
    );
    present
}

/// What asking every server once needs.
struct Round<'a> {
    config: &'a EnrollConfig,
    files: &'a IdentityFiles,
    token: &'a SecretString,
    tls: Arc<ClientConfig>,
    key: rcgen::KeyPair,
    csr: Vec<u8>,
}

impl<'a> Round<'a> {
    fn begin(
        config: &'a EnrollConfig,
        files: &'a IdentityFiles,
        token: &'a SecretString,
        known: Option<&TrustBundle>,
    ) -> Result<Self, EnrollError> {
        let tls = enrollment_tls(config, known)?;
        if config.servers.is_empty() {
            return Err(EnrollError::NoServers);
        }
        files.prepare()?;
        let key = files.pending_key()?;
        let csr = create_csr(&key)?;
        Ok(Self { config, files, token, tls, key, csr })
    }

    /// None when no server could be asked or could answer for now.
    async fn run(&self) -> Result<Option<AgentIdentity>, EnrollError> {
        let node = &self.config.node;
        let mut refusal = None;
        for server in &self.config.servers {
            let request = EnrollRequest {
                node: node.to_string(),
                token: self.token.expose_secret().to_owned(),
                csr: self.csr.clone(),
            };
            match enroll_at(server, &self.tls, request, &self.key, node).await {
                Ok(identity) => {
                    self.files.store(&identity)?;
                    tracing::info!(%node, server, "enrolled");
                    return Ok(Some(identity));
                }
                Err(Failure::Definite(reason)) => {
                    tracing::error!(server, reason, "enrolment refused");
                    refusal =
                        Some(EnrollError::Refused { server: server.clone(), reason, node: node.clone() });
                }
                Err(Failure::Transient(reason)) => {
                    tracing::warn!(server, reason, "enrolment failed");
                }
            }
        }
        // The other servers had their chance, but asking this one again would not change its answer.
        refusal.map_or(Ok(None), Err)
    }
}

/// A given hash is what the operator trusts now; else the roots of the ended identity are still good.
fn enrollment_tls(
    config: &EnrollConfig,
    known: Option<&TrustBundle>,
) -> Result<Arc<ClientConfig>, EnrollError> {
    match (&config.ca_hash, known) {
        (Some(hash), _) => Ok(pinned_tls(hash)?),
        (None, Some(bundle)) => Ok(anonymous_tls(bundle, ALPN_GRPC)?),
        (None, None) => Err(EnrollError::NoCaHash { node: config.node.clone() }),
    }
}

async fn enroll_at(
    server: &str,
    tls: &Arc<ClientConfig>,
    request: EnrollRequest,
    key: &rcgen::KeyPair,
    node: &NodeName,
) -> Result<AgentIdentity, Failure> {
    let mut connection = Connection::open(server, tls).await?;
    let response = connection.client.enroll(request).await.map_err(|status| Failure::of_status(&status))?;
    connection.identity_of(&response.into_inner(), key, node)
}
