//! Authentication of callers and decisions about them, which several listeners share.

use std::path::Path;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tunnel_pki::{IdentityError, TrustBundle};
use tunnel_runtime::config::ConfigError;
use tunnel_runtime::reloaded::{FileMetrics, NamedFile, ReloadedFile};

use super::config::ListenersConfig;
use crate::admission::{Budget, Part, Shares};
use crate::agent_port::FromEdge;
use crate::caller::{Authenticator, CallerTls, ClientRoots, Reviewer, Tokens};
use crate::kube::Lookups;
use crate::listener::{Cluster, Gatekeeper, ListenerContext, Pods, Reception, Services};
use crate::policy::Policy;
use crate::runtime::Runtime;

/// A followed file with its first content; None: it is not given.
pub(crate) type Followed<T> = Option<(ReloadedFile<T>, T)>;

/// The connect listener's connections. One with TLS takes three files.
pub(super) const ASKED: Part = Part::new(1, 32).of_files(3);

/// The callers' files.
pub(crate) struct CallerFiles {
    policy: Followed<Policy>,
    roots: Followed<TrustBundle>,
    tokens: Followed<Tokens>,
}

impl CallerFiles {
    pub(super) fn open(config: &ListenersConfig, metrics: &FileMetrics) -> Result<Self, ConfigError> {
        let (policy, roots) = (&config.connect.policy, &config.common.client_ca_file);
        let tokens = &config.common.token_auth_file;
        let roots_of = |pem: &str| TrustBundle::from_foreign_pem(pem).map_err(|error| error.to_string());
        Ok(Self {
            policy: open("--policy", "policy", policy.as_deref(), Policy::parse, metrics)?,
            roots: open("--client-ca-file", "client-ca", roots.as_deref(), roots_of, metrics)?,
            tokens: open("--token-auth-file", "tokens", tokens.as_deref(), Tokens::parse, metrics)?,
        })
    }
}

/// The parts that several listeners share.
pub(crate) struct Callers {
    /// To ask the API server, if there is one.
    pub(super) client: Option<kube::Client>,
    /// None: no listener ends the TLS of callers.
    pub(super) tls: Option<Arc<CallerTls>>,
    pub(super) reception: Reception,
    /// None: there is no cluster.
    pub(super) pods: Option<Arc<Pods>>,
    /// Places of callers of the connect listener, and of workloads on edge nodes: these take as many files as a caller
    /// with TLS.
    pub(super) asked: Shares,
    pub(super) unauthenticated: Arc<Shares>,
}

impl Callers {
    /// Follows the files. `own`: the TLS with this process's certificate.
    pub(crate) fn new(
        config: &ListenersConfig,
        files: CallerFiles,
        runtime: &Runtime,
        client: Option<kube::Client>,
        own: Result<CallerTls, IdentityError>,
        budget: &Budget,
    ) -> Self {
        let CallerFiles { policy, roots, tokens } = files;
        let ends_tls = config.listeners.terminate_tls
            || config.connect.connect_port.is_some()
            || config.common.metrics_port.is_some();
        // It has no settings that could be wrong.
        let failed =
            |error: &_| tracing::error!(%error, "failed to set up TLS for callers, TLS termination is off");
        let tls = if ends_tls { own.inspect_err(failed).ok().map(Arc::new) } else { None };
        if let Some(tls) = &tls {
            follow_roots(tls, roots, client.as_ref(), runtime);
        }
        let reviewer = client.clone().map(|client| {
            let audiences = config.common.token_audience.clone();
            Arc::new(Reviewer::new(client, audiences))
        });
        let cluster = client.clone().map(|client| -> Arc<dyn Cluster> { Arc::new(Lookups::new(client)) });
        let pods = cluster.clone().zip(reviewer.as_ref());
        let pods = pods.map(|(cluster, reviewer)| Arc::new(Pods::new(cluster, reviewer.questions())));
        let (policy_file, policy) = policy.unzip();
        let (token_file, tokens) = tokens.unzip();
        let gatekeeper = Arc::new(Gatekeeper {
            authenticator: Arc::new(Authenticator::new(tokens.unwrap_or_default(), reviewer)),
            services: cluster.map_or(Services::Resolver, |api| Services::Cluster(api, Default::default())),
            policy: ArcSwap::from_pointee(policy.unwrap_or_default()),
            router: runtime.router.clone(),
        });
        let keeper = gatekeeper.clone();
        let rights = runtime.rights.clone();
        follow(policy_file, runtime, move |policy| {
            keeper.policy.store(Arc::new(policy));
            rights.notify_one();
            Ok(())
        });
        let (authenticator, rights) = (gatekeeper.authenticator.clone(), runtime.rights.clone());
        follow(token_file, runtime, move |tokens| {
            authenticator.set_tokens(tokens);
            rights.notify_one();
            Ok(())
        });
        let reception = Reception { gatekeeper, context: ListenerContext::of(runtime) };
        let asked = Shares::new(budget.places(&ASKED));
        let unauthenticated = Arc::new(Shares::new(budget.unauthenticated));
        Self { client, tls, reception, pods, asked, unauthenticated }
    }

    pub(super) fn authenticator(&self) -> Arc<Authenticator> {
        self.reception.gatekeeper.authenticator.clone()
    }

    /// The reception of workloads on edge nodes, for the links of their agents.
    pub(crate) fn workloads(&self) -> FromEdge {
        FromEdge { reception: self.reception.clone(), shares: self.asked.clone() }
    }
}

/// Lets callers show certificates of `--client-ca-file`, or in a cluster of the CA that kube-apiserver accepts.
fn follow_roots(
    tls: &Arc<CallerTls>,
    roots: Followed<TrustBundle>,
    client: Option<&kube::Client>,
    runtime: &Runtime,
) {
    let (mut changes, rights) = (tls.accepted.changes(), runtime.rights.clone());
    let changed = async move {
        while changes.changed().await.is_ok() {
            rights.notify_one();
        }
    };
    runtime.tasks.spawn(runtime.stop.clone().run_until_cancelled_owned(changed));
    match (roots, client) {
        (Some((file, roots)), _) => {
            if let Err(error) = tls.accept_roots(&roots) {
                tracing::error!(%error, "failed to apply the client CA, client certificates are not accepted");
            }
            let tls = tls.clone();
            let apply = move |roots: TrustBundle| tls.accept_roots(&roots).map_err(|error| error.to_string());
            follow(Some(file), runtime, apply);
        }
        (None, Some(client)) => {
            let roots = ClientRoots::new(client.clone(), tls.clone());
            runtime.tasks.spawn(roots.follow(runtime.stop.clone()));
        }
        (None, None) => {}
    }
}

/// Applies each new content of a file until the stop.
pub(super) fn follow<T: Send + 'static>(
    file: Option<ReloadedFile<T>>,
    runtime: &Runtime,
    apply: impl Fn(T) -> Result<(), String> + Send + Sync + 'static,
) {
    if let Some(file) = file {
        let apply = move |content| std::future::ready(apply(content));
        runtime.tasks.spawn(file.run(apply, runtime.stop.clone()));
    }
}

pub(super) fn open<T: Send + 'static>(
    key: &'static str,
    what: &'static str,
    path: Option<&Path>,
    parse: fn(&str) -> Result<T, String>,
    metrics: &FileMetrics,
) -> Result<Followed<T>, ConfigError> {
    let Some(path) = path else { return Ok(None) };
    ReloadedFile::open_one(what, NamedFile::new(key, path), parse, metrics).map(Some)
}
