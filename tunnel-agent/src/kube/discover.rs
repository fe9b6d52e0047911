//! Follows the servers' addresses. Whatever happens to the API server or to the objects there, the last addresses stay.

use std::collections::BTreeMap;
use std::path::Path;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::StreamExt;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Api;
use kube::runtime::watcher::Event;
use kube::{Resource, ResourceExt as _};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;
use tunnel_core::config::HostPort;

use super::ApiServer;
use super::remembered::Remembered;
use super::servers::{Found, of_service, of_slices};
use super::watch::{self as objects, News, Which};

/// The label by which EndpointSlices name their Service.
const SERVICE_LABEL: &str = "kubernetes.io/service-name";

/// Finds the servers, until it is dropped.
pub struct Discovery {
    servers: watch::Receiver<Arc<Vec<HostPort>>>,
    trouble: Trouble,
    _task: AbortOnDropHandle<()>,
}

/// Why what is known may be old.
#[derive(Clone, Default)]
struct Trouble(Arc<Mutex<Troubles>>);

#[derive(Default)]
struct Troubles {
    /// Of the requests for the Service, and for its EndpointSlices.
    requests: [Option<String>; 2],
    /// Of what the objects say.
    objects: Option<String>,
    /// What was said last.
    told: Option<String>,
}

impl Troubles {
    fn now(&self) -> Option<&String> {
        self.requests.iter().flatten().next().or(self.objects.as_ref())
    }
}

impl Trouble {
    fn known(&self) -> MutexGuard<'_, Troubles> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same text is logged once.
    fn change(&self, change: impl FnOnce(&mut Troubles)) {
        let mut known = self.known();
        change(&mut known);
        let now = known.now().cloned();
        if now == known.told {
            return;
        }
        match &now {
            Some(reason) => {
                tracing::warn!(reason, "the servers cannot be looked up; the last known ones stay");
            }
            None => tracing::info!("the servers can be looked up again"),
        }
        known.told = now;
    }
}

impl Discovery {
    /// Begins with the servers of the state directory's file.
    pub fn start(api: Arc<ApiServer>, state_dir: &Path) -> Self {
        let remembered = Remembered::new(state_dir, "servers");
        let known = remembered.read();
        if !known.is_empty() {
            tracing::info!(servers = list(&known), "servers as of the last run");
        }
        let (publish, servers) = watch::channel(Arc::new(known));
        let trouble = Trouble::default();
        let task = tokio::spawn(Follower { api, remembered, publish, trouble: trouble.clone() }.run());
        Self { servers, trouble, _task: AbortOnDropHandle::new(task) }
    }

    /// The servers, which are none until the API server has told of some.
    pub fn servers(&self) -> watch::Receiver<Arc<Vec<HostPort>>> {
        self.servers.clone()
    }

    /// Why they may be old.
    pub fn trouble(&self) -> Option<String> {
        self.trouble.known().now().cloned()
    }
}

