//! Reads Nodes into an inventory.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Node;
use kube::runtime::watcher::{Config, Event};
use kube::{Api, Client};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tunnel_kube::Health;
use tunnel_routing::inventory::{
    Inventory, InventoryNode, LogBudget, NodeSpec, NodeStatus, Selector, read_node,
};
use tunnel_runtime::text::printable;

use crate::kube::partial::Partial;

/// A Node with only the fields that the tunnel needs.
pub type SlimNode = Partial<Node, NodeSpec<String>, NodeStatus<String, i64>>;

/// Changes within this time are published together.
pub(crate) const DEBOUNCE: Duration = Duration::from_millis(50);

/// Maximum number of unusable fields named per Node; the rest is counted.
const MAX_SKIPPED: usize = 8;

/// Follows the Nodes and publishes an inventory whenever a field that the tunnel needs has changed, until `stop`. An
/// inventory is always complete, so the first is published once every node is known; it has cloud nodes whether they
/// are Ready or not.
///
/// Unless `allow_empty` is set, nodes that vanish all at once are kept, because that is more likely a mistake of the
/// API server. An empty list is refused, even the first one if `last_known` returns nodes of an earlier run. These also tell
/// which nodes were edge nodes before.
///
/// A name, an address or a port that cannot be used is left out with a warning; the rest of its node stays.
pub async fn run<F: Future<Output = ()> + Send, K: Future<Output = Inventory> + Send>(
    client: Client,
    selector: Selector,
    health: Health,
    allow_empty: bool,
    mut last_known: impl FnMut() -> K + Send,
    mut publish: impl FnMut(Inventory) -> F + Send,
    stop: CancellationToken,
) {
    let mut events = pin!(health.follow(Api::<SlimNode>::all(client), Config::default(), "nodes"));
    let mut nodes = Nodes::new(selector, allow_empty);
    let mut due: Option<Instant> = None;
    let mut had_nodes = false;
    loop {
        tokio::select! {
            // Publishing first: events may come without a pause.
            biased;
            () = stop.cancelled() => return,
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                due = None;
                let inventory = nodes.inventory();
                let empty = inventory.is_empty();
                if empty && had_nodes && !allow_empty {
                    log_vanished();
                    continue;
                }
                had_nodes = !empty;
                publish(inventory).await;
            }
            event = events.next() => {
                let Some(event) = event else { return };
                if matches!(event, Event::InitDone) && nodes.is_first_list() {
                    nodes.inventory = last_known().await;
                    had_nodes = !nodes.inventory.is_empty();
                }
                if nodes.apply(event) {
                    due.get_or_insert_with(|| Instant::now() + DEBOUNCE);
                }
            }
        }
    }
}

fn log_vanished() {
    tracing::warn!(
        "API server lists no nodes, keeping the known ones (--allow-empty-inventory accepts an empty list)"
    );
}

struct Nodes {
    selector: Selector,
    /// True if a list may be empty.
    allow_empty: bool,
    inventory: Inventory,
    /// Fields that could not be used, by node.
    skipped: BTreeMap<String, Vec<SkippedField>>,
    /// The list being read.
    listed: BTreeMap<String, Known>,
    /// True once the API server has reported the nodes.
    complete: bool,
    /// Limits warnings about skipped fields: a kubelet may write its Node as often as it likes.
    lines: LogBudget,
}

struct Known {
    /// None if its name cannot be used.
    node: Option<InventoryNode>,
    skipped: Vec<SkippedField>,
}

/// A field of a Node that was left out.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SkippedField {
    key: &'static str,
    value: String,
    reason: String,
}

impl Nodes {
    fn new(selector: Selector, allow_empty: bool) -> Self {
        let (inventory, skipped, listed) = (Inventory::default(), BTreeMap::new(), BTreeMap::new());
        let lines = LogBudget::new("invalid fields of Nodes");
        Self { selector, allow_empty, inventory, skipped, listed, complete: false, lines }
    }

    /// True if the list is empty although it must not be; it is refused if there were nodes before.
    fn lists_none(&self) -> bool {
        !self.allow_empty && self.listed.values().all(|known| known.node.is_none())
    }

