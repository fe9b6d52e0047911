//! `tunnel-server doctor`: looks for faults of this server and its host. ARCHITECTURE.md describes the checks.

mod cluster;
mod firewall;
mod host;
mod kubelet_names;
mod node;
mod pki;
mod rules;
mod service;
mod trial;

pub use node::test;

use std::path::PathBuf;
use std::time::SystemTime;

use tunnel_doctor::{Asked, Checkup, Outcome, Report, check_running, resolves};

use crate::config::Config;
use crate::status::StatusReport;

/// Examines the server with this configuration. `running` is the server's own status, or the reason why there is none;
/// `rules` are files with the output of iptables-save or `nft list ruleset`, to be used instead of this host's rules.
pub async fn examine(config: &Config, running: &Asked<StatusReport>, rules: &[PathBuf]) -> Report {
    let mut checkup = Checkup::default();
    let start = "start it: `systemctl start postern-server@a`, or see `kubectl -n kube-system get pods --selector app.kubernetes.io/name=tunnel-server --output wide`";
    let version = |status: &StatusReport| format!("version {}, id {}", status.version, status.server_id);
    check_running(&mut checkup, running, start, version);
    let running = running.as_ref().ok();

    host::check(&mut checkup, config, running).await;
    firewall::check(&mut checkup, config, running, rules).await;
    checkup.add("listeners", service::listeners(config, running).await);
    pki::check(&mut checkup, config, SystemTime::now()).await;
    match config.nodes.inventory {
        Some(_) => checkup.add("API server", Outcome::Skipped("not in a cluster".to_owned())),
        None => cluster::check(&mut checkup, config).await,
    }
    checkup.run("names", &[], async || names(config).await).await;
    checkup.add("inventory", service::inventory(config, running));
    checkup.add("kubelet ports", node::kubelet_ports(config, running));
    checkup.report("tunnel-server", env!("CARGO_PKG_VERSION"))
}

async fn names(config: &Config) -> Outcome {
    let mut faults = Vec::new();
    for peer in &config.nodes.peers {
        faults.extend(resolves("--peers", &peer.to_string()).await);
    }
    let fine =
        if config.nodes.peers.is_empty() { "no --peers" } else { "every one of --peers has an address" };
    Outcome::of(faults, fine)
}
