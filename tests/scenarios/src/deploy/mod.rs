//! deploy/ as an administrator applies it: real images, real pods, and only the rights that are used.
use std::cell::Cell;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::client::{self, visit};
use postern_testbed::cluster::api::is_true;
use postern_testbed::cluster::kubectl::Kubectl;
use postern_testbed::cluster::pods::{self, TALK, shell};
use postern_testbed::cluster::postern::NAMESPACE;
use postern_testbed::cluster::{CLOUD_NODE, Cluster, EDGE_NODE};
use postern_testbed::report::{figure, progress};
use postern_testbed::target::Behaviour;
use postern_testbed::wait::{wait_for, wait_until};
use postern_testbed::{CLOUD, Testbed};
use serde_json::{Value, json};

use crate::common::{alongside, target};
use crate::kubernetes::following::Following;
use crate::rights;

mod accepted;
mod by_name;
mod callers;
mod chart;
mod connect;
mod follow;
mod gateways;
mod guide;
mod konnectivity;
mod metrics;
mod migration;
mod monitoring;
mod offline;
mod overlays;
mod patches;
mod plugin;
mod readme;
mod render;
mod superedge;
mod two_masters;

use accepted::{components, extended};
use callers::callers_are_asked_for;
use chart::chart_is_installed_upgraded_and_removed;
use gateways::gateways_are_deployed_as_documented;
use guide::the_guide_is_followed;
use konnectivity::migration_from_konnectivity;
use metrics::prometheus_reads_servers;
use migration::migration_from_yurttunnel_and_back;
use monitoring::{alerts_fire_and_stay_silent, panels_ask_for_what_programs_expose};
use overlays::{
    a_host_without_a_tun_device_can_have_a_server, addresses_are_as_documented,
    components_go_where_the_servers_are, every_binding_has_its_role,
    masters_of_every_distribution_get_a_server, no_windows_node_gets_a_pod, programs_can_be_pinned,
    public_addresses_leave_no_node_port, redirectors_get_what_servers_get,
};
use patches::{argument, overlay, overlay_with};
use readme::the_readme_is_followed;
use render::chart_renders_what_kustomize_does;
use superedge::migration_from_superedge;
use two_masters::two_masters_are_updated;

scenarios! {
    manifests_run_unchanged(images, limit = 420),
    migration_from_yurttunnel_and_back(images, limit = 420),
    migration_from_konnectivity(images, limit = 600),
    migration_from_superedge(images, limit = 600),
    chart_renders_what_kustomize_does(images, no_cluster, limit = 300),
    gateways_are_deployed_as_documented(images, no_cluster),
    programs_can_be_pinned(cluster, no_cluster),
    a_host_without_a_tun_device_can_have_a_server(cluster, no_cluster),
    masters_of_every_distribution_get_a_server(cluster, no_cluster),
    no_windows_node_gets_a_pod(cluster, no_cluster),
    redirectors_get_what_servers_get(cluster, no_cluster),
    public_addresses_leave_no_node_port(cluster, no_cluster, quick),
    addresses_are_as_documented(cluster, no_cluster, quick),
    components_go_where_the_servers_are(cluster, no_cluster),
    every_binding_has_its_role(cluster, no_cluster),
    chart_is_installed_upgraded_and_removed(images, limit = 600),
    the_guide_is_followed(images, limit = 420),
    the_readme_is_followed(images, limit = 300),
    callers_are_asked_for(images, limit = 300),
    prometheus_reads_servers(images, limit = 360),
    two_masters_are_updated(images, limit = 600),
    alerts_fire_and_stay_silent(limit = 240),
    panels_ask_for_what_programs_expose,
}

