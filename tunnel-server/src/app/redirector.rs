//! The redirector's counterpart of a CA: a certificate for which it enrols as an agent does, and the roots that the
//! servers announce.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rustls::ClientConfig;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tunnel_link::link::Congestion;
use tunnel_pki::enrol::reach::Reach;
use tunnel_pki::enrol::{
    Announced, EnrollConfig, Enrolled, IdentityKeeper, IdentityMetrics, Refusals, install_bundles,
};
use tunnel_pki::{ALPN_PEER, Holder, TrustBundle, agent_tls};
use tunnel_runtime::clock::Clock;
use tunnel_runtime::config::HostPort;
use tunnel_runtime::lifecycle::Readiness;

use crate::config::{Config, RedirectorConfig};
use crate::peers::{Peers, RedirectorLinks};

/// Maximum number of trust bundles that wait to be installed.
const BUNDLES: usize = 16;
/// Interval at which to check for a linked server.
const CHECK: Duration = Duration::from_millis(100);
/// Name of the part that a redirector without a link waits for.
const SERVER: &str = "a server";

/// A redirector with its certificate.
pub(crate) struct Redirector {
    enrolled: Enrolled,
    /// TLS settings for dialling servers, which are kept current.
    pub(super) tls: Arc<ArcSwap<ClientConfig>>,
    /// The trusted roots, which are kept current.
    pub(super) roots: watch::Sender<Arc<TrustBundle>>,
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
        let reach = Reach { congestion: Congestion::System, ..Reach::default() };
        let enroll = EnrollConfig {
            servers: config.nodes.peers.iter().map(ToString::to_string).collect(),
            holder: Holder::Redirector,
            node: redirector.node.clone(),
            state_dir: config.process.state_dir.clone(),
            token: redirector.token.clone(),
            reach: reach.clone(),
            clock: Clock::default(),
        };
        let api = match config.nodes.inventory {
            Some(_) => None,
            None => Some(config.kube.connect().await?.0),
        };
        let enrolled = Enrolled::obtain(enroll, api, metrics).await?;
        let identity = enrolled.keeper.current();
        let tls = agent_tls(&identity, ALPN_PEER).context("the redirector's certificate")?;
        let roots = watch::Sender::new(Arc::new(identity.bundle.clone()));
        Ok(Self { enrolled, tls: Arc::new(ArcSwap::from(tls)), roots, reach })
    }

    /// Keeps the certificate valid until `stop`. `addresses`: the servers.
    pub(crate) fn start(
        self,
        addresses: watch::Receiver<Arc<BTreeSet<HostPort>>>,
        tasks: &TaskTracker,
        stop: CancellationToken,
    ) -> RedirectorLinks {
        let (announced, bundles) = mpsc::channel::<Announced>(BUNDLES);
        let refusals = Arc::<Mutex<Refusals>>::default();
        let Self { enrolled, tls, roots, reach } = self;
        let (keeper, refused) = (enrolled.keeper.clone(), refusals.clone());
        tasks.spawn(stop.run_until_cancelled_owned(async move {
            tokio::join!(
                install_bundles(keeper.clone(), reach, bundles),
                follow_identity(&keeper, &tls, &roots),
                keeper.clone().follow_servers(addresses),
                enrolled.recover(move || refused.lock().strongest()),
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

/// Reports readiness while a server is linked: without one no connection can be forwarded, and what checks a gateway has
/// to send its clients to another.
pub(crate) async fn ready_while_linked(peers: Arc<Peers>, readiness: Readiness, stop: CancellationToken) {
    let mut pending = Some(readiness.pending(SERVER));
    let follow = async {
        loop {
            if peers.all().is_empty() {
                pending.get_or_insert_with(|| readiness.pending(SERVER));
            } else {
                pending = None;
            }
            tokio::time::sleep(CHECK).await;
        }
    };
    stop.run_until_cancelled(follow).await;
}
