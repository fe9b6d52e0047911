//! The condition `PosternTunnel` of edge nodes, written by the server that leads.

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{ListParams, Patch, PatchParams};
use kube::core::ClusterResourceScope;
use kube::{Api, Resource};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until, timeout};
use tunnel_core::identity::NodeName;

use super::Live;
use super::reign::{Reign, Want};
use crate::kube::client::reason;
use crate::kube::leader::writer::{Complaint, RequestError, Retry, request};
use crate::kube::{Cluster, MANAGER};

/// The condition's type.
pub const CONDITION: &str = "PosternTunnel";

/// At most ten writes a second.
const PACE: Duration = Duration::from_millis(100);
/// How often the conditions are read again: somebody else may have changed them.
const REREAD: Duration = Duration::from_secs(30 * 60);
/// Nodes in one answer. With everything that kubelets report a Node has some ten kilobytes.
const PAGE: u32 = 500;
/// How long one page may take.
const PAGE_TIME: Duration = Duration::from_secs(30);

/// Keeps the conditions current while this server leads, until `live` ends.
pub(super) async fn run(cluster: Cluster, live: Live) {
    let conditions = Conditions {
        api: Api::all(cluster.client.clone()),
        cluster,
        live,
        reign: None,
        queue: VecDeque::new(),
        next_claim: None,
        next_read: None,
        next_write: Instant::now(),
        retry: Retry::default(),
        reading: Complaint::new("reading the conditions of Nodes"),
        writing: Complaint::new("writing the condition of Nodes"),
    };
    conditions.run().await;
}

struct Conditions {
    cluster: Cluster,
    api: Api<Conditioned>,
    live: Live,
    /// None while another server leads, or the conditions could not be read yet.
    reign: Option<Reign>,
    queue: VecDeque<NodeName>,
    next_claim: Option<Instant>,
    /// Some while this server leads and knows the nodes.
    next_read: Option<Instant>,
    next_write: Instant,
    retry: Retry,
    reading: Complaint,
    writing: Complaint,
}

impl Conditions {
    async fn run(mut self) {
        // Until then the inventory is empty because it is not known.
        if self.cluster.inventory.changed().await.is_err() {
            return;
        }
        let mut leader = self.cluster.leader.clone();
        leader.mark_changed();
        let at = |when: Option<Instant>| sleep_until(when.unwrap_or_else(Instant::now));
        loop {
            tokio::select! {
                biased;
                changed = leader.changed() => match changed {
                    Ok(()) => self.crown(*leader.borrow_and_update()),
                    Err(_) => return,
                },
                changed = self.cluster.inventory.changed() => match changed {
                    Ok(()) => self.plan(),
                    Err(_) => return,
                },
                changed = self.live.changed() => match changed {
                    Ok(()) => self.plan(),
                    Err(_) => return,
                },
                () = at(self.next_read), if self.next_read.is_some() => self.read().await,
                () = at(self.next_claim), if self.next_claim.is_some() => self.plan(),
                () = sleep_until(self.next_write), if !self.queue.is_empty() => self.write().await,
            }
        }
    }

    fn crown(&mut self, leads: bool) {
        self.reign = None;
        self.queue.clear();
        self.next_claim = None;
        self.next_read = leads.then(Instant::now);
    }

    async fn read(&mut self) {
        let asked = Instant::now();
        match list(&self.api).await {
            Ok(present) => {
                self.reading.fine();
                self.retry.reset();
                match &mut self.reign {
                    Some(reign) => reign.read(present),
                    None => self.reign = Some(Reign::new(asked, present)),
                }
                self.next_read = Some(Instant::now() + REREAD);
                self.plan();
            }
            Err(error) => {
                self.reading.error(&error);
                self.next_read = Some(Instant::now() + self.retry.next_delay());
            }
        }
    }

    fn plan(&mut self) {
        let inventory = self.cluster.inventory.borrow_and_update().clone();
        let live = self.live.borrow_and_update().clone();
        if let Some(reign) = &mut self.reign {
            let now = Instant::now();
            reign.update(now, &inventory, &live);
            let (due, next_claim) = reign.plan(now);
            (self.queue, self.next_claim) = (due.into(), next_claim);
        }
    }

