//! Debian packages that tests and demo use.
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use crate::command::{is_root, program, run, succeeds};

/// A program and the package that brings it.
pub(crate) struct Need {
    program: &'static str,
    package: &'static str,
}

/// What the testbed is made with, and what fuzz targets are compiled with.
pub(crate) const TESTBED: &[Need] = &[
    Need { program: "ip", package: "iproute2" },
    Need { program: "iptables", package: "iptables" },
    Need { program: "nsenter", package: "util-linux" },
    Need { program: "conntrack", package: "conntrack" },
    Need { program: "tinyproxy", package: "tinyproxy-bin" },
    Need { program: "g++", package: "g++" },
    Need { program: "systemd-analyze", package: "systemd" },
    Need { program: "promtool", package: "prometheus" },
    Need { program: "prometheus-node-exporter", package: "prometheus-node-exporter" },
    Need { program: "curl", package: "curl" },
    Need { program: "ssh", package: "openssh-client" },
    Need { program: "/usr/sbin/sshd", package: "openssh-server" },
    Need { program: "nc", package: "netcat-openbsd" },
    Need { program: "chromium", package: "chromium" },
];

/// What the demo shows.
pub(crate) const DEMO: &[Need] = &[
    Need { program: "prometheus", package: "prometheus" },
    Need { program: "prometheus-node-exporter", package: "prometheus-node-exporter" },
];

/// The peers of the benchmark that Debian has, and what counts system calls there.
pub(crate) const BENCH: &[Need] =
    &[Need { program: "haproxy", package: "haproxy" }, Need { program: "perf", package: "linux-perf" }];

/// What zig and cargo-zigbuild come with.
pub(crate) const PIP: &[Need] = &[Need { program: "pip3", package: "python3-pip" }];

/// What runs the arm64 programs on amd64.
pub(crate) const QEMU_USER: &[Need] = &[Need { program: "qemu-aarch64-static", package: "qemu-user-static" }];

/// What other kernels are booted with.
pub(crate) const VIRTUAL_MACHINE: &[Need] = &[
    Need { program: "qemu-system-x86_64", package: "qemu-system-x86" },
    Need { program: "busybox", package: "busybox-static" },
    Need { program: "conntrack", package: "conntrack" },
    Need { program: "cpio", package: "cpio" },
    Need { program: "depmod", package: "kmod" },
    Need { program: "strip", package: "binutils" },
];

/// What the test cluster is made of besides the peers.
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

/// Debian asks this program whether a service may start; 101 means no (invoke-rc.d).
const POLICY: &str = "/usr/sbin/policy-rc.d";

/// Installs what is missing with apt-get, and prints that it does. No installed service is started: the demo starts its
/// own processes in its own namespaces.
pub(crate) fn install(needs: &[&[Need]]) -> Result<()> {
    let missing: Vec<&str> =
        needs.iter().copied().flatten().filter(|need| !is_there(need)).map(|need| need.package).collect();
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
    let no_services = NoServices::put()?;
    let apt = |args: &[&str]| {
        let mut command = program("apt-get");
        // Another run may be installing at this moment.
        command.env("DEBIAN_FRONTEND", "noninteractive").args(["-o", "DPkg::Lock::Timeout=300"]).args(args);
        run(&mut command)
    };
    let install = [&["install", "-y", "--no-install-recommends"], missing.as_slice()].concat();
    if apt(&install).is_err() {
        println!("that failed, perhaps because the package lists are old: updating them");
        apt(&["update"])?;
        apt(&install)?;
    }
    drop(no_services);
    for need in needs.iter().copied().flatten() {
        ensure!(is_there(need), "{} is still missing after installing {}", need.program, need.package);
    }
    Ok(())
}

fn is_there(need: &Need) -> bool {
    let shell = |script: &str| succeeds(program("sh").args(["-c", script]));
    let on_path = shell(&format!("command -v {}", need.program));
    // Another package has a busybox that is dynamic and has fewer programs.
    on_path && (need.program != "busybox" || shell("busybox --list | grep -qx httpd"))
}

/// While it lives, installing a package starts no service.
struct NoServices {
    ours: bool,
}

impl NoServices {
    fn put() -> Result<Self> {
        if Path::new(POLICY).exists() {
            return Ok(Self { ours: false });
        }
        fs::write(POLICY, "#!/bin/sh\nexit 101\n").with_context(|| format!("writing {POLICY}"))?;
        fs::set_permissions(POLICY, fs::Permissions::from_mode(0o755))
            .with_context(|| format!("making {POLICY} executable"))?;
        Ok(Self { ours: true })
    }
}

impl Drop for NoServices {
    fn drop(&mut self) {
        if self.ours
            && let Err(error) = fs::remove_file(POLICY)
        {
            eprintln!("xtask: remove {POLICY} yourself: {error}");
        }
    }
}
