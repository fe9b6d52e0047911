//! The DNS records, for CoreDNS's `hosts` plugin: edge nodes' names lead to the internal Service, all others to the node.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::select_all;
use k8s_openapi::api::core::v1::{ConfigMap, Service};
use kube::Api;
use kube::api::{Patch, PatchParams};
use kube::runtime::events::EventType;
use kube::runtime::watcher::Event;
use serde_json::json;
use tunnel_kube::{Attempts, FIELD_MANAGER, Followed, RequestError, named, request};

use super::events::{self, Events};
use crate::inventory::Inventory;
use crate::kube::context::{KubeContext, WRITE_DEADLINE};
use crate::kube::reconcile::{self, Reconcile, changes};

pub const KEY: &str = "tunnel-nodes";

/// Changes within this time are written as one.
const DEBOUNCE: Duration = Duration::from_millis(200);

/// The records, sorted, one a line: address, tab, node's name. Edge nodes have `internal`, the address of the internal
/// Service, or no record without one; the others have their own address, or no record without one.
pub fn records(inventory: &Inventory, internal: Option<IpAddr>) -> String {
    let mut lines: Vec<String> = inventory
        .nodes
        .iter()
        .filter_map(|node| {
            let address = if node.edge { internal } else { node.addresses.first().copied() };
            Some(format!("{}\t{}", address?, node.name))
        })
        .collect();
    lines.sort_unstable();
    lines.join("\n")
}

/// Keeps the records current while this server leads, until the stop. Nothing is written before the nodes are known.
pub async fn run(context: KubeContext, events: Events) {
    let KubeContext { client, namespace, names, health, stop, .. } = context.clone();
    let api = Api::namespaced(client.clone(), &namespace);
    let services = Api::namespaced(client, &namespace);
    let inputs = select_all([
        health
            .follow(api.clone(), named(&names.dns_configmap), "configmaps/dns-records")
            .map(|event| Input::ConfigMap(Box::new(event)))
            .boxed(),
        health
            .follow(services, named(&names.internal_service), "services/dns-records")
            .map(|event| Input::Service(Box::new(event)))
            .boxed(),
        changes(&context.inventory).map(|()| Input::Nodes).boxed(),
        changes(&context.leader).map(|()| Input::Leader).boxed(),
    ]);
    let target = Records {
        context,
        events,
        api,
        configmap: Followed::default(),
        service: Followed::default(),
        nodes_known: false,
        addressing: Attempts::new("giving edge nodes DNS records"),
    };
    reconcile::run(target, inputs, DEBOUNCE, Attempts::new("writing the DNS records"), stop).await;
}

enum Input {
    ConfigMap(Box<Event<ConfigMap>>),
    Service(Box<Event<Service>>),
    Nodes,
    Leader,
}

struct Records {
    context: KubeContext,
    events: Events,
    api: Api<ConfigMap>,
    configmap: Followed<ConfigMap>,
    service: Followed<Service>,
    nodes_known: bool,
    addressing: Attempts,
}

impl Reconcile for Records {
    type Input = Input;

    fn apply(&mut self, input: Input) {
        match input {
            Input::ConfigMap(event) => self.configmap.apply(*event),
            Input::Service(event) => self.service.apply(*event),
            Input::Nodes => self.nodes_known = true,
            Input::Leader => {}
        }
    }

    async fn reconcile(&mut self, attempts: &mut Attempts) -> Result<(), RequestError> {
        let leads = *self.context.leader.borrow();
        if !(leads && self.nodes_known && self.configmap.known && self.service.known) {
            return Ok(());
        }
        let inventory = self.context.inventory.borrow().clone();
        let address = self.service.object.as_ref().and_then(cluster_ip);
        self.report_address(address, inventory.counts().0);
        let wanted = records(&inventory, address);
        let is = self.configmap.object.as_ref().and_then(|configmap| configmap.data.as_ref()?.get(KEY));
        if is != Some(&wanted) {
            let name = &self.context.names.dns_configmap;
            let patch = Patch::Apply(json!({
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": name},
                "data": BTreeMap::from([(KEY, &wanted)]),
            }));
            // Another writer's value of this key is replaced; its other keys stay.
            let params = PatchParams::apply(FIELD_MANAGER).force();
            let applied = request(WRITE_DEADLINE, self.api.patch(name, &params, &patch)).await?;
            self.configmap.object = Some(applied);
            tracing::info!(configmap = %name, records = wanted.lines().count(), "wrote the DNS records");
        }
        attempts.succeeded();
        Ok(())
    }
}

