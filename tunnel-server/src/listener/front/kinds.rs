//! Parts of a listener that speaks HTTP.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;
use parking_lot::Mutex;
use tunnel_runtime::NodeName;

use super::metrics::MetricsPage;
use super::pods::Pods;
use super::target_tls::TargetTls;
use crate::admission::Share;
use crate::caller::{Authenticator, Caller, CallerTls, Certified, Refusal, Reviewer};
use crate::listener::connect::Reception;

/// Maximum length of a request's head, in bytes.
pub(super) const MAX_HEAD: usize = 64 << 10;

/// Clients that may use a listener.
pub(crate) enum Admission {
    /// Every client that reaches it: it listens on loopback.
    Everyone,
    /// Callers that the cluster's rules allow, or, without a cluster, every caller with a certificate.
    Callers(Arc<Authenticator>),
    /// Clients in these ranges, to these ports (every tunnelled port if there are none); other clients as callers with
    /// a token, from other hosts only if the operator permits tokens that others can read.
    Listed { clients: Vec<IpNet>, ports: Vec<u16>, authenticator: Arc<Authenticator>, exposed_tokens: bool },
    /// Clients of a proxy, for what the policy permits. They come from this edge node if there is one.
    Policy(Box<Reception>, Option<NodeName>),
}

/// A listener that speaks HTTP.
pub(crate) struct Front {
    pub(crate) listener: &'static str,
    pub(crate) admission: Admission,
    /// TLS with clients; `None` for plain HTTP.
    pub(crate) tls: Option<Arc<CallerTls>>,
    /// TLS with targets; `None` if they are plain HTTP too.
    pub(crate) targets: Option<Arc<TargetTls>>,
    /// Looks up pods' nodes; `None` if paths with a pod have no meaning.
    pub(crate) pods: Option<Arc<Pods>>,
    /// The page that it answers with; `None` if its requests are for edge nodes.
    pub(crate) metrics: Option<MetricsPage>,
}

impl Front {
    /// True if a connection ends with its first refusal, which takes HTTP/1.1.
    pub(super) fn ends_with_refusal(&self) -> bool {
        self.is_proxy() || self.metrics.is_some()
    }

    /// True if others can read what a client at this address sends.
    pub(super) fn is_exposed(&self, client: IpAddr) -> bool {
        self.tls.is_none() && !client.to_canonical().is_loopback()
    }

    /// The authenticator of callers.
    pub(super) fn reviewer(&self) -> Option<&Arc<Reviewer>> {
        match &self.admission {
            Admission::Callers(authenticator) | Admission::Listed { authenticator, .. } => {
                authenticator.reviewer.as_ref()
            }
            Admission::Everyone | Admission::Policy(..) => None,
        }
    }

    pub(super) fn is_proxy(&self) -> bool {
        matches!(self.admission, Admission::Policy(..))
    }
}

/// The other end of a connection.
pub(super) struct Peer {
    pub(super) client: SocketAddr,
    /// From its certificate.
    certificate: Option<(Caller, Arc<Certified>)>,
    /// The connection's place, if it has one.
    place: Mutex<Option<Share>>,
}

impl Peer {
    pub(super) fn new(
        client: SocketAddr,
        certificate: Option<(Caller, Arc<Certified>)>,
        place: Option<Share>,
    ) -> Self {
        Self { client, certificate, place: Mutex::new(place) }
    }

    /// Returns the certificate that it has shown.
    ///
    /// # Errors
    /// A handshake would not accept it any more.
    pub(super) fn certificate(&self) -> Result<Option<&(Caller, Arc<Certified>)>, Refusal> {
        if let Some((_, certified)) = &self.certificate {
            certified.check().map_err(Refusal::Unauthenticated)?;
        }
        Ok(self.certificate.as_ref())
    }

    /// Waits until its certificate is accepted no longer.
    pub(super) async fn lapsed(&self) {
        match &self.certificate {
            Some((_, certified)) => certified.lapsed().await,
            None => std::future::pending().await,
        }
    }

    /// Called when one of its requests was admitted: it no longer counts as unauthenticated.
    pub(super) fn admitted(&self) {
        if let Some(place) = &mut *self.place.lock() {
            place.known();
        }
    }

    /// Takes the connection's place, for its only request.
    pub(super) fn take_place(&self) -> Option<Share> {
        self.place.lock().take()
    }
}
