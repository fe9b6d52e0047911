//! Looks up what a client waits for: a pod's node, a Service, its endpoints.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Api;
use kube::api::ListParams;
use tunnel_kube::request;

use super::read::SERVICE_NAME;
use super::read::cluster_ips::PartialService;
use crate::listener::{Cluster, ClusterService, Endpoint, Listed};

/// Time limit for the API server.
const DEADLINE: Duration = Duration::from_secs(4);

/// Asks the API server.
pub struct Lookups {
    client: kube::Client,
}

impl Lookups {
    pub fn new(client: kube::Client) -> Self {
        Self { client }
    }
}

#[tonic::async_trait]
impl Cluster for Lookups {
    async fn node_of_pod(&self, namespace: &str, name: &str) -> Result<Option<String>, String> {
        let api = Api::<Pod>::namespaced(self.client.clone(), namespace);
        let pod = request(DEADLINE, "reading Pod", name, api.get_opt(name)).await;
        let pod = pod.map_err(|error| error.to_string())?;
        Ok(pod.map(|pod| pod.spec.and_then(|spec| spec.node_name).unwrap_or_default()))
    }

    async fn endpoints(&self, name: &str, namespace: &str, port: u16) -> Result<Listed, String> {
        let services = Api::<Service>::namespaced(self.client.clone(), namespace);
        let full_name = format!("{name}.{namespace}");
        let service = request(DEADLINE, "reading Service", &full_name, services.get_opt(name)).await;
        let service = service.map_err(|error| error.to_string())?;
        let spec = service.and_then(|service| service.spec).unwrap_or_default();
        let ports = spec.ports.unwrap_or_default();
        let mut tcp = ports.iter().filter(|known| is_tcp(known.protocol.as_deref()));
        let Some(of_service) = tcp.find(|known| known.port == i32::from(port)) else {
            return Ok(Err(format!("there is no Service {full_name} with a TCP port {port}")));
        };
        let wanted = of_service.name.as_deref().unwrap_or_default();
        let found = self.endpoints_by_name(name, namespace, wanted).await?;
        let none = || format!("the Service {full_name} has no ready endpoint");
        Ok(if found.is_empty() { Err(none()) } else { Ok(found) })
    }

    async fn endpoints_by_name(
        &self,
        name: &str,
        namespace: &str,
        port: &str,
    ) -> Result<Vec<Endpoint>, String> {
        let slices = Api::<EndpointSlice>::namespaced(self.client.clone(), namespace);
        let of_this = ListParams::default().labels(&format!("{SERVICE_NAME}={name}"));
        let full_name = format!("{name}.{namespace}");
        let slices = request(DEADLINE, "listing EndpointSlices of", &full_name, slices.list(&of_this)).await;
        let slices = slices.map_err(|error| error.to_string())?;
        let (mut found, mut ending) = (Vec::new(), Vec::new());
        for slice in slices {
            let of_slice = slice.ports.unwrap_or_default().into_iter().find(|known| {
                known.name.as_deref().unwrap_or_default() == port && is_tcp(known.protocol.as_deref())
            });
            let Some(port) = of_slice.and_then(|known| u16::try_from(known.port?).ok()) else { continue };
            for endpoint in slice.endpoints {
                let conditions = endpoint.conditions.unwrap_or_default();
                // An unknown readiness counts as ready (EndpointConditions).
                let ready = conditions.ready != Some(false);
                let ends = conditions.terminating == Some(true) && conditions.serving == Some(true);
                let found = match (ready, ends) {
                    (true, _) => &mut found,
                    (false, true) => &mut ending,
                    (false, false) => continue,
                };
                let node: Option<Box<str>> = endpoint.node_name.map(Into::into);
                let addresses = endpoint.addresses.iter().filter_map(|address| address.parse().ok());
                found.extend(
                    addresses.map(|address| Endpoint {
                        address: SocketAddr::new(address, port),
                        node: node.clone(),
                    }),
                );
            }
        }
        // As kube-proxy does (KEP-1669): with a single pod, one that ends serves until the next one is ready.
        Ok(if found.is_empty() { ending } else { found })
    }

    /// Finds a Service by its first cluster IP. Needs Kubernetes 1.31.
    async fn service_at(&self, address: IpAddr) -> Result<Option<Arc<ClusterService>>, String> {
        let api = Api::<PartialService>::all(self.client.clone());
        let address = address.to_canonical();
        let of_this = ListParams::default().fields(&format!("spec.clusterIP={address}"));
        let object = address.to_string();
        let found = request(DEADLINE, "finding the Service at", &object, api.list(&of_this)).await;
        let found = found.map_err(|error| error.to_string())?;
        let mut found = found.items.iter().filter_map(PartialService::cluster_service);
        Ok(found.find(|service| service.addresses.contains(&address)).map(Arc::new))
    }
}

fn is_tcp(protocol: Option<&str>) -> bool {
    protocol.is_none_or(|protocol| protocol == "TCP")
}
