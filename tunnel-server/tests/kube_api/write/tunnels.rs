//! Tunnels as Events and as a condition of their Node.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use postern_fake_kube::{Fault, eventually};
use serde_json::{Value, json};
use tokio::sync::watch;
use tunnel_routing::inventory::{Inventory, InventoryNode};
use tunnel_runtime::NodeName;
use tunnel_server::kube::KubeContext;
use tunnel_server::kube::write::CONDITION;
use tunnel_server::kube::write::events::Events;
use tunnel_server::kube::write::tunnels::{self, Tunnels};

use crate::fixture::{self, Fixture};

const NODES: &str = "/api/v1/nodes";
const EVENTS: &str = "/apis/events.k8s.io/v1/namespaces/default/events";

/// The sessions, which the test sets.
#[derive(Clone)]
struct Sessions {
    live: Arc<Mutex<Vec<NodeName>>>,
    elsewhere: Arc<Mutex<Vec<NodeName>>>,
    lost: Arc<Mutex<Vec<NodeName>>>,
    changed: watch::Sender<u64>,
}

impl Sessions {
    fn start(fixture: &Fixture, live: &[&str]) -> Self {
        Self::start_with(fixture, live, true)
    }

    /// With the condition or without.
    fn start_with(fixture: &Fixture, live: &[&str], condition: bool) -> Self {
        Self::of((fixture.context.clone(), fixture.events.clone()), live, condition)
    }

    /// The sessions of one of several servers.
    fn of((context, events): (KubeContext, Events), live: &[&str], condition: bool) -> Self {
        let (elsewhere, lost) = (Arc::default(), Arc::default());
        let sessions = Self { live: Arc::default(), elsewhere, lost, changed: watch::Sender::new(0) };
        sessions.set(live);
        let names = |nodes: &Mutex<Vec<NodeName>>| -> BTreeSet<NodeName> {
            nodes.lock().unwrap().iter().cloned().collect()
        };
        let (here, there, lost) = (sessions.live.clone(), sessions.elsewhere.clone(), sessions.lost.clone());
        let changed = || sessions.changed.subscribe();
        let own = Tunnels { changed: changed(), nodes: move || names(&here) };
        let elsewhere = Tunnels { changed: changed(), nodes: move || (names(&there), names(&lost)) };
        tokio::spawn(tunnels::run(context, events, own, elsewhere, condition));
        sessions
    }

    fn set(&self, live: &[&str]) {
        self.replace(&self.live, live);
    }

    /// Sets the nodes of other servers.
    fn set_elsewhere(&self, live: &[&str]) {
        self.replace(&self.elsewhere, live);
    }

    /// Sets the nodes whose last server is out of reach.
    fn set_lost(&self, lost: &[&str]) {
        self.replace(&self.lost, lost);
    }

    fn replace(&self, nodes: &Mutex<Vec<NodeName>>, with: &[&str]) {
        *nodes.lock().unwrap() = with.iter().map(|node| node.parse().unwrap()).collect();
        self.changed.send_modify(|changes| *changes += 1);
    }
}

fn node(name: &str, tunnel: Option<&str>) -> Value {
    let mut conditions = vec![json!({"type": "Ready", "status": "True", "reason": "KubeletReady"})];
    conditions.extend(tunnel.map(|status| json!({"type": CONDITION, "status": status})));
    json!({"metadata": {"name": name}, "status": {"conditions": conditions}})
}

impl Fixture {
    fn condition(&self, node: &str) -> Option<Value> {
        let node = self.api.get(NODES, node)?;
        let conditions = node["status"]["conditions"].as_array()?;
        conditions.iter().find(|condition| condition["type"] == CONDITION).cloned()
    }

    fn status(&self, node: &str) -> Option<String> {
        Some(self.condition(node)?["status"].as_str()?.to_owned())
    }
}