/// The pages with commands for a cluster. Titles of sections with commands are unique among them.
const DOCUMENT: &str = concat!(
    include_str!("../../../../docs/install/kubernetes.md"),
    include_str!("../../../../docs/install/addresses.md"),
    include_str!("../../../../docs/install/remove.md"),
    include_str!("../../../../docs/tasks/ports.md"),
    include_str!("../../../../docs/tasks/names.md"),
    include_str!("../../../../docs/tasks/callers.md"),
    include_str!("../../../../docs/tasks/prometheus.md"),
    include_str!("../../../../docs/tasks/redirectors.md"),
    include_str!("../../../../docs/tasks/certificates.md"),
    include_str!("../../../../docs/tasks/revoke.md"),
    include_str!("../../../../docs/tasks/upgrade.md"),
);
const PROGRAMS: [(&str, &str); 2] = [("tunnel-server", CLOUD_NODE), ("tunnel-agent", EDGE_NODE)];
const PATIENCE: Duration = Duration::from_secs(60);
/// Interval at which a rolling update is looked at.
const LOOK: Duration = Duration::from_millis(500);

async fn manifests_run_unchanged(testbed: &Testbed) -> Result<()> {
    let mut cluster = Cluster::start(testbed).await?;
    accepted::by_the_api_server(&cluster).await?;
    import(&mut cluster).await?;
    pods::run(&cluster.api, &[shell("talker", EDGE_NODE, TALK)]).await?;
    explained(&cluster, installed).await
}

/// Imports into each host the image of the program that runs there.
async fn import(cluster: &mut Cluster<'_>) -> Result<()> {
    for (program, node) in PROGRAMS {
        let archive = archive(program)?;
        cluster.host_mut(node)?.import(&archive).await.with_context(|| archive.display().to_string())?;
    }
    Ok(())
}

async fn installed(cluster: &Cluster<'_>) -> Result<()> {
    let kubectl = &cluster.kubectl;
    kubectl.run(&["apply", "-k", text(&overlay(cluster.testbed, "base")?)?]).await?;
    for (program, _) in PROGRAMS {
        rolled_out(kubectl, program).await?;
    }
    progress("both DaemonSets are ready");
    logs(kubectl).await?;
    plugin::every_command(kubectl, 1).await?;
    rules_of_the_host(cluster).await?;
    ports(cluster).await?;
    rotation(kubectl).await?;
    restarts(cluster).await?;
    given_servers(cluster).await?;
    rights::of_base(cluster).await
}

/// Waits until the rollout is complete on its only node.
async fn rolled_out(kubectl: &Kubectl, daemon_set: &str) -> Result<()> {
    ready(kubectl, daemon_set, 1).await
}

async fn ready(kubectl: &Kubectl, daemon_set: &str, nodes: u32) -> Result<()> {
    ready_in(kubectl, NAMESPACE, daemon_set, nodes).await
}

async fn ready_in(kubectl: &Kubectl, namespace: &str, daemon_set: &str, nodes: u32) -> Result<()> {
    let name = format!("daemonset/{daemon_set}");
    // A rolling update replaces them one after the other, and each old pod finishes its connections.
    let patience = 90 * nodes;
    let status = kubectl.within(Duration::from_secs(u64::from(patience) + 10));
    let timeout = format!("--timeout={patience}s");
    status.run(&["rollout", "status", &name, "--namespace", namespace, &timeout]).await?;
    // A controller that has not seen a node's label yet has no pods, and reports the rollout as complete.
    let args = ["get", &name, "--namespace", namespace, "--output=jsonpath={.status.numberReady}"];
    let (ready, wanted) = (async || kubectl.run(&args).await, nodes.to_string());
    wait_until(&format!("{name} to be ready on {nodes} nodes"), PATIENCE, ready, |now| *now == wanted)
        .await
        .map(drop)
}

/// Reads `kubectl logs` of a pod of the edge node, which is behind NAT.
async fn logs(kubectl: &Kubectl) -> Result<()> {
    wait_for("kubectl logs of the edge's pod", PATIENCE, async || {
        let output = kubectl.output(&["logs", "talker", "--tail=1"]).await?;
        let line = String::from_utf8_lossy(&output.stdout).into_owned();
        Ok((output.status.success() && line.starts_with("line ")).then_some(()))
    })
    .await
}

