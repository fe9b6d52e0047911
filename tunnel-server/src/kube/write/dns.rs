//! DNS records for CoreDNS's `hosts` plugin: edge nodes' names lead to the internal Service, all others to the node.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use futures_util::stream::select_all;
use k8s_openapi::api::core::v1::{ConfigMap, Service};
use kube::Api;
use kube::api::{Patch, PatchParams};
use kube::runtime::events::EventType;
use kube::runtime::watcher::Event;
use prometheus_client::metrics::gauge::Gauge;
use serde_json::json;
use tokio::time::Instant;
use tunnel_kube::{Attempts, FIELD_MANAGER, Followed, named, request};
use tunnel_routing::inventory::Inventory;
use tunnel_runtime::NodeName;

use super::events::{self, Events};
use crate::kube::context::{KubeContext, WRITE_DEADLINE};
use crate::kube::error::ClusterError;
use crate::kube::reconcile::{self, Reconcile, changes, inputs};

pub const KEY: &str = "tunnel-nodes";

/// Changes within this time are written together.
const DEBOUNCE: Duration = Duration::from_millis(200);
/// Minimum pause between two writes.
const PAUSE: Duration = Duration::from_secs(1);
/// Maximum average write rate, in bytes per second: etcd stores every write, and every CoreDNS receives it.
const BYTES_A_SECOND: usize = 64 << 10;
/// Maximum size of the records. The API server limits a ConfigMap's data to 1 MiB; the rest is left for other keys.
const MOST_BYTES: usize = 1_000_000;
/// Names per line when there is no room for one line each.
const NAMES: usize = 32;

/// Text of the ConfigMap's key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text {
    pub text: String,
    /// Number of records in the text.
    pub records: usize,
    /// Number of records without room.
    pub left_out: usize,
    /// Number of nodes whose names could be somebody else's.
    pub refused: usize,
}

/// Returns the records, sorted, one per line: address, tab, node name. Edge nodes get `internal`, the internal
/// Service's address, the others their own address. A node without address has no record, nor has one whose name has dots
/// outside of `zones`: the record would be found before those of the cluster and of the Internet with this name.
///
/// If they exceed [`MOST_BYTES`], several names share a line. If that is still too much, the last edge nodes in name
/// order are left out.
pub fn records(inventory: &Inventory, internal: Option<IpAddr>, zones: &[NodeName]) -> Text {
    let is_nodes = |name: &str| {
        let within =
            |zone: &NodeName| name.strip_suffix(zone.as_str()).is_some_and(|rest| rest.ends_with('.'));
        !name.contains('.') || zones.iter().any(within)
    };
    let refused = inventory.iter().filter(|node| !is_nodes(node.name.as_str())).count();
    let records: Vec<(IpAddr, &NodeName)> = inventory
        .iter()
        .filter(|node| is_nodes(node.name.as_str()))
        .filter_map(|node| {
            let address = if node.edge { internal } else { node.addresses.first().copied() };
            Some((address?, &node.name))
        })
        .collect();
    let mut lines: Vec<String> = records.iter().map(|(address, name)| format!("{address}\t{name}")).collect();
    if lines.iter().map(|line| line.len() + 1).sum::<usize>() <= MOST_BYTES {
        lines.sort_unstable();
        return Text { text: lines.join("\n"), records: records.len(), left_out: 0, refused };
    }
    // Cloud nodes first.
    let mut by_address: BTreeMap<(bool, IpAddr), Vec<&NodeName>> = BTreeMap::new();
    for (address, name) in &records {
        by_address.entry((Some(*address) == internal, *address)).or_default().push(name);
    }
    let (mut text, mut written) = (String::new(), 0);
    'all: for ((_, address), names) in by_address {
        let address = address.to_string();
        for (n, name) in names.into_iter().enumerate() {
            // The names ascend, so the last ones are left out.
            let begin = n % NAMES == 0;
            let more = name.as_str().len() + if begin { address.len() + 2 } else { 1 };
            if text.len() + more > MOST_BYTES {
                break 'all;
            }
            if begin && !text.is_empty() {
                text.push('\n');
            }
            text.push_str(if begin { &address } else { " " });
            text.push_str(if begin { "\t" } else { "" });
            text.push_str(name.as_str());
            written += 1;
        }
    }
    Text { text, records: written, left_out: records.len() - written, refused }
}

