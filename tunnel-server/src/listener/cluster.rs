//! The listeners' questions to the cluster, while a client waits. `crate::kube` answers them; no listener imports it.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use rand::seq::SliceRandom as _;
use tokio::time::Instant;
use tunnel_runtime::answer_cache::AnswerCache;

/// Time for which endpoints are used without asking again.
const FRESH: Duration = Duration::from_secs(5);
/// The same for a Service without endpoints, so that clients that wait for one do not wait longer.
const FRESH_NONE: Duration = Duration::from_secs(1);
/// Time for which the API server's last answer is used while it does not answer.
const KEPT: Duration = Duration::from_secs(600);
/// Maximum number of endpoints kept of one Service; more would not spread the load noticeably better.
const MOST: usize = 64;

/// Errors say that the cluster does not answer, and why.
#[tonic::async_trait]
pub trait Cluster: Send + Sync {
    /// Returns the node of a pod: an empty name if it is not scheduled yet, `None` if there is no such pod.
    async fn node_of_pod(&self, namespace: &str, name: &str) -> Result<Option<String>, String>;

    /// Returns the ready endpoints of a Service's TCP port.
    async fn endpoints(&self, name: &str, namespace: &str, port: u16) -> Result<Listed, String>;

    /// Returns the ready endpoints of a Service's TCP port of this name, none if there are none.
    async fn endpoints_by_name(
        &self,
        name: &str,
        namespace: &str,
        port: &str,
    ) -> Result<Vec<Endpoint>, String>;

    /// Returns the Service that has this address.
    async fn service_at(&self, address: IpAddr) -> Result<Option<Arc<ClusterService>>, String>;
}

/// The ready endpoints of a Service's port, or the reason why there are none.
pub type Listed = Result<Vec<Endpoint>, String>;

/// Address of one endpoint of a Service's port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub address: SocketAddr,
    /// Node of the endpoint, if it has one.
    pub node: Option<Box<str>>,
}

/// A Service with a cluster IP.
#[derive(Debug, PartialEq, Eq)]
pub struct ClusterService {
    pub namespace: Box<str>,
    pub name: Box<str>,
    pub addresses: Box<[IpAddr]>,
    /// TCP ports by number, each with its name in EndpointSlices.
    pub ports: Box<[(u16, Box<str>)]>,
}

impl ClusterService {
    /// Returns the name of a TCP port.
    pub fn port_name(&self, port: u16) -> Option<&str> {
        self.ports.iter().find(|(number, _)| *number == port).map(|(_, name)| &**name)
    }
}

/// The Services of a cluster. Only the fields that identify a connection's destination are kept, so that those of the
/// largest cluster fit in a few megabytes.
#[derive(Debug, Default)]
pub struct ClusterIps {
    /// True once a complete list was read.
    pub known: bool,
    by_address: HashMap<IpAddr, Arc<ClusterService>>,
    by_name: HashMap<(Box<str>, Box<str>), Arc<ClusterService>>,
}

impl ClusterIps {
    /// Those of a complete list, which are added one by one.
    pub fn of_list() -> Self {
        Self { known: true, ..Self::default() }
    }

    pub fn get(&self, address: IpAddr) -> Option<Arc<ClusterService>> {
        self.by_address.get(&address.to_canonical()).cloned()
    }

    /// Adds a Service. Its previous state has been removed.
    pub fn put(&mut self, service: ClusterService) {
        let service = Arc::new(service);
        for address in &service.addresses {
            self.by_address.insert(*address, service.clone());
        }
        self.by_name.insert((service.namespace.clone(), service.name.clone()), service);
    }

    pub fn remove(&mut self, namespace: &str, name: &str) {
        let Some(gone) = self.by_name.remove(&(Box::from(namespace), Box::from(name))) else { return };
        for address in &gone.addresses {
            // Another Service may have the address by now.
            if self.by_address.get(address).is_some_and(|now| Arc::ptr_eq(now, &gone)) {
                self.by_address.remove(address);
            }
        }
    }
}

