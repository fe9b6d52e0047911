//! The ports of the internal Service: one for each tunnelled port of the ConfigMap, leading to a listener of the servers.
//!
//! The list is read, changed and written with the version that was read. Server-side apply does not work here: it can
//! neither take over the target of a port that another writer named, nor remove ports of another manager, such as
//! YurtTunnel's.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures_util::stream::select_all;
use k8s_openapi::api::core::v1::{Service, ServicePort};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::Api;
use kube::api::Patch;
use kube::runtime::watcher::Event;
use serde_json::json;
use tokio::time::Instant;
use tunnel_kube::{Attempts, Followed, merge, named, request};
use tunnel_routing::inventory::READ_ONLY_KUBELET_PORT;

use crate::kube::context::{KubeContext, WRITE_DEADLINE};
use crate::kube::error::ClusterError;
use crate::kube::reconcile::{self, Reconcile, changes, inputs};
use crate::runtime::settings::{InternalListener, Listeners};

/// Prefix of the names of ports created here.
const PREFIX: &str = "dnat-";
const TCP: &str = "TCP";
/// Changes within this time are written together.
const DEBOUNCE: Duration = Duration::from_millis(200);

/// Computes the Service's new ports from `present`. A wanted port gets its target, and a name if it is new; TCP ports
/// named `dnat-…` that are not wanted are removed; a port for the kubelet's port without TLS leads to the plain listener
/// while that is on; all others stay as they are.
pub fn ports(
    present: &[ServicePort],
    wanted: &BTreeMap<u16, InternalListener>,
    listeners: &Listeners,
) -> Vec<ServicePort> {
    let tcp = |port: &ServicePort| port.protocol.as_deref().unwrap_or(TCP) == TCP;
    let target_of = |number: u16, listener: InternalListener| match listener {
        InternalListener::Https => listeners.secure.get(&number).copied().unwrap_or(listeners.https),
        InternalListener::Http => listeners.http,
    };
    let target = |number, listener| IntOrString::Int(i32::from(target_of(number, listener)));
    let mut missing = wanted.clone();
    // The API server would refuse a target port of 0, and with it the whole list.
    missing.retain(|number, listener| target_of(*number, *listener) != 0);
    let mut ports = Vec::with_capacity(present.len() + wanted.len());
    for port in present {
        let mut port = port.clone();
        if tcp(&port) {
            match u16::try_from(port.port).ok().and_then(|number| missing.remove_entry(&number)) {
                Some((number, listener)) => port.target_port = Some(target(number, listener)),
                None if port.name.as_deref().is_some_and(|name| name.starts_with(PREFIX)) => continue,
                // It is in no list of the ConfigMap. In YurtTunnel's Service it leads to the http listener, which is on the
                // loopback address here and would refuse the connection.
                None if port.port == i32::from(READ_ONLY_KUBELET_PORT) && listeners.http != 0 => {
                    port.target_port = Some(IntOrString::Int(i32::from(listeners.http)));
                }
                None => {}
            }
        }
        ports.push(port);
    }
    let mut names: BTreeSet<String> = ports.iter().filter_map(|port| port.name.clone()).collect();
    for (number, listener) in missing {
        // A UDP port, or a port with another number, may already have the name.
        let name = std::iter::once(format!("{PREFIX}{number}"))
            .chain((2..).map(|n| format!("{PREFIX}{number}-{n}")))
            .find(|name| !names.contains(name));
        names.extend(name.clone());
        ports.push(ServicePort {
            name,
            port: i32::from(number),
            protocol: Some(TCP.into()),
            target_port: Some(target(number, listener)),
            ..ServicePort::default()
        });
    }
    // A Service with several ports needs names for them.
    if ports.len() > 1 {
        for port in ports.iter_mut().filter(|port| port.name.as_deref().is_none_or(str::is_empty)) {
            let protocol = port.protocol.as_deref().unwrap_or(TCP).to_ascii_lowercase();
            port.name = Some(format!("{protocol}-{}", port.port));
        }
    }
    ports
}