/// Keeps the records current while this server leads, until the stop signal. Nothing is written before the nodes are
/// known. `zones` are those of nodes' names with dots. `left_out` is set to the number of nodes without a record.
pub async fn run(context: KubeContext, events: Events, zones: Vec<NodeName>, left_out: Gauge) {
    let KubeContext { client, namespace, names, health, stop, .. } = context.clone();
    let api = Api::<ConfigMap>::namespaced(client.clone(), &namespace);
    let configmaps = health.follow(api.clone(), named(&names.dns_configmap), "configmaps/dns-records");
    let services = Api::<Service>::namespaced(client, &namespace);
    let services = health.follow(services, named(&names.internal_service), "services/dns-records");
    let inputs = select_all([
        inputs(configmaps, |target: &mut Records, event| target.configmap.apply(event)),
        inputs(services, |target: &mut Records, event| target.service.apply(event)),
        inputs(changes(&context.inventory), |target: &mut Records, ()| target.nodes_known = true),
        inputs(changes(&context.leader), |_: &mut Records, ()| {}),
    ]);
    let target = Records {
        context,
        events,
        api,
        configmap: Followed::default(),
        service: Followed::default(),
        nodes_known: false,
        not_before: None,
        zones,
        left_out,
        told: 0,
        refused: 0,
        addressing: Attempts::new("giving edge nodes DNS records"),
    };
    reconcile::run(target, inputs, DEBOUNCE, Attempts::new("writing the DNS records"), stop).await;
}

struct Records {
    context: KubeContext,
    events: Events,
    api: Api<ConfigMap>,
    configmap: Followed<ConfigMap>,
    service: Followed<Service>,
    nodes_known: bool,
    /// Earliest time of the next write.
    not_before: Option<Instant>,
    zones: Vec<NodeName>,
    left_out: Gauge,
    /// Last reported number of records without room.
    told: usize,
    /// The same of nodes whose names are not for records.
    refused: usize,
    addressing: Attempts,
}

impl Reconcile for Records {
    fn not_before(&self) -> Option<Instant> {
        self.not_before
    }

    async fn reconcile(&mut self, attempts: &mut Attempts) -> Result<Option<Instant>, ClusterError> {
        let leads = *self.context.leader.borrow();
        if !(leads && self.nodes_known && self.configmap.known && self.service.known) {
            // Only the leader reports a number.
            self.left_out.set(0);
            return Ok(None);
        }
        let inventory = self.context.inventory.borrow().clone();
        let address = self.service.only().and_then(cluster_ip);
        self.report_address(address, inventory.counts().0);
        let Text { text: wanted, records, left_out, refused } = records(&inventory, address, &self.zones);
        self.report_left_out(records, left_out);
        self.report_refused(refused);
        self.left_out.set(i64::try_from(left_out + refused).unwrap_or(i64::MAX));
        let is = self.configmap.only().and_then(|configmap| configmap.data.as_ref()?.get(KEY));
        if is != Some(&wanted) {
            let name = &self.context.names.dns_configmap;
            let patch = Patch::Apply(json!({
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": name},
                "data": BTreeMap::from([(KEY, &wanted)]),
            }));
            // Another writer's value of this key is overwritten; other keys stay.
            let params = PatchParams::apply(FIELD_MANAGER).force();
            let share = Duration::from_secs_f64(wanted.len() as f64 / BYTES_A_SECOND as f64);
            self.not_before = Some(Instant::now() + share.max(PAUSE));
            let applied =
                request(WRITE_DEADLINE, "writing ConfigMap", name, self.api.patch(name, &params, &patch))
                    .await?;
            self.configmap.apply(Event::Apply(applied));
            tracing::info!(configmap = %name, records, "updated the DNS records");
        }
        attempts.succeeded();
        Ok(None)
    }
}

impl Records {
    /// Reports records without room: when the first appear, when they have doubled, and when all have room again.
    fn report_left_out(&mut self, records: usize, left_out: usize) {
        if (left_out == 0) == (self.told == 0) && left_out <= 2 * self.told {
            return;
        }
        self.told = left_out;
        let KubeContext { namespace, names, .. } = &self.context;
        if left_out == 0 {
            tracing::info!(configmap = %names.dns_configmap, "all nodes have DNS records again");
            return;
        }
        let note = format!(
            "{left_out} edge nodes have no DNS record: a ConfigMap has room for {MOST_BYTES} bytes, which are {records} records; \
             use the addresses of the others, or shorter names"
        );
        tracing::warn!(configmap = %names.dns_configmap, records, left_out, "ConfigMap is full, edge nodes have no DNS record");
        let regarding = events::object("ConfigMap", namespace, &names.dns_configmap);
        self.events.publish(regarding, EventType::Warning, "RecordsLeftOut", note);
    }

    /// Reports nodes whose names are not for records, when their number grows.
    fn report_refused(&mut self, refused: usize) {
        if std::mem::replace(&mut self.refused, refused) < refused {
            tracing::warn!(
                refused,
                fix = "name the zones of the nodes' names with --dns-zones",
                "nodes whose names have dots have no DNS record"
            );
        }
    }

