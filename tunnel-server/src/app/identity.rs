//! The certificate of this process, and its rules for agents.

use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::ClientConfig;
use tokio::sync::watch;
use tunnel_pki::{IdentityError, TrustBundle};
use tunnel_runtime::lifecycle::Shutdown;

use super::Bound;
use super::redirector::{Redirector, ready_while_linked};
use super::running::Said;
use crate::caller::CallerTls;
use crate::config::RedirectorConfig;
use crate::peers::RedirectorLinks;
use crate::pki::{RevocationStore, ServerCertificate, Standing};
use crate::runtime::Runtime;

pub(super) struct ServerIdentity {
    /// None: this is a redirector.
    pub(super) certificate: Option<Arc<ServerCertificate>>,
    pub(super) redirector: Option<RedirectorLinks>,
    pub(super) standing: Standing,
    /// The roots in force.
    pub(super) roots: watch::Receiver<Arc<TrustBundle>>,
    pub(super) peer_tls: Arc<ArcSwap<ClientConfig>>,
    pub(super) caller_tls: Result<CallerTls, IdentityError>,
    /// None: the egress listener has no port.
    pub(super) egress_tls: Option<CallerTls>,
}

impl Bound {
    /// Waits for the CA and makes the certificate, or enrols. None: the drain has started meanwhile.
    ///
    /// # Errors
    /// No usable CA or certificate.
    pub(super) async fn identity(
        &self,
        said: &Said,
        shutdown: &Shutdown,
    ) -> anyhow::Result<Option<ServerIdentity>> {
        if let Some(redirector) = &self.config.redirector {
            return self.enrolled(redirector, said, shutdown).await;
        }
        let (config, Runtime { readiness, server_id, .. }) = (&self.config, &self.runtime);
        let ca = self.source.authority(config, self.lifetimes, readiness, shutdown).await?;
        let Some(ca) = ca else { return Ok(None) };
        let names = config.server_names();
        let certificate = ServerCertificate::start(ca, names, server_id, self.metrics.pki.clone())?;
        let own = certificate.tls.clone();
        let egress_tls =
            config.listeners.egress.tls.as_ref().map(|_| CallerTls::new(own.clone())).transpose()?;
        let standing = self.standing(said)?;
        Ok(Some(ServerIdentity {
            peer_tls: certificate.peer_tls.clone(),
            roots: certificate.roots.clone(),
            certificate: Some(Arc::new(certificate)),
            redirector: None,
            standing,
            caller_tls: CallerTls::new(own),
            egress_tls,
        }))
    }

    async fn enrolled(
        &self,
        config: &RedirectorConfig,
        said: &Said,
        shutdown: &Shutdown,
    ) -> anyhow::Result<Option<ServerIdentity>> {
        let Runtime { tasks, stop, readiness, peers, .. } = &self.runtime;
        let enrolling = readiness.pending("certificate");
        let enrolled = Redirector::enrol(&self.config, config, self.metrics.identity.clone());
        let enrolled = shutdown.draining_token().run_until_cancelled(enrolled).await.transpose()?;
        drop(enrolling);
        let Some(redirector) = enrolled else { return Ok(None) };
        tasks.spawn(ready_while_linked(peers.clone(), readiness.clone(), stop.clone()));
        Ok(Some(ServerIdentity {
            peer_tls: redirector.tls.clone(),
            certificate: None,
            standing: self.standing(said)?,
            roots: redirector.roots.subscribe(),
            redirector: Some(redirector.start(said.peers.subscribe(), tasks, stop.clone())),
            // Its certificate is a client's: no scraper would take it for a server's.
            caller_tls: CallerTls::self_signed(config.node.as_str()),
            egress_tls: None,
        }))
    }

    /// Reads the revocations, before anyone is let in, and follows them.
    fn standing(&self, said: &Said) -> anyhow::Result<Standing> {
        let revocations = RevocationStore::new(&self.config.process.state_dir);
        let revoked = revocations.open()?;
        let known = revoked.subscribe();
        self.runtime.tasks.spawn(revocations.follow(revoked, self.runtime.stop.clone()));
        let refuse_unknown = self.config.listeners.agents.refuse_unknown;
        Ok(Standing::new(known, said.known_nodes.subscribe(), refuse_unknown))
    }
}