/// Keeps the ports current while this server leads, until stopped. Nothing is written before the settings are known.
pub async fn run(context: KubeContext, listeners: Listeners) {
    let stop = context.stop.clone();
    let api = Api::<Service>::namespaced(context.client.clone(), &context.namespace);
    let only = named(&context.names.internal_service);
    let services = context.health.follow(api.clone(), only, "services/ports");
    let inputs = select_all([
        inputs(services, |target: &mut Ports, event| target.service.apply(event)),
        inputs(changes(&context.settings), |target: &mut Ports, ()| target.settings_known = true),
        inputs(changes(&context.leader), |_: &mut Ports, ()| {}),
    ]);
    let target = Ports { context, listeners, api, service: Followed::default(), settings_known: false };
    let attempts = Attempts::new("keeping the ports of the internal Service");
    reconcile::run(target, inputs, DEBOUNCE, attempts, stop).await;
}

struct Ports {
    context: KubeContext,
    listeners: Listeners,
    api: Api<Service>,
    service: Followed<Service>,
    settings_known: bool,
}

impl Reconcile for Ports {
    async fn reconcile(&mut self, attempts: &mut Attempts) -> Result<Option<Instant>, ClusterError> {
        let leads = *self.context.leader.borrow();
        if !(leads && self.settings_known && self.service.known) {
            return Ok(None);
        }
        let wanted = self.context.settings.borrow().internal.clone();
        let name = &self.context.names.internal_service;
        let Some(service) = self.service.only() else {
            if wanted.is_empty() {
                attempts.succeeded();
            } else {
                attempts.report(&format!("there is no Service {}/{name}", self.context.namespace));
            }
            return Ok(None);
        };
        let present = service.spec.as_ref().and_then(|spec| spec.ports.as_deref()).unwrap_or_default();
        let next = ports(present, &wanted, &self.listeners);
        if next != present {
            // A merge patch replaces the list; the version guarantees that it is the list that was read.
            let patch = Patch::Merge(json!({
                "metadata": {"resourceVersion": service.metadata.resource_version},
                "spec": {"ports": next},
            }));
            let params = merge();
            let patch = self.api.patch(name, &params, &patch);
            let patched = request(WRITE_DEADLINE, "changing Service", name, patch).await?;
            self.service.apply(Event::Apply(patched));
            tracing::info!(service = %name, ports = next.len(), "updated the ports of the internal Service");
        }
        attempts.succeeded();
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTENERS: Listeners =
        Listeners { https: 10263, secure: BTreeMap::new(), http: 10268, pairs: 10264 };

    fn port(name: &str, protocol: &str, number: i32, target: i32) -> ServicePort {
        ServicePort {
            name: Some(name.into()),
            protocol: Some(protocol.into()),
            port: number,
            target_port: Some(IntOrString::Int(target)),
            ..ServicePort::default()
        }
    }

    fn base() -> Vec<ServicePort> {
        vec![port("http", TCP, 10255, 10268), port("https", TCP, 10250, 10263)]
    }

    fn after(present: &[ServicePort], wanted: &[(u16, InternalListener)]) -> Vec<ServicePort> {
        let wanted = wanted.iter().copied().collect();
        let ports = ports(present, &wanted, &LISTENERS);
        assert_eq!(super::ports(&ports, &wanted, &LISTENERS), ports, "what was written is written again");
        ports
    }

    #[test]
    fn configured_ports_are_added() {
        let mut expected = base();
        expected.push(port("dnat-9100", TCP, 9100, 10268));
        expected.push(port("dnat-9443", TCP, 9443, 10263));
        let wanted = [(9443, InternalListener::Https), (9100, InternalListener::Http)];
        assert_eq!(after(&base(), &wanted), expected);
    }

    #[test]
    fn a_port_of_its_own_at_the_https_listener_is_the_target() {
        let listeners = Listeners { secure: BTreeMap::from([(9443, 10270)]), ..LISTENERS };
        let wanted = BTreeMap::from([(9443, InternalListener::Https), (9444, InternalListener::Https)]);
        let mut expected = base();
        expected.extend([port("dnat-9443", TCP, 9443, 10270), port("dnat-9444", TCP, 9444, 10263)]);
        assert_eq!(super::ports(&base(), &wanted, &listeners), expected);
    }

    #[test]
    fn another_target_is_rewritten_and_the_rest_of_the_port_stays() {
        let mut metrics = port("metrics", TCP, 9100, 9100);
        metrics.node_port = Some(31000);
        metrics.app_protocol = Some("http".into());
        let mut named = port("dnat-9443", TCP, 9443, 1);
        named.target_port = Some(IntOrString::String("https".into()));
        let wanted = [(9443, InternalListener::Https), (9100, InternalListener::Http)];
        let expected = [
            ServicePort { target_port: Some(IntOrString::Int(10268)), ..metrics.clone() },
            port("dnat-9443", TCP, 9443, 10263),
        ];
        assert_eq!(after(&[metrics, named], &wanted), expected);
    }

    #[test]
    fn a_port_without_a_protocol_is_tcp() {
        let mut plain = port("metrics", TCP, 9100, 1);
        plain.protocol = None;
        let expected = [ServicePort { target_port: Some(IntOrString::Int(10268)), ..plain.clone() }];
        assert_eq!(after(&[plain], &[(9100, InternalListener::Http)]), expected);
    }

    #[test]
    fn ports_that_are_no_longer_configured_go() {
        let mut present = base();
        present.extend([port("dnat-9100", TCP, 9100, 10268), port("dnat-9200", TCP, 9200, 10268)]);
        let mut expected = base();
        expected.push(port("dnat-9200", TCP, 9200, 10268));
        assert_eq!(after(&present, &[(9200, InternalListener::Http)]), expected);
        assert_eq!(after(&present, &[]), base());
    }

    /// Connections to it would not be answered.
    #[test]
    fn without_the_plain_listener_no_port_leads_there() {
        let listeners = Listeners { http: 0, ..LISTENERS };
        let wanted = BTreeMap::from([(9100, InternalListener::Http), (9443, InternalListener::Https)]);
        let mut expected = base();
        expected.push(port("dnat-9443", TCP, 9443, 10263));
        let mut present = base();
        present.push(port("dnat-9100", TCP, 9100, 10268));
        assert_eq!(super::ports(&present, &wanted, &listeners), expected);
    }

    #[test]
    fn yurttunnels_port_of_the_kubelet_leads_to_the_plain_listener() {
        let present = [port("http", TCP, 10255, 10264), port("https", TCP, 10250, 10263)];
        assert_eq!(after(&present, &[]), base());
        let without = Listeners { http: 0, ..LISTENERS };
        assert_eq!(super::ports(&present, &BTreeMap::new(), &without), present);
        let udp = port("http", "UDP", 10255, 10264);
        assert_eq!(after(std::slice::from_ref(&udp), &[]), [udp]);
    }

    #[test]
    fn udp_and_other_names_are_left_alone() {
        let mut present = base();
        present.extend([port("dnat-53", "UDP", 53, 53), port("metrics", TCP, 9090, 9090)]);
        assert_eq!(after(&present, &[]), present);
    }

    #[test]
    fn the_same_number_over_udp_is_another_port() {
        let udp = port("dnat-9100", "UDP", 9100, 9100);
        let expected = [udp.clone(), port("dnat-9100-2", TCP, 9100, 10268)];
        assert_eq!(after(&[udp], &[(9100, InternalListener::Http)]), expected);
    }

    #[test]
    fn a_single_port_without_a_name_gets_one_when_there_are_more() {
        let mut only = port("", TCP, 443, 10263);
        only.name = None;
        assert_eq!(after(std::slice::from_ref(&only), &[]), [only.clone()]);
        let expected = [port("tcp-443", TCP, 443, 10263), port("dnat-9100", TCP, 9100, 10268)];
        assert_eq!(after(&[only], &[(9100, InternalListener::Http)]), expected);
    }
}
