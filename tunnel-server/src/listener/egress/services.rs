//! Services: a cluster IP stands for its endpoints, some of which are on edge nodes. kube-proxy on this server's host
//! would lead to them too, but not through a tunnel.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::seq::SliceRandom as _;
use tokio::sync::watch;
use tunnel_link::outcome::Outcome;

use super::destination::not_allowed;
use crate::caller::answer_cache::AnswerCache;
use crate::listener::cluster::{Cluster, ClusterIps, ClusterService, Endpoint};
use crate::listener::context::Failed;

/// Time for which endpoints are used without asking again.
const FRESH: Duration = Duration::from_secs(5);
/// The same for a Service without endpoints, so that clients that wait for one do not wait longer.
const FRESH_NONE: Duration = Duration::from_secs(1);
/// Time for which the API server's last answer is used while it does not answer.
const KEPT: Duration = Duration::from_secs(600);
/// Maximum number of endpoints kept of one Service; more would not spread the load noticeably better.
const MOST: usize = 64;

/// A Service's port: its name, address and port number.
type Key = (Box<str>, SocketAddr);

/// The Services of the cluster, and their endpoints.
pub(crate) struct ClusterServices {
    services: watch::Receiver<ClusterIps>,
    cluster: Arc<dyn Cluster>,
    answers: AnswerCache<Key, CachedEndpoints>,
}

/// A Service's endpoints, as the API server last listed them.
#[derive(Clone)]
struct CachedEndpoints {
    endpoints: Arc<[Endpoint]>,
    /// Time at which it listed them. `None` if none of the endpoints could be reached, so that they are asked for again.
    asked: Option<Instant>,
}

impl CachedEndpoints {
    fn is_fresh(&self) -> bool {
        let fresh = if self.endpoints.is_empty() { FRESH_NONE } else { FRESH };
        self.asked.is_some_and(|asked| asked.elapsed() < fresh)
    }
}

/// A Service that a caller wants to reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RequestedService {
    /// `NAME.NAMESPACE`.
    pub(super) name: Box<str>,
    address: SocketAddr,
}

impl std::fmt::Display for RequestedService {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Service {} ({})", self.name, self.address)
    }
}

impl RequestedService {
    fn failed(&self, outcome: Outcome, why: &str) -> Failed {
        Failed { outcome, reason: format!("{self}: {why}") }
    }

    pub(super) fn no_endpoint(&self) -> Failed {
        self.failed(Outcome::Refused, "it has no ready endpoint")
    }

    pub(super) fn out_of_reach(&self, endpoint: SocketAddr) -> Failed {
        self.failed(Outcome::Denied, &not_allowed(format_args!("its endpoint {endpoint}")))
    }

    pub(super) fn at(&self, endpoint: SocketAddr, failed: &Failed) -> Failed {
        self.failed(failed.outcome, &format!("endpoint {endpoint}: {}", failed.reason))
    }
}

impl ClusterServices {
    pub(crate) fn new(services: watch::Receiver<ClusterIps>, cluster: Arc<dyn Cluster>) -> Self {
        Self { services, cluster, answers: AnswerCache::default() }
    }

