//! Certificate, key and trusted roots of an agent or a redirector.

use std::fmt;
use std::sync::OnceLock;

use rustls::ClientConfig;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tunnel_runtime::NodeName;
use tunnel_runtime::clock::Clock;
use zeroize::Zeroizing;

use super::bundle::TrustBundle;
use super::certificate::{Validity, holder_of_certificate, validity};
use super::error::IdentityError;
use super::holder::Holder;
use super::key::PrivateKey;
use super::request;

type ChainAndKey = (Vec<CertificateDer<'static>>, Zeroizing<PrivateKeyDer<'static>>);

/// Parses a chain and the key of its leaf from PEM.
pub(super) fn chain_and_key(chain: &str, key: &str) -> Result<ChainAndKey, IdentityError> {
    let chain = CertificateDer::pem_slice_iter(chain.as_bytes())
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| IdentityError::Parse(format!("not PEM: {error}")))?;
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes())
        .map_err(|error| IdentityError::Key(format!("not PEM: {error}")))?;
    Ok((chain, Zeroizing::new(key)))
}

/// Credentials of an agent or a redirector, and the roots that it trusts.
pub struct AgentIdentity {
    pub holder: Holder,
    /// The node that the certificate names.
    pub node: NodeName,
    /// The certificate chain, leaf first.
    pub chain: Vec<CertificateDer<'static>>,
    /// The leaf's private key.
    pub key: Zeroizing<PrivateKeyDer<'static>>,
    /// Roots that may sign a server's certificate.
    pub bundle: TrustBundle,
    /// By which certificates are valid.
    pub clock: Clock,
    /// Of the leaf.
    pub validity: Validity,
    /// Made for the first link. It has the sessions that links resume, so those of another certificate, or of other roots, are
    /// not resumed.
    pub(super) tls: OnceLock<ClientConfig>,
}

impl AgentIdentity {
    /// Checks that the parts belong together.
    ///
    /// # Errors
    /// Fails if the chain is empty, if its leaf is neither an agent's certificate nor a redirector's, or if the key is
    /// not the leaf's.
    pub fn new(
        chain: Vec<CertificateDer<'static>>,
        key: Zeroizing<PrivateKeyDer<'static>>,
        bundle: TrustBundle,
    ) -> Result<Self, IdentityError> {
        let leaf =
            chain.first().ok_or_else(|| IdentityError::Parse("the chain has no certificate".into()))?;
        let (holder, node) = holder_of_certificate(leaf)?;
        let validity = validity(leaf)?;
        if !request::matches(&PrivateKey::from_der(&key)?, leaf)? {
            return Err(IdentityError::Key("it is not the certificate's key".into()));
        }
        let clock = Clock::default();
        Ok(Self { holder, node, chain, key, bundle, clock, validity, tls: OnceLock::new() })
    }

    /// [`AgentIdentity::new`] from PEM.
    pub fn from_pem(chain: &str, key: &str, bundle: TrustBundle) -> Result<Self, IdentityError> {
        let (chain, key) = chain_and_key(chain, key)?;
        Self::new(chain, key, bundle)
    }

    /// Returns the same identity with other trusted roots.
    #[must_use]
    pub fn with_bundle(&self, bundle: TrustBundle) -> Self {
        Self {
            holder: self.holder,
            node: self.node.clone(),
            chain: self.chain.clone(),
            key: Zeroizing::new(self.key.clone_key()),
            bundle,
            clock: self.clock,
            validity: self.validity,
            tls: OnceLock::new(),
        }
    }

    /// True if the root that signs new certificates (the bundle's first) signed this one. If not, a rotation is under
    /// way, and the certificate must be renewed before the old root is removed.
    pub fn is_signed_by_newest_root(&self) -> bool {
        self.chain.first().is_some_and(|leaf| self.bundle.issuer_of(leaf) == Some(0))
    }
}

/// Omits the key.
impl fmt::Debug for AgentIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AgentIdentity")
            .field("holder", &self.holder)
            .field("node", &self.node)
            .field("validity", &self.validity)
            .field("bundle", &self.bundle)
            .finish_non_exhaustive()
    }
}