fn list(servers: &[HostPort]) -> String {
    servers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

struct Follower {
    api: Arc<ApiServer>,
    remembered: Remembered<HostPort>,
    publish: watch::Sender<Arc<Vec<HostPort>>>,
    trouble: Trouble,
}

/// What the API server has told. A list counts once it is whole.
#[derive(Default)]
struct Seen {
    /// None: not known yet.
    service: Option<Option<Service>>,
    listed_service: Option<Service>,
    /// None: not known yet.
    slices: Option<BTreeMap<String, EndpointSlice>>,
    listed_slices: BTreeMap<String, EndpointSlice>,
}

impl Seen {
    fn service(&mut self, event: Event<Service>) {
        match event {
            Event::Init => self.listed_service = None,
            Event::InitApply(service) => self.listed_service = Some(service),
            Event::InitDone => self.service = Some(self.listed_service.take()),
            Event::Apply(service) => self.service = Some(Some(service)),
            Event::Delete(_) => self.service = Some(None),
        }
    }

    fn slice(&mut self, event: Event<EndpointSlice>) {
        match event {
            Event::Init => self.listed_slices.clear(),
            Event::InitApply(slice) => drop(self.listed_slices.insert(slice.name_any(), slice)),
            Event::InitDone => self.slices = Some(std::mem::take(&mut self.listed_slices)),
            Event::Apply(slice) => {
                self.slices.get_or_insert_default().insert(slice.name_any(), slice);
            }
            Event::Delete(slice) => {
                self.slices.get_or_insert_default().remove(&slice.name_any());
            }
        }
    }

    /// The servers; None while the answer is not whole.
    fn servers(&self) -> Option<Result<Vec<HostPort>, String>> {
        let Some(service) = self.service.as_ref()? else { return Some(Err("there is none".to_owned())) };
        Some(match of_service(service) {
            Ok(Found::Servers(servers)) => Ok(servers),
            Ok(Found::Nodes(port)) => match of_slices(self.slices.as_ref()?.values(), port) {
                servers if servers.is_empty() => {
                    Err("it has no ready endpoint: is a tunnel-server running?".to_owned())
                }
                servers => Ok(servers),
            },
            Err(error) => Err(error.to_string()),
        })
    }

    /// EndpointSlices are asked for only when the Service leads to them.
    fn needs_slices(&self) -> bool {
        let service = self.service.as_ref().and_then(Option::as_ref);
        service.is_some_and(|service| matches!(of_service(service), Ok(Found::Nodes(_))))
    }
}

impl Follower {
    async fn run(self) {
        let (namespace, name) = (self.api.namespace(), self.api.service());
        let one = Which { fields: Some(format!("metadata.name={name}")), labels: None };
        let mut services = pin!(objects::follow(|| self.objects::<Service>(), one));
        let of_it = Which { fields: None, labels: Some(format!("{SERVICE_LABEL}={name}")) };
        let mut slices = pin!(objects::follow(|| self.objects::<EndpointSlice>(), of_it));
        let mut seen = Seen::default();
        loop {
            let needs_slices = seen.needs_slices();
            // Neither ends.
            tokio::select! {
                Some(news) = services.next() => {
                    if let Some(event) = self.heard(0, &format!("Service {namespace}/{name}"), news) {
                        seen.service(event);
                    }
                }
                Some(news) = slices.next(), if needs_slices => {
                    let what = format!("EndpointSlices of Service {namespace}/{name}");
                    if let Some(event) = self.heard(1, &what, news) {
                        seen.slice(event);
                    }
                }
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
                    let mend = "mend it, or give --service, --namespace or --server";
                    let text = format!("Service {namespace}/{name}: {lack}; {mend}");
                    self.trouble.change(|known| known.objects = Some(text));
                }
            }
        }
    }

    async fn objects<K>(&self) -> Result<Api<K>, String>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        let client = self.api.client().await.map_err(|error| error.to_string())?;
        Ok(Api::namespaced(client, self.api.namespace()))
    }

    /// Takes in what there is to hear of the requests, and hands on what there is of the objects.
    fn heard<K>(&self, requests: usize, what: &str, news: News<K>) -> Option<Event<K>> {
        match news {
            News::Failed { reason, passing } => {
                self.api.failed();
                tracing::debug!(what, reason, "asking again");
                if !passing {
                    self.trouble.change(|known| known.requests[requests] = Some(format!("{what}: {reason}")));
                }
                None
            }
            News::Works => {
                self.trouble.change(|known| known.requests[requests] = None);
                None
            }
            News::Event(event) => {
                if matches!(event, Event::Apply(_) | Event::Delete(_)) {
                    self.trouble.change(|known| known.requests[requests] = None);
                }
                Some(event)
            }
        }
    }

    async fn publish(&self, servers: Vec<HostPort>) {
        if **self.publish.borrow() == servers {
            return;
        }
        tracing::info!(servers = list(&servers), "servers found through the API server");
        let servers = Arc::new(servers);
        self.publish.send_replace(Arc::clone(&servers));
        let remembered = self.remembered.clone();
        // An edge's disk may be slow to sync.
        let written = tokio::task::spawn_blocking(move || remembered.write(&servers)).await;
        if let Ok(Err(error)) = written {
            tracing::warn!(%error, "a restart while the API server is away will not know the servers");
        }
    }
}
