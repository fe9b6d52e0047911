//! `cargo xtask peers`: the real Kubernetes, Prometheus, metrics-server, konnectivity, Helm, kube-router's network policies and
//! Cilium's loader, built from Go modules once and kept outside of any clone.
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum;

use crate::cache;
use crate::command::{name_of, program, root, run};
use crate::files;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Only one of them.
    #[arg(long, value_enum)]
    only: Option<Peer>,
}

/// Programs that are built together, from one Go module below tests/peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Peer {
    Kubernetes,
    /// The oldest one that the documentation names.
    #[value(name = "kubernetes-1.30")]
    OldKubernetes,
    #[value(name = "kubernetes-1.37")]
    NewKubernetes,
    /// Debian's is built without kubernetes_sd.
    Prometheus,
    /// Its releases use other versions of Kubernetes' packages than the cluster: no module for both.
    MetricsServer,
    /// Its controller of NetworkPolicies.
    KubeRouter,
    Konnectivity,
    Helm,
    /// Its action on others' programs when it starts.
    Cilium,
}

impl Peer {
    /// The names of the programs, and their packages.
    fn programs(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Kubernetes | Self::OldKubernetes | Self::NewKubernetes => &[
                ("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver"),
                ("kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager"),
                ("kube-proxy", "k8s.io/kubernetes/cmd/kube-proxy"),
                ("kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler"),
                ("kubelet", "k8s.io/kubernetes/cmd/kubelet"),
                ("kubectl", "k8s.io/kubernetes/cmd/kubectl"),
            ],
            Self::Prometheus => &[("prometheus", "github.com/prometheus/prometheus/cmd/prometheus")],
            Self::MetricsServer => &[("metrics-server", "sigs.k8s.io/metrics-server/cmd/metrics-server")],
            Self::KubeRouter => &[("network-policies", ".")],
            Self::Konnectivity => &[
                ("proxy-server", "sigs.k8s.io/apiserver-network-proxy/cmd/server"),
                ("proxy-agent", "sigs.k8s.io/apiserver-network-proxy/cmd/agent"),
                ("proxy-test-client", "sigs.k8s.io/apiserver-network-proxy/cmd/test-client"),
            ],
            Self::Helm => &[("helm", "helm.sh/helm/v3/cmd/helm")],
            Self::Cilium => &[("cilium-without-socket-lb", ".")],
        }
    }

    /// Build tags. Of Prometheus' service discoveries only one is needed, and the others are most of its build.
    fn tags(self) -> &'static str {
        match self {
            Self::Prometheus => "remove_all_sd,enable_kubernetes_sd",
            _ => "",
        }
    }

    /// True for those that only `cargo xtask test --kubernetes` needs.
    fn is_on_request(self) -> bool {
        matches!(self, Self::OldKubernetes | Self::NewKubernetes)
    }

    fn is_kubernetes(self) -> bool {
        self == Self::Kubernetes || self.is_on_request()
    }

    fn module(self) -> PathBuf {
        root().join("tests/peers").join(name_of(&self))
    }

    /// Flags of Go's linker. Without those of the version, Kubernetes calls itself v0.0.0.
    fn ldflags(self, go_mod: &str) -> Result<String> {
        if !self.is_kubernetes() {
            return Ok("-s -w".to_owned());
        }
        let version = word_after(go_mod, "require k8s.io/kubernetes ")?;
        let mut numbers = version.trim_start_matches('v').split('.');
        let (Some(major), Some(minor)) = (numbers.next(), numbers.next()) else {
            bail!(
                "tests/peers/{}/go.mod requires k8s.io/kubernetes {version:?}: not a version",
                name_of(&self)
            )
        };
        let package = "k8s.io/component-base/version";
        Ok(format!(
            "-s -w -X {package}.gitVersion={version} -X {package}.gitMajor={major} -X {package}.gitMinor={minor}"
        ))
    }
}

