//! The nodes, as an inventory.

mod slim;

pub use slim::{Address, SlimNode};

use std::collections::BTreeMap;
use std::pin::pin;
use std::time::Duration;

use futures_util::StreamExt as _;
use ipnet::IpNet;
use kube::runtime::watcher::{Config, Event};
use kube::{Api, Client};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tunnel_core::text::printable;

use super::watch::{Health, follow};
use crate::inventory::{Inventory, InventoryNode, ROUTED, Selector, add_address, kubelet_port};

/// Changes that come this close together are published as one.
const TOGETHER: Duration = Duration::from_millis(50);

/// Follows the Nodes and publishes them whenever something changes that the tunnel cares about, until `stop`. The first
/// inventory is published when every node is known, and none ever with only a part of them; cloud nodes are there
/// whether they are Ready or not.
///
/// A name, an address or a port that cannot be used is left out with a warning; the rest of its node stays.
pub async fn run(
    client: Client,
    selector: Selector,
    health: Health,
    mut publish: impl FnMut(Inventory) + Send,
    stop: CancellationToken,
) {
    let mut events = pin!(follow(Api::<SlimNode>::all(client), Config::default(), "nodes", health));
    let mut nodes = Nodes::new(selector);
    let mut due: Option<Instant> = None;
    loop {
        tokio::select! {
            // Publishing goes first: events may come without a pause.
            biased;
            () = stop.cancelled() => return,
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                due = None;
                publish(nodes.inventory());
            }
            event = events.next() => {
                let Some(event) = event else { return };
                if nodes.apply(event) {
                    due.get_or_insert_with(|| Instant::now() + TOGETHER);
                }
            }
        }
    }
}

/// What is known of the nodes.
struct Nodes {
    selector: Selector,
    known: BTreeMap<String, Known>,
    /// A list that is being told.
    listed: BTreeMap<String, Known>,
    /// Whether there was a whole list.
    complete: bool,
}

struct Known {
    /// None: its name cannot be used.
    node: Option<InventoryNode>,
    complaints: Vec<Complaint>,
}

/// Something of a Node that is left out.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Complaint {
    key: &'static str,
    value: String,
    reason: String,
}

impl Nodes {
    fn new(selector: Selector) -> Self {
        Self { selector, known: BTreeMap::new(), listed: BTreeMap::new(), complete: false }
    }

    fn inventory(&self) -> Inventory {
        Inventory { nodes: self.known.values().filter_map(|known| known.node.clone()).collect() }
    }

    /// Whether the inventory is another one now.
    fn apply(&mut self, event: Event<SlimNode>) -> bool {
        match event {
            Event::Init => {
                self.listed.clear();
                false
            }
            Event::InitApply(node) => {
                let known = self.read(&node);
                self.listed.insert(node.name().to_owned(), known);
                false
            }
            Event::InitDone => {
                let before = std::mem::replace(&mut self.known, std::mem::take(&mut self.listed));
                let same =
                    before.values().map(|known| &known.node).eq(self.known.values().map(|known| &known.node));
                !std::mem::replace(&mut self.complete, true) || !same
            }
            Event::Apply(node) => {
                let known = self.read(&node);
                match self.known.get_mut(node.name()) {
                    Some(before) => {
                        let changed = before.node != known.node;
                        *before = known;
                        changed
                    }
                    None => {
                        let usable = known.node.is_some();
                        self.known.insert(node.name().to_owned(), known);
                        usable
                    }
                }
            }
            Event::Delete(node) => self.known.remove(node.name()).is_some_and(|known| known.node.is_some()),
        }
    }

    fn read(&self, node: &SlimNode) -> Known {
        let known = read(node, &self.selector);
        for complaint in self.unsaid(node.name(), &known.complaints) {
            tracing::warn!(
                node = printable(node.name(), 253),
                key = complaint.key,
                value = printable(&complaint.value, 64),
                reason = complaint.reason,
                "a part of a Node cannot be used and is left out"
            );
        }
        known
    }

    /// Those that the node's last version did not give already.
    fn unsaid<'a>(&'a self, name: &str, complaints: &'a [Complaint]) -> impl Iterator<Item = &'a Complaint> {
        let said = self.known.get(name).map_or(&[][..], |before| &before.complaints);
        complaints.iter().filter(|complaint| !said.contains(complaint))
    }
}

