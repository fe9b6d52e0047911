//! What the server's certificate names in a cluster: both Services, however they are reached, and the servers behind
//! them. For clients that verify the name they dialled; agents verify another one (`tunnel_core::identity::SERVER_NAME`).

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::runtime::watcher::{Config, Event};
use kube::{Api, ResourceExt as _};
use rustls_pki_types::DnsName;
use tokio::time::{Instant, sleep_until};
use tunnel_core::text::printable;

use super::leader::writer::{Complaint, Followed};
use super::{Cluster, watch};
use crate::pki::{ServerCertificate, ServerNames};

/// Says where agents outside reach a Service of type ClusterIP: `host:port`.
const EXTERNAL_ADDRESS: &str = "x-tunnel-server-external-addr";
const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// The domain of a cluster that was given none.
const CLUSTER_DOMAIN: &str = "cluster.local";
/// A certificate is issued for all changes within this time.
const DEBOUNCE: Duration = Duration::from_millis(500);

/// Keeps the names of `certificate` current until the stop: `base` and what the cluster says. What is not known because
/// the API server is silent stays as it was last.
pub async fn run(cluster: Cluster, certificate: Arc<ServerCertificate>, base: ServerNames) {
    let stop = cluster.stop.clone();
    let names = Names {
        cluster,
        certificate,
        current: base.clone(),
        base,
        agents: Followed::default(),
        internal: Followed::default(),
        slices: Slices::default(),
        skipped: BTreeSet::new(),
        complaint: Complaint::new("naming the Services in the server's certificate"),
    };
    let _ = stop.run_until_cancelled(names.run()).await;
}

struct Names {
    cluster: Cluster,
    certificate: Arc<ServerCertificate>,
    base: ServerNames,
    /// Those that the certificate has.
    current: ServerNames,
    agents: Followed<Service>,
    internal: Followed<Service>,
    slices: Slices,
    /// Names that were left out, which was said.
    skipped: BTreeSet<String>,
    complaint: Complaint,
}

impl Names {
    async fn run(mut self) {
        let Cluster { client, namespace, names, health, .. } = self.cluster.clone();
        let services = |name: &str, resource: &'static str| {
            let only = Config::default().fields(&format!("metadata.name={name}"));
            watch::follow(
                Api::<Service>::namespaced(client.clone(), &namespace),
                only,
                resource,
                health.clone(),
            )
        };
        let mut agents = pin!(services(&names.service, "services/names"));
        let mut internal = pin!(services(&names.internal_service, "services/internal-names"));
        let both = format!("{SERVICE_NAME} in ({},{})", names.service, names.internal_service);
        let mut slices = pin!(watch::follow(
            Api::<EndpointSlice>::namespaced(client.clone(), &namespace),
            Config::default().labels(&both),
            "endpointslices",
            health.clone(),
        ));
        // The Services' own names are known from the start.
        let mut due = Some(Instant::now());
        loop {
            tokio::select! {
                event = agents.next() => match event {
                    Some(event) => self.agents.apply(event),
                    None => return,
                },
                event = internal.next() => match event {
                    Some(event) => self.internal.apply(event),
                    None => return,
                },
                event = slices.next() => match event {
                    Some(event) => self.slices.apply(event),
                    None => return,
                },
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    due = None;
                    self.update();
                    continue;
                }
            }
            due = due.or_else(|| Some(Instant::now() + DEBOUNCE));
        }
    }

    fn update(&mut self) {
        let names = &self.cluster.names;
        let mut found = Found::default();
        for (name, service) in [(&names.service, &self.agents), (&names.internal_service, &self.internal)] {
            found.service_names(name, &self.cluster.namespace);
            if let Some(service) = &service.object {
                found.service(service);
            }
        }
        self.slices.known.values().for_each(|slice| found.slice(slice));
        let skipped = std::mem::take(&mut found.skipped);
        for name in skipped.difference(&self.skipped) {
            let name = printable(name, 260);
            tracing::warn!(
                name,
                "neither a DNS name nor an address: it is left out of the server's certificate"
            );
        }
        self.skipped = skipped;
        let next = found.joined(&self.base);
        if next == self.current {
            return;
        }
        match self.certificate.set_names(next.clone()) {
            Ok(()) => {
                self.complaint.fine();
                self.current = next;
            }
            Err(error) => {
                self.complaint.error(&error);
            }
        }
    }
}

/// The slices there are.
#[derive(Default)]
struct Slices {
    known: BTreeMap<String, EndpointSlice>,
    listed: BTreeMap<String, EndpointSlice>,
}

impl Slices {
    fn apply(&mut self, event: Event<EndpointSlice>) {
        match event {
            Event::Init => self.listed.clear(),
            Event::InitApply(slice) => {
                self.listed.insert(slice.name_any(), slice);
            }
            Event::InitDone => self.known = std::mem::take(&mut self.listed),
            Event::Apply(slice) => {
                self.known.insert(slice.name_any(), slice);
            }
            Event::Delete(slice) => {
                self.known.remove(&slice.name_any());
            }
        }
    }
}

/// What a cluster calls the servers.
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
            // "None" is how a headless Service says that it has no address.
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
            self.host(host_of(address.trim()));
        }
    }

    fn slice(&mut self, slice: &EndpointSlice) {
        // Those that are not ready too: a server that starts is named in time, and one that fails a check for a moment
        // costs no certificate.
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
        // In an order that does not depend on the cluster's, so that equal names are equal.
        let dns: BTreeSet<_> = base.dns.iter().cloned().chain(self.dns).collect();
        let addresses: BTreeSet<_> = base.addresses.iter().copied().chain(self.addresses).collect();
        ServerNames {
            dns: dns.into_iter().collect(),
            addresses: addresses.into_iter().collect(),
            local_addresses: base.local_addresses,
        }
    }
}

/// The host of `host:port`, `address:port`, `[address]:port`, or of a host alone.
fn host_of(text: &str) -> &str {
    if text.parse::<IpAddr>().is_ok() {
        return text;
    }
    let host = match text.rsplit_once(':') {
        Some((host, port)) if text.parse::<SocketAddr>().is_ok() || port.parse::<u16>().is_ok() => host,
        _ => text,
    };
    host.strip_prefix('[').and_then(|inner| inner.strip_suffix(']')).unwrap_or(host)
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
            "metadata": {"annotations": {"x-tunnel-server-external-addr": "tunnel.example.com:31008"}},
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
        assert_eq!(addresses(&found), ["10.96.0.9", "198.51.100.7", "203.0.113.9", "fd00:96::9"]);
        assert_eq!(found.dns.iter().collect::<Vec<_>>(), ["lb-1.example.com", "tunnel.example.com"]);
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
        assert_eq!(found.skipped.iter().collect::<Vec<_>>(), ["not a name"]);
    }

    #[test]
    fn the_host_of_an_address_is_what_precedes_the_port() {
        for (text, host) in [
            ("tunnel.example.com:31008", "tunnel.example.com"),
            ("tunnel.example.com", "tunnel.example.com"),
            ("192.0.2.1:10262", "192.0.2.1"),
            ("192.0.2.1", "192.0.2.1"),
            ("[2001:db8::1]:10262", "2001:db8::1"),
            ("[2001:db8::1]", "2001:db8::1"),
            ("2001:db8::1", "2001:db8::1"),
        ] {
            assert_eq!(host_of(text), host, "{text}");
        }
    }

    #[test]
    fn the_names_that_were_given_stay() {
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