#[tokio::test]
async fn a_tunnel_to_any_server_is_one_and_to_go_from_one_to_another_is_no_event() {
    let fixture = Fixture::new(true).await;
    for name in ["edge-1", "edge-2"] {
        fixture.api.put(NODES, node(name, None));
    }
    let sessions = Sessions::start(&fixture, &["edge-1"]);
    sessions.set_elsewhere(&["edge-2"]);
    fixture.nodes(&["edge-1", "edge-2"], &[]);
    for node in ["edge-1", "edge-2"] {
        eventually("the condition", || fixture.status(node).filter(|status| status == "True")).await;
    }
    eventually("an Event", || fixture.notes("default", "TunnelUp", "edge-1").pop()).await;
    assert!(fixture.notes("default", "TunnelUp", "edge-2").is_empty(), "the other server had it before");

    // edge-1 goes to the other server, and edge-2 nowhere.
    sessions.set_elsewhere(&["edge-1", "edge-2"]);
    sessions.set(&[]);
    sessions.set_elsewhere(&["edge-1"]);
    eventually("an Event", || fixture.notes("default", "TunnelDown", "edge-2").pop()).await;
    assert!(fixture.notes("default", "TunnelDown", "edge-1").is_empty());
    eventually("no tunnel", || (fixture.status("edge-2")? == "False").then_some(())).await;
    assert_eq!(fixture.status("edge-1").as_deref(), Some("True"));
    assert_eq!(fixture.notes("default", "TunnelUp", "edge-1").len(), 1);
}

#[tokio::test]
async fn a_node_whose_server_is_out_of_reach_is_not_down_at_once() {
    let fixture = Fixture::new(true).await;
    let names = ["edge-1", "edge-2", "edge-3"];
    fixture.api.put_all(NODES, names.iter().map(|name| node(name, None)));
    let sessions = Sessions::start(&fixture, &["edge-3"]);
    sessions.set_elsewhere(&["edge-1", "edge-2"]);
    fixture.nodes(&names, &[]);
    for name in names {
        eventually("the condition", || fixture.status(name).filter(|status| status == "True")).await;
    }
    // edge-1's server is out of reach, edge-2 has left another one, and the session of edge-3 with this server ends.
    sessions.set_lost(&["edge-1"]);
    sessions.set_elsewhere(&[]);
    sessions.set(&[]);
    for name in ["edge-2", "edge-3"] {
        eventually("an Event", || fixture.notes("default", "TunnelDown", name).pop()).await;
        eventually("no tunnel", || (fixture.status(name)? == "False").then_some(())).await;
    }
    assert!(fixture.notes("default", "TunnelDown", "edge-1").is_empty());
    assert_eq!(fixture.status("edge-1").as_deref(), Some("True"));

    // It is in reach again, and has edge-1 no more.
    let found = Instant::now();
    sessions.set_lost(&[]);
    eventually("an Event", || fixture.notes("default", "TunnelDown", "edge-1").pop()).await;
    eventually("no tunnel", || (fixture.status("edge-1")? == "False").then_some(())).await;
    assert!(found.elapsed() < Duration::from_secs(30), "it was written after {:?}", found.elapsed());
}

