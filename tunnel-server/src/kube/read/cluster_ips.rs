//! Services by cluster IP, for the egress listener.

use std::net::IpAddr;
use std::pin::pin;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Service;
use kube::Api;
use kube::runtime::watcher::{Config, Event};
use serde::Deserialize;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tunnel_kube::Health;

use crate::kube::partial::Partial;
use crate::listener::{ClusterIps, ClusterService};

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
            Event::Init => listed = ClusterIps::of_list(),
            Event::InitApply(service) => service.put_in(&mut listed),
            Event::InitDone => drop(services.send_replace(std::mem::take(&mut listed))),
            Event::Apply(service) => services.send_modify(|known| service.put_in(known)),
            Event::Delete(service) => services.send_modify(|known| service.remove_from(known)),
        }
    }
}

pub(crate) type PartialService = Partial<Service, Spec>;

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Spec {
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
    fn put_in(&self, services: &mut ClusterIps) {
        self.remove_from(services);
        if let Some(service) = self.cluster_service() {
            services.put(service);
        }
    }

    fn remove_from(&self, services: &mut ClusterIps) {
        services.remove(self.namespace(), self.name());
    }

    /// Returns None for a headless or ExternalName Service.
    pub(crate) fn cluster_service(&self) -> Option<ClusterService> {
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
        let (namespace, name) = (self.namespace().into(), self.name().into());
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
        hook.put_in(&mut services);
        for address in ["10.96.0.9", "fd00:96::9", "::ffff:10.96.0.9"] {
            assert_eq!(named(&services, address).as_deref(), Some("shop/hook"), "{address}");
        }
        assert_eq!(named(&services, "10.96.0.1"), None);
        // A Service of the same name in another namespace.
        service("bank", "hook", &json!({"clusterIP": "10.96.0.8"})).put_in(&mut services);
        service("shop", "hook", &json!({"clusterIP": "10.96.0.9"})).put_in(&mut services);
        assert_eq!(named(&services, "fd00:96::9"), None);
        hook.remove_from(&mut services);
        assert_eq!(named(&services, "10.96.0.9"), None);
        assert_eq!(named(&services, "10.96.0.8").as_deref(), Some("bank/hook"));
    }

    #[test]
    fn an_address_that_another_service_has_taken_over_stays() {
        let mut services = ClusterIps::default();
        let old = service("shop", "old", &json!({"clusterIP": "10.96.0.9"}));
        old.put_in(&mut services);
        service("shop", "new", &json!({"clusterIP": "10.96.0.9"})).put_in(&mut services);
        old.remove_from(&mut services);
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