    /// Returns the Service with this address, and its ready endpoints of the same address family, preferring those that
    /// are `reached`. Returns `None` if the address is not a Service's. `asks`: the API server may be asked about an
    /// unknown address.
    pub(super) async fn find(
        &self,
        address: SocketAddr,
        asks: bool,
        reached: impl Fn(&Endpoint) -> bool,
    ) -> Result<Option<(RequestedService, Arc<[Endpoint]>)>, Failed> {
        let followed = self.services.borrow().get(address.ip());
        let service = match followed {
            None if asks => self.ask(address.ip()).await?,
            followed => followed,
        };
        let Some(service) = service else { return Ok(None) };
        let name = format!("{}.{}", service.name, service.namespace);
        let wanted = RequestedService { name: name.into(), address };
        let Some(port) = service.port_name(address.port()) else {
            return Err(wanted.failed(Outcome::Denied, "it has no such TCP port"));
        };
        let key = (wanted.name.clone(), address);
        let before = self.answers.get(&key);
        if let Some(answer) = before.as_ref().filter(|answer| answer.is_fresh()) {
            return Ok(Some((wanted, answer.endpoints.clone())));
        }
        let endpoints = match self.cluster.endpoints_by_name(&service.name, &service.namespace, port).await {
            Ok(endpoints) => some_of(endpoints, address.ip(), reached),
            Err(reason) => {
                let Some(before) = before else { return Err(wanted.failed(Outcome::TimedOut, &reason)) };
                tracing::debug!(service = %wanted.name, reason, "failed to list the endpoints of a Service, using the cached ones");
                return Ok(Some((wanted, before.endpoints)));
            }
        };
        let answer = CachedEndpoints { endpoints: endpoints.clone(), asked: Some(Instant::now()) };
        self.answers.put(key, answer, KEPT);
        Ok(Some((wanted, endpoints)))
    }

    /// Asks for the Service that has an address which was not a Service's in the last update from the API server: that
    /// may be old, for example just after the API server has restarted.
    async fn ask(&self, address: IpAddr) -> Result<Option<Arc<ClusterService>>, Failed> {
        match self.cluster.service_at(address).await {
            Ok(found) => Ok(found),
            Err(error) if self.services.borrow().known => {
                tracing::debug!(%address, error, "failed to look up the Service of an address, assuming none");
                Ok(None)
            }
            Err(error) => {
                let reason = format!("failed to look up the Service of {address}: {error}");
                Err(Failed { outcome: Outcome::TimedOut, reason })
            }
        }
    }

    /// Marks the endpoints as unreachable, so that they are asked for again.
    pub(super) fn doubt(&self, wanted: &RequestedService, endpoints: Arc<[Endpoint]>) {
        let answer = CachedEndpoints { endpoints, asked: None };
        self.answers.put((wanted.name.clone(), wanted.address), answer, KEPT);
    }
}

/// Selects the endpoints to keep: any [`MOST`] that are reached, or one that an error can name if none is.
fn some_of(endpoints: Vec<Endpoint>, family: IpAddr, reached: impl Fn(&Endpoint) -> bool) -> Arc<[Endpoint]> {
    let same = endpoints.into_iter().filter(|endpoint| endpoint.address.is_ipv4() == family.is_ipv4());
    let (mut some, mut others): (Vec<_>, Vec<_>) = same.partition(reached);
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
        let family = "10.96.0.9".parse().unwrap();
        let some = some_of(many, family, |endpoint| endpoint.address.to_string().starts_with("10.72.7."));
        assert_eq!(some.len(), MOST);
        assert!(some.iter().all(|endpoint| endpoint.address.to_string().starts_with("10.72.7.")));
    }

    #[test]
    fn an_endpoint_out_of_reach_is_named_and_none_of_the_other_family_is() {
        let all = vec![endpoint("[fd00::7]:9443"), endpoint("10.0.0.7:9443"), endpoint("10.0.0.8:9443")];
        let some = |family: &str| some_of(all.clone(), family.parse().unwrap(), |_| false);
        assert_eq!(*some("10.96.0.9"), [endpoint("10.0.0.7:9443")]);
        assert_eq!(*some("fd00:96::9"), [endpoint("[fd00::7]:9443")]);
        assert_eq!(*some_of(Vec::new(), "10.96.0.9".parse().unwrap(), |_| true), []);
    }

    #[test]
    fn an_answer_is_fresh_for_a_while_and_less_long_without_endpoints() {
        let answer = |endpoints: &[Endpoint], asked| CachedEndpoints { endpoints: endpoints.into(), asked };
        let ago = |time| Instant::now().checked_sub(time);
        let some = [endpoint("10.0.0.7:9443")];
        assert!(answer(&some, ago(FRESH_NONE)).is_fresh());
        assert!(!answer(&some, ago(FRESH)).is_fresh());
        assert!(!answer(&[], ago(FRESH_NONE)).is_fresh());
        assert!(!answer(&some, None).is_fresh());
    }
}
