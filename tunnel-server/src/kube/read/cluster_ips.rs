//! Services by cluster IP, for the egress listener. Only the fields that identify a connection's destination are kept, so
//! that the Services of the largest cluster fit in a few megabytes. Endpoints are looked up on demand.

use std::collections::HashMap;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Service;
use kube::Api;
use kube::api::ListParams;
use kube::runtime::watcher::{Config, Event};
use serde::Deserialize;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tunnel_kube::{Health, RequestError, request};

use crate::kube::partial::Partial;

/// A Service with a cluster IP.
#[derive(Debug, PartialEq, Eq)]
pub struct ClusterService {
    pub namespace: Box<str>,
    pub name: Box<str>,
    addresses: Box<[IpAddr]>,
    /// TCP ports by number, each with its name in EndpointSlices.
    ports: Box<[(u16, Box<str>)]>,
}

impl ClusterService {
    /// Returns the name of a TCP port.
    pub fn port_name(&self, port: u16) -> Option<&str> {
        self.ports.iter().find(|(number, _)| *number == port).map(|(_, name)| &**name)
    }
}

/// The Services of a cluster.
#[derive(Debug, Default)]
pub struct ClusterIps {
    /// True once a complete list was read.
    pub known: bool,
    by_address: HashMap<IpAddr, Arc<ClusterService>>,
    by_name: HashMap<(Box<str>, Box<str>), Arc<ClusterService>>,
}

impl ClusterIps {
    pub fn get(&self, address: IpAddr) -> Option<Arc<ClusterService>> {
        self.by_address.get(&address.to_canonical()).cloned()
    }

    fn put(&mut self, service: &PartialService) {
        self.remove(service);
        let Some(service) = service.cluster_service().map(Arc::new) else { return };
        for address in &service.addresses {
            self.by_address.insert(*address, service.clone());
        }
        self.by_name.insert((service.namespace.clone(), service.name.clone()), service);
    }

    fn remove(&mut self, service: &PartialService) {
        let Some(gone) = self.by_name.remove(&service.key()) else { return };
        for address in &gone.addresses {
            // Another Service may have the address by now.
            if self.by_address.get(address).is_some_and(|now| Arc::ptr_eq(now, &gone)) {
                self.by_address.remove(address);
            }
        }
    }
}

/// Follows the Services of all namespaces until `stop`.
pub async fn run(
    client: kube::Client,
    health: Health,
    services: watch::Sender<ClusterIps>,
    stop: CancellationToken,
) {
    let api = Api::<PartialService>::all(client);
    let mut changes = pin!(health.follow(api, Config::default(), "services/cluster-ips"));
    let mut listed = ClusterIps::default();
    while let Some(Some(event)) = stop.run_until_cancelled(changes.next()).await {
        match event {
            Event::Init => listed = ClusterIps { known: true, ..ClusterIps::default() },
            Event::InitApply(service) => listed.put(&service),
            Event::InitDone => drop(services.send_replace(std::mem::take(&mut listed))),
            Event::Apply(service) => services.send_modify(|known| known.put(&service)),
            Event::Delete(service) => services.send_modify(|known| known.remove(&service)),
        }
    }
}

/// Asks the API server for the Service with this address as its first cluster IP. Needs Kubernetes 1.31.
pub async fn ask(
    client: &kube::Client,
    address: IpAddr,
    deadline: Duration,
) -> Result<Option<Arc<ClusterService>>, RequestError> {
    let api = Api::<PartialService>::all(client.clone());
    let of_this = ListParams::default().fields(&format!("spec.clusterIP={}", address.to_canonical()));
    let object = address.to_string();
    let found = request(deadline, "finding the Service at", &object, api.list(&of_this)).await?;
    let found = found.items.iter().find_map(PartialService::cluster_service);
    Ok(found.filter(|service| service.addresses.contains(&address.to_canonical())).map(Arc::new))
}

type PartialService = Partial<Service, Spec>;

#[derive(Clone, Debug, Deserialize)]
struct Spec {
    #[serde(rename = "clusterIP")]
    cluster_ip: Option<String>,
    #[serde(rename = "clusterIPs")]
    cluster_ips: Option<Vec<String>>,
    ports: Option<Vec<Port>>,
}

