//! Follows the servers' addresses. Whatever happens to the API server or to the objects there, the last addresses stay.

use std::collections::BTreeMap;
use std::path::Path;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Api;
use kube::ResourceExt as _;
use kube::runtime::watcher::{self, Event};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;
use tunnel_core::config::HostPort;

use super::ApiServer;
use super::client::{chain, reason};
use super::remembered::Remembered;
use super::servers::{Found, of_service, of_slices};
use crate::enroll::Backoff;

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
struct Trouble(Arc<Mutex<Option<String>>>);

impl Trouble {
    /// The same text is logged once.
    fn set(&self, text: String) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.as_ref() != Some(&text) {
            tracing::warn!(reason = text, "the servers cannot be looked up; the last known ones stay");
            *known = Some(text);
        }
    }

    fn clear(&self) {
        if self.0.lock().unwrap_or_else(PoisonError::into_inner).take().is_some() {
            tracing::info!("the servers can be looked up again");
        }
    }
}

impl Discovery {
    /// Begins with the servers of the state directory's file.
    pub fn start(api: Arc<ApiServer>, state_dir: &Path) -> Self {
        let remembered = Remembered::new(state_dir);
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
        self.trouble.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn list(servers: &[HostPort]) -> String {
    servers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

struct Follower {
    api: Arc<ApiServer>,
    remembered: Remembered,
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
        let mut backoff = Backoff::default();
        loop {
            let failure = self.follow(&mut backoff).await;
            self.api.failed();
            self.trouble.set(failure);
            tokio::time::sleep(backoff.next_delay()).await;
        }
    }

    /// Until something fails; then everything is asked anew, with what the configuration says then.
    async fn follow(&self, backoff: &mut Backoff) -> String {
        let client = match self.api.client().await {
            Ok(client) => client,
            Err(error) => return error.to_string(),
        };
        let (namespace, name) = (self.api.namespace(), self.api.service());
        // Lists may come from the API server's cache: a fleet asks when it comes back.
        let config = || watcher::Config::default().any_semantic();
        let one = config().fields(&format!("metadata.name={name}"));
        let mut services = pin!(watcher::watcher(Api::<Service>::namespaced(client.clone(), namespace), one));
        let of_it = config().labels(&format!("{SERVICE_LABEL}={name}"));
        let mut slices = pin!(watcher::watcher(Api::<EndpointSlice>::namespaced(client, namespace), of_it));
        let mut seen = Seen::default();
        loop {
            let failure = tokio::select! {
                event = services.next() => match event {
                    Some(Ok(event)) => {
                        seen.service(event);
                        None
                    }
                    Some(Err(error)) => Some(told("Service", namespace, name, &error)),
                    None => Some("the watch ended".to_owned()),
                },
                event = slices.next(), if seen.needs_slices() => match event {
                    Some(Ok(event)) => {
                        seen.slice(event);
                        None
                    }
                    Some(Err(error)) => Some(told("EndpointSlices of Service", namespace, name, &error)),
                    None => Some("the watch ended".to_owned()),
                },
            };
            if let Some(failure) = failure {
                return failure;
            }
            match seen.servers() {
                None => {}
                Some(Ok(servers)) => {
                    *backoff = Backoff::default();
                    self.trouble.clear();
                    self.publish(servers).await;
                }
                Some(Err(lack)) => {
                    *backoff = Backoff::default();
                    let mend = "mend it, or give --service, --namespace or --server";
                    self.trouble.set(format!("Service {namespace}/{name}: {lack}; {mend}"));
                }
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

fn told(what: &str, namespace: &str, name: &str, error: &watcher::Error) -> String {
    let text = match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => reason(error),
        other => chain(other),
    };
    format!("{what} {namespace}/{name}: {text}")
}
