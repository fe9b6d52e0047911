//! Names in the server's certificate in a cluster: all names and addresses of both Services, and the addresses of the
//! servers behind them. For clients that verify the name they dialled; agents verify another one
//! (`tunnel_pki::SERVER_NAME`).

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::select_all;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::runtime::watcher::Config;
use kube::{Api, ResourceExt as _};
use rustls_pki_types::DnsName;
use tokio::time::Instant;
use tunnel_kube::{Attempts, Followed, named};
use tunnel_runtime::config::HostPort;
use tunnel_runtime::text::printable;

use super::SERVICE_NAME;
use crate::kube::context::KubeContext;
use crate::kube::error::ClusterError;
use crate::kube::reconcile::{self, Reconcile, inputs};
use crate::pki::{ServerCertificate, ServerNames};

/// Annotation of a ClusterIP Service with its external addresses for agents: `host:port`, separated by commas.
const EXTERNAL_ADDRESS: &str = "x-tunnel-server-external-addr";
/// Default cluster domain.
const CLUSTER_DOMAIN: &str = "cluster.local";
/// Changes within this time cause one new certificate.
const DEBOUNCE: Duration = Duration::from_millis(500);

/// Keeps the names in `certificate` current until the context's stop signal: `base` plus those of the cluster.
pub async fn run(context: KubeContext, certificate: Arc<ServerCertificate>, base: ServerNames) {
    let KubeContext { client, namespace, names, health, stop, .. } = context.clone();
    let services = Api::<Service>::namespaced(client.clone(), &namespace);
    let slices = Api::<EndpointSlice>::namespaced(client, &namespace);
    let both = format!("{SERVICE_NAME} in ({},{})", names.service, names.internal_service);
    let agents = health.follow(services.clone(), named(&names.service), "services/names");
    let internal = health.follow(services, named(&names.internal_service), "services/internal-names");
    let slices = health.follow(slices, Config::default().labels(&both), "endpointslices");
    let inputs = select_all([
        inputs(agents, |target: &mut Names, event| target.agents.apply(event)),
        inputs(internal, |target: &mut Names, event| target.internal.apply(event)),
        inputs(slices, |target: &mut Names, event| target.slices.apply(event)),
    ]);
    let target = Names {
        context,
        certificate,
        current: base.clone(),
        base,
        agents: Followed::default(),
        internal: Followed::default(),
        slices: Followed::default(),
        skipped: BTreeSet::new(),
    };
    let attempts = Attempts::new("naming the Services in the server's certificate");
    reconcile::run(target, inputs, DEBOUNCE, attempts, stop).await;
}

struct Names {
    context: KubeContext,
    certificate: Arc<ServerCertificate>,
    base: ServerNames,
    /// Names in the current certificate.
    current: ServerNames,
    /// The Service that agents dial.
    agents: Followed<Service>,
    /// The Service for components in the cloud.
    internal: Followed<Service>,
    slices: Followed<EndpointSlice>,
    /// Names left out, which have been logged.
    skipped: BTreeSet<String>,
}

impl Reconcile for Names {
    async fn reconcile(&mut self, attempts: &mut Attempts) -> Result<Option<Instant>, ClusterError> {
        let names = &self.context.names;
        let mut found = Found::default();
        for (name, service) in [(&names.service, &self.agents), (&names.internal_service, &self.internal)] {
            found.service_names(name, &self.context.namespace);
            if let Some(service) = service.only() {
                found.service(service);
            }
        }
        self.slices.objects.values().for_each(|slice| found.slice(slice));
        let skipped = std::mem::take(&mut found.skipped);
        for name in skipped.difference(&self.skipped) {
            let name = printable(name, 260);
            tracing::warn!(
                name,
                "ignoring a name for the server's certificate, neither a DNS name nor an address"
            );
        }
        self.skipped = skipped;
        let next = found.joined(&self.base);
        if next != self.current {
            match self.certificate.set_names(next.clone()) {
                Ok(()) => {
                    attempts.succeeded();
                    self.current = next;
                }
                Err(error) => {
                    attempts.report(&error);
                }
            }
        }
        Ok(None)
    }
}

/// Names and addresses of the servers in the cluster.
#[derive(Debug, Default)]
struct Found {
    dns: BTreeSet<String>,
    addresses: BTreeSet<IpAddr>,
    skipped: BTreeSet<String>,
}

impl Found {
    fn service_names(&mut self, name: &str, namespace: &str) {
        self.host(name);
        self.host(&format!("{name}.{namespace}"));
        self.host(&format!("{name}.{namespace}.svc"));
        self.host(&format!("{name}.{namespace}.svc.{CLUSTER_DOMAIN}"));
    }