#[derive(Clone, Debug, Deserialize)]
struct Port {
    name: Option<String>,
    port: u16,
    protocol: Option<String>,
}

impl PartialService {
    fn key(&self) -> (Box<str>, Box<str>) {
        (self.namespace().into(), self.name().into())
    }

    /// Returns None for a headless or ExternalName Service.
    fn cluster_service(&self) -> Option<ClusterService> {
        let spec = self.spec.as_ref()?;
        let listed = spec.cluster_ips.iter().flatten();
        // "None" marks a headless Service.
        let parsed =
            spec.cluster_ip.iter().chain(listed).filter_map(|address| address.parse::<IpAddr>().ok());
        let mut addresses: Vec<_> = parsed.map(|address| address.to_canonical()).collect();
        addresses.sort_unstable();
        addresses.dedup();
        if addresses.is_empty() {
            return None;
        }
        let ports = spec.ports.iter().flatten();
        let tcp = ports.filter(|port| port.protocol.as_deref().is_none_or(|protocol| protocol == "TCP"));
        let ports = tcp.map(|port| (port.port, port.name.as_deref().unwrap_or_default().into())).collect();
        let (namespace, name) = self.key();
        Some(ClusterService { namespace, name, addresses: addresses.into(), ports })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn service(namespace: &str, name: &str, spec: &Value) -> PartialService {
        let metadata = json!({"namespace": namespace, "name": name, "labels": {"a": "b"}});
        serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
    }

    fn named(services: &ClusterIps, address: &str) -> Option<String> {
        services.get(address.parse().unwrap()).map(|found| format!("{}/{}", found.namespace, found.name))
    }

    #[test]
    fn a_service_is_found_by_each_of_its_addresses_until_it_is_gone() {
        let mut services = ClusterIps::default();
        let both = json!({"clusterIP": "10.96.0.9", "clusterIPs": ["10.96.0.9", "fd00:96::9"], "ports": [{"port": 443}]});
        let hook = service("shop", "hook", &both);
        services.put(&hook);
        for address in ["10.96.0.9", "fd00:96::9", "::ffff:10.96.0.9"] {
            assert_eq!(named(&services, address).as_deref(), Some("shop/hook"), "{address}");
        }
        assert_eq!(named(&services, "10.96.0.1"), None);
        // A Service of the same name in another namespace.
        services.put(&service("bank", "hook", &json!({"clusterIP": "10.96.0.8"})));
        services.put(&service("shop", "hook", &json!({"clusterIP": "10.96.0.9"})));
        assert_eq!(named(&services, "fd00:96::9"), None);
        services.remove(&hook);
        assert_eq!(named(&services, "10.96.0.9"), None);
        assert_eq!(named(&services, "10.96.0.8").as_deref(), Some("bank/hook"));
    }

    #[test]
    fn an_address_that_another_service_has_taken_over_stays() {
        let mut services = ClusterIps::default();
        let old = service("shop", "old", &json!({"clusterIP": "10.96.0.9"}));
        services.put(&old);
        services.put(&service("shop", "new", &json!({"clusterIP": "10.96.0.9"})));
        services.remove(&old);
        assert_eq!(named(&services, "10.96.0.9").as_deref(), Some("shop/new"));
    }

    #[test]
    fn only_tcp_ports_of_services_with_an_address_count() {
        for spec in [
            json!({"clusterIP": "None", "clusterIPs": ["None"], "ports": [{"port": 443}]}),
            json!({"type": "ExternalName", "externalName": "example.org"}),
            json!({"clusterIP": ""}),
        ] {
            assert_eq!(service("shop", "hook", &spec).cluster_service(), None, "{spec}");
        }
        let ports = json!([
            {"port": 53, "protocol": "UDP", "name": "dns"},
            {"port": 53, "protocol": "TCP", "name": "dns-tcp"},
            {"port": 443, "targetPort": "https"},
        ]);
        let found = service("shop", "hook", &json!({"clusterIP": "10.96.0.9", "ports": ports}));
        let found = found.cluster_service().unwrap();
        assert_eq!(found.port_name(53), Some("dns-tcp"));
        assert_eq!(found.port_name(443), Some(""));
        assert_eq!(found.port_name(80), None);
    }
}