    async fn write(&mut self) {
        let Some(reign) = &mut self.reign else { return };
        let Some(node) = self.queue.pop_front() else { return };
        let Some(want) = reign.want(Instant::now(), &node) else { return };
        let patch = Patch::Strategic(patch(want, &self.cluster.identity));
        let params = PatchParams { field_manager: Some(MANAGER.into()), ..PatchParams::default() };
        let patched = request(self.api.patch_status(node.as_str(), &params, &patch)).await;
        self.next_write = Instant::now() + PACE;
        match patched {
            Ok(_) => {
                reign.wrote(&node, want);
                self.retry.reset();
                self.writing.fine();
                tracing::debug!(%node, status = want.status(), "wrote the condition {CONDITION}");
            }
            // The inventory will say that the node is gone.
            Err(RequestError { code: Some(404), .. }) => {}
            Err(error) => {
                self.writing.error(&error);
                // Behind the others: one node that cannot be written holds up none.
                self.queue.push_back(node);
                self.next_write = Instant::now() + self.retry.next_delay();
            }
        }
    }
}

/// A strategic merge: conditions are a list by type, and the kubelet's stay as they are.
fn patch(want: Want, server: &str) -> Value {
    let (reason, message, since) = match want {
        Want::Up => {
            ("TunnelUp", format!("the agent has a tunnel; said by server {server}"), Timestamp::now())
        }
        Want::Down(since) => {
            ("TunnelDown", format!("no tunnel since {since:.0}; said by server {server}"), since)
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

/// The condition's status on every node that has it.
async fn list(api: &Api<Conditioned>) -> Result<HashMap<NodeName, String>, String> {
    let mut present = HashMap::new();
    let mut params = ListParams::default().limit(PAGE);
    loop {
        let page = timeout(PAGE_TIME, api.list(&params))
            .await
            .map_err(|_| format!("no answer within {} s", PAGE_TIME.as_secs()))?
            .map_err(|error| reason(&error))?;
        for node in page.items {
            if let (Some(name), Some(status)) = (node.name(), node.status) {
                present.insert(name, status);
            }
        }
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params.continue_token = Some(token),
            None => return Ok(present),
        }
    }
}

/// A Node of which only the name and our condition are read.
#[derive(Clone, Debug, Deserialize)]
#[serde(from = "Wire")]
struct Conditioned {
    metadata: ObjectMeta,
    /// The condition's status; None without the condition.
    status: Option<String>,
}

impl Conditioned {
    fn name(&self) -> Option<NodeName> {
        self.metadata.name.as_deref()?.parse().ok()
    }
}

impl Resource for Conditioned {
    type DynamicType = ();
    type Scope = ClusterResourceScope;

    fn kind(&(): &()) -> Cow<'_, str> {
        "Node".into()
    }

    fn group(&(): &()) -> Cow<'_, str> {
        "".into()
    }

    fn version(&(): &()) -> Cow<'_, str> {
        "v1".into()
    }

    fn plural(&(): &()) -> Cow<'_, str> {
        "nodes".into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[derive(Deserialize)]
struct Wire {
    metadata: WireMetadata,
    status: Option<WireStatus>,
}

#[derive(Deserialize)]
struct WireMetadata {
    name: Option<String>,
}

#[derive(Deserialize)]
struct WireStatus {
    conditions: Option<Vec<WireCondition>>,
}

#[derive(Deserialize)]
struct WireCondition {
    r#type: String,
    status: String,
}

impl From<Wire> for Conditioned {
    fn from(wire: Wire) -> Self {
        let conditions = wire.status.and_then(|status| status.conditions).unwrap_or_default();
        let ours = conditions.into_iter().find(|condition| condition.r#type == CONDITION);
        Self {
            metadata: ObjectMeta { name: wire.metadata.name, ..ObjectMeta::default() },
            status: ours.map(|condition| condition.status),
        }
    }
}