/// The endpoints of Services, as the API server last listed them.
#[derive(Default)]
pub(crate) struct EndpointCache(AnswerCache<String, CachedEndpoints>);

/// A Service's endpoints, or the reason why there are none.
#[derive(Clone)]
struct CachedEndpoints {
    endpoints: Result<Arc<[Endpoint]>, String>,
    listed: Instant,
    /// Time at which the API server was asked last.
    asked: Instant,
    /// True if none of them could be reached.
    doubted: bool,
}

impl CachedEndpoints {
    fn is_fresh(&self) -> bool {
        let found = self.endpoints.as_ref().is_ok_and(|endpoints| !endpoints.is_empty());
        !self.doubted && self.asked.elapsed() < if found { FRESH } else { FRESH_NONE }
    }
}

impl EndpointCache {
    /// Returns the endpoints of a Service's port, preferring those that are `reached`. Uses `list` to ask for them, and the
    /// cached answer if that fails.
    ///
    /// # Errors
    /// There are none, or the API server does not answer and there is no cached answer.
    pub(crate) async fn get_or_list(
        &self,
        key: String,
        list: impl Future<Output = Result<Listed, String>>,
        reached: impl Fn(&Endpoint) -> bool,
    ) -> Result<Arc<[Endpoint]>, String> {
        let before = self.0.get(&key);
        match &before {
            Some(known) if known.is_fresh() => return known.endpoints.clone(),
            // Others do not wait for the answer, and one asks at a time while the API server does not answer.
            Some(known) if !known.doubted => {
                self.put(key.clone(), CachedEndpoints { asked: Instant::now(), ..known.clone() });
            }
            _ => {}
        }
        let endpoints = match (list.await, before) {
            (Ok(listed), _) => listed.map(|endpoints| some_of(endpoints, reached)),
            (Err(reason), None) => return Err(reason),
            (Err(reason), Some(before)) => {
                tracing::debug!(service = %key, reason, "failed to list the endpoints of a Service, using the cached ones");
                return before.endpoints;
            }
        };
        let now = Instant::now();
        let known = CachedEndpoints { endpoints: endpoints.clone(), listed: now, asked: now, doubted: false };
        self.put(key, known);
        endpoints
    }

    /// Marks the endpoints as unreachable, so that they are asked for again, unless they have been meanwhile.
    pub(crate) fn doubt(&self, key: String, endpoints: &Arc<[Endpoint]>) {
        let Some(known) = self.0.get(&key) else { return };
        if known.endpoints.as_ref().is_ok_and(|known| Arc::ptr_eq(known, endpoints)) {
            self.put(key, CachedEndpoints { doubted: true, ..known });
        }
    }

    fn put(&self, key: String, known: CachedEndpoints) {
        let lasts = KEPT.saturating_sub(known.listed.elapsed());
        self.0.put(key, known, lasts);
    }
}

