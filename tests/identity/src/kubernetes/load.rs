//! Requests of a fleet of agents to the API server.

use std::sync::Arc;
use std::time::{Duration, Instant};

use postern_fake_kube::{ApiServer, eventually};
use serde_json::json;
use tokio::task::JoinSet;
use tunnel_agent::kube::discover::Discovery;
use tunnel_agent::kube::node as node_ranges;

use super::agent_api;
use super::servers::{SERVICE, SERVICES, SLICES};
use crate::harness::node;

const AGENTS: usize = 100;

/// The parts of an agent that ask the API server while nothing is wrong.
struct Agent {
    discovery: Discovery,
    knows_its_pods: Box<dyn Fn() -> bool>,
}

async fn fleet(api: &ApiServer, tasks: &mut JoinSet<()>) -> Vec<Agent> {
    let mut agents = Vec::new();
    for n in 0..AGENTS {
        let state_dir = api.dir().join(format!("agent-{n}"));
        std::fs::create_dir_all(&state_dir).unwrap();
        let (client, pods) = (agent_api(api).await, Arc::default());
        let name = node(&format!("edge-{n}"));
        tasks.spawn(node_ranges::follow(client.clone(), name, Arc::clone(&pods), state_dir.clone()));
        let knows_its_pods = Box::new(move || pods.load().len() == 1);
        agents.push(Agent { discovery: Discovery::start(client, SERVICE, &state_dir), knows_its_pods });
    }
    agents
}

/// Lists, watches and reads until now.
fn requests(api: &ApiServer) -> (usize, usize, usize) {
    let of = |verb: &str| SERVICES_AND_SLICES.iter().map(|path| api.requests(verb, path)).sum();
    let all = api.all_requests().into_iter();
    let reads = all.filter(|((verb, path), _)| verb == "get" && path.starts_with("/api/v1/nodes/"));
    (of("list"), of("watch"), reads.map(|(_, count)| count).sum())
}

const SERVICES_AND_SLICES: [&str; 2] = [SERVICES, SLICES];

async fn all_watch(api: &ApiServer) {
    let open = || SERVICES_AND_SLICES.iter().all(|path| api.open_watches(path) == AGENTS);
    eventually("every agent to watch both", || open().then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_costs_two_lists_two_watches_and_one_read_and_an_outage_two_watches() {
    let api = ApiServer::start();
    api.put(
        SERVICES,
        json!({
            "metadata": {"name": SERVICE},
            "spec": {"type": "NodePort", "ports": [{"name": "tcp", "port": 10262, "nodePort": 31008}]},
        }),
    );
    api.put(
        SLICES,
        json!({
            "metadata": {"name": "a", "labels": {"kubernetes.io/service-name": SERVICE}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": ["127.0.0.1"], "conditions": {"ready": true}}],
        }),
    );
    let nodes = (0..AGENTS).map(|n| {
        json!({"metadata": {"name": format!("edge-{n}")}, "spec": {"podCIDR": format!("10.244.{n}.0/24")}})
    });
    api.put_all("/api/v1/nodes", nodes);
    let mut tasks = JoinSet::new();
    let agents = fleet(&api, &mut tasks).await;
    all_watch(&api).await;
    eventually("every agent knows its pods", || {
        agents.iter().all(|agent| (agent.knows_its_pods)()).then_some(())
    })
    .await;
    assert_eq!(requests(&api), (2 * AGENTS, 2 * AGENTS, AGENTS));

    // The watches tell all of them of a new server.
    api.edit(SLICES, "a", |slice| slice["endpoints"][0]["addresses"] = json!(["127.0.0.2"]));
    let knows =
        |agent: &Agent| agent.discovery.servers().borrow().iter().any(|server| server.host == "127.0.0.2");
    eventually("every agent knows", || agents.iter().all(knows).then_some(())).await;
    assert_eq!(requests(&api), (2 * AGENTS, 2 * AGENTS, AGENTS));

    // The API server restarts: the watches are opened again over some seconds, and nothing is listed.
    let lost = Instant::now();
    api.down();
    eventually("every agent noticed", || {
        SERVICES_AND_SLICES.iter().all(|path| api.open_watches(path) == 0).then_some(())
    })
    .await;
    api.up();
    all_watch(&api).await;
    let took = lost.elapsed();
    assert!(took >= Duration::from_secs(7), "{} watches within {took:?}", 2 * AGENTS);
    assert_eq!(requests(&api), (2 * AGENTS, 4 * AGENTS, AGENTS));
}
