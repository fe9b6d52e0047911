//! The condition `PosternTunnel` of edge nodes, written by the server that leads.

mod leader_term;

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tunnel_core::identity::NodeName;
use tunnel_kube::{Attempts, FIELD_MANAGER, RequestError, request};

use self::leader_term::{LeaderTerm, Want};
use crate::kube::context::{KubeContext, WRITE_DEADLINE};
use crate::kube::partial::Partial;
use crate::shared_map::SharedSet;

pub const CONDITION: &str = "PosternTunnel";

/// At most ten writes a second.
const PACE: Duration = Duration::from_millis(100);
/// How often the conditions are read again: another writer may have changed them.
const REREAD: Duration = Duration::from_secs(30 * 60);
/// Nodes in one answer. With everything that kubelets report a Node has some ten kilobytes.
const PAGE: u32 = 500;
/// How long one page may take.
const PAGE_TIME: Duration = Duration::from_secs(30);

/// Keeps the conditions current while this server leads, until `live` ends. `live` has the nodes with a tunnel to any
/// server.
pub(super) async fn run(context: KubeContext, live: watch::Receiver<SharedSet<NodeName>>) {
    let conditions = Conditions {
        api: Api::all(context.client.clone()),
        context,
        live,
        term: None,
        queue: VecDeque::new(),
        next_claim: None,
        next_read: None,
        next_write: Instant::now(),
        reading: Attempts::new("reading the conditions of Nodes"),
        writing: Attempts::new("writing the condition of Nodes"),
    };
    conditions.run().await;
}

struct Conditions {
    context: KubeContext,
    api: Api<ConditionNode>,
    live: watch::Receiver<SharedSet<NodeName>>,
    /// None while another server leads, or the conditions could not be read yet.
    term: Option<LeaderTerm>,
    queue: VecDeque<NodeName>,
    next_claim: Option<Instant>,
    /// Some while this server leads and knows the nodes.
    next_read: Option<Instant>,
    next_write: Instant,
    reading: Attempts,
    writing: Attempts,
}

impl Conditions {
    async fn run(mut self) {
        // An inventory that is not known yet is empty.
        if self.context.inventory.changed().await.is_err() {
            return;
        }
        let mut leader = self.context.leader.clone();
        leader.mark_changed();
        let at = |when: Option<Instant>| sleep_until(when.unwrap_or_else(Instant::now));
        loop {
            tokio::select! {
                biased;
                changed = leader.changed() => match changed {
                    Ok(()) => self.set_leading(*leader.borrow_and_update()),
                    Err(_) => return,
                },
                changed = self.context.inventory.changed() => match changed {
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

    fn set_leading(&mut self, leads: bool) {
        self.term = None;
        self.queue.clear();
        self.next_claim = None;
        self.next_read = leads.then(Instant::now);
    }

    async fn read(&mut self) {
        let began = Instant::now();
        match list(&self.api).await {
            Ok(present) => {
                self.reading.succeeded();
                match &mut self.term {
                    Some(term) => term.set_present(present),
                    None => self.term = Some(LeaderTerm::new(began, present)),
                }
                self.next_read = Some(Instant::now() + REREAD);
                self.plan();
            }
            Err(error) => {
                self.reading.report(&error);
                self.next_read = Some(Instant::now() + self.reading.next_delay());
            }
        }
    }

    fn plan(&mut self) {
        let inventory = self.context.inventory.borrow_and_update().clone();
        let live = self.live.borrow_and_update().clone();
        if let Some(term) = &mut self.term {
            let now = Instant::now();
            term.update(now, &inventory, &live);
            let (due, next_claim) = term.plan(now);
            self.next_claim = next_claim;
            // Those that wait keep their turn: one that fails is behind the others.
            self.queue.retain(|node| due.contains(node));
            let queued: HashSet<NodeName> = self.queue.iter().cloned().collect();
            self.queue.extend(due.iter().filter(|node| !queued.contains(*node)).cloned());
        }
    }

    async fn write(&mut self) {
        let Some(term) = &mut self.term else { return };
        let Some(node) = self.queue.pop_front() else { return };
        let Some(want) = term.want(Instant::now(), &node) else { return };
        let patch = Patch::Strategic(patch(want, &self.context.identity));
        let params = PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
        let patched = request(WRITE_DEADLINE, self.api.patch_status(node.as_str(), &params, &patch)).await;
        self.next_write = Instant::now() + PACE;
        match patched {
            Ok(_) => {
                term.wrote(&node, want);
                self.writing.succeeded();
                tracing::debug!(%node, status = want.status(), "wrote the condition {CONDITION}");
            }
            // The node is gone, as the inventory will show.
            Err(error) if error.is_not_found() => {}
            Err(error) => {
                self.writing.report(&error);
                // Behind the others: one node that cannot be written delays no other.
                self.queue.push_back(node);
                self.next_write = Instant::now() + self.writing.next_delay();
            }
        }
    }
}

/// A strategic merge: conditions are a list by type, and the kubelet's stay as they are.
fn patch(want: Want, server: &str) -> Value {
    let (reason, message, since) = match want {
        Want::Up => {
            ("TunnelUp", format!("the agent has a tunnel; reported by server {server}"), Timestamp::now())
        }
        Want::Down(since) => {
            ("TunnelDown", format!("no tunnel since {since:.0}; reported by server {server}"), since)
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
async fn list(api: &Api<ConditionNode>) -> Result<HashMap<NodeName, String>, RequestError> {
    let mut present = HashMap::new();
    let mut params = ListParams::default().limit(PAGE);
    loop {
        let page = request(PAGE_TIME, api.list(&params)).await?;
        for node in page.items {
            let Ok(name) = node.name().parse() else { continue };
            let conditions = node.status.and_then(|status| status.conditions).unwrap_or_default();
            if let Some(ours) = conditions.into_iter().find(|condition| condition.r#type == CONDITION) {
                present.insert(name, ours.status);
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
