//! The first enrolment without an API server: by an enrolment token, over gRPC at a server.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::ClientConfig;
use tunnel_link::proto::EnrollRequest;
use tunnel_runtime::NodeName;
use tunnel_runtime::clock::Clock;

use crate::enrol::EnrollError;
use crate::enrol::attempt::{AttemptError, RETRIES, is_orphaned};
use crate::enrol::enrollment::Connection;
use crate::enrol::error::enrol_by_token;
use crate::enrol::files::IdentityFiles;
use crate::enrol::reach::Reach;
use crate::{
    AgentIdentity, ExposeSecret, Holder, PrivateKey, SecretString, create_csr, create_named_csr, pinned_tls,
};

/// Settings to obtain an identity and to keep it.
#[derive(Clone, Debug)]
pub struct EnrollConfig {
    /// `host:port` of each server. At least one for an enrolment by token.
    pub servers: Vec<String>,
    pub holder: Holder,
    pub node: NodeName,
    pub state_dir: PathBuf,
    /// For the first enrolment, and for one with another CA: the token, and `sha256:HEX` of the CA's key, which verifies
    /// the server.
    pub token: Option<(SecretString, String)>,
    pub reach: Reach,
    /// This host's clock, by which certificates are valid.
    pub clock: Clock,
}

/// Returns the identity on disk if it is this node's and has not expired or there is no token. Else enrols for a new
/// one.
///
/// With a token, an unexpired identity is replaced if it is from another CA than the hash says or its root is no longer
/// trusted, and a server agrees. If none does it is used as it is: a token and a hash that were left in a unit file
/// must not stop a working agent.
///
/// Tries every server, with growing pauses while none can be reached. The future may be dropped at any time: the next
/// call continues with the same key.
///
/// # Errors
/// Those that only the operator can fix: unusable files, another node's identity, a token that is missing or that a
/// server refused, a server with another CA than the expected one.
pub async fn ensure_identity(config: &EnrollConfig) -> Result<AgentIdentity, EnrollError> {
    let files = IdentityFiles::new(&config.state_dir, config.holder);
    if let Some(identity) = files.load()? {
        if identity.node != config.node {
            return Err(EnrollError::OtherNode {
                path: files.certificate(),
                found: identity.node,
                expected: config.node.clone(),
            });
        }
        if !identity.validity.is_over(config.clock.now()) {
            let Some(token) = &config.token else { return Ok(identity) };
            return Ok(match doubt(&identity, &token.1) {
                Some(doubt) => replace_if_agreed(config, &files, token, identity, doubt).await,
                None => identity,
            });
        }
        if config.token.is_none() {
            // Servers use their own clock. If this node's is ahead, the certificate works once the clock is set right.
            tracing::error!(
                path = %files.certificate().display(),
                fix = enrol_by_token(config.holder, &config.node),
                "certificate has expired and there is no --token, using it in case this node's clock is wrong"
            );
            return Ok(identity);
        }
        tracing::warn!(node = %config.node, "certificate has expired, enrolling again");
    }
    let token = config.token.as_ref().ok_or_else(|| EnrollError::NoToken {
        state_dir: config.state_dir.clone(),
        holder: config.holder,
        node: config.node.clone(),
    })?;
    let mut backoff = RETRIES;
    let round = Round::begin(config, &files, token)?;
    loop {
        if let Some(identity) = round.run().await? {
            return Ok(identity);
        }
        tokio::time::sleep(backoff.next_delay()).await;
    }
}

/// Reason why an unexpired identity may be useless with today's servers.
fn doubt(identity: &AgentIdentity, ca_hash: &str) -> Option<&'static str> {
    if is_orphaned(identity) {
        return Some("the root that signed the certificate is no longer trusted");
    }
    let is_known = identity.bundle.hashes().iter().any(|hash| hash.eq_ignore_ascii_case(ca_hash));
    (!is_known).then_some("the certificate is from another CA than --ca-hash says")
}

/// Tries once to enrol at each server. Returns the present identity if that fails.
async fn replace_if_agreed(
    config: &EnrollConfig,
    files: &IdentityFiles,
    token: &(SecretString, String),
    present: AgentIdentity,
    doubt: &str,
) -> AgentIdentity {
    tracing::info!(node = %config.node, reason = doubt, "enrolling again");
    let enrolled = async { Round::begin(config, files, token)?.run().await }.await;
    let error = match enrolled {
        Ok(Some(identity)) => return identity,
        Ok(None) => "no server reachable".to_owned(),
        Err(error) => error.to_string(),
    };
    tracing::warn!(
        node = %config.node,
        reason = doubt,
        error,
        fix = format!("if it works, remove --token and --ca-hash; if not, {}", enrol_by_token(config.holder, &config.node)),
        "failed to enrol again, using the stored certificate"
    );
    present
}

/// One enrolment request to each server in turn.
struct Round<'a> {
    config: &'a EnrollConfig,
    files: &'a IdentityFiles,
    token: &'a SecretString,
    tls: Arc<ClientConfig>,
    key: PrivateKey,
    csr: Vec<u8>,
}

impl<'a> Round<'a> {
    fn begin(
        config: &'a EnrollConfig,
        files: &'a IdentityFiles,
        (token, ca_hash): &'a (SecretString, String),
    ) -> Result<Self, EnrollError> {
        let tls = pinned_tls(ca_hash)?;
        files.prepare()?;
        let key = files.pending_key()?;
        let csr = match config.holder {
            // An agent's token already says which holder it is for.
            Holder::Agent => create_csr(&key)?,
            holder => create_named_csr(&key, holder, &config.node)?.der().to_vec(),
        };
        Ok(Self { config, files, token, tls, key, csr })
    }

    /// None if no server could be reached or could answer for now.
    async fn run(&self) -> Result<Option<AgentIdentity>, EnrollError> {
        let node = &self.config.node;
        let mut refusal = None;
        for server in &self.config.servers {
            match self.enrol_at(server).await {
                Ok(identity) => {
                    self.files.store(&identity)?;
                    tracing::info!(%node, server, "enrolled");
                    return Ok(Some(identity));
                }
                Err(AttemptError::Refused(reason)) => {
                    tracing::error!(server, reason, "enrolment refused");
                    refusal = Some(EnrollError::Refused {
                        server: server.clone(),
                        reason,
                        holder: self.config.holder,
                        node: node.clone(),
                    });
                }
                Err(AttemptError::Transient(reason)) => {
                    tracing::warn!(server, error = reason, "enrolment failed");
                }
            }
        }
        // Every server was asked, and this one would refuse again.
        refusal.map_or(Ok(None), Err)
    }

    async fn enrol_at(&self, server: &str) -> Result<AgentIdentity, AttemptError> {
        let mut connection = Connection::open(&self.config.reach, server, &self.tls).await?;
        let request = EnrollRequest {
            node: self.config.node.to_string(),
            token: self.token.expose_secret().to_owned(),
            csr: self.csr.clone(),
        };
        let response = Connection::answer(connection.client.enroll(request)).await?;
        connection.issued_identity(
            &response,
            &self.key,
            (self.config.holder, &self.config.node),
            self.config.clock,
        )
    }
}