impl Records {
    /// Without the internal Service's address edge nodes have no record, which matters only if there are any.
    fn report_address(&mut self, address: Option<IpAddr>, edge_nodes: usize) {
        if address.is_some() || edge_nodes == 0 {
            self.addressing.succeeded();
            return;
        }
        let KubeContext { namespace, names, .. } = &self.context;
        let service = &names.internal_service;
        let why = match &self.service.object {
            None => format!("there is no Service {namespace}/{service}"),
            Some(_) => format!("the Service {namespace}/{service} has no clusterIP"),
        };
        if self.addressing.report(&why) {
            let mut regarding = events::object("Service", namespace, service);
            regarding.uid = self.service.object.as_ref().and_then(|service| service.metadata.uid.clone());
            let note = format!("edge nodes have no DNS records: {why}");
            self.events.publish(regarding, EventType::Warning, "NoClusterIP", note);
        }
    }
}

/// The Service's first address; None for a headless one.
fn cluster_ip(service: &Service) -> Option<IpAddr> {
    service.spec.as_ref()?.cluster_ip.as_ref()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::{DEFAULT_KUBELET_PORT, InventoryNode};

    fn node(name: &str, edge: bool, addresses: &[&str]) -> InventoryNode {
        InventoryNode {
            name: name.parse().unwrap(),
            edge,
            addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
            left_out: 0,
            kubelet_port: DEFAULT_KUBELET_PORT,
            pod_cidrs: Vec::new(),
            created: None,
        }
    }

    fn edge(name: &str) -> InventoryNode {
        node(name, true, &["192.168.50.2"])
    }

    fn text(nodes: &[InventoryNode]) -> String {
        records(&Inventory { nodes: nodes.to_vec() }, Some("10.96.7.7".parse().unwrap()))
    }

    #[test]
    fn edge_nodes_lead_to_the_internal_service() {
        assert_eq!(text(&[edge("edge-2"), edge("edge-1")]), "10.96.7.7\tedge-1\n10.96.7.7\tedge-2");
    }

    #[test]
    fn cloud_nodes_lead_to_themselves() {
        // The inventory has InternalIPs before ExternalIPs.
        let both = node("cloud-1", false, &["10.0.0.1", "203.0.113.1"]);
        let external = node("cloud-2", false, &["203.0.113.2"]);
        let none = node("cloud-3", false, &[]);
        assert_eq!(text(&[both, external, none]), "10.0.0.1\tcloud-1\n203.0.113.2\tcloud-2");
    }

    #[test]
    fn the_lines_are_sorted() {
        let cloud = node("cloud-1", false, &["10.0.0.1"]);
        let late = node("a-cloud", false, &["10.200.0.1"]);
        let expected = "10.0.0.1\tcloud-1\n10.200.0.1\ta-cloud\n10.96.7.7\tedge-1";
        assert_eq!(text(&[edge("edge-1"), late, cloud]), expected);
    }

    #[test]
    fn a_node_may_become_an_edge_node() {
        let mut changing = node("node", false, &["192.168.50.2"]);
        assert_eq!(text(std::slice::from_ref(&changing)), "192.168.50.2\tnode");
        changing.edge = true;
        assert_eq!(text(std::slice::from_ref(&changing)), "10.96.7.7\tnode");
    }

    #[test]
    fn deleting_a_node_takes_its_record_only() {
        // YurtTunnel removed every line that ends in the name, so edge-node1 went with node1.
        assert_eq!(text(&[edge("node1"), edge("edge-node1")]), "10.96.7.7\tedge-node1\n10.96.7.7\tnode1");
        assert_eq!(text(&[edge("edge-node1")]), "10.96.7.7\tedge-node1");
        assert_eq!(text(&[]), "");
    }

    #[test]
    fn without_the_internal_service_edge_nodes_have_no_record() {
        let inventory = Inventory { nodes: vec![edge("edge-1"), node("cloud-1", false, &["10.0.0.1"])] };
        assert_eq!(records(&inventory, None), "10.0.0.1\tcloud-1");
    }

    #[test]
    fn addresses_may_be_ipv6() {
        let inventory = Inventory { nodes: vec![edge("edge-1"), node("cloud-1", false, &["fd00::1"])] };
        let internal = Some("fd00:96::a".parse().unwrap());
        assert_eq!(records(&inventory, internal), "fd00:96::a\tedge-1\nfd00::1\tcloud-1");
    }

    #[test]
    fn a_headless_service_has_no_address() {
        let service = |cluster_ip: &str| {
            let spec = json!({"spec": {"clusterIP": cluster_ip}});
            serde_json::from_value::<Service>(spec).unwrap()
        };
        assert_eq!(cluster_ip(&service("None")), None);
        assert_eq!(cluster_ip(&service("")), None);
        assert_eq!(cluster_ip(&service("fd00::9")), Some("fd00::9".parse().unwrap()));
        assert_eq!(cluster_ip(&Service::default()), None);
    }
}