#[tokio::test]
async fn the_condition_follows_the_tunnel_and_the_kubelets_conditions_stay() {
    let fixture = Fixture::new(true).await;
    for (name, tunnel) in [("edge-1", None), ("edge-2", None), ("was-edge", Some("True")), ("cloud-1", None)]
    {
        fixture.api.put(NODES, node(name, tunnel));
    }
    for code in [403, 500] {
        fixture.api.inject("list", "nodes", Fault::Status(code), 1);
        fixture.api.inject("patch", "nodes", Fault::Status(code), 1);
    }
    let began = Instant::now();
    let sessions = Sessions::start(&fixture, &["edge-1"]);
    fixture.nodes(&["edge-1", "edge-2"], &["was-edge", "cloud-1"]);
    let up = eventually("the condition of edge-1", || fixture.condition("edge-1")).await;
    assert_eq!((&up["status"], &up["reason"]), (&"True".into(), &"TunnelUp".into()));
    assert!(up["message"].as_str().unwrap().contains("server-a"), "{up}");
    for time in ["lastTransitionTime", "lastHeartbeatTime"] {
        up[time].as_str().unwrap().parse::<jiff::Timestamp>().unwrap();
    }
    eventually("was-edge without a condition", || fixture.status("was-edge").is_none().then_some(())).await;

    // A tunnel has ended after 5 s; an agent that was never there gets half a minute.
    let ended = Instant::now();
    sessions.set(&[]);
    eventually("no tunnel", || (fixture.status("edge-1")? == "False").then_some(())).await;
    assert!(ended.elapsed() >= Duration::from_secs(5), "it was written after {:?}", ended.elapsed());
    eventually("no tunnel", || (fixture.status("edge-2")? == "False").then_some(())).await;
    assert!(began.elapsed() >= Duration::from_secs(30), "it was written after {:?}", began.elapsed());
    let down = fixture.condition("edge-2").unwrap();
    assert_eq!((&down["status"], &down["reason"]), (&"False".into(), &"TunnelDown".into()));
    assert!(down["message"].as_str().unwrap().contains("away: no tunnel since 20"), "{down}");
    sessions.set(&["edge-1", "edge-2"]);
    for edge in ["edge-1", "edge-2"] {
        eventually("the tunnel is back", || (fixture.status(edge)? == "True").then_some(())).await;
    }
    for name in ["edge-1", "edge-2", "was-edge", "cloud-1"] {
        let ready = fixture.api.get(NODES, name).unwrap()["status"]["conditions"][0].clone();
        assert_eq!(ready["reason"], "KubeletReady", "{name}");
    }
    assert_eq!(fixture.api.writes("nodes/cloud-1"), 0);
}

#[tokio::test]
async fn without_the_condition_nodes_are_neither_read_nor_written() {
    let fixture = Fixture::new(true).await;
    fixture.api.put(NODES, node("edge-1", None));
    let _sessions = Sessions::start_with(&fixture, &["edge-1"], false);
    fixture.nodes(&["edge-1"], &[]);
    eventually("an Event", || fixture.notes("default", "TunnelUp", "edge-1").pop()).await;
    assert_eq!((fixture.api.writes(NODES), fixture.api.requests("list", NODES)), (0, 0));
}

#[tokio::test]
async fn a_restart_after_which_the_agents_return_writes_nothing() {
    let fixture = Fixture::new(true).await;
    let names: Vec<_> = (0..1200).map(|n| format!("edge-{n}")).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    fixture.api.put_all(NODES, names.iter().map(|name| node(name, Some("True"))));
    let sessions = Sessions::start(&fixture, &[]);
    fixture.nodes(&names, &[]);
    // Three pages of 500.
    eventually("the list of conditions", || (fixture.api.requests("continue", NODES) >= 2).then_some(()))
        .await;
    sessions.set(&names);
    // A node without a condition shows when the others have been checked.
    fixture.api.put(NODES, node("edge-new", None));
    let mut more = names.clone();
    more.push("edge-new");
    sessions.set(&more);
    fixture.nodes(&more, &[]);
    eventually("the condition of the new node", || fixture.status("edge-new")).await;
    assert_eq!(fixture.api.writes(NODES), 1, "{:?}", fixture.api.all_requests());
}

#[tokio::test]
async fn writes_are_paced_and_a_deleted_node_delays_no_other() {
    let fixture = Fixture::new(true).await;
    let names: Vec<_> = (0..15).map(|n| format!("edge-{n}")).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    fixture.api.put_all(NODES, names.iter().map(|name| node(name, None)));
    let mut with_unknown = names.clone();
    // In the inventory, but deleted: 404.
    with_unknown.push("edge-gone");
    let began = Instant::now();
    let _sessions = Sessions::start(&fixture, &with_unknown);
    fixture.nodes(&with_unknown, &[]);
    for name in &names {
        eventually("every condition", || (fixture.status(name)? == "True").then_some(())).await;
    }
    // Ten a second: the fifteenth comes 1.4 s after the first.
    assert!(began.elapsed() >= Duration::from_millis(1400), "{:?}", began.elapsed());
}

