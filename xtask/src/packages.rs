//! Debian packages that tests and demo use.
use std::collections::BTreeSet;

use anyhow::{Result, ensure};

use crate::command::{is_root, program, run, succeeds};
use crate::services::without_services;

/// A program and the package that brings it.
pub(crate) struct Need {
    program: &'static str,
    package: &'static str,
}

/// Programs that set up the testbed.
pub(crate) const TESTBED: &[Need] = &[
    Need { program: "ip", package: "iproute2" },
    Need { program: "iptables", package: "iptables" },
    Need { program: "nsenter", package: "util-linux" },
];

/// Program that makes the testbed's NAT forget its mappings.
pub(crate) const NAT: &[Need] = &[Need { program: "conntrack", package: "conntrack" }];

/// Programs that scenarios run besides; their kinds do not tell which of them runs which.
pub(crate) const SCENARIOS: &[Need] = &[
    Need { program: "tinyproxy", package: "tinyproxy-bin" },
    Need { program: "g++", package: "g++" },
    Need { program: "systemd-analyze", package: "systemd" },
    Need { program: "prometheus", package: "prometheus" },
    Need { program: "promtool", package: "prometheus" },
    Need { program: "prometheus-node-exporter", package: "prometheus-node-exporter" },
    Need { program: "curl", package: "curl" },
    Need { program: "ssh", package: "openssh-client" },
    Need { program: "/usr/sbin/sshd", package: "openssh-server" },
    Need { program: "nc", package: "netcat-openbsd" },
    Need { program: "nft", package: "nftables" },
    Need { program: "strace", package: "strace" },
    Need { program: "chromium", package: "chromium" },
];

/// Judge of the shell scripts of deploy/krew.
pub(crate) const LINT: &[Need] = &[Need { program: "shellcheck", package: "shellcheck" }];

/// Shells that complete the programs' commands, and what checks their man pages.
pub(crate) const SHELLS: &[Need] = &[
    Need { program: "bash", package: "bash" },
    Need { program: "zsh", package: "zsh" },
    Need { program: "fish", package: "fish" },
    Need { program: "mandoc", package: "mandoc" },
];

/// Compiler of the fuzz targets.
pub(crate) const FUZZ: &[Need] = &[Need { program: "g++", package: "g++" }];

/// Programs that the demo shows.
pub(crate) const DEMO: &[Need] = &[
    Need { program: "prometheus", package: "prometheus" },
    Need { program: "prometheus-node-exporter", package: "prometheus-node-exporter" },
];

/// The peers of the benchmark that Debian has, and the program that counts system calls there.
pub(crate) const BENCH: &[Need] =
    &[Need { program: "haproxy", package: "haproxy" }, Need { program: "perf", package: "linux-perf" }];

/// Installer of zig and cargo-zigbuild.
pub(crate) const PIP: &[Need] = &[Need { program: "pip3", package: "python3-pip" }];

/// Programs that try the packages of a release.
pub(crate) const PACKAGES: &[Need] = &[
    Need { program: "busybox", package: "busybox-static" },
    Need { program: "lintian", package: "lintian" },
    Need { program: "rpm", package: "rpm" },
    Need { program: "xz", package: "xz-utils" },
];

/// Emulator that runs the arm64 programs on amd64.
pub(crate) const QEMU_USER: &[Need] = &[Need { program: "qemu-aarch64-static", package: "qemu-user-static" }];

/// Programs that boot other kernels, and those in the machine. Nothing of systemd is started outside of it.
pub(crate) const VIRTUAL_MACHINE: &[Need] = &[
    Need { program: "qemu-system-x86_64", package: "qemu-system-x86" },
    Need { program: "busybox", package: "busybox-static" },
    Need { program: "conntrack", package: "conntrack" },
    Need { program: "cpio", package: "cpio" },
    Need { program: "depmod", package: "kmod" },
    Need { program: "ipvsadm", package: "ipvsadm" },
    Need { program: "strip", package: "binutils" },
    Need { program: "journalctl", package: "systemd" },
];

/// Programs of the test cluster besides the peers.
pub(crate) const CLUSTER: &[Need] = &[
    Need { program: "etcd", package: "etcd-server" },
    Need { program: "containerd", package: "containerd" },
    Need { program: "runc", package: "runc" },
    Need { program: "/usr/lib/cni/bridge", package: "containernetworking-plugins" },
    Need { program: "conntrack", package: "conntrack" },
    Need { program: "busybox", package: "busybox-static" },
    Need { program: "haproxy", package: "haproxy" },
    Need { program: "curl", package: "curl" },
    Need { program: "prometheus", package: "prometheus" },
    Need { program: "prometheus-node-exporter", package: "prometheus-node-exporter" },
];

/// Programs that kube-router runs.
pub(crate) const POLICIES: &[Need] = &[Need { program: "ipset", package: "ipset" }];

/// Installs what is missing with apt-get, and prints that it does. No installed service is started or enabled: tests and demo
/// start processes of their own in their own namespaces.
pub(crate) fn install(needs: &[&[Need]]) -> Result<()> {
    let missing = packages(needs.iter().copied().flatten().filter(|need| !is_there(need)));
    if missing.is_empty() {
        return Ok(());
    }
    let list = missing.join(" ");
    println!("installing Debian packages that are missing: {list}");
    ensure!(
        succeeds(program("apt-get").arg("--version")),
        "this machine has no apt-get: install {list} yourself"
    );
    ensure!(is_root(), "installing packages needs root: run as root, or `apt-get install {list}` first");
    let install = [&["install", "-y", "--no-install-recommends"], missing.as_slice()].concat();
    if without_services(|| apt_get(&install)).is_err() {
        println!("that failed, perhaps because the package lists are old: updating them");
        apt_get(&["update"])?;
        without_services(|| apt_get(&install))?;
    }
    for need in needs.iter().copied().flatten() {
        ensure!(is_there(need), "{} is still missing after installing {}", need.program, need.package);
    }
    Ok(())
}

/// Names of the packages in these lists, for messages.
pub(crate) fn names(needs: &[&[Need]]) -> String {
    packages(needs.iter().copied().flatten()).join(", ")
}

/// Packages of these programs, each once.
fn packages<'a>(needs: impl Iterator<Item = &'a Need>) -> Vec<&'static str> {
    let names: BTreeSet<&'static str> = needs.map(|need| need.package).collect();
    names.into_iter().collect()
}

fn apt_get(args: &[&str]) -> Result<()> {
    // It inherits this process's blocked signals, but Ctrl-C has to end it. Not every env has the option.
    let unblock = "--default-signal=INT,TERM";
    let can_unblock = succeeds(program("env").args([unblock, "true"]));
    let mut command = program(if can_unblock { "env" } else { "apt-get" });
    if can_unblock {
        command.args([unblock, "apt-get"]);
    }
    // Another run may be installing at this moment.
    command.env("DEBIAN_FRONTEND", "noninteractive").args(["-o", "DPkg::Lock::Timeout=300"]).args(args);
    run(&mut command)
}

fn is_there(need: &Need) -> bool {
    let shell = |script: &str| succeeds(program("sh").args(["-c", script]));
    let on_path = shell(&format!("command -v {}", need.program));
    // Another package has a busybox that is dynamic and has fewer programs.
    on_path && (need.program != "busybox" || shell("busybox --list | grep -qx httpd"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demo_needs_little_and_each_package_once() {
        let demo = names(&[TESTBED, DEMO, TESTBED]);
        assert_eq!(demo, "iproute2, iptables, prometheus, prometheus-node-exporter, util-linux");
    }
}