    fn service(&mut self, service: &Service) {
        if let Some(spec) = &service.spec {
            let cluster_ips = spec.cluster_ip.iter().chain(spec.cluster_ips.iter().flatten());
            // "None" marks a headless Service.
            let addresses = cluster_ips.filter(|address| !matches!(address.as_str(), "" | "None"));
            for address in addresses.chain(spec.external_ips.iter().flatten()) {
                self.host(address);
            }
        }
        let balancer = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
        for ingress in balancer.and_then(|balancer| balancer.ingress.as_ref()).into_iter().flatten() {
            for host in ingress.ip.iter().chain(&ingress.hostname) {
                self.host(host);
            }
        }
        if let Some(address) = service.annotations().get(EXTERNAL_ADDRESS) {
            for entry in address.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
                // The port may be missing.
                let known = entry.parse::<HostPort>().or_else(|_| format!("{entry}:1").parse());
                self.host(known.as_ref().map_or(entry, |known| &known.host));
            }
        }
    }

    fn slice(&mut self, slice: &EndpointSlice) {
        // Includes endpoints that are not ready: a starting server is named in time, and one that briefly fails a check
        // causes no new certificate.
        for address in slice.endpoints.iter().flat_map(|endpoint| &endpoint.addresses) {
            self.host(address);
        }
    }

    fn host(&mut self, host: &str) {
        let name = host.strip_suffix('.').unwrap_or(host);
        if let Ok(address) = host.parse() {
            self.addresses.insert(address);
        } else if DnsName::try_from(name).is_ok() {
            self.dns.insert(name.to_ascii_lowercase());
        } else {
            self.skipped.insert(host.to_owned());
        }
    }

    fn joined(self, base: &ServerNames) -> ServerNames {
        // Sorted, so that equal sets compare equal.
        let dns: BTreeSet<_> = base.dns.iter().cloned().chain(self.dns).collect();
        let addresses: BTreeSet<_> = base.addresses.iter().copied().chain(self.addresses).collect();
        ServerNames {
            dns: dns.into_iter().collect(),
            addresses: addresses.into_iter().collect(),
            local_addresses: base.local_addresses,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn found(service: serde_json::Value) -> Found {
        let mut found = Found::default();
        found.service(&serde_json::from_value(service).unwrap());
        found
    }

    fn addresses(found: &Found) -> Vec<String> {
        found.addresses.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_service_has_four_names() {
        let mut found = Found::default();
        found.service_names("svc", "ns");
        let names: Vec<_> = found.dns.into_iter().collect();
        assert_eq!(names, ["svc", "svc.ns", "svc.ns.svc", "svc.ns.svc.cluster.local"]);
    }

    #[test]
    fn every_way_to_reach_a_service_is_named() {
        let found = found(json!({
            "metadata": {"annotations": {
                "x-tunnel-server-external-addr":
                    "tunnel.example.com:31008, 192.0.2.4:10262, [2001:db8::1]:10262, other.example.com, 2001:db8::2, [2001:db8::3]",
            }},
            "spec": {
                "clusterIP": "10.96.0.9",
                "clusterIPs": ["10.96.0.9", "fd00:96::9"],
                "externalIPs": ["203.0.113.9"],
            },
            "status": {"loadBalancer": {"ingress": [
                {"ip": "198.51.100.7"},
                {"hostname": "Lb-1.example.com."},
            ]}},
        }));
        let expected = [
            "10.96.0.9",
            "192.0.2.4",
            "198.51.100.7",
            "203.0.113.9",
            "2001:db8::1",
            "2001:db8::2",
            "2001:db8::3",
            "fd00:96::9",
        ];
        assert_eq!(addresses(&found), expected);
        let names = ["lb-1.example.com", "other.example.com", "tunnel.example.com"];
        assert_eq!(found.dns.iter().collect::<Vec<_>>(), names);
        assert_eq!(found.skipped.len(), 0, "{:?}", found.skipped);
    }

    #[test]
    fn a_headless_service_has_no_address() {
        let found = found(json!({"spec": {"clusterIP": "None", "clusterIPs": ["None"]}}));
        assert!(found.addresses.is_empty() && found.dns.is_empty() && found.skipped.is_empty(), "{found:?}");
    }

    #[test]
    fn what_cannot_be_in_a_certificate_is_left_out() {
        let found = found(json!({
            "metadata": {"annotations": {"x-tunnel-server-external-addr": "not a name:10262"}},
            "spec": {"clusterIP": "10.96.0.9"},
        }));
        assert_eq!(addresses(&found), ["10.96.0.9"]);
        assert_eq!(found.skipped.iter().collect::<Vec<_>>(), ["not a name:10262"]);
    }

    #[test]
    fn given_names_stay() {
        let base = ServerNames {
            dns: vec!["z.example.com".into()],
            addresses: vec!["192.0.2.9".parse().unwrap()],
            local_addresses: true,
        };
        let mut found = Found::default();
        found.host("a.example.com");
        found.host("192.0.2.9");
        let joined = found.joined(&base);
        assert_eq!(joined.dns, ["a.example.com", "z.example.com"]);
        assert_eq!(joined.addresses, base.addresses);
        assert!(joined.local_addresses);
    }
}
