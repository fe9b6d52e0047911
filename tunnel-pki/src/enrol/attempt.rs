//! Code shared by the attempts to get a certificate: by token, by CSR and for a renewal.

use std::fmt::Display;
use std::time::Duration;

use tunnel_runtime::NodeName;
use tunnel_runtime::backoff::Backoff;

use crate::{AgentIdentity, Holder, IdentityError};

/// Delays between attempts.
pub(crate) const RETRIES: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(60));

/// A failed attempt.
#[derive(Debug)]
pub(crate) enum AttemptError {
    /// The same request would be refused again.
    Refused(String),
    /// A later attempt or another server may succeed.
    Transient(String),
}

impl AttemptError {
    pub(crate) fn transient(error: impl Display) -> Self {
        Self::Transient(error.to_string())
    }

    pub(crate) fn reason(&self) -> &str {
        match self {
            Self::Refused(reason) | Self::Transient(reason) => reason,
        }
    }
}

/// True if the root that signed the certificate is no longer trusted.
pub(crate) fn is_orphaned(identity: &AgentIdentity) -> bool {
    identity.chain.first().is_none_or(|leaf| identity.bundle.issuer_of(leaf).is_none())
}

/// Accepts an issued identity only if it is for this holder and signed by one of the roots that came with it.
pub(crate) fn check_issued(
    identity: AgentIdentity,
    holder: Holder,
    node: &NodeName,
) -> Result<AgentIdentity, IdentityError> {
    if identity.holder != holder {
        let reason = format!("it is the {}'s, not the {holder}'s", identity.holder);
        return Err(IdentityError::Parse(reason));
    }
    if identity.node != *node {
        return Err(IdentityError::OtherNode {
            expected: node.to_string(),
            found: identity.node.to_string(),
        });
    }
    if is_orphaned(&identity) {
        return Err(IdentityError::Bundle("no root of it signed the certificate".into()));
    }
    Ok(identity)
}