/// The image has neither iptables nor nft: doctor finds the port by trying it, and says how other tools show the rules
/// for it.
async fn rules_of_the_host(cluster: &Cluster<'_>) -> Result<()> {
    // A part of the virtual address range that is unused here, also by self-tests.
    let rule = "OUTPUT -d 198.19.255.0/24 -p tcp --dport 10255 -j REDIRECT --to-ports 9";
    let host = &cluster.testbed.cloud;
    let pod = ["exec", "--namespace", NAMESPACE, "daemonset/tunnel-server", "--"];
    let doctor = [&pod[..], &["/tunnel-server", "doctor", "--output=json"]].concat();
    // The server's own check may meet the rule before it is gone.
    cluster.testbed.allow_error("did not reach the listener");
    host.iptables(&format!("-t nat -A {rule}"))?;
    let output = cluster.kubectl.output(&doctor).await?;
    host.iptables(&format!("-t nat -D {rule}"))?;
    let report: Value = serde_json::from_slice(&output.stdout)
        .with_context(|| postern_testbed::cluster::kubectl::said(&output))?;
    let check = |name: &str| {
        let checks = report["checks"].as_array().map_or(&[][..], Vec::as_slice);
        checks.iter().find(|check| check["name"] == name).cloned().unwrap_or_default()
    };
    let (rules, pods) = (check("rules"), check("pods"));
    let finding = &rules["findings"][0];
    let found = finding["found"].as_str().unwrap_or_default();
    ensure!(
        finding["code"] == "foreign-rules" && found.contains("port 10255 of the virtual addresses"),
        "{report:#}"
    );
    ensure!(found.contains("on the host `iptables-save > "), "{report:#}");
    let reason = pods["found"].as_str().unwrap_or_default();
    ensure!(pods["state"] == "skipped" && reason.contains("CAP_SYS_ADMIN"), "{report:#}");
    Ok(())
}

/// Ports in the ConfigMap become ports of the internal Service; an invalid one becomes an Event, which counts
/// repetitions.
async fn ports(cluster: &Cluster<'_>) -> Result<()> {
    let configmap = format!("/api/v1/namespaces/{NAMESPACE}/configmaps/tunnel-server-cfg");
    let change = json!({ "data": {
        "http-proxy-ports": "9100, nonsense",
        "https-proxy-ports": "9443",
        "localhost-proxy-ports": "10266",
    }});
    cluster.api.patch(&configmap, &change).await?;
    service_has_port(cluster, NAMESPACE).await?;
    let events = format!("/api/v1/namespaces/{NAMESPACE}/events");
    let reported = |events: &Value, is_such: fn(&Value) -> bool| {
        let events = events["items"].as_array().map_or(&[][..], Vec::as_slice);
        events.iter().any(|event| event["reason"] == "InvalidPort" && is_such(event))
    };
    let once = |events: &Value| reported(events, |_| true);
    cluster.api.wait("the Event about an invalid port", &events, PATIENCE, once).await?;
    for ports in ["9100", "9100, nonsense"] {
        let change = json!({ "data": { "http-proxy-ports": ports } });
        cluster.api.patch(&configmap, &change).await?;
    }
    let again = |events: &Value| reported(events, |event| event["series"]["count"].as_u64() > Some(1));
    cluster.api.wait("the same Event, repeated", &events, PATIENCE, again).await?;
    let records = format!("/api/v1/namespaces/{NAMESPACE}/configmaps/tunnel-nodes");
    let named = |records: &Value| {
        records["data"]["tunnel-nodes"]
            .as_str()
            .is_some_and(|lines| lines.contains(&format!("\t{EDGE_NODE}")))
    };
    cluster.api.wait("the DNS records", &records, PATIENCE, named).await?;
    agents_metrics(cluster).await
}

