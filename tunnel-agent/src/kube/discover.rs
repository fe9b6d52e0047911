//! Follows the servers' addresses. The last ones stay while the API server is unreachable or its objects name no
//! server.

use std::fmt::Debug;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;

use futures_util::{Stream, StreamExt};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::runtime::watcher::{Config, Event};
use kube::{Api, Client, Resource};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;
use tunnel_kube::{FollowSettings, Followed, Signal, follow, named};
use tunnel_runtime::config::HostPort;
use tunnel_runtime::log_once::LogOnce;
use tunnel_runtime::state_file::StateFile;

use super::servers::{Found, of_service, of_slices};

/// Label with which EndpointSlices name their Service.
const SERVICE_LABEL: &str = "kubernetes.io/service-name";

/// Finds the servers until it is dropped.
pub struct Discovery {
    servers: watch::Receiver<Arc<Vec<HostPort>>>,
    trouble: Trouble,
    _task: AbortOnDropHandle<()>,
}

/// Reasons why the servers may be out of date.
#[derive(Clone, Default)]
struct Trouble(Arc<Mutex<Troubles>>);

#[derive(Default)]
struct Troubles {
    /// Failures of the requests for the Service and for its EndpointSlices.
    requests: [Option<String>; 2],
    /// Faults of the objects themselves.
    objects: Option<String>,
    logged: LogOnce,
}

impl Troubles {
    fn now(&self) -> Option<&String> {
        self.requests.iter().flatten().next().or(self.objects.as_ref())
    }
}

impl Trouble {
    fn change(&self, change: impl FnOnce(&mut Troubles)) {
        let mut known = self.0.lock();
        change(&mut known);
        match known.now().cloned() {
            Some(reason) if known.logged.is_new(&reason) => {
                tracing::warn!(reason, "failed to look up the servers, keeping the last known ones");
            }
            None if known.logged.clear() => tracing::info!("looked up the servers again"),
            _ => {}
        }
    }
}

impl Discovery {
    /// Looks in the client's namespace. Starts with the servers from the file in the state directory.
    pub fn start(api: Client, service: &str, state_dir: &Path) -> Self {
        let file = StateFile::<Vec<HostPort>>::new(state_dir.join("servers.json"));
        let known = file.load().unwrap_or_default();
        if !known.is_empty() {
            tracing::info!(servers = list(&known), "read the servers of the last run");
        }
        let (publish, servers) = watch::channel(Arc::new(known));
        let trouble = Trouble::default();
        let task = tokio::spawn(
            Finder { api, service: service.to_owned(), file, publish, trouble: trouble.clone() }.run(),
        );
        Self { servers, trouble, _task: AbortOnDropHandle::new(task) }
    }

    /// The servers. Empty until some were found.
    pub fn servers(&self) -> watch::Receiver<Arc<Vec<HostPort>>> {
        self.servers.clone()
    }

    /// Reason why the servers may be out of date.
    pub fn trouble(&self) -> Option<String> {
        self.trouble.0.lock().now().cloned()
    }
}

fn list(servers: &[HostPort]) -> String {
    servers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

struct Finder {
    api: Client,
    /// Name of the Service.
    service: String,
    file: Arc<StateFile<Vec<HostPort>>>,
    publish: watch::Sender<Arc<Vec<HostPort>>>,
    trouble: Trouble,
}

/// The objects known so far.
#[derive(Default)]
struct Seen {
    service: Followed<Service>,
    slices: Followed<EndpointSlice>,
}

impl Seen {
    /// Returns the servers, or the fault. None while not everything is known.
    fn servers(&self) -> Option<Result<Vec<HostPort>, String>> {
        if !self.service.known {
            return None;
        }
        let Some(service) = self.service.only() else { return Some(Err("there is none".to_owned())) };
        Some(match of_service(service) {
            Ok(Found::Servers(servers)) => Ok(servers),
            Ok(Found::Nodes(_)) if !self.slices.known => return None,
            Ok(Found::Nodes(port)) => match of_slices(self.slices.objects.values(), port) {
                servers if servers.is_empty() => {
                    Err("it has no endpoint: is a tunnel-server running?".to_owned())
                }
                servers => Ok(servers),
            },
            Err(error) => Err(error),
        })
    }

    /// EndpointSlices are followed only if the Service leads to them.
    fn needs_slices(&self) -> bool {
        self.service.only().is_some_and(|service| matches!(of_service(service), Ok(Found::Nodes(_))))
    }
}

impl Finder {
    async fn run(self) {
        let (namespace, name) = (self.api.default_namespace(), self.service.as_str());
        let service = format!("Service {namespace}/{name}");
        let mut services = pin!(self.follow::<Service>(0, service.clone(), named(name)));
        let label = Config::default().labels(&format!("{SERVICE_LABEL}={name}"));
        let of_service = format!("EndpointSlices of {service}");
        let mut slices = pin!(self.follow::<EndpointSlice>(1, of_service, label));
        let mut seen = Seen::default();
        loop {
            let needs_slices = seen.needs_slices();
            // Neither stream ends.
            tokio::select! {
                Some(event) = services.next() => seen.service.apply(event),
                Some(event) = slices.next(), if needs_slices => seen.slices.apply(event),
                else => return,
            }
            if !seen.needs_slices() {
                self.trouble.change(|known| known.requests[1] = None);
            }
            match seen.servers() {
                None => {}
                Some(Ok(servers)) => {
                    self.trouble.change(|known| known.objects = None);
                    self.publish(servers).await;
                }
                Some(Err(lack)) => {
                    let fix = "fix it, or give --service, --namespace or --server";
                    let text = format!("{service}: {lack}; {fix}");
                    self.trouble.change(|known| known.objects = Some(text));
                }
            }
        }
    }

    /// `requests` is the index of its failures.
    fn follow<K>(&self, requests: usize, what: String, config: Config) -> impl Stream<Item = Event<K>> + Send
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + DeserializeOwned
            + Debug
            + Send
            + 'static,
    {
        // After an outage the whole fleet asks at the same time. The API server may answer from its cache, in one page.
        let config = Config { page_size: None, ..config.any_semantic() };
        let report = move |signal: Signal<'_>| match signal {
            Signal::Failed { reason, passing } => {
                tracing::debug!(what, reason, "failed to ask the API server, retrying");
                if !passing {
                    self.trouble.change(|known| known.requests[requests] = Some(format!("{what}: {reason}")));
                }
            }
            Signal::Works => self.trouble.change(|known| known.requests[requests] = None),
            Signal::Slow { .. } => {}
        };
        follow(Api::<K>::default_namespaced(self.api.clone()), config, FollowSettings::AGENT, report)
    }

    async fn publish(&self, servers: Vec<HostPort>) {
        if **self.publish.borrow() == servers {
            return;
        }
        tracing::info!(servers = list(&servers), "found the servers through the API server");
        self.publish.send_replace(Arc::new(servers.clone()));
        self.file.save(servers).await;
    }
}
