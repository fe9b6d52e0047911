//! The redirector's counterpart of a CA: a certificate for which it enrols as an agent does, and the roots that the
//! servers announce.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use arc_swap::ArcSwap;
use rustls::ClientConfig;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tunnel_kube::{ApiServer, ClientSettings};
use tunnel_link::link::Congestion;
use tunnel_pki::enrol::reach::Reach;
use tunnel_pki::enrol::{
    Announced, CsrEnrolment, EnrollConfig, IdentityKeeper, IdentityMetrics, Pace, Recovery, Refused,
    ensure_identity, install_bundles, recover,
};
use tunnel_pki::{ALPN_PEER, Holder, TrustBundle, agent_tls};
use tunnel_runtime::config::HostPort;
use tunnel_runtime::lifecycle::ReadyGuard;

use crate::config::{Config, NodeSource, RedirectorConfig};
use crate::peers::{Peers, RedirectorLinks, Refusals};

/// Maximum number of trust bundles that wait to be installed.
const BUNDLES: usize = 16;
/// Interval at which to check for a linked server.
const CHECK: Duration = Duration::from_millis(100);

/// A redirector with its certificate.
pub(crate) struct Redirector {
    keeper: Arc<IdentityKeeper>,
    /// Set in a cluster.
    enrolment: Option<Arc<CsrEnrolment>>,
    tls: Arc<ArcSwap<ClientConfig>>,
    roots: watch::Sender<Arc<TrustBundle>>,
    reach: Reach,
}

impl Redirector {
    /// Loads the identity from the state directory, or enrols for a new one; that may wait for servers, and in a
    /// cluster for the API server.
    ///
    /// # Errors
    /// Only the operator can fix these: files, the kubeconfig, or a refused token.
    pub(crate) async fn enrol(
        config: &Config,
        redirector: &RedirectorConfig,
        metrics: IdentityMetrics,
    ) -> anyhow::Result<Self> {
        let reach = Reach::new(None, Congestion::System);
        let enroll = EnrollConfig {
            servers: config.nodes.peers.iter().map(ToString::to_string).collect(),
            holder: Holder::Redirector,
            node: redirector.node.clone(),
            state_dir: config.process.state_dir.clone(),
            token: redirector.token.clone(),
            ca_hash: redirector.ca_hash.clone(),
            reach: reach.clone(),
        };
        let (enrolment, identity, recovery) = match &config.source() {
            NodeSource::File(_) => (None, ensure_identity(&enroll).await?, Recovery::Token),
            NodeSource::Kubernetes(options) => {
                let (kubeconfig, namespace) = (options.kubeconfig.clone(), options.namespace.clone());
                let api = ApiServer::open(kubeconfig, namespace, ClientSettings::SERVER).await?;
                let holder = (Holder::Redirector, redirector.node.clone());
                let enrolment = Arc::new(CsrEnrolment::new(
                    api,
                    holder,
                    config.process.state_dir.clone(),
                    Pace::default(),
                ));
                let identity = enrolment.ensure_identity().await?;
                (Some(enrolment), identity, Recovery::ApiServer)
            }
        };
        let tls = agent_tls(&identity, ALPN_PEER).context("the redirector's certificate")?;
        let roots = watch::Sender::new(Arc::new(identity.bundle.clone()));
        let keeper = Arc::new(IdentityKeeper::with_recovery(enroll, identity, metrics, recovery));
        Ok(Self { keeper, enrolment, tls: Arc::new(ArcSwap::from(tls)), roots, reach })
    }

    /// Returns the TLS settings for dialling servers, which are kept current.
    pub(crate) fn tls(&self) -> Arc<ArcSwap<ClientConfig>> {
        self.tls.clone()
    }

    /// Returns the trusted roots, which are kept current.
    pub(crate) fn roots(&self) -> watch::Receiver<Arc<TrustBundle>> {
        self.roots.subscribe()
    }

    /// Keeps the certificate valid until `stop`. `addresses`: the servers.
    pub(crate) fn start(
        self,
        addresses: watch::Receiver<Arc<BTreeSet<HostPort>>>,
        tasks: &TaskTracker,
        stop: CancellationToken,
    ) -> RedirectorLinks {
        let (announced, bundles) = mpsc::channel::<Announced>(BUNDLES);
        let refusals = Arc::<Refusals>::default();
        let Self { keeper, enrolment, tls, roots, reach } = self;
        let refused = refusals.clone();
        tasks.spawn(stop.run_until_cancelled_owned(async move {
            let recovering = async {
                match enrolment {
                    Some(enrolment) => {
                        recover(enrolment, keeper.clone(), move || refused.lasts().map(Refused::For)).await;
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::join!(
                install_bundles(keeper.clone(), reach, bundles),
                follow_identity(&keeper, &tls, &roots),
                follow_servers(&keeper, addresses),
                recovering,
            );
        }));
        RedirectorLinks { announced, refusals }
    }
}

/// Uses each new certificate, and new roots, for the links that are made from then on.
async fn follow_identity(
    keeper: &IdentityKeeper,
    tls: &ArcSwap<ClientConfig>,
    roots: &watch::Sender<Arc<TrustBundle>>,
) {
    let mut identities = keeper.subscribe();
    // This never fails, because the keeper has the sender.
    while identities.changed().await.is_ok() {
        let identity = identities.borrow_and_update().clone();
        match agent_tls(&identity, ALPN_PEER) {
            Ok(config) => {
                tls.store(config);
                roots.send_replace(Arc::new(identity.bundle.clone()));
            }
            Err(error) => tracing::error!(%error, "failed to use the new certificate"),
        }
    }
}

/// Renews at the current servers. While none are known, the earlier ones stay.
async fn follow_servers(keeper: &IdentityKeeper, mut addresses: watch::Receiver<Arc<BTreeSet<HostPort>>>) {
    loop {
        let servers: Vec<_> = addresses.borrow_and_update().iter().map(ToString::to_string).collect();
        if !servers.is_empty() {
            keeper.set_servers(servers);
        }
        if addresses.changed().await.is_err() {
            return;
        }
    }
}

/// Reports readiness once a server is linked: no connection can be forwarded before.
pub(crate) async fn ready_once_linked(peers: Arc<Peers>, pending: ReadyGuard, stop: CancellationToken) {
    let linked = async {
        while peers.all().is_empty() {
            tokio::time::sleep(CHECK).await;
        }
    };
    if stop.run_until_cancelled(linked).await.is_some() {
        pending.ready();
    }
}
