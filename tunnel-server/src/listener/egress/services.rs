//! Services: a cluster IP stands for its endpoints, some of which are on edge nodes. kube-proxy on this server's host
//! would lead to them too, but not through a tunnel.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use tokio::sync::watch;
use tunnel_link::outcome::Outcome;

use super::destination::not_allowed;
use crate::listener::cluster::{Cluster, ClusterIps, ClusterService, Endpoint, EndpointCache};
use crate::listener::context::Failed;

/// The Services of the cluster, and their endpoints.
pub(crate) struct ClusterServices {
    services: watch::Receiver<ClusterIps>,
    cluster: Arc<dyn Cluster>,
    endpoints: EndpointCache,
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
        Self { services, cluster, endpoints: EndpointCache::default() }
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
        let list = async {
            let listed = self.cluster.endpoints_by_name(&service.name, &service.namespace, port).await;
            listed.map(|endpoints| Ok(of_family(endpoints, address)))
        };
        match self.endpoints.get_or_list(wanted.to_string(), list, reached).await {
            Ok(endpoints) => Ok(Some((wanted, endpoints))),
            Err(reason) => Err(wanted.failed(Outcome::TimedOut, &reason)),
        }
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
    pub(super) fn doubt(&self, wanted: &RequestedService, endpoints: &Arc<[Endpoint]>) {
        self.endpoints.doubt(wanted.to_string(), endpoints);
    }
}

/// Returns the endpoints of the same address family.
fn of_family(mut endpoints: Vec<Endpoint>, address: SocketAddr) -> Vec<Endpoint> {
    endpoints.retain(|endpoint| endpoint.address.is_ipv4() == address.is_ipv4());
    endpoints
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_leads_to_endpoints_of_its_family() {
        let endpoint = |address: &str| Endpoint { address: address.parse().unwrap(), node: None };
        let all = [endpoint("[fd00::7]:9443"), endpoint("10.0.0.7:9443")];
        for (address, wanted) in [("[fd00:96::9]:443", &all[..1]), ("10.96.0.9:443", &all[1..])] {
            assert_eq!(of_family(all.to_vec(), address.parse().unwrap()), wanted, "{address}");
        }
    }
}
