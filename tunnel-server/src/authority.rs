//! The certificate of this process: a server's or a redirector's.

use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::ClientConfig;
use tokio::sync::watch;

use crate::config::Config;
use crate::door::EgressTls;
use crate::pki::{Revocations, ServerCertificate};
use crate::redirector::Redirector;
use crate::reloaded::FileMetrics;

/// The certificate of this process.
pub(crate) enum Authority {
    /// With a CA of its own, or its fleet's.
    Server(Arc<ServerCertificate>, watch::Sender<Arc<Revocations>>),
    Redirector(Redirector),
}

impl Authority {
    /// Returns `None` if the egress listener has no port.
    pub(crate) fn egress_tls(
        &self,
        config: &Config,
        metrics: &FileMetrics,
    ) -> anyhow::Result<Option<EgressTls>> {
        match (self, &config.egress.tls) {
            (Self::Server(certificate, _), Some(tls)) => {
                Ok(Some(EgressTls::new(tls.clone(), certificate.tls(), metrics)?))
            }
            _ => Ok(None),
        }
    }

    pub(crate) fn peer_tls(&self) -> Arc<ArcSwap<ClientConfig>> {
        match self {
            Self::Server(certificate, _) => certificate.peer_tls(),
            Self::Redirector(redirector) => redirector.tls(),
        }
    }
}
