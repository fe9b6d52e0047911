//! `cargo xtask demo`: builds everything, then runs the `demo` program.
use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{SigSet, Signal};

use crate::command::{built, cargo, is_root, run};
use crate::{build_ebpf, packages, peers};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// A real Kubernetes with a node behind NAT: logs, exec, attach, port-forward, cp and Prometheus.
    #[arg(long, conflicts_with = "remove")]
    kubernetes: bool,
    /// Leave everything up at the end, and say how to look around.
    #[arg(long, conflicts_with = "remove")]
    keep: bool,
    /// Remove what an earlier `--keep` left up, and do nothing else.
    #[arg(long)]
    remove: bool,
}

/// Runs one of the two demos, which is built already.
pub(crate) fn run_demo_program(kubernetes: bool, arguments: &[&str]) -> Result<ExitCode> {
    let path = built("demo")?;
    let mut command = std::process::Command::new(&path);
    command.args(kubernetes.then_some("--kubernetes")).args(arguments);
    if kubernetes {
        peers::for_cluster(&mut command)?;
    }
    // Ctrl-C reaches the whole foreground group: the demo removes everything, this process only waits for it.
    let mut mask = SigSet::empty();
    mask.add(Signal::SIGINT);
    let previous =
        mask.thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_BLOCK).context("holding back SIGINT")?;
    let child = command.spawn().with_context(|| format!("starting {}", path.display()));
    let status = child?.wait().context("waiting for the demo")?;
    previous.thread_set_mask().context("taking SIGINT again")?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}

pub(crate) fn run_demo(options: &Options) -> Result<ExitCode> {
    ensure!(
        is_root(),
        "the demo needs root: it makes network namespaces and a cgroup, attaches eBPF programs to that cgroup and namespace, and sets iptables rules in its router. Run `sudo -E cargo xtask demo`."
    );
    if options.remove {
        run(cargo().args(["build", "--quiet", "-p", "postern-demo"]))?;
        return run_demo_program(false, &["--remove"]);
    }
    packages::install(&[packages::TESTBED, packages::DEMO])?;
    if options.kubernetes {
        packages::install(&[packages::CLUSTER])?;
    }
    build_ebpf::run()?;
    build_programs(&["postern-demo"])?;
    run_demo_program(options.kubernetes, if options.keep { &["--keep"] } else { &[] })
}

/// Builds the two programs and the packages that run them.
pub(crate) fn build_programs(packages: &[&str]) -> Result<()> {
    let packages = ["tunnel-server", "tunnel-agent"].iter().chain(packages);
    run(cargo().arg("build").args(packages.flat_map(|name| ["-p", name])))
}
