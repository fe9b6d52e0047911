//! Two masters, each with an API server (sharing one etcd) and a tunnel-server, and an edge behind NAT: first behind
//! one address, so that the agent has a session with only one of them, then attached to both.
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use postern_testbed::agent::{self, Agent};
use postern_testbed::client::echo;
use postern_testbed::cluster::api::{condition, is_true};
use postern_testbed::cluster::kubectl::Kubectl;
use postern_testbed::cluster::manifests::Manifests;
use postern_testbed::cluster::postern::NAMESPACE;
use postern_testbed::cluster::{CLOUD_NODE, Cluster, EDGE_NODE, pods, postern};
use postern_testbed::process::Process;
use postern_testbed::report::figure;
use postern_testbed::server::Server;
use postern_testbed::target::Behaviour;
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, CloudHost, NEIGHBOUR, ROUTER, Testbed};
use serde_json::{Value, json};

use super::checks::Checks;
use super::following::Following;
use super::outages::ports_are_followed;
use super::{commands, forward, views};
use crate::common::{alongside, hold, target};

const CONDITION: &str = "PosternTunnel";
/// The second master.
const SECOND: &str = "cloud-2";
/// Time limit for servers and agents to notice that a path is dead, or works again.
const NOTICED: Duration = Duration::from_secs(45);
/// Time limit for a server to reconnect to the API server: watches back off for up to 10 s.
const BACK: Duration = Duration::from_secs(60);
/// Duration for which unaffected traffic is watched during a fault.
const WATCHED: Duration = Duration::from_secs(8);
/// Time limit for a server to stop; it waits for its connections for 10 s.
const STOPS: Duration = Duration::from_secs(30);
/// Time limit for a new leader: the Lease of a dead server ends after 15 s.
const LEADS: Duration = Duration::from_secs(40);

struct Masters<'a> {
    cluster: Cluster<'a>,
    second: &'a CloudHost,
    /// API server of the second master; the first one's belongs to the cluster.
    apiserver: Process,
    servers: [Server<'a>; 2],
    /// kubectl for the API server of each master.
    kubectl: [Kubectl; 2],
}

pub(super) async fn two_masters(testbed: &Testbed) -> Result<()> {
    let second = testbed.add_cloud_host("second", NEIGHBOUR)?;
    // One that starts while its API server is away.
    for what in ["the CA Secret, using the CA", "the revocations, using those"] {
        testbed.allow_error(&format!("failed to read {what} of the state directory"));
    }
    let mut cluster = Cluster::start_balanced(testbed).await?;
    cluster.join(SECOND, "control-plane", &second, "10.71.1.0/24").await?;
    let apiserver = cluster.add_apiserver("kube-apiserver-second", &second).await?;
    let all = [commands::pods(EDGE_NODE), forward::pods(EDGE_NODE), views::pods(EDGE_NODE)].concat();
    pods::run(&cluster.api, &all).await?;
    let masters = [(CLOUD, CLOUD_NODE), (NEIGHBOUR, SECOND)];
    let manifests = postern::install_for(&cluster, "overlays/loadbalancer", &[], &masters).await?;
    let service = format!("/api/v1/namespaces/{NAMESPACE}/services/x-tunnel-server-svc/status");
    // With ipMode Proxy kube-proxy does not handle this address.
    let ingress =
        json!({ "status": { "loadBalancer": { "ingress": [{ "ip": ROUTER, "ipMode": "Proxy" }] } } });
    cluster.api.patch(&service, &ingress).await.context("the load balancer's address")?;
    let pods_too = "--edge-pod-routes=10.72.0.0/16";
    let first = postern::server(&cluster, &manifests).await?.flag(pods_too).start().await?;
    let other = postern::server_on(&cluster, &manifests, &second, "second").await?;
    let other = other.flag(pods_too).start().await?;
    let kubectl = [cluster.kubectl_at(CLOUD)?, cluster.kubectl_at(NEIGHBOUR)?];
    let mut masters = Masters { cluster, second: &second, apiserver, servers: [first, other], kubectl };
    masters.wait_peers(1).await?;

    let mut checks = Checks::new();
    let agent = masters.behind_one_address(&mut checks, &manifests).await?;
    let _agent = masters.attach_to_both(agent, &manifests).await?;
    checks.run("both API servers reach the edge by their own server", masters.each_by_its_own()).await;
    checks.run("a master is killed, and is back", masters.killed()).await;
    checks.run("a server is replaced, and its successor dies", masters.replaced()).await;
    checks.run("a server's successor is stopped", masters.undone()).await;
    checks.finish()
}