#[tokio::test]
async fn nodes_that_cannot_be_written_delay_no_other() {
    let fixture = Fixture::new(true).await;
    let names = ["edge-0", "edge-1", "edge-2", "edge-3"];
    fixture.api.put_all(NODES, names.iter().map(|name| node(name, None)));
    // As a policy or a webhook may refuse them.
    for (node, code) in [("edge-0", 403), ("edge-1", 422)] {
        fixture.api.inject_for("patch", "nodes", node, Fault::Status(code));
    }
    let sessions = Sessions::start(&fixture, &names);
    fixture.nodes(&names, &[]);
    let is = |node: &'static str, status: &'static str| {
        let fixture = &fixture;
        move || (fixture.status(node)? == status).then_some(())
    };
    let tries = || fixture.api.requests("patch", &format!("{NODES}/edge-1/status"));
    for node in ["edge-2", "edge-3"] {
        eventually("the others' conditions", is(node, "True")).await;
    }
    // The delays have grown to several seconds then.
    eventually("more attempts", || (tries() >= 3).then_some(())).await;
    for (live, status) in [(&names[..3], "False"), (&names[..], "True")] {
        let (began, before) = (Instant::now(), tries());
        sessions.set(live);
        eventually("the change of another node", is("edge-3", status)).await;
        let (took, tried) = (began.elapsed(), tries() - before);
        // Five seconds are those after which a tunnel is down.
        assert!(took < Duration::from_secs(15), "{status} after {took:?}");
        assert!(tried <= 6, "{tried} attempts in {took:?}");
    }
    fixture.api.heal();
    eventually("the condition once it can be written", is("edge-1", "True")).await;
}

#[tokio::test]
async fn a_node_created_again_gets_the_condition_again() {
    let fixture = Fixture::new(true).await;
    let _sessions = Sessions::start(&fixture, &["edge-1"]);
    // The inventory has the name all the time: the watch may see both changes at once.
    for time in ["2026-01-01T00:00:00Z", "2026-01-01T00:00:10Z"] {
        let mut created = node("edge-1", None);
        created["metadata"]["creationTimestamp"] = time.into();
        if fixture.api.get(NODES, "edge-1").is_some() {
            fixture.api.remove(NODES, "edge-1");
        }
        fixture.api.put(NODES, created);
        let known = fixture::inventory(&["edge-1"], &[]);
        let known = (**known.get("edge-1").unwrap()).clone();
        let created = Some(time.parse::<jiff::Timestamp>().unwrap().into());
        let known: Inventory = [InventoryNode { created, ..known }].into_iter().collect();
        fixture.inputs.inventory.send_replace(Arc::new(known));
        eventually("the condition", || fixture.status("edge-1").filter(|status| status == "True")).await;
    }
    assert_eq!(fixture.api.writes("nodes/edge-1"), 2);
}

