//! `tunnel-server doctor`: what is wrong with this server and its host. ARCHITECTURE.md says what it examines how.

mod cluster;
mod firewall;
mod host;
mod kubelet_names;
mod node;
mod pki;
mod rules;
mod service;
mod trial;

pub(crate) use firewall::warn_of_taken_pod_ports;
pub use node::test;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::SystemTime;

use tunnel_core::doctor::{
    Checkup, Finding, Outcome, Report, Running, codes, judge_limits, judge_running, resolves,
};
use tunnel_core::limits::in_pod;

use crate::config::{Config, NodeSource};
use crate::status::StatusReport;

/// Examines the server with this configuration. `running` is its own answer, or why there is none; `rules` are files with the
/// output of iptables-save or `nft list ruleset`, to be judged instead of this host's.
pub async fn examine(
    config: &Config,
    running: Result<Running<StatusReport>, String>,
    rules: &[PathBuf],
) -> Report {
    let mut checkup = Checkup::default();
    let start = "start it: `systemctl start postern-server@a`, or see `kubectl -n kube-system get pods --selector app.kubernetes.io/name=tunnel-server --output wide`";
    let version = |status: &StatusReport| format!("version {}, id {}", status.version, status.server_id);
    let (is_running, is_ready) = judge_running(&running, start, version);
    checkup.add("running", is_running);
    checkup.add("ready", is_ready);
    let running = running.ok();
    let running = running.as_ref();
    let limits = async || running.map_or_else(host::unknown, |it| judge_limits(&it.metrics, in_pod()));
    checkup.run("limits", &["running"], limits).await;

    host::check(&mut checkup, config, running).await;
    firewall::check(&mut checkup, config, running, rules).await;
    service::check_listeners(&mut checkup, config, running).await;
    pki::check(&mut checkup, config, SystemTime::now()).await;
    match &config.source {
        NodeSource::Kubernetes(options) => cluster::check(&mut checkup, options, config).await,
        NodeSource::File(_) => checkup.add("API server", Outcome::Skipped("not in a cluster".to_owned())),
    }
    checkup.run("names", &[], async || names(config).await).await;
    checkup.add("inventory", service::inventory(config, running));
    checkup.report("tunnel-server", env!("CARGO_PKG_VERSION"))
}

/// The ports of the flags, and those that the running server has from its cluster's ConfigMap.
fn tunnelled(flags: &BTreeSet<u16>, running: Option<&Running<StatusReport>>) -> Vec<u16> {
    let running = running.into_iter().flat_map(|running| &running.status.redirect.ports);
    flags.iter().chain(running).copied().collect::<BTreeSet<u16>>().into_iter().collect()
}

async fn names(config: &Config) -> Outcome {
    let mut faults = Vec::new();
    for peer in &config.peers {
        faults.extend(resolves("--peers", &peer.to_string()).await);
    }
    let fine = if config.peers.is_empty() { "no --peers" } else { "every one of --peers has an address" };
    Outcome::of(faults, fine)
}

/// The report when the flags are wrong: nothing else can be examined then.
pub fn bad_flags(reason: &str) -> Report {
    let mut checkup = Checkup::default();
    let fix = "correct the flag: `tunnel-server --help` has its form";
    checkup.add("flags", Finding::new(&codes::BAD_FLAGS, reason, fix).into());
    checkup.report("tunnel-server", env!("CARGO_PKG_VERSION"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_of_the_configmap_are_examined_too() {
        let mut status = serde_json::json!({
            "version": "1", "server_id": "s", "uptime_s": 1, "ready": true, "pending": [], "nodes": [], "doors": [],
            "redirect": {"state": "on", "reason": null, "mended": 0, "counters": {}, "routes": 1, "routes_down": 0,
                         "excluded": 0, "programs": []},
            "inventory": {"source": "f", "edge": 0, "cloud": 0, "last_error": null, "conflicts": []},
        });
        let ports = |status: &serde_json::Value| {
            let status = serde_json::from_value(status.clone()).unwrap();
            let running = Running { status, pending: None, metrics: String::new(), flags: None };
            tunnelled(&BTreeSet::from([10250, 10255]), Some(&running))
        };
        // One of a version that does not say them.
        assert_eq!(ports(&status), [10250, 10255]);
        status["redirect"]["ports"] = serde_json::json!([9200, 10250]);
        assert_eq!(ports(&status), [9200, 10250, 10255]);
        assert_eq!(tunnelled(&BTreeSet::from([10250]), None), [10250]);
    }
}
