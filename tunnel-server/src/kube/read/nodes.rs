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
/// API server. An empty list is refused, even the first one if an earlier run had nodes. These are `last_known`, which is
/// awaited with the first list, and also tell which nodes were edge nodes before.
///
/// A name, an address or a port that cannot be used is left out with a warning; the rest of its node stays.
pub async fn run(
    client: Client,
    selector: Selector,
    health: Health,
    allow_empty: bool,
    last_known: impl Future<Output = Inventory> + Send,
    mut publish: impl FnMut(Inventory) + Send,
    stop: CancellationToken,
) {
    let mut events = pin!(health.follow(Api::<SlimNode>::all(client), Config::default(), "nodes"));
    let mut nodes = Nodes::new(selector, allow_empty);
    let mut last_known = Some(last_known);
    let mut due: Option<Instant> = None;
    let mut had_nodes = false;
    loop {
        tokio::select! {
            // Publishing first: events may come without a pause.
            biased;
            () = stop.cancelled() => return,
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                due = None;
                let inventory = nodes.inventory.clone();
                let empty = inventory.is_empty();
                if empty && had_nodes && !allow_empty {
                    log_vanished();
                    continue;
                }
                had_nodes = !empty;
                publish(inventory);
            }
            event = events.next() => {
                let Some(event) = event else { return };
                if matches!(event, Event::InitDone)
                    && nodes.is_first_list()
                    && let Some(last_known) = last_known.take()
                {
                    nodes.inventory = last_known.await;
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
            Event::Delete(node) => {
                self.skipped.remove(node.name());
                self.inventory.remove(node.name())
            }
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
mod tests;
