//! `cargo xtask demo`: builds everything, then runs the `demo` program.
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, ensure};

use crate::command::{build_as, built, is_root, program, run_in_foreground, target_dir};
use crate::{build_ebpf, packages, peers};

/// Packages of the programs that the demo, scenarios and the benchmark run.
pub(crate) const PROGRAMS: &[&str] = &["tunnel-server", "tunnel-agent"];
/// Profile in Cargo.toml for a first look at Postern: nothing is optimised. It is also the name of the folder.
const PROFILE: &str = "demo";

#[derive(clap::Args)]
pub(crate) struct Options {
    /// A real Kubernetes with a node behind NAT: logs, exec, attach, port-forward, cp, Prometheus, a pod and a Service.
    #[arg(long, conflicts_with = "remove")]
    kubernetes: bool,
    /// Leave everything up at the end, and print how to explore it.
    #[arg(long, conflicts_with = "remove")]
    keep: bool,
    /// Remove what an earlier `--keep` left up, and do nothing else.
    #[arg(long)]
    remove: bool,
}

/// Installs the Debian packages that one of the two demos needs.
pub(crate) fn install(kubernetes: bool) -> Result<()> {
    packages::install(&[packages::TESTBED, if kubernetes { packages::CLUSTER } else { packages::DEMO }])
}

/// Runs one of the two demos with the programs that tests run, which have been built.
pub(crate) fn run_demo_program(kubernetes: bool) -> Result<ExitCode> {
    run_program(&built("demo")?, kubernetes, &[])
}

fn run_program(demo: &Path, kubernetes: bool, arguments: &[&str]) -> Result<ExitCode> {
    let mut command = program(demo);
    command.args(kubernetes.then_some("--kubernetes")).args(arguments);
    if kubernetes {
        command.envs(peers::variables(peers::CLUSTER, None)?);
    }
    run_in_foreground(&mut command)
}

pub(crate) fn run_demo(options: &Options) -> Result<ExitCode> {
    ensure!(
        is_root(),
        "the demo needs root: it makes network namespaces and a cgroup, attaches eBPF programs to that cgroup and namespace, and sets iptables rules in its router. Run `sudo -E cargo xtask demo`."
    );
    let demo = target_dir()?.join(PROFILE).join("demo");
    if options.remove {
        build_as(PROFILE, &["postern-demo"])?;
        return run_program(&demo, false, &["--remove"]);
    }
    // With the steps that are left: the first time, compiling takes minutes.
    println!(
        "\n=== 1 of 4: Debian's packages; then the eBPF programs, tunnel-server, tunnel-agent and the demo, the demo"
    );
    install(options.kubernetes)?;
    println!("\n=== 2 of 4: the eBPF programs; then tunnel-server, tunnel-agent and the demo, the demo");
    build_ebpf::run()?;
    println!("\n=== 3 of 4: tunnel-server, tunnel-agent and the demo; then the demo");
    // In one command: built one after the other, packages have other features, and libraries are compiled twice.
    build_as(PROFILE, &[PROGRAMS, &["postern-demo"]].concat())?;
    println!("\n=== 4 of 4: the demo");
    run_program(&demo, options.kubernetes, if options.keep { &["--keep"] } else { &[] })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_has_the_profile() {
        let manifest = include_str!("../../Cargo.toml");
        assert!(manifest.contains(&format!("\n[profile.{PROFILE}]\n")));
    }
}
