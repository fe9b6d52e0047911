//! The condition `PosternTunnel` of edge nodes, written by the leader.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::stream::select_all;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{ListParams, Patch};
use parking_lot::Mutex;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;
use tunnel_kube::{Attempts, RequestError, merge, request};
use tunnel_runtime::NodeName;
use tunnel_runtime::backoff::Backoff;

use super::tracker::Tracker;
use crate::kube::context::{KubeContext, WRITE_DEADLINE};
use crate::kube::error::ClusterError;
use crate::kube::partial::Partial;
use crate::kube::reconcile::{self, Reconcile, changes, inputs};

pub const CONDITION: &str = "PosternTunnel";

/// Limits the writes to ten a second.
const PACE: Duration = Duration::from_millis(100);
/// Longest delay before the next write while writes fail, whichever nodes they are of.
const SLOWEST: Duration = Duration::from_secs(5);
/// Delays before a node that could not be written is tried again: one that never can be must not delay the others.
const RETRY: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];
/// Interval at which the conditions are read again, in case another writer changed them.
const REREAD: Duration = Duration::from_secs(30 * 60);
/// Nodes per list page. A Node with everything that kubelets report has about ten kilobytes.
const PAGE: u32 = 500;
/// Time limit of one page.
const PAGE_TIME: Duration = Duration::from_secs(30);

/// Keeps the conditions current while this server leads, until the stop signal. `changed` signals changes of `tunnels`.
pub(super) async fn run(context: KubeContext, tunnels: Arc<Mutex<Tracker>>, changed: watch::Receiver<()>) {
    let inputs = select_all([
        inputs(changes(&context.inventory), |target: &mut Conditions, ()| target.nodes_changed()),
        inputs(changes(&context.leader), |target: &mut Conditions, ()| target.changed = true),
        inputs(changes(&changed), |target: &mut Conditions, ()| target.changed = true),
    ]);
    let (api, stop, now) = (Api::all(context.client.clone()), context.stop.clone(), Instant::now());
    let conditions = Conditions {
        context,
        api,
        tunnels,
        present: None,
        read_again: now,
        changed: false,
        queue: VecDeque::new(),
        next_write: now,
        slower: Backoff::new(PACE, SLOWEST),
        failing: HashMap::new(),
        logged: HashSet::new(),
    };
    reconcile::run(conditions, inputs, PACE, Attempts::new("keeping the condition of Nodes"), stop).await;
}

struct Conditions {
    context: KubeContext,
    api: Api<ConditionNode>,
    tunnels: Arc<Mutex<Tracker>>,
    /// The condition in the API server, for each node that has one; None if it has to be read.
    present: Option<HashMap<NodeName, Present>>,
    read_again: Instant,
    /// True if nodes that are not in the queue may have to be written.
    changed: bool,
    queue: VecDeque<NodeName>,
    next_write: Instant,
    slower: Backoff,
    /// Nodes whose last write failed.
    failing: HashMap<NodeName, Failing>,
    /// The status of failed writes, each logged once until none fails any more.
    logged: HashSet<Option<u16>>,
}

struct Present {
    status: String,
    /// Creation time of the Node, if it is known. One that is created again under this name has no condition.
    created: Option<SystemTime>,
}

struct Failing {
    again: Instant,
    backoff: Backoff,
}

/// Desired condition of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Want {
    Up,
    /// No tunnel since this time.
    Down(Instant),
    /// Not an edge node any more: no condition.
    Gone,
}

impl Want {
    /// Status of the condition; None for no condition.
    fn status(self) -> Option<&'static str> {
        match self {
            Self::Up => Some("True"),
            Self::Down(_) => Some("False"),
            Self::Gone => None,
        }
    }
}

impl Reconcile for Conditions {
    fn not_before(&self) -> Option<Instant> {
        Some(self.next_write)
    }

    async fn reconcile(&mut self, attempts: &mut Attempts) -> Result<Option<Instant>, ClusterError> {
        let mut leader = self.context.leader.clone();
        if !*leader.borrow_and_update() {
            self.present = None;
            self.queue.clear();
            self.failing.clear();
            self.logged.clear();
            return Ok(None);
        }
        if self.present.is_none() || Instant::now() >= self.read_again {
            let present = list(&self.api).await?;
            attempts.succeeded();
            // Another server that led meanwhile may have written others.
            self.present = leader.has_changed().is_ok_and(|changed| !changed).then_some(present);
            self.read_again = Instant::now() + REREAD;
            self.changed = true;
            // The list may have taken long: asks again who leads.
            return Ok(Some(Instant::now()));
        }
        // Later changes queue up behind those already waiting.
        if self.queue.is_empty() && std::mem::take(&mut self.changed) {
            self.queue = self.due();
        }
        let Some(node) = self.queue.pop_front().or_else(|| self.failing_due()) else {
            return Ok(self.failing.values().map(|failing| failing.again).chain([self.read_again]).min());
        };
        match self.want(&node) {
            Some(want) => {
                let written = self.write(&node, want).await;
                self.next_write = Instant::now() + self.judge(node, written);
            }
            None => self.succeeded(&node),
        }
        Ok(Some(self.next_write))
    }
}

impl Conditions {
    /// Forgets nodes that are gone.
    fn nodes_changed(&mut self) {
        self.changed = true;
        if let Some(present) = &mut self.present {
            let inventory = self.context.inventory.borrow();
            present.retain(|node, _| inventory.get(node.as_str()).is_some());
            self.failing.retain(|node, _| inventory.get(node.as_str()).is_some());
            drop(inventory);
            self.forget_logged();
        }
    }