/// Selects the endpoints to keep: any [`MOST`] that are reached, or one that an error can name if none is.
fn some_of(endpoints: Vec<Endpoint>, reached: impl Fn(&Endpoint) -> bool) -> Arc<[Endpoint]> {
    let (mut some, mut others): (Vec<_>, Vec<_>) = endpoints.into_iter().partition(reached);
    if some.is_empty() {
        others.truncate(1);
        return others.into();
    }
    some.shuffle(&mut rand::rng());
    some.truncate(MOST);
    some.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(address: &str) -> Endpoint {
        Endpoint { address: address.parse().unwrap(), node: None }
    }

    #[test]
    fn of_many_endpoints_some_that_are_reached_are_remembered() {
        let many = (0..5000).map(|n| endpoint(&format!("10.72.{}.{}:9443", n / 250, n % 250))).collect();
        let some = some_of(many, |endpoint| endpoint.address.to_string().starts_with("10.72.7."));
        assert_eq!(some.len(), MOST);
        assert!(some.iter().all(|endpoint| endpoint.address.to_string().starts_with("10.72.7.")));
    }

    #[test]
    fn an_endpoint_out_of_reach_is_named() {
        let all = vec![endpoint("10.0.0.7:9443"), endpoint("10.0.0.8:9443")];
        assert_eq!(*some_of(all, |_| false), [endpoint("10.0.0.7:9443")]);
    }

    /// Asks twice, this much later the second time, and returns the second answer. `list` answers them in turn.
    async fn twice(
        first: Result<Listed, String>,
        later: Duration,
        second: Result<Listed, String>,
    ) -> Result<Arc<[Endpoint]>, String> {
        let cache = EndpointCache::default();
        let _ = cache.get_or_list("hook.shop:443".to_owned(), async { first }, |_| true).await;
        tokio::time::advance(later).await;
        cache.get_or_list("hook.shop:443".to_owned(), async { second }, |_| true).await
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_is_fresh_for_a_while_and_less_long_without_endpoints() {
        let [old, new] = ["10.0.0.7:9443", "10.0.0.8:9443"].map(|address| [endpoint(address)]);
        let some = |endpoints: &[Endpoint]| Ok(Ok(endpoints.to_vec()));
        let almost = |time: Duration| time - Duration::from_millis(1);
        assert_eq!(*twice(some(&old), almost(FRESH), some(&new)).await.unwrap(), old);
        assert_eq!(*twice(some(&old), FRESH, some(&new)).await.unwrap(), new);
        let nones: [Listed; 2] = [Ok(Vec::new()), Err("it has none".to_owned())];
        for none in nones {
            let answer = twice(Ok(none.clone()), almost(FRESH_NONE), some(&new)).await;
            assert_eq!(answer.map(|endpoints| endpoints.to_vec()), none);
            assert_eq!(*twice(Ok(none), FRESH_NONE, some(&new)).await.unwrap(), new);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_answer_is_used_for_a_while_without_another() {
        let old = [endpoint("10.0.0.7:9443")];
        let some = || Ok(Ok(old.to_vec()));
        let silent = || Err("no answer within 4 s".to_owned());
        let almost = KEPT - Duration::from_millis(1);
        assert_eq!(*twice(some(), almost, silent()).await.unwrap(), old);
        assert_eq!(twice(some(), KEPT, silent()).await.unwrap_err(), "no answer within 4 s");
    }

    #[tokio::test(start_paused = true)]
    async fn one_waits_for_a_silent_api_server_at_a_time() {
        let (cache, key) = (EndpointCache::default(), || "hook.shop:443".to_owned());
        let old = [endpoint("10.0.0.7:9443")];
        cache.get_or_list(key(), async { Ok(Ok(old.to_vec())) }, |_| true).await.unwrap();
        tokio::time::advance(FRESH).await;
        let silent = async {
            tokio::time::sleep(Duration::from_secs(4)).await;
            Err("no answer within 4 s".to_owned())
        };
        let asks = async { cache.get_or_list(key(), silent, |_| true).await.unwrap() };
        let asked = || async { panic!("two ask at a time") };
        let others = async { cache.get_or_list(key(), asked(), |_| true).await.unwrap() };
        let (one, other) = tokio::join!(asks, others);
        assert_eq!((&*one, &*other), (&old[..], &old[..]));
        assert_eq!(*cache.get_or_list(key(), asked(), |_| true).await.unwrap(), old);
    }

    #[tokio::test(start_paused = true)]
    async fn unreachable_endpoints_are_asked_for_again() {
        let (old, new) = (endpoint("10.0.0.7:9443"), endpoint("10.0.0.8:9443"));
        let (cache, key) = (EndpointCache::default(), || "hook.shop:443".to_owned());
        let list = async |endpoint: &Endpoint| {
            let listed = vec![endpoint.clone()];
            cache.get_or_list(key(), async { Ok(Ok(listed)) }, |_| true).await.unwrap()
        };
        let before = list(&old).await;
        cache.doubt(key(), &before);
        assert_eq!(list(&new).await.first(), Some(&new));
        // A dial that fails later says nothing of those listed since.
        cache.doubt(key(), &before);
        assert_eq!(*list(&old).await, [new]);
    }
}
