//! `tunnel-agent doctor`: what is wrong with this agent, its node and the way to the servers.

mod identity;
mod konnectivity;
mod node;
mod sessions;
#[cfg(test)]
mod tests_support;
mod way;

use std::time::SystemTime;

use tunnel_core::doctor::{
    Checkup, Finding, Outcome, Report, Running, codes, judge_limits, judge_running, state_directory,
};
use tunnel_core::identity::NodeName;
use tunnel_core::limits::in_pod;
use tunnel_kube::ClientSettings;
use tunnel_kube::doctor::{Right, answers, rights};

use crate::config::Config;
use crate::kube::KubeOptions;
use crate::status::AgentStatus;

/// Examines the agent with this configuration. `running` is its own answer, or why there is none.
pub async fn examine(config: &Config, running: Result<Running<AgentStatus>, String>) -> Report {
    let now = SystemTime::now();
    let mut checkup = Checkup::default();
    let start = "start it: `systemctl start postern-agent@a`, or see `kubectl -n kube-system get pods --selector app.kubernetes.io/name=tunnel-agent --output wide`";
    let version = |status: &AgentStatus| format!("version {}, node {}", status.version, status.node);
    let (is_running, is_ready) = judge_running(&running, start, version);
    checkup.add("running", is_running);
    checkup.add("ready", is_ready);
    let running = running.ok();
    let unknown = || Outcome::Skipped("the agent does not run".to_owned());
    checkup.add("limits", running.as_ref().map_or_else(unknown, |it| judge_limits(&it.metrics, in_pod())));
    if let Some(servers) = &config.konnectivity {
        let own = konnectivity::check(&mut checkup, config, servers, running.as_ref()).await;
        node::check(&mut checkup, config, own).await;
        return checkup.report("tunnel-agent", env!("CARGO_PKG_VERSION"));
    }

    checkup
        .run("state directory", &[], async || {
            let dir = &config.state_dir;
            Outcome::of(state_directory(dir).into_iter().collect(), dir.display().to_string())
        })
        .await;
    let held = identity::check(&mut checkup, config, now).await;
    match &config.kube {
        Some(kube) => cluster(&mut checkup, kube, config).await,
        None => checkup.add("API server", Outcome::Skipped("this agent enrols without one".to_owned())),
    }
    let own = way::check(&mut checkup, config, running.as_ref(), held.as_ref(), now).await;
    match &running {
        Some(running) => checkup.run("attached", &[], async || sessions::judge(&running.status)).await,
        None => checkup.add("attached", unknown()),
    }
    node::check(&mut checkup, config, own).await;
    checkup.report("tunnel-agent", env!("CARGO_PKG_VERSION"))
}

/// The report when the flags are wrong: nothing else can be examined then.
pub fn bad_flags(reason: &str) -> Report {
    let mut checkup = Checkup::default();
    let fix = "correct the flag: `tunnel-agent --help` has its form";
    checkup.add("flags", Finding::new(&codes::BAD_FLAGS, reason, fix).into());
    checkup.report("tunnel-agent", env!("CARGO_PKG_VERSION"))
}

async fn cluster(checkup: &mut Checkup, kube: &KubeOptions, config: &Config) {
    let connected =
        tunnel_kube::connect(kube.kubeconfig.as_deref(), kube.namespace.as_deref(), &ClientSettings::AGENT)
            .await;
    let (client, namespace) = match connected {
        Ok(connected) => connected,
        Err(error) => {
            let fix = "name the kubelet's kubeconfig with --kubeconfig, or enrol with --server, --token and --ca-hash";
            checkup.add(
                "API server",
                Finding::new(&codes::API_SERVER_UNREACHABLE, error.to_string(), fix).into(),
            );
            return;
        }
    };
    checkup.run("API server", &[], async || answers(&client).await).await;
    let wanted = wanted(&kube.service, config.pod_targets.then_some(&config.node_name));
    let fix = "kubectl apply -k deploy/base (its Role and ClusterRole tunnel-agent), or with --pod-targets=on an \
               overlay with the component edge-pods";
    checkup
        .run("API rights", &["API server"], async || rights(&client, &namespace, &wanted, fix).await)
        .await;
}

/// `node`: the one whose ranges of pods are read.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_its_own_node_must_be_readable() {
        let node = "edge-1".parse().unwrap();
        let with_pods = wanted("x-tunnel-server-svc", Some(&node));
        let nodes: Vec<_> = with_pods.iter().filter(|right| right.resource == "nodes").collect();
        assert!(nodes.len() == 1 && nodes[0].name.as_deref() == Some("edge-1"), "{nodes:?}");
        assert_eq!(wanted("x-tunnel-server-svc", None).len(), with_pods.len() - 1);
    }
}