/// The agent's admin port, which is in the ConfigMap: metrics for the cloud, the rest only for the node.
async fn agents_metrics(cluster: &Cluster<'_>) -> Result<()> {
    let edge = cluster.testbed.edge(1);
    let tunnelled = async |method: &str, path: &str| {
        let stream = client::connect((edge.address, 10266)).await?;
        client::http(stream, method, path, "info").await
    };
    let metrics = wait_for("the agent's metrics, through the tunnel", PATIENCE, async || {
        Ok(tunnelled("GET", "/metrics").await.ok())
    })
    .await?;
    ensure!(metrics.0 == 200 && metrics.1.contains("postern_agent_"), "the agent's metrics: {metrics:?}");
    for (method, path) in [("PUT", "/debug/flags/v"), ("GET", "/config"), ("GET", "/status")] {
        let (status, said) = tunnelled(method, path).await?;
        ensure!(status == 404, "{method} {path} through the tunnel: {status} {said}");
    }
    let own = SocketAddr::from((Ipv4Addr::LOCALHOST, 10266));
    let stream = client::connect_from(&edge.ns, own, client::PATIENCE).await.context("on the node")?;
    let (status, said) = client::http(stream, "PUT", "/debug/flags/v", "info").await?;
    ensure!(status == 200, "PUT on the node: {status} {said}");
    Ok(())
}

/// Waits until the internal Service has port 9443. A port without TLS would need the plain listener.
async fn service_has_port(cluster: &Cluster<'_>, namespace: &str) -> Result<()> {
    let service = format!("/api/v1/namespaces/{namespace}/services/x-tunnel-server-internal-svc");
    let has_port = |service: &Value| {
        let ports = service["spec"]["ports"].as_array().map_or(&[][..], Vec::as_slice);
        ports.iter().any(|port| port["name"] == "dnat-9443")
    };
    cluster.api.wait("the internal Service's port", &service, PATIENCE, has_port).await.map(drop)
}

/// Rotates the CA from within a server's pod, as documented.
async fn rotation(kubectl: &Kubectl) -> Result<()> {
    let ca = async |step: &str| {
        let server = ["exec", "--namespace", NAMESPACE, "daemonset/tunnel-server", "--"];
        kubectl.run(&[&server[..], &["/tunnel-server", "ca", step, "--in-cluster"]].concat()).await
    };
    ca("introduce").await?;
    let status = ca("status").await?;
    ensure!(status.matches("sha256:").count() >= 2, "there are not two roots in {status:?}");
    Ok(())
}

/// Replaces the pods of each DaemonSet, first by applying another overlay: the tunnel comes back without a new
/// certificate.
async fn restarts(cluster: &Cluster<'_>) -> Result<()> {
    let kubectl = &cluster.kubectl;
    let label = json!({ "metadata": { "labels": { "superedge.io/edge-node": "enable" } } });
    cluster.api.patch(&format!("/api/v1/nodes/{EDGE_NODE}"), &label).await?;
    kubectl.run(&["apply", "-k", text(&overlay(cluster.testbed, "overlays/superedge")?)?]).await?;
    for (program, _) in PROGRAMS {
        rolled_out(kubectl, program).await?;
    }
    logs(kubectl).await.context("after another overlay was applied")?;
    offline::agents_are_updated(cluster).await?;
    // The guide's other way of finding the API server.
    let cloud = CLOUD.to_string();
    follow::section(cluster, DOCUMENT, guide::FINDING_SERVERS, &[("api.example.org", cloud.as_str())])
        .await?;
    rolled_out(kubectl, "tunnel-agent").await?;
    logs(kubectl).await.context("after the agent was given the API server's address")?;
    // A port in the ConfigMap.
    let exporter = target(cluster.testbed, 1, 9100, Behaviour::Echo)?;
    for (program, _) in PROGRAMS {
        update(cluster, program, exporter.address).await.with_context(|| format!("updating {program}"))?;
    }
    let requests = cluster.api.get("/apis/certificates.k8s.io/v1/certificatesigningrequests").await?;
    let requests = requests["items"].as_array().map_or(&[][..], Vec::as_slice);
    let ours = requests.iter().filter(|csr| csr["spec"]["signerName"] == "postern.internal/agent").count();
    ensure!(ours == 1, "{ours} certificates were requested; the agent's state must outlive its pod");
    Ok(())
}

