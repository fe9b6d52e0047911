//! Credentials that a caller has shown, to ask again whose they are while its connection is open.

use std::fmt;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};
use tunnel_runtime::NodeName;

use super::certified::Certified;
use super::identity::{Caller, Refusal};
use crate::metrics::Judgement;

/// A bearer token. It is kept only as long as a connection that it has opened.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct BearerToken(Arc<str>);

impl BearerToken {
    pub(crate) fn new(token: &str) -> Self {
        Self(token.into())
    }

    pub(crate) fn secret(&self) -> &str {
        &self.0
    }
}

/// Shows nothing of it.
impl fmt::Debug for BearerToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BearerToken")
    }
}

/// Credentials that a caller has shown.
#[derive(Clone, Debug)]
pub(crate) enum Shown {
    Nothing,
    Certificate(Caller, Arc<Certified>),
    Token(BearerToken),
    /// A workload on an edge node: the link of the node's agent, which ends with its right.
    Node(NodeName),
}

impl Shown {
    /// A value that is the same for all connections of a caller, and tells nothing of what it has shown.
    pub(crate) fn digest(&self) -> [u8; 32] {
        match self {
            Self::Nothing => [0; 32],
            Self::Certificate(_, certified) => Sha256::digest(&certified.leaf).into(),
            Self::Token(token) => Sha256::digest(token.secret()).into(),
            Self::Node(name) => Sha256::digest(name.as_str()).into(),
        }
    }
}

impl Refusal {
    /// Refuses a request that shows no identity where one is needed.
    pub(crate) fn no_identity() -> Self {
        Self::Unauthenticated("the caller has not authenticated".to_owned())
    }

    /// Judges an open connection by it. `asked`: the API server may have said it.
    pub(crate) fn judgement(self, asked: bool) -> Judgement {
        match self {
            Self::Unauthenticated(reason) | Self::Forbidden(reason) if asked => Judgement::Refused(reason),
            Self::Unauthenticated(reason) | Self::Forbidden(reason) => Judgement::Withdrawn(reason),
            Self::Unavailable(reason) => Judgement::Unanswered(reason),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_in_no_debug_output() {
        let shown = Shown::Token(BearerToken::new("alices-own-token"));
        assert!(!format!("{shown:?}").contains("alices"), "{shown:?}");
    }
}