pub(crate) fn run_peers(options: &Options) -> Result<ExitCode> {
    let all = || Peer::value_variants().iter().copied().filter(|peer| !peer.is_on_request()).collect();
    for peer in options.only.map_or_else(all, |peer| vec![peer]) {
        println!("{}", build(peer)?.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// Another version of Kubernetes than that of every run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kubernetes {
    #[value(name = "1.30")]
    Old,
    #[value(name = "1.37")]
    New,
}

impl Kubernetes {
    fn peer(self) -> Peer {
        match self {
            Self::Old => Peer::OldKubernetes,
            Self::New => Peer::NewKubernetes,
        }
    }
}

/// Peers of the test cluster.
pub(crate) const CLUSTER: &[Peer] = &[Peer::Kubernetes, Peer::Prometheus];

/// Builds these, with another version of Kubernetes if one is given, and returns the variables that tell a program (scenarios,
/// demo) where they are.
pub(crate) fn variables(peers: &[Peer], kubernetes: Option<Kubernetes>) -> Result<Vec<(String, PathBuf)>> {
    let variable = |peer: &Peer| {
        let name = format!("POSTERN_PEERS_{}", name_of(peer).to_uppercase().replace('-', "_"));
        let other = kubernetes.filter(|_| *peer == Peer::Kubernetes).map(Kubernetes::peer);
        Ok((name, build(other.unwrap_or(*peer))?))
    };
    peers.iter().map(variable).collect()
}

/// Folder of the programs, which are built first if it does not exist.
pub(crate) fn build(peer: Peer) -> Result<PathBuf> {
    let module = peer.module();
    let go_mod = files::text(&module.join("go.mod"))?;
    let ldflags = peer.ldflags(&go_mod)?;
    let (sums, programs) = (files::text(&module.join("go.sum"))?, format!("{:?}", peer.programs()));
    let parts = [sums.as_str(), &go_mod, &ldflags, peer.tags(), &programs];
    cache::once("peers", &name_of(&peer), &parts, |folder| build_into(folder, peer, &go_mod, &ldflags))
}

fn build_into(folder: &Path, peer: Peer, go_mod: &str, ldflags: &str) -> Result<()> {
    let (module, programs) = (peer.module(), peer.programs());
    let (go, version) = need_go(&name_of(&peer), go_mod)?;
    println!(
        "building {} program(s) of {} with {version}, once for every clone on this machine; the first time takes some minutes",
        programs.len(),
        name_of(&peer)
    );
    let start = Instant::now();
    for (at, (name, package)) in programs.iter().enumerate() {
        let mut command = program(&go);
        command
            .current_dir(&module)
            .env("CGO_ENABLED", "0")
            // The linker would drop DWARF, and writing it is a tenth of the CPU time.
            .args(["build", "-gcflags=all=-dwarf=false", "-trimpath", "-mod=readonly", "-tags", peer.tags()])
            .args(["-ldflags", ldflags, "-o"])
            .arg(folder.join(name))
            .arg(package);
        println!("building {name} ({} of {}), {:.0?} so far", at + 1, programs.len(), start.elapsed());
        run(&mut command).with_context(|| format!("in {}", module.display()))?;
    }
    println!("built {} in {:.0?}", name_of(&peer), start.elapsed());
    Ok(())
}

/// Finds a Go that is new enough for this module below tests/peers; returns its path and version.
pub(crate) fn need_go(module: &str, go_mod: &str) -> Result<(PathBuf, String)> {
    let least = word_after(go_mod, "go ")?;
    let install = format!(
        "install Go {least} or newer (tests/peers/{module}/go.mod says so; Debian's package is golang-go, from backports where the release's own is older) and put it on PATH"
    );
    let folder = root().join("tests/peers").join(module);
    // Go's own archive puts it into the second, which is not on the PATH of every shell.
    let places = [PathBuf::from("go"), PathBuf::from("/usr/local/go/bin/go")];
    let found = places.iter().find_map(|go| {
        let output = program(go).current_dir(&folder).args(["env", "GOVERSION"]).output().ok()?;
        Some((go.clone(), String::from_utf8_lossy(&output.stdout).trim().to_owned()))
    });
    let (go, version) = found.with_context(|| format!("Go is missing: {install}"))?;
    ensure!(
        numbers(version.trim_start_matches("go")) >= numbers(least),
        "{} is {version:?}, too old: {install}",
        go.display()
    );
    Ok((go, version))
}

fn numbers(version: &str) -> Vec<u32> {
    version.split('.').map_while(|part| part.parse().ok()).collect()
}

/// Rest of the line that begins with `prefix`.
fn word_after<'a>(go_mod: &'a str, prefix: &str) -> Result<&'a str> {
    let found = go_mod.lines().find_map(|line| line.strip_prefix(prefix));
    found.map(str::trim).with_context(|| format!("no line {prefix:?} in go.mod"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_number() {
        assert!(numbers("1.26.10") > numbers("1.26.2"));
        assert!(numbers("1.24.0") < numbers("1.26.2"));
        assert!(numbers("") < numbers("1.24.0"), "a Go without a version is too old");
    }

    #[test]
    fn the_version_of_kubernetes_goes_into_its_programs() {
        let flags = Peer::Kubernetes.ldflags("go 1.24.0\nrequire k8s.io/kubernetes v1.34.4\n").unwrap();
        for part in ["gitVersion=v1.34.4", "gitMajor=1 ", "gitMinor=34"] {
            assert!(flags.contains(part), "{flags}");
        }
        assert!(Peer::Kubernetes.ldflags("go 1.24.0\n").is_err());
    }
}
