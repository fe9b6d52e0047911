//! The programs that `cargo xtask peers` builds.
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};

/// Path of a Kubernetes program.
pub fn kubernetes(name: &str) -> Result<PathBuf> {
    program("kubernetes", name)
}

/// Path of a Prometheus with kubernetes_sd, which Debian's lacks.
pub fn prometheus() -> Result<PathBuf> {
    program("prometheus", "prometheus")
}

/// Path of Helm.
pub fn helm() -> Result<PathBuf> {
    program("helm", "helm")
}

/// Path of metrics-server, which `kubectl top` needs.
pub fn metrics_server() -> Result<PathBuf> {
    program("metrics-server", "metrics-server")
}

/// Path of kube-router's controller of NetworkPolicies; its arguments are a kubeconfig, the Node's name and the range of Services.
pub fn network_policies() -> Result<PathBuf> {
    program("kube-router", "network-policies")
}

/// Path of a konnectivity program.
pub fn konnectivity(name: &str) -> Result<PathBuf> {
    program("konnectivity", name)
}

/// Path of a program that does to a cgroup what Cilium does at its start without socket load balancing; its argument is
/// the mounted cgroup.
pub fn cilium_without_socket_lb() -> Result<PathBuf> {
    program("cilium", "cilium-without-socket-lb")
}

fn program(peer: &str, name: &str) -> Result<PathBuf> {
    let variable = format!("POSTERN_PEERS_{}", peer.to_uppercase().replace('-', "_"));
    let folder = std::env::var_os(&variable).with_context(|| {
        format!(
            "{variable} is not set: `cargo xtask test` and `cargo xtask demo --kubernetes` set it; by hand, set it to what `cargo xtask peers --only {peer}` prints last"
        )
    })?;
    let path = PathBuf::from(folder).join(name);
    ensure!(path.exists(), "{} is missing: run `cargo xtask peers --only {peer}`", path.display());
    Ok(path)
}
