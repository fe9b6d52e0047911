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