/// A new agent with fixed server addresses enrols through the API server.
async fn given_servers(cluster: &Cluster<'_>) -> Result<()> {
    let kubectl = &cluster.kubectl;
    let service = format!("/api/v1/namespaces/{NAMESPACE}/services/x-tunnel-server-svc");
    let port = cluster.api.get(&service).await?["spec"]["ports"][0]["nodePort"].to_string();
    let patch = json!([
        // With another state directory it does not find the agent that it would take over from.
        {
            "op": "replace",
            "path": "/spec/updateStrategy/rollingUpdate",
            "value": { "maxSurge": 0, "maxUnavailable": 1 },
        },
        argument(&format!("--server={CLOUD}:{port}")),
        { "op": "replace", "path": "/spec/template/spec/volumes/0/hostPath/path", "value": "/var/lib/postern/another" },
    ]);
    let (object, patch) = ("daemonset/tunnel-agent", patch.to_string());
    kubectl.run(&["patch", object, "--namespace", NAMESPACE, "--type=json", "--patch", &patch]).await?;
    rolled_out(kubectl, "tunnel-agent").await?;
    logs(kubectl).await.context("with servers that were given")?;
    let requests = cluster.api.get("/apis/certificates.k8s.io/v1/certificatesigningrequests").await?;
    let requests = requests["items"].as_array().map_or(&[][..], Vec::as_slice);
    let ours = requests.iter().filter(|csr| csr["spec"]["signerName"] == "postern.internal/agent").count();
    ensure!(ours == 2, "{ours} certificates were requested; this agent must have asked for the second");
    Ok(())
}

/// Makes a rolling update of the servers or of the agents, during which every connect to `address` works.
async fn update(cluster: &Cluster<'_>, program: &str, address: SocketAddr) -> Result<()> {
    wait_for("the port to be redirected", PATIENCE, async || Ok(visit(address).await.ok())).await?;
    alongside("a rolling update", address, restart(cluster, program, 1)).await
}