#[tokio::test]
async fn only_the_leader_writes() {
    let fixture = Fixture::new(false).await;
    let (context, inputs) = fixture.other().await;
    for edge in ["edge-1", "edge-2"] {
        fixture.api.put(NODES, node(edge, None));
    }
    // edge-1 has a tunnel to the other server, which leads, and edge-2 one to this one.
    let sessions = Sessions::start(&fixture, &[]);
    let events = Events::start(context.client.clone(), "server-b", context.stop.clone());
    let leading = Sessions::of((context, events), &["edge-1"], true);
    inputs.leader.send_replace(true);
    for inventory in [&fixture.inputs.inventory, &inputs.inventory] {
        inventory.send_replace(fixture::inventory(&["edge-1", "edge-2"], &[]));
    }
    sessions.set_elsewhere(&["edge-1"]);
    // From then on the leader knows the sessions of this server that came before.
    eventually("an Event", || fixture.notes("default", "TunnelUp", "edge-1").pop()).await;
    sessions.set(&["edge-2"]);
    leading.set_elsewhere(&["edge-2"]);
    eventually("an Event", || fixture.notes("default", "TunnelUp", "edge-2").pop()).await;
    for edge in ["edge-1", "edge-2"] {
        eventually("the condition", || (fixture.status(edge)? == "True").then_some(())).await;
    }
    sessions.set(&[]);
    leading.set_elsewhere(&[]);
    eventually("an Event", || fixture.notes("default", "TunnelDown", "edge-2").pop()).await;
    let reporters: Vec<_> =
        fixture.api.list(EVENTS).iter().map(|event| event["reportingInstance"].clone()).collect();
    assert_eq!(reporters, ["server-b"; 3]);
    assert_eq!(fixture.api.requests("list", NODES), 1, "{:?}", fixture.api.all_requests());

    // The other server leads. It may report once more what it saw end just now: perhaps no server has reported it.
    inputs.leader.send_replace(false);
    fixture.inputs.leader.send_replace(true);
    eventually("the list of conditions", || (fixture.api.requests("list", NODES) > 1).then_some(())).await;
    sessions.set(&["edge-2"]);
    let up = || fixture.notes("default", "TunnelUp", "edge-2").len() > 1;
    eventually("an Event of the other server", || up().then_some(())).await;
}

#[tokio::test]
async fn a_server_that_loses_the_lead_while_it_reads_writes_nothing() {
    let fixture = Fixture::new(true).await;
    fixture.api.put(NODES, node("edge-1", None));
    let slow = Duration::from_secs(1);
    fixture.api.inject("list", "nodes", Fault::Delay(slow), 1);
    let _sessions = Sessions::start(&fixture, &["edge-1"]);
    fixture.nodes(&["edge-1"], &[]);
    eventually("the list", || (fixture.api.requests("list", NODES) > 0).then_some(())).await;
    fixture.inputs.leader.send_replace(false);
    tokio::time::sleep(2 * slow).await;
    assert_eq!(fixture.api.writes(NODES), 0);
    fixture.inputs.leader.send_replace(true);
    eventually("the condition", || fixture.status("edge-1")).await;
    assert_eq!(fixture.api.requests("list", NODES), 2, "what it read before may be old");
}

#[tokio::test]
async fn agents_that_flap_cost_no_writes() {
    let fixture = Fixture::new(true).await;
    let names: Vec<_> = (0..20).map(|n| format!("edge-{n}")).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    fixture.api.put_all(NODES, names.iter().map(|name| node(name, Some("True"))));
    let sessions = Sessions::start(&fixture, &names);
    fixture.nodes(&names, &[]);
    eventually("the list of conditions", || (fixture.api.requests("list", NODES) > 0).then_some(())).await;
    // Ten a second, each away for less than a condition waits for.
    let mut tick = tokio::time::interval(Duration::from_millis(50));
    for n in 0..80 {
        tick.tick().await;
        let without: Vec<_> =
            names.iter().enumerate().filter(|(at, _)| *at != n / 2 % 20).map(|(_, name)| *name).collect();
        sessions.set(if n % 2 == 0 { &without } else { &names });
    }
    // A node without a condition shows that the changes before it have been handled.
    fixture.api.put(NODES, node("edge-new", None));
    let more: Vec<_> = names.iter().copied().chain(["edge-new"]).collect();
    sessions.set(&more);
    fixture.nodes(&more, &[]);
    eventually("the condition of the new node", || fixture.status("edge-new")).await;
    assert_eq!(fixture.api.writes(NODES), 1, "{:?}", fixture.api.all_requests());
    // Their Events are bounded for each node and altogether.
    assert!(fixture.api.writes("events") <= 50 + 5 * 10, "{:?}", fixture.api.all_requests());
}