    /// True if the nodes known to an earlier run are needed to judge the list: one without nodes, and nodes that are edge nodes
    /// no more.
    fn is_first_list(&self) -> bool {
        !self.complete && self.inventory.is_empty()
    }

    fn inventory(&self) -> Inventory {
        self.inventory.clone()
    }

    /// Returns true if the inventory has changed.
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
            Event::InitDone if self.lists_none() && !self.inventory.is_empty() => {
                log_vanished();
                // Later changes are added to the known nodes.
                self.listed.clear();
                false
            }
            Event::InitDone => {
                let (mut nodes, mut skipped) = (Vec::with_capacity(self.listed.len()), BTreeMap::new());
                for (name, known) in std::mem::take(&mut self.listed) {
                    let before = self.inventory.get(&name).map(Arc::as_ref);
                    nodes.extend(known.node.map(|node| node.following(before)));
                    if !known.skipped.is_empty() {
                        skipped.insert(name, known.skipped);
                    }
                }
                self.skipped = skipped;
                let first = !std::mem::replace(&mut self.complete, true);
                let before = std::mem::replace(&mut self.inventory, nodes.into());
                first || self.inventory != before
            }
            Event::Apply(node) => {
                let known = self.read(&node);
                // After a refused first list, the first node counts as a change even if it was known.
                let first = !std::mem::replace(&mut self.complete, true);
                self.set(node.name(), known) || first
            }
            Event::Delete(node) => self.forget(node.name()),
        }
    }

    /// Returns true if the inventory has changed.
    fn set(&mut self, name: &str, known: Known) -> bool {
        if known.skipped.is_empty() {
            self.skipped.remove(name);
        } else {
            self.skipped.insert(name.to_owned(), known.skipped);
        }
        match known.node {
            Some(node) => {
                let node = node.following(self.inventory.get(name).map(Arc::as_ref));
                self.inventory.insert(node)
            }
            None => self.inventory.remove(name),
        }
    }

    fn forget(&mut self, name: &str) -> bool {
        self.skipped.remove(name);
        self.inventory.remove(name)
    }

    fn read(&mut self, node: &SlimNode) -> Known {
        let known = read(node, &self.selector);
        for field in self.worth_logging(node.name(), &known.skipped, Instant::now().into_std()) {
            tracing::warn!(
                node = printable(node.name(), 253),
                key = field.key,
                value = field.value,
                reason = field.reason,
                "ignoring an invalid field of a Node"
            );
        }
        known
    }

    /// Returns the fields that were not skipped in the node's last version, within the log budget.
    fn worth_logging<'a>(
        &mut self,
        name: &str,
        skipped: &'a [SkippedField],
        now: std::time::Instant,
    ) -> Vec<&'a SkippedField> {
        let logged = self.skipped.get(name).map_or(&[][..], Vec::as_slice);
        let new = skipped.iter().filter(|field| !logged.contains(field));
        new.filter(|_| self.lines.may_log(now)).collect()
    }
}

