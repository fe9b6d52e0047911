//! `tunnel-agent doctor`: finds faults of this agent, its node and the connections to the servers.

mod identity;
mod konnectivity;
mod node;
mod sessions;
#[cfg(test)]
pub(crate) mod tests;
mod way;

use std::time::SystemTime;

use tunnel_doctor::cluster::{Right, connected, rights};
use tunnel_doctor::{Asked, Checkup, Outcome, Report, check_running, state_directory};
use tunnel_kube::ClientSettings;
use tunnel_runtime::NodeName;

use crate::config::Config;
use crate::kube::KubeOptions;
use crate::status::AgentStatus;

/// Examines the agent with this configuration. `running` is the agent's own answer, or the reason why there is none.
pub async fn examine(config: &Config, running: &Asked<AgentStatus>) -> Report {
    let now = SystemTime::now();
    let mut checkup = Checkup::default();
    let start = "start it: `systemctl start postern-agent@a`, or see `kubectl -n kube-system get pods --selector app.kubernetes.io/name=tunnel-agent --output wide`";
    let version = |status: &AgentStatus| format!("version {}, node {}", status.version, status.node);
    check_running(&mut checkup, running, start, version);
    let running = running.as_ref().ok();
    if let Some(servers) = &config.konnectivity {
        let own = konnectivity::check(&mut checkup, config, servers, running).await;
        node::check(&mut checkup, config, own).await;
        return checkup.report("tunnel-agent", env!("CARGO_PKG_VERSION"));
    }

    checkup
        .run("state directory", &[], async || {
            let dir = &config.given.state_dir;
            Outcome::of(state_directory(dir).into_iter().collect(), dir.display().to_string())
        })
        .await;
    let held = identity::check(&mut checkup, config, now).await;
    match &config.kube {
        Some(kube) => cluster(&mut checkup, kube, config).await,
        None => checkup.add("API server", Outcome::Skipped("this agent enrols without one".to_owned())),
    }
    let own = way::check(&mut checkup, config, running, held.as_ref(), now).await;
    match running {
        Some(running) => checkup.run("attached", &[], async || sessions::judge(&running.status)).await,
        None => checkup.add("attached", Outcome::Skipped("the agent does not run".to_owned())),
    }
    node::check(&mut checkup, config, own).await;
    checkup.report("tunnel-agent", env!("CARGO_PKG_VERSION"))
}

async fn cluster(checkup: &mut Checkup, kube: &KubeOptions, config: &Config) {
    let client =
        tunnel_kube::connect(kube.kubeconfig.as_deref(), kube.namespace.as_deref(), &ClientSettings::AGENT)
            .await;
    let fix =
        "name the kubelet's kubeconfig with --kubeconfig, or enrol with --server, --token and --ca-hash";
    let Some((client, namespace)) = connected(checkup, client, fix).await else { return };
    let wanted = wanted(&kube.service, config.given.targets.pods.then_some(&config.node_name));
    let fix = "kubectl apply -k OVERLAY, or helm upgrade again (deploy/base and the chart have the Role and ClusterRole \
               tunnel-agent; --pod-targets=on needs the component edge-pods, in the chart agent.podTargets)";
    checkup
        .run("API rights", &["API server"], async || rights(&client, &namespace, &wanted, fix).await)
        .await;
}

/// Permissions that the agent needs. `node` is the Node whose pod ranges are read.
fn wanted(service: &str, node: Option<&NodeName>) -> Vec<Right> {
    let mut wanted = vec![
        Right::everywhere("certificates.k8s.io", "certificatesigningrequests", &["create", "get"]),
        Right::here("", "services", &["list", "watch"]).named(service),
        Right::here("discovery.k8s.io", "endpointslices", &["list", "watch"]),
    ];
    // A kubelet may read its own Node and no other.
    wanted.extend(node.map(|node| Right::everywhere("", "nodes", &["get"]).named(node.as_str())));
    wanted
}