    /// Reports that edge nodes have no records because the internal Service has no address, if there are edge nodes.
    fn report_address(&mut self, address: Option<IpAddr>, edge_nodes: usize) {
        if address.is_some() || edge_nodes == 0 {
            self.addressing.succeeded();
            return;
        }
        let KubeContext { namespace, names, .. } = &self.context;
        let service = &names.internal_service;
        let why = match self.service.only() {
            None => format!("there is no Service {namespace}/{service}"),
            Some(_) => format!("the Service {namespace}/{service} has no clusterIP"),
        };
        if self.addressing.report(&why) {
            let mut regarding = events::object("Service", namespace, service);
            regarding.uid = self.service.only().and_then(|service| service.metadata.uid.clone());
            let note = format!("edge nodes have no DNS records: {why}");
            self.events.publish(regarding, EventType::Warning, "NoClusterIP", note);
        }
    }
}

/// Returns the Service's first address; None if it is headless.
fn cluster_ip(service: &Service) -> Option<IpAddr> {
    service.spec.as_ref()?.cluster_ip.as_ref()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use tunnel_routing::inventory::{DEFAULT_KUBELET_PORT, InventoryNode};

    use super::*;

    fn node(name: &str, edge: bool, addresses: &[&str]) -> InventoryNode {
        InventoryNode {
            name: name.parse().unwrap(),
            edge,
            addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
            left_out: 0,
            kubelet_port: DEFAULT_KUBELET_PORT,
            pod_cidrs: Vec::new(),
            created: None,
            was_edge: false,
            labels: BTreeMap::new(),
        }
    }

    fn edge(name: &str) -> InventoryNode {
        node(name, true, &["192.168.50.2"])
    }

    fn text(nodes: &[InventoryNode]) -> String {
        records(&nodes.to_vec().into(), Some("10.96.7.7".parse().unwrap()), &[]).text
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
    fn no_record_shadows_another_name() {
        let names =
            ["redis.prod.svc.cluster.local", "10.70.0.10", "registry.example.org", "web.shop", "example.org"];
        let nodes = names.map(|name| node(name, false, &["203.0.113.9"]));
        let edges =
            [edge("edge-1"), edge("b.edge.example.org"), edge("edge.example.org"), edge("bedge.example.org")];
        let inventory = nodes.into_iter().chain(edges).collect();
        let written = |zones: &[&str]| {
            let zones: Vec<_> = zones.iter().map(|zone| zone.parse().unwrap()).collect();
            let Text { text, refused, .. } = records(&inventory, Some("10.96.7.7".parse().unwrap()), &zones);
            (text, refused)
        };
        assert_eq!(written(&[]), ("10.96.7.7\tedge-1".to_owned(), 8));
        let zoned = "10.96.7.7\tb.edge.example.org\n10.96.7.7\tedge-1".to_owned();
        assert_eq!(written(&["edge.example.org"]), (zoned, 7));
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
        let inventory = vec![edge("edge-1"), node("cloud-1", false, &["10.0.0.1"])].into();
        assert_eq!(records(&inventory, None, &[]).text, "10.0.0.1\tcloud-1");
    }

    #[test]
    fn addresses_may_be_ipv6() {
        let inventory = vec![edge("edge-1"), node("cloud-1", false, &["fd00::1"])].into();
        let internal = Some("fd00:96::a".parse().unwrap());
        assert_eq!(records(&inventory, internal, &[]).text, "fd00:96::a\tedge-1\nfd00::1\tcloud-1");
    }

    #[test]
    fn many_records_share_lines_and_what_does_not_fit_is_left_out() {
        let fleet = |count: usize, length: usize| {
            let edge = (0..count).map(|n| edge(&format!("edge-{n:0length$}")));
            let cloud = (0..3).map(|n| node(&format!("cloud-{n}"), false, &[&format!("10.0.0.{n}")]));
            records(&edge.chain(cloud).collect(), Some("10.96.7.7".parse().unwrap()), &[])
        };
        // 23 bytes each.
        let plain = fleet(40_000, 7);
        assert_eq!((plain.text.lines().count(), plain.records, plain.left_out), (40_003, 40_003, 0));
        let shared = fleet(60_000, 7);
        assert_eq!((shared.records, shared.left_out), (60_003, 0));
        let names: Vec<&str> =
            shared.text.lines().flat_map(|line| line.split_ascii_whitespace().skip(1)).collect();
        assert_eq!((names.len(), names[0], names[59_999 + 3]), (60_003, "cloud-0", "edge-0059999"));
        assert!(shared.text.lines().all(|line| line.split_ascii_whitespace().count() <= NAMES + 1));
        let many = fleet(100_000, 40);
        assert_eq!(many.records + many.left_out, 100_003);
        assert!(many.text.len() <= MOST_BYTES && many.text.len() > MOST_BYTES - 100);
        assert!(
            many.text.contains("10.0.0.2\tcloud-2\n")
                && many.text.ends_with(&format!("{:040}", many.records - 4))
        );
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