fn read(node: &SlimNode, selector: &Selector) -> Known {
    let name = match node.name().parse() {
        Ok(name) => name,
        Err(error) => {
            let (key, value, reason) =
                ("metadata.name", printable(node.name(), 253), printable(&format!("{error}"), 512));
            return Known { node: None, skipped: vec![SkippedField { key, value, reason }] };
        }
    };
    let mut skipped = Vec::new();
    let mut more = 0;
    let edge = selector.matches(node.labels());
    let read = read_node(name, edge, node.spec.as_ref(), node.status.as_ref(), |invalid| {
        let (key, reason) = (invalid.field.key(), invalid.reason.to_owned());
        if skipped.len() < MAX_SKIPPED {
            skipped.push(SkippedField { key, value: printable(&invalid.value, 64), reason });
        } else {
            more += 1;
        }
        Ok::<_, Infallible>(())
    });
    let Ok(read) = read;
    if more > 0 {
        let (key, value, reason) = ("status", more.to_string(), "so many more cannot be used".to_owned());
        skipped.push(SkippedField { key, value, reason });
    }
    let labels = selector.kept(edge, node.labels());
    Known { node: Some(InventoryNode { created: node.created(), labels, ..read }), skipped }
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

    #[test]
    fn a_node_that_drops_its_edge_label_was_one() {
        let labelled = |label: &str, created: &str| {
            slim(&json!({"metadata": {"name": "edge-1", "creationTimestamp": created,
                "labels": {"superedge.io/edge-node": label}}}))
        };
        let (first, again) = ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z");
        let was_edge = |nodes: &Nodes| nodes.inventory().get("edge-1").map(|node| node.was_edge);
        let mut nodes = Nodes::new(Selector::default(), false);
        assert!(listed(&mut nodes, &[labelled("enable", first)]));
        assert_eq!(was_edge(&nodes), Some(false));
        assert!(nodes.apply(Event::Apply(labelled("", first))));
        assert_eq!(was_edge(&nodes), Some(true));
        // Whatever it writes next, and when the nodes are listed anew, by this run or another one.
        nodes.apply(Event::Apply(labelled("x", first)));
        listed(&mut nodes, &[labelled("", first)]);
        assert_eq!(was_edge(&nodes), Some(true));
        let kept = serde_json::to_string(&nodes.inventory()).unwrap();
        let mut nodes = Nodes::new(Selector::default(), false);
        assert!(nodes.is_first_list());
        nodes.inventory = serde_json::from_str(&kept).unwrap();
        listed(&mut nodes, &[labelled("", first)]);
        assert_eq!(was_edge(&nodes), Some(true));
        // Another Node of that name is another one.
        nodes.apply(Event::Apply(labelled("", again)));
        assert_eq!(was_edge(&nodes), Some(false));
    }

    fn names(nodes: &Nodes) -> Vec<String> {
        nodes.inventory().iter().map(|node| node.name.to_string()).collect()
    }

    #[test]
    fn absent_and_null_fields_are_empty() {
        for node in [
            json!({"metadata": {"name": "bare"}}),
            json!({"metadata": {"name": "nulls", "labels": null},
                "spec": {"podCIDR": "", "podCIDRs": null}, "status": {"addresses": null, "daemonEndpoints": {}}}),
        ] {
            let Known { node, skipped } = read(&slim(&node), &Selector::default());
            let node = node.unwrap();
            assert_eq!((skipped, node.edge, node.kubelet_port), (Vec::new(), false, 10250));
            assert_eq!((node.addresses, node.pod_cidrs), (Vec::new(), Vec::new()));
        }
    }

    #[test]
    fn unusable_fields_are_left_out_and_the_rest_stays() {
        let odd = slim(&json!({
            "metadata": {"name": "edge-1"},
            "spec": {"podCIDRs": ["10.244.1.0/24", "10.244/16"]},
            "status": {
                "addresses": [{"type": "InternalIP", "address": "10.0.0"}, {"type": "InternalIP", "address": "10.0.0.1"}],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": 70000}},
            },
        }));
        let Known { node, skipped } = read(&odd, &Selector::default());
        let node = node.unwrap();
        assert_eq!(node.addresses, ["10.0.0.1".parse::<std::net::IpAddr>().unwrap()]);
        assert_eq!(node.pod_cidrs, ["10.244.1.0/24".parse().unwrap()]);
        assert_eq!(node.kubelet_port, 10250);
        let skipped: Vec<_> =
            skipped.iter().map(|field| (field.key, field.value.as_str(), field.reason.as_str())).collect();
        assert_eq!(
            skipped,
            [
                ("status.addresses", "10.0.0", "not an IP address"),
                ("status.daemonEndpoints.kubeletEndpoint.Port", "70000", "not a port"),
                ("spec.podCIDRs", "10.244/16", "not an address range"),
            ]
        );

        let mut nodes = Nodes::new(Selector::default(), false);
        assert!(listed(&mut nodes, &[node_with_bad_name(), node_named("edge-1")]));
        assert_eq!(names(&nodes), ["edge-1"]);
        assert!(!nodes.apply(Event::Apply(node_with_bad_name())), "it is not in the inventory");
    }

    #[test]
    fn unusual_values_are_what_they_are_or_are_left_out() {
        let field = |spec: Value, status: Value| {
            let odd = slim(&json!({"metadata": {"name": "edge-1"}, "spec": spec, "status": status}));
            let Known { node, skipped } = read(&odd, &Selector::default());
            (node.unwrap(), skipped.len())
        };
        for (text, address) in [
            ("10.0.0.1", Some("10.0.0.1")),
            ("::ffff:10.0.0.1", Some("10.0.0.1")),
            ("FD00:0::00A", Some("fd00::a")),
            ("010.0.0.1", None),
            ("10.0.1", None),
            ("167772161", None),
            ("0x0a.0.0.1", None),
            ("10.0.0.1/24", None),
            ("10.0.0.1:10250", None),
            ("[fd00::1]", None),
            ("fe80::1%eth0", None),
            (" 10.0.0.1", None),
            ("edge-1", None),
            ("", None),
        ] {
            let status = json!({"addresses": [{"type": "InternalIP", "address": text}]});
            let (node, skipped) = field(json!({}), status);
            let read: Vec<_> = node.addresses.iter().map(ToString::to_string).collect();
            assert_eq!(read, address.into_iter().collect::<Vec<_>>(), "{text:?}");
            assert_eq!(skipped == 0, address.is_some(), "{text:?}");
        }
        let types = ["Hostname", "ExternalIP", "InternalDNS", "ExternalDNS", "internalip", "", "InternalIP"];
        let typed = types
            .iter()
            .zip(1..)
            .map(|(r#type, n)| json!({"type": r#type, "address": format!("10.0.0.{n}")}));
        let (node, skipped) = field(json!({}), json!({"addresses": typed.collect::<Vec<_>>()}));
        let read: Vec<_> = node.addresses.iter().map(ToString::to_string).collect();
        assert_eq!((read, skipped), (vec!["10.0.0.7".to_owned(), "10.0.0.2".to_owned()], 0));
        for (port, read) in
            [(0, 10250), (1, 1), (65535, 65535), (65536, 10250), (-1, 10250), (i64::MIN, 10250)]
        {
            let (node, skipped) =
                field(json!({}), json!({"daemonEndpoints": {"kubeletEndpoint": {"Port": port}}}));
            assert_eq!(node.kubelet_port, read, "{port}");
            assert_eq!(skipped, usize::from(!(0..=65535).contains(&port)), "{port}");
        }
        for (range, read) in [
            ("0.0.0.0/0", Some("0.0.0.0/0")),
            ("10.244.1.77/24", Some("10.244.1.0/24")),
            ("10.244.1.77/32", Some("10.244.1.77/32")),
            ("FD00::1/64", Some("fd00::/64")),
            ("10.244.1.0/33", None),
            ("10.244.1.0/-1", None),
            ("10.244.1.0", None),
            // Kubernetes accepts leading zeros too.
            ("010.244.1.0/24", Some("10.244.1.0/24")),
        ] {
            let (node, skipped) = field(json!({"podCIDR": range, "podCIDRs": [range]}), json!({}));
            let ranges: Vec<_> = node.pod_cidrs.iter().map(ToString::to_string).collect();
            assert_eq!(ranges, read.into_iter().collect::<Vec<_>>(), "{range}");
            assert_eq!(skipped == 0, read.is_some(), "{range}");
        }
    }

    fn node_with_bad_name() -> SlimNode {
        node("Edge_1", "10.0.0.9")
    }

    fn node_named(name: &str) -> SlimNode {
        node(name, "10.0.0.1")
    }

    #[test]
    fn only_fields_that_the_tunnel_needs_are_a_change() {
        let mut nodes = Nodes::new(Selector::default(), false);
        assert!(listed(&mut nodes, &[]), "the first list counts even when it is empty");
        assert!(!listed(&mut nodes, &[]));
        assert!(nodes.apply(Event::Apply(node("a", "10.0.0.1"))));
        assert!(!nodes.apply(Event::Apply(node("a", "10.0.0.1"))), "a heartbeat");
        assert!(nodes.apply(Event::Apply(node("a", "10.0.0.2"))));
        assert!(!listed(&mut nodes, &[node("a", "10.0.0.2")]), "a list of the same");
        assert!(nodes.apply(Event::Delete(node("a", "10.0.0.2"))));
        assert!(!nodes.apply(Event::Delete(node("a", "10.0.0.2"))));
    }

    #[test]
    fn a_complete_list_replaces_everything() {
        let mut nodes = Nodes::new(Selector::default(), false);
        listed(&mut nodes, &[node("a", "10.0.0.1"), node("b", "10.0.0.2")]);
        nodes.apply(Event::Init);
        nodes.apply(Event::InitApply(node("c", "10.0.0.3")));
        assert_eq!(names(&nodes), ["a", "b"], "half a list is not visible");
        nodes.apply(Event::Init);
        nodes.apply(Event::InitApply(node("b", "10.0.0.2")));
        assert!(nodes.apply(Event::InitDone));
        assert_eq!(names(&nodes), ["b"], "a list that starts over starts empty");
    }

    #[test]
    fn a_list_without_nodes_is_refused() {
        let mut nodes = Nodes::new(Selector::default(), false);
        listed(&mut nodes, &[node("a", "10.0.0.1"), node("b", "10.0.0.2")]);
        assert!(!listed(&mut nodes, &[]));
        assert!(!listed(&mut nodes, &[node_with_bad_name()]), "none of them can be used");
        assert!(nodes.apply(Event::Apply(node("c", "10.0.0.3"))));
        assert_eq!(names(&nodes), ["a", "b", "c"]);
        assert!(listed(&mut nodes, &[node("c", "10.0.0.3")]));
        assert_eq!(names(&nodes), ["c"], "a list with nodes is true");
        // Nodes may be removed one by one.
        assert!(nodes.apply(Event::Delete(node("c", "10.0.0.3"))));
        assert!(names(&nodes).is_empty());

        let mut nodes = Nodes::new(Selector::default(), true);
        listed(&mut nodes, &[node("a", "10.0.0.1")]);
        assert!(listed(&mut nodes, &[]));
        assert!(names(&nodes).is_empty(), "it is allowed");
    }

    #[test]
    fn after_a_first_list_without_nodes_those_known_before_count_with_the_first_that_comes() {
        let mut nodes = Nodes::new(Selector::default(), false);
        nodes.apply(Event::Init);
        assert!(nodes.is_first_list());
        nodes.inventory = [node("a", "10.0.0.1"), node("b", "10.0.0.2")]
            .iter()
            .filter_map(|node| read(node, &Selector::default()).node)
            .collect();
        assert!(!nodes.apply(Event::InitDone));
        assert!(nodes.apply(Event::Apply(node("a", "10.0.0.1"))), "it is as it was");
        assert_eq!(names(&nodes), ["a", "b"]);
        assert!(!nodes.apply(Event::Apply(node("a", "10.0.0.1"))), "a heartbeat");
        nodes.apply(Event::Init);
        assert!(!nodes.is_first_list());
    }

    #[test]
    fn a_warning_is_not_repeated_for_heartbeats() {
        let mut nodes = Nodes::new(Selector::default(), false);
        let warnings = |nodes: &mut Nodes, address| {
            let skipped = read(&node("a", address), &nodes.selector).skipped;
            nodes.worth_logging("a", &skipped, std::time::Instant::now()).len()
        };
        assert_eq!(warnings(&mut nodes, "10.0.0"), 1);
        listed(&mut nodes, &[node("a", "10.0.0")]);
        assert_eq!(warnings(&mut nodes, "10.0.0"), 0);
        assert_eq!(warnings(&mut nodes, "10.0"), 1);
        assert_eq!(warnings(&mut nodes, "10.0.0.1"), 0);
        nodes.apply(Event::Delete(node("a", "10.0.0")));
        assert_eq!(warnings(&mut nodes, "10.0.0"), 1, "another node of that name");
    }

    #[test]
    fn a_node_that_names_ever_other_things_does_not_fill_the_log() {
        let mut nodes = Nodes::new(Selector::default(), false);
        let now = std::time::Instant::now();
        let mut lines = 0;
        for n in 0..1000 {
            let known = read(&node("a", &format!("10.0.{n}")), &nodes.selector);
            assert_eq!(known.skipped.len(), 1);
            lines += nodes.worth_logging("a", &known.skipped, now).len();
            nodes.set("a", known);
        }
        assert_eq!(lines, 100);
    }
}