/// Makes a rolling update of a program's pods on this number of nodes, during which kubectl may not fail; nor may a
/// `kubectl logs -f` from before the update, until a new pod is ready.
async fn restart(cluster: &Cluster<'_>, program: &str, nodes: u32) -> Result<()> {
    let kubectl = &cluster.kubectl;
    let before = running(kubectl, program).await?;
    let (asked, begun, updated) = (Cell::new(0), Cell::new(false), Cell::new(false));
    let update = async {
        let daemon_set = format!("daemonset/{program}");
        kubectl.run(&["rollout", "restart", &daemon_set, "--namespace", NAMESPACE]).await?;
        ready(kubectl, program, nodes).await?;
        updated.set(true);
        anyhow::Ok(())
    };
    let ask = async {
        while !updated.get() {
            let said = kubectl.run(&["logs", "talker", "--tail=1"]).await?;
            ensure!(said.starts_with("line "), "kubectl logs: {said}");
            let said = kubectl.run(&["exec", "talker", "--", "echo", "there"]).await?;
            ensure!(said.trim() == "there", "kubectl exec: {said}");
            asked.set(asked.get() + 1);
        }
        Ok(())
    };
    // Beside the other commands, each of which may take seconds: behind them it would be noticed too late.
    let look = async {
        while !begun.get() && !updated.get() {
            begun.set(new_is_ready(kubectl, program, &before).await?);
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    };
    let mut following = Following::start(kubectl).await?;
    let follow = async {
        // The old pod is told to end once the new one is ready, and then has the drain timeout.
        while !begun.get() && !updated.get() {
            following.next(1).await.context("kubectl logs -f since before the update")?;
        }
        Ok(())
    };
    tokio::try_join!(update, ask, look, follow)?;
    figure(&format!("kubectl logs and exec {} times during a rolling update", asked.get()));
    // A pod that has handed over may still finish its connections.
    let now = async || running(kubectl, program).await;
    let new = |now: &Vec<String>| !now.is_empty() && now.iter().all(|pod| !before.contains(pod));
    wait_until("every pod to be a new one", PATIENCE, now, new).await.map(drop)
}

/// Reports whether one of a program's pods that is not among `before` is ready.
async fn new_is_ready(kubectl: &Kubectl, program: &str, before: &[String]) -> Result<bool> {
    let selector = format!("--selector=app.kubernetes.io/name={program}");
    let pods = kubectl.run(&["get", "pods", "--namespace", NAMESPACE, &selector, "--output=json"]).await?;
    let pods: Value = serde_json::from_str(&pods).context("the list of pods")?;
    let new = |pod: &&Value| {
        let name = format!("pod/{}", pod["metadata"]["name"].as_str().unwrap_or_default());
        !before.contains(&name)
    };
    Ok(pods["items"].as_array().into_iter().flatten().filter(new).any(|pod| is_true(pod, "Ready")))
}

/// Returns a program's pods, as `pod/NAME`.
async fn running(kubectl: &Kubectl, program: &str) -> Result<Vec<String>> {
    let selector = format!("--selector=app.kubernetes.io/name={program}");
    let running = "--field-selector=status.phase=Running";
    let names =
        kubectl.run(&["get", "pods", "--namespace", NAMESPACE, &selector, running, "--output=name"]).await?;
    Ok(names.lines().map(str::to_owned).collect())
}

/// Runs `run` on a cluster with the images and a pod that prints lines; explains a failure.
async fn on_cluster(testbed: &Testbed, run: impl AsyncFnOnce(&Cluster<'_>) -> Result<()>) -> Result<()> {
    let mut cluster = Cluster::start(testbed).await?;
    import(&mut cluster).await?;
    pods::run(&cluster.api, &[shell("talker", EDGE_NODE, TALK)]).await?;
    explained(&cluster, run).await
}

/// Adds the state of the installation to an error.
async fn explained(cluster: &Cluster<'_>, run: impl AsyncFnOnce(&Cluster<'_>) -> Result<()>) -> Result<()> {
    match run(cluster).await {
        Ok(()) => Ok(()),
        Err(error) => Err(error.context(explanation(&cluster.kubectl).await)),
    }
}

/// Describes the state of an installation that does not work.
async fn explanation(kubectl: &Kubectl) -> String {
    let mut text = String::new();
    for args in [
        &["get", "pods,services,endpointslices,csr", "-A", "--output=wide"][..],
        &["get", "events", "-A"],
        &["logs", "daemonset/tunnel-server", "--namespace", NAMESPACE, "--tail=40"],
        &["logs", "daemonset/tunnel-agent", "--namespace", NAMESPACE, "--tail=40"],
    ] {
        match kubectl.within(Duration::from_secs(10)).output(args).await {
            Ok(output) => text.push_str(&postern_testbed::cluster::kubectl::said(&output)),
            Err(error) => text.push_str(&format!("{error:#}")),
        }
        text.push('\n');
    }
    text
}

/// Returns the image that `cargo xtask image` wrote to the target folder.
fn archive(program: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("where this program is")?;
    let target = own.parent().and_then(Path::parent).context("this program is in no target folder")?;
    let path = target.join("image").join(format!("{program}.oci.tar"));
    ensure!(path.exists(), "{} is missing: run `cargo xtask image --profile dev`", path.display());
    Ok(path)
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))
}

#[cfg(test)]
mod tests;