    /// Returns the nodes that have to be written now.
    fn due(&self) -> VecDeque<NodeName> {
        let inventory = self.context.inventory.borrow().clone();
        let nodes = inventory.iter().map(|node| &node.name);
        let due = |node: &&NodeName| !self.failing.contains_key(*node) && self.want(node).is_some();
        nodes.filter(due).cloned().collect()
    }

    /// Returns the failing node that has been waiting for its next attempt for longest.
    fn failing_due(&self) -> Option<NodeName> {
        let (node, failing) = self.failing.iter().min_by_key(|(_, failing)| failing.again)?;
        (failing.again <= Instant::now()).then(|| node.clone())
    }

    /// Returns the delay before the next write, of whichever node.
    fn judge(&mut self, node: NodeName, written: Result<(), RequestError>) -> Duration {
        match written {
            // Not found: the node was deleted, as the inventory will show.
            Err(error) if !error.is_not_found() => {
                if self.logged.insert(error.code) {
                    tracing::warn!(%node, %error, "failed to update the condition of a Node, retrying");
                } else {
                    tracing::debug!(%node, %error, "failed to update the condition of a Node, retrying");
                }
                let [first, last] = RETRY;
                let now = Instant::now();
                let new = || Failing { again: now, backoff: Backoff::new(first, last) };
                let failing = self.failing.entry(node).or_insert_with(new);
                failing.again = now + failing.backoff.next_delay();
                PACE + self.slower.next_delay()
            }
            _ => {
                self.slower.reset();
                self.succeeded(&node);
                PACE
            }
        }
    }

    fn succeeded(&mut self, node: &NodeName) {
        self.failing.remove(node);
        self.forget_logged();
    }

    fn forget_logged(&mut self) {
        if self.failing.is_empty() && !std::mem::take(&mut self.logged).is_empty() {
            tracing::info!("the conditions of all Nodes can be updated again");
        }
    }

    /// Returns the condition to write for `node`; None if it is up to date or not known yet.
    fn want(&self, node: &NodeName) -> Option<Want> {
        let (is_edge, created) = {
            let inventory = self.context.inventory.borrow();
            let node = inventory.get(node.as_str())?;
            (node.edge, node.created)
        };
        let is_of_this_node = |present: &&Present| present.created.zip(created).is_none_or(|(a, b)| a == b);
        let present = self.present.as_ref()?.get(node).filter(is_of_this_node);
        let present = present.map(|present| present.status.as_str());
        let want = if is_edge {
            let tunnel = self.tunnels.lock().get(node);
            match tunnel? {
                (true, _) => Want::Up,
                (false, since) => Want::Down(since),
            }
        } else {
            Want::Gone
        };
        (want.status() != present).then_some(want)
    }

    async fn write(&mut self, node: &NodeName, want: Want) -> Result<(), RequestError> {
        // Before the request: the Node may be created again meanwhile.
        let created = self.context.inventory.borrow().get(node.as_str()).and_then(|node| node.created);
        let patch = Patch::Strategic(patch(want, &self.context.identity));
        let params = merge();
        let write = self.api.patch_status(node.as_str(), &params, &patch);
        request(WRITE_DEADLINE, "changing the condition of Node", node.as_str(), write).await?;
        tracing::debug!(%node, condition = CONDITION, status = want.status(), "updated the node condition");
        let status = want.status().map(str::to_owned);
        if let Some(present) = &mut self.present {
            match status {
                Some(status) => present.insert(node.clone(), Present { status, created }),
                None => present.remove(node),
            };
        }
        Ok(())
    }
}

/// Builds a strategic merge patch: conditions are a list keyed by type, so the kubelet's conditions stay.
fn patch(want: Want, server: &str) -> Value {
    let (reason, message, since) = match want {
        Want::Up => (
            "TunnelUp",
            format!("connected: the agent has a tunnel; reported by server {server}"),
            Timestamp::now(),
        ),
        Want::Down(since) => {
            let since = Timestamp::now() - since.elapsed();
            ("TunnelDown", format!("away: no tunnel since {since:.0}; reported by server {server}"), since)
        }
        Want::Gone => {
            return json!({"status": {"conditions": [{"type": CONDITION, "$patch": "delete"}]}});
        }
    };
    json!({"status": {"conditions": [{
        "type": CONDITION,
        "status": want.status(),
        "reason": reason,
        "message": message,
        "lastTransitionTime": format!("{since:.0}"),
        "lastHeartbeatTime": format!("{:.0}", Timestamp::now()),
    }]}})
}

/// Reads the condition of every node that has one.
async fn list(api: &Api<ConditionNode>) -> Result<HashMap<NodeName, Present>, RequestError> {
    let mut present = HashMap::new();
    let mut params = ListParams::default().limit(PAGE);
    loop {
        let page = request(PAGE_TIME, "listing", "Nodes", api.list(&params)).await?;
        for node in page.items {
            let Ok(name) = node.name().parse() else { continue };
            let created = node.created();
            let conditions = node.status.and_then(|status| status.conditions).unwrap_or_default();
            if let Some(ours) = conditions.into_iter().find(|condition| condition.r#type == CONDITION) {
                present.insert(name, Present { status: ours.status, created });
            }
        }
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params.continue_token = Some(token),
            None => return Ok(present),
        }
    }
}

type ConditionNode = Partial<Node, IgnoredAny, NodeConditions>;

#[derive(Clone, Debug, Deserialize)]
struct NodeConditions {
    conditions: Option<Vec<NodeCondition>>,
}

#[derive(Clone, Debug, Deserialize)]
struct NodeCondition {
    r#type: String,
    status: String,
}