fn read(node: &SlimNode, selector: &Selector) -> Known {
    let mut complaints = Vec::new();
    let mut complain = |key, value: &str, reason: String| {
        complaints.push(Complaint { key, value: value.to_owned(), reason });
    };
    let name = match node.name().parse() {
        Ok(name) => name,
        Err(error) => {
            complain("metadata.name", node.name(), format!("{error}"));
            return Known { node: None, complaints };
        }
    };
    let mut addresses = Vec::new();
    for wanted in ROUTED {
        for entry in node.addresses.iter().filter(|entry| entry.r#type == wanted) {
            match entry.address.parse() {
                Ok(address) => add_address(&mut addresses, address),
                Err(_) => complain("status.addresses", &entry.address, "not an IP address".to_owned()),
            }
        }
    }
    let port = node.kubelet_port.and_then(|port| match u16::try_from(port) {
        Ok(port) => Some(port),
        Err(_) => {
            let key = "status.daemonEndpoints.kubeletEndpoint.Port";
            complain(key, &port.to_string(), "not a port".to_owned());
            None
        }
    });
    let mut pod_cidrs = Vec::new();
    for text in node.pod_cidrs.iter().filter(|text| !text.is_empty()) {
        match text.parse::<IpNet>() {
            Ok(net) => pod_cidrs.push(net.trunc()),
            Err(_) => complain("spec.podCIDRs", text, "not an address range".to_owned()),
        }
    }
    let edge = selector.matches(node.labels());
    let node = InventoryNode { name, edge, addresses, kubelet_port: kubelet_port(port), pod_cidrs };
    Known { node: Some(node), complaints }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn slim(node: &Value) -> SlimNode {
        serde_json::from_value(node.clone()).unwrap()
    }

    fn node(name: &str, address: &str) -> SlimNode {
        slim(&json!({
            "metadata": {"name": name, "resourceVersion": "1", "labels": {"superedge.io/edge-node": "enable"}},
            "status": {"addresses": [{"type": "InternalIP", "address": address}]},
        }))
    }

    fn listed(nodes: &mut Nodes, items: &[SlimNode]) -> bool {
        assert!(!nodes.apply(Event::Init));
        for item in items {
            assert!(!nodes.apply(Event::InitApply(item.clone())));
        }
        nodes.apply(Event::InitDone)
    }

    fn names(nodes: &Nodes) -> Vec<String> {
        nodes.inventory().nodes.iter().map(|node| node.name.to_string()).collect()
    }

    /// The two readers of Nodes must not differ.
    #[test]
    fn a_node_reads_as_it_does_from_the_inventory_file() {
        for node in [
            json!({"kind": "Node", "metadata": {"name": "edge-1", "labels": {"openyurt.io/is-edge-worker": "true"}},
            "spec": {"podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.7/24", "fd00:10:244:1::/64"]},
            "status": {
                "addresses": [
                    {"type": "ExternalIP", "address": "203.0.113.9"}, {"type": "InternalIP", "address": "10.8.0.7"},
                    {"type": "Hostname", "address": "edge-1"}, {"type": "InternalIP", "address": "::ffff:10.8.0.7"},
                    {"type": "InternalIP", "address": "fd00:8::7"}, {"type": "ExternalIP", "address": "10.8.0.7"},
                ],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": 10350}},
            }}),
            json!({"kind": "Node", "metadata": {"name": "cloud-1", "labels": {"openyurt.io/is-edge-worker": "false"}},
                "spec": {"podCIDR": "10.244.0.5/24"},
                "status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 0}}}}),
            json!({"kind": "Node", "metadata": {"name": "bare"}}),
            json!({"kind": "Node", "metadata": {"name": "nulls", "labels": null},
                "spec": {"podCIDR": "", "podCIDRs": null}, "status": {"addresses": null, "daemonEndpoints": {}}}),
        ] {
            let selector = Selector::default();
            let known = read(&slim(&node), &selector);
            assert_eq!(known.complaints, []);
            let file = crate::inventory::parse(&node.to_string(), &selector).unwrap();
            assert_eq!(vec![known.node.unwrap()], file.nodes);
        }
    }

    #[test]
    fn what_cannot_be_used_is_left_out_and_the_rest_stays() {
        let odd = slim(&json!({
            "metadata": {"name": "edge-1"},
            "spec": {"podCIDRs": ["10.244.1.0/24", "10.244/16"]},
            "status": {
                "addresses": [{"type": "InternalIP", "address": "10.0.0"}, {"type": "InternalIP", "address": "10.0.0.1"}],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": 70000}},
            },
        }));
        let Known { node, complaints } = read(&odd, &Selector::default());
        let node = node.unwrap();
        assert_eq!(node.addresses, ["10.0.0.1".parse::<std::net::IpAddr>().unwrap()]);
        assert_eq!(node.pod_cidrs, ["10.244.1.0/24".parse().unwrap()]);
        assert_eq!(node.kubelet_port, 10250);
        let complaints: Vec<_> =
            complaints.iter().map(|c| (c.key, c.value.as_str(), c.reason.as_str())).collect();
        assert_eq!(
            complaints,
            [
                ("status.addresses", "10.0.0", "not an IP address"),
                ("status.daemonEndpoints.kubeletEndpoint.Port", "70000", "not a port"),
                ("spec.podCIDRs", "10.244/16", "not an address range"),
            ]
        );

        let mut nodes = Nodes::new(Selector::default());
        assert!(listed(&mut nodes, &[node_with_bad_name(), node_named("edge-1")]));
        assert_eq!(names(&nodes), ["edge-1"]);
        assert!(!nodes.apply(Event::Apply(node_with_bad_name())), "it is not in the inventory");
    }

    fn node_with_bad_name() -> SlimNode {
        node("Edge_1", "10.0.0.9")
    }

    fn node_named(name: &str) -> SlimNode {
        node(name, "10.0.0.1")
    }

    #[test]
    fn only_what_the_tunnel_cares_about_is_a_change() {
        let mut nodes = Nodes::new(Selector::default());
        assert!(listed(&mut nodes, &[]), "the first list is news even when it is empty");
        assert!(!listed(&mut nodes, &[]));
        assert!(nodes.apply(Event::Apply(node("a", "10.0.0.1"))));
        assert!(!nodes.apply(Event::Apply(node("a", "10.0.0.1"))), "a heartbeat");
        assert!(nodes.apply(Event::Apply(node("a", "10.0.0.2"))));
        assert!(!listed(&mut nodes, &[node("a", "10.0.0.2")]), "a list of the same");
        assert!(nodes.apply(Event::Delete(node("a", "10.0.0.2"))));
        assert!(!nodes.apply(Event::Delete(node("a", "10.0.0.2"))));
    }

    #[test]
    fn a_list_replaces_everything_at_once() {
        let mut nodes = Nodes::new(Selector::default());
        listed(&mut nodes, &[node("a", "10.0.0.1"), node("b", "10.0.0.2")]);
        nodes.apply(Event::Init);
        nodes.apply(Event::InitApply(node("c", "10.0.0.3")));
        assert_eq!(names(&nodes), ["a", "b"], "half a list is not to be seen");
        nodes.apply(Event::Init);
        nodes.apply(Event::InitApply(node("b", "10.0.0.2")));
        assert!(nodes.apply(Event::InitDone));
        assert_eq!(names(&nodes), ["b"], "a list that was begun again begins empty");
    }

    #[test]
    fn a_warning_is_not_repeated_for_heartbeats() {
        let mut nodes = Nodes::new(Selector::default());
        let unsaid = |nodes: &Nodes, address| {
            let complaints = read(&node("a", address), &nodes.selector).complaints;
            nodes.unsaid("a", &complaints).count()
        };
        assert_eq!(unsaid(&nodes, "10.0.0"), 1);
        listed(&mut nodes, &[node("a", "10.0.0")]);
        assert_eq!((unsaid(&nodes, "10.0.0"), unsaid(&nodes, "10.0"), unsaid(&nodes, "10.0.0.1")), (0, 1, 0));
        nodes.apply(Event::Delete(node("a", "10.0.0")));
        assert_eq!(unsaid(&nodes, "10.0.0"), 1, "another node of that name");
    }
}