impl<'a> Masters<'a> {
    async fn wait_peers(&self, count: usize) -> Result<()> {
        for server in &self.servers {
            let peers = async || server.peers().await;
            wait_until(&format!("{count} peers"), NOTICED, peers, |peers| peers.len() == count).await?;
        }
        Ok(())
    }

    /// Returns the servers with which the agent has a session.
    async fn attached(&self) -> Result<Vec<usize>> {
        let mut attached = Vec::new();
        for (at, server) in self.servers.iter().enumerate() {
            // A dead server has none.
            if server.is_connected(EDGE_NODE).await.unwrap_or(false) {
                attached.push(at);
            }
        }
        Ok(attached)
    }

    async fn wait_attached(&self, wanted: &[usize]) -> Result<()> {
        let what = format!("the agent to be attached to {wanted:?}");
        let attached = async || self.attached().await;
        wait_until(&what, NOTICED, attached, |now| now == wanted).await.map(drop)
    }

    /// Starts an agent that knows only the load balancer's address: every connection of the other master's commands is
    /// forwarded between the servers.
    async fn behind_one_address(&mut self, checks: &mut Checks, manifests: &Manifests) -> Result<Agent<'a>> {
        let agent = postern::agent_builder(&self.cluster, manifests, 1)?.spawn()?;
        let attached = async || self.attached().await;
        let near =
            wait_until("a session by the balancer", agent::START, attached, |now| now.len() == 1).await?[0];
        let far = 1 - near;
        self.cluster.kubectl = self.kubectl[far].clone();
        // The copies take most of the suite's time, and each byte passes through two servers here.
        commands::run(checks, &self.cluster, 50).await;
        forward::run(checks, &self.cluster).await;
        views::run(checks, &self.cluster).await;
        checks.run("every connection was forwarded", self.all_forwarded(near)).await;
        checks.run("the API server beside the session reaches the edge", works(&self.kubectl[near])).await;
        checks.run("a server that starts without an API server forwards", self.unaided(near)).await;
        checks.run("the session's server dies behind its one address", self.dies(near)).await;
        Ok(agent)
    }

    async fn all_forwarded(&self, near: usize) -> Result<()> {
        let far = &self.servers[1 - near];
        let lines = far.settled_access_log().await?;
        ensure!(!lines.is_empty(), "the server without the session relayed nothing");
        for line in &lines {
            ensure!(line.text("listener") == "redirect" && !line.text("via").is_empty(), "{line:?}");
        }
        ensure!(self.attached().await? == [near], "the agent is attached elsewhere too");
        figure(&format!("{} connections were forwarded", lines.len()));
        Ok(())
    }

    /// The server without the session starts while no API server answers it. It can forward only to servers that it
    /// dials itself, so it has to know the other one from before.
    async fn unaided(&mut self, near: usize) -> Result<()> {
        let far = 1 - near;
        self.servers[far].process.crash().await?;
        let host = [&self.cluster.testbed.cloud, &self.second.ns][far].clone();
        // Only for new connections: the host's kubelet keeps its existing one.
        let rule = format!("OUTPUT -d {ROUTER} -p tcp --dport 6443 --syn -j REJECT --reject-with tcp-reset");
        host.iptables(&format!("-I {rule}"))?;
        let meanwhile = self.forwards_unaided(near).await;
        host.iptables(&format!("-D {rule}"))?;
        meanwhile?;
        let old = async || Ok(self.servers[far].status().await?["inventory"]["old_s"].as_u64());
        wait_until("the nodes to be those of the API server again", BACK, old, Option::is_none).await?;
        self.wait_peers(1).await
    }

    async fn forwards_unaided(&mut self, near: usize) -> Result<()> {
        let (server, kubectl) = (&mut self.servers[1 - near], &self.kubectl[1 - near]);
        let before = server.access_log()?.len();
        server.start_again().await?;
        let has_the_edge = |node: &&Value| node["name"] == EDGE_NODE;
        let via = async || {
            let status = server.status().await?;
            ensure!(status["inventory"]["old_s"].is_u64(), "the nodes are not its own: {status}");
            let node = status["nodes"].as_array().into_iter().flatten().find(has_the_edge);
            Ok(node.and_then(|node| node["via"].as_array().map(Vec::len)))
        };
        wait_until("the server to know who has the edge", NOTICED, via, |via| *via == Some(1)).await?;
        works_soon(kubectl).await.context("through a server that has found the other one by itself")?;
        let forwarded = async || Ok(server.access_log()?.split_off(before));
        wait_until("a connection that was forwarded", NOTICED, forwarded, |lines| {
            lines.iter().any(|line| line.text("outcome") == "ok" && !line.text("via").is_empty())
        })
        .await?;
        ensure!(self.attached().await? == [near], "the agent is attached elsewhere too");
        Ok(())
    }

    /// The agent attaches to the other server through the same address.
    async fn dies(&mut self, near: usize) -> Result<()> {
        self.servers[near].process.crash().await?;
        let start = Instant::now();
        self.wait_attached(&[1 - near]).await?;
        figure(&format!("the agent has another session {:.1?} after its server was killed", start.elapsed()));
        works_soon(&self.kubectl[1 - near]).await?;
        self.servers[near].start_again().await?;
        self.wait_peers(1).await?;
        works_soon(&self.kubectl[near]).await
    }

    async fn attach_to_both(&self, mut agent: Agent<'a>, manifests: &Manifests) -> Result<Agent<'a>> {
        agent.process.stop().await?;
        let builder = postern::agent_builder(&self.cluster, manifests, 1)?;
        let servers = self.servers.iter().map(|server| format!("--server={}", server.agent_address()));
        let agent = servers.fold(builder, agent::Builder::flag).spawn()?;
        self.wait_attached(&[0, 1]).await?;
        Ok(agent)
    }

    async fn each_by_its_own(&self) -> Result<()> {
        for (server, kubectl) in self.servers.iter().zip(&self.kubectl) {
            let before = server.access_log()?.len();
            works(kubectl).await?;
            let lines = server.settled_access_log().await?.split_off(before);
            ensure!(lines.iter().all(|line| line.text("via").is_empty()), "forwarded: {lines:?}");
        }
        Ok(())
    }

    /// Returns the time since which the edge node has a tunnel and the number of reported tunnel ends, both from the
    /// cluster.
    async fn said(&self) -> Result<(Value, u64)> {
        let path = format!("/api/v1/nodes/{EDGE_NODE}");
        let node =
            self.cluster.api.wait("the condition", &path, NOTICED, |node| is_true(node, CONDITION)).await?;
        let since = condition(&node, CONDITION).map(|found| found["lastTransitionTime"].clone());
        let events = self.cluster.api.get("/apis/events.k8s.io/v1/namespaces/default/events").await?;
        let events = events["items"].as_array().with_context(|| format!("no list in {events}"))?;
        let of_tunnel =
            |event: &&Value| event["reason"] == "TunnelDown" && event["regarding"]["name"] == EDGE_NODE;
        let times = |event: &Value| event["series"]["count"].as_u64().unwrap_or(1);
        Ok((since.context("no condition")?, events.iter().filter(of_tunnel).map(times).sum()))
    }

    /// Kills the first master's API server and tunnel-server: the other master's go on.
    async fn killed(&mut self) -> Result<()> {
        let said = self.said().await?;
        let mut following = Following::start(&self.kubectl[1]).await?;
        self.cluster.control_plane.kill_apiserver().await?;
        self.servers[0].process.crash().await?;
        goes_on(&self.kubectl[1], WATCHED).await.context("at the other master")?;
        following.next(15).await.context("at the other master")?;
        ensure!(self.attached().await? == [1], "the other server has lost the agent");
        self.cluster.restart_apiserver().await?;
        let ready = async || self.kubectl[0].run(&["get", "--raw", "/readyz"]).await;
        wait_until("the first API server", NOTICED, ready, |text| text == "ok").await?;
        self.servers[0].start_again().await?;
        self.wait_attached(&[0, 1]).await?;
        self.wait_peers(1).await?;
        ensure!(self.apiserver.ended()?.is_none(), "the second API server has ended");
        works_soon(&self.kubectl[0]).await?;
        let now = self.said().await?;
        ensure!(now == said, "the cluster says that the edge was away: {now:?} after {said:?}");
        Ok(())
    }

    /// Replaces a server by a rolling update as pods do it: no connection fails, and if the successor dies, the
    /// replaced server goes on.
    async fn replaced(&mut self) -> Result<()> {
        // This leaves one server that may write to the cluster.
        self.servers[1].process.crash().await?;
        let first = self.servers[0].id().await?;
        self.wait_leads(&first).await?;
        let mut following = Following::start(&self.kubectl[0]).await?;
        let kubectl = self.kubectl[0].clone();
        let (mut second, ()) = tokio::try_join!(self.servers[0].take_over(), async {
            goes_on(&kubectl, WATCHED).await.context("during the takeover")
        })?;
        following.next(15).await.context("what the first one relays")?;
        let successor = second.id().await?;
        ensure!(successor != first, "the first server still answers");
        self.wait_leads(&successor).await?;
        second.process.crash().await?;
        self.servers[0].wait_log("successor ended, resuming service").await?;
        self.servers[0].wait_connected(EDGE_NODE, true, agent::START).await?;
        works(&self.kubectl[0]).await.context("after the successor's death")?;
        self.wait_leads(&first).await.context("after the successor's death")?;
        self.servers[1].start_again().await?;
        self.wait_attached(&[0, 1]).await?;
        self.wait_peers(1).await?;
        following.next(15).await.context("what the first one relays")
    }

    /// As by `kubectl rollout undo`: a server that waits to be stopped gets everything back, and no connection fails.
    async fn undone(&mut self) -> Result<()> {
        // This leaves no other path to the edge.
        self.servers[1].process.crash().await?;
        ports_are_followed(&self.cluster, "9101").await?;
        let edge = target(self.cluster.testbed, 1, 9101, Behaviour::Echo)?;
        let (server, kubectl) = (&self.servers[0], &self.kubectl[0]);
        let first = server.id().await?;
        let mut second = server.successor()?;
        // Not by their logs, which contain their predecessors' lines too.
        let taken = async || Ok(server.id().await? != first && server.get("/readyz").await?.0 == 200);
        wait_until("the second server to take over", NOTICED, taken, |taken| *taken).await?;
        let mut held = hold(edge.address, b"before").await?;
        alongside("the stop of a successor", edge.address, async {
            second.process.signal(Signal::SIGTERM)?;
            server.wait_log("successor handed back").await?;
            works(kubectl).await?;
            echo(&mut held, b"after").await.context("on the connection that the successor relays")?;
            drop(held);
            let status = second.process.wait_exit(STOPS).await?;
            ensure!(status.code() == Some(0), "the successor ended with {status}");
            Ok(())
        })
        .await?;
        ensure!(server.id().await? == first, "another server answers");
        self.wait_leads(&first).await.context("after the successor's end")?;
        self.servers[1].start_again().await?;
        self.wait_attached(&[0, 1]).await?;
        self.wait_peers(1).await
    }

    async fn wait_leads(&self, id: &str) -> Result<()> {
        let path = format!("/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/tunnel-server");
        let holds = |lease: &Value| lease["spec"]["holderIdentity"] == id;
        self.cluster.api.wait(&format!("{id} to hold the Lease"), &path, LEADS, holds).await.map(drop)
    }
}

/// Runs logs and exec once.
async fn works(kubectl: &Kubectl) -> Result<()> {
    commands::logs(kubectl).await?;
    commands::exec(kubectl).await
}

/// As [`works`], right after a status has said that the edge is reached: the kernel's routes follow a moment later.
async fn works_soon(kubectl: &Kubectl) -> Result<()> {
    let reached = async || works(kubectl).await;
    wait_until("kubectl to reach the edge", NOTICED, reached, |()| true).await
}

/// Runs commands one after the other, each on a new connection, none of which may fail.
async fn goes_on(kubectl: &Kubectl, span: Duration) -> Result<()> {
    let (end, mut count) = (Instant::now() + span, 0);
    while count == 0 || Instant::now() < end {
        let printed = kubectl.run(&["exec", "idle", "--", "hostname"]).await?;
        ensure!(printed == "idle\n", "hostname printed {printed:?}");
        count += 1;
    }
    figure(&format!("{count} commands without a failure"));
    Ok(())
}
