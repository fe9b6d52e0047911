//! The command line of a tunnel-server, and the host that it runs on.

use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context as _, Result};

use crate::cgroup::{Cgroup, MemoryLimit};
use crate::inventory;
use crate::netns::Namespace;
use crate::process::{self, Placement, Process, Version};
use crate::topology::{CLOUD, CloudHost, NEIGHBOUR, Testbed};

/// Ports that a testbed's redirect serves.
pub const PORTS: &str = "10250,10255,9100,9101,9102,9103,9104,9105";

#[derive(Debug, Clone)]
pub struct Builder<'a> {
    pub(super) testbed: &'a Testbed,
    pub(super) flags: Vec<String>,
    environment: Vec<(&'static str, String)>,
    ports: Option<String>,
    pub(super) name: String,
    /// Kubeconfig for reading the nodes from an API server instead of a file.
    pub(super) kubeconfig: Option<PathBuf>,
    stderr: Option<Arc<OwnedFd>>,
    /// Hard limit of open files, if it differs from this process's.
    open_files: Option<u32>,
    memory: Option<MemoryLimit>,
    /// Set to drop CAP_SYS_ADMIN, as in the shipped manifests.
    without_sys_admin: bool,
    /// Command line of the program, if it is not the build for this machine.
    program: Option<Vec<PathBuf>>,
    pub(super) version: Version,
    pub(super) host: Host<'a>,
}

/// The host on which a server runs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Host<'a> {
    pub(super) ns: &'a Namespace,
    cgroup: &'a Cgroup,
    pub(super) address: Ipv4Addr,
    /// Name of its state folder.
    pub(super) state: &'static str,
    /// Name of its inventory file.
    pub(super) inventory: &'static str,
    pub(super) agent_port: u16,
    pub(super) admin_port: u16,
}

impl<'a> Host<'a> {
    /// Makes a host with the default ports.
    pub(super) const fn new(
        ns: &'a Namespace,
        cgroup: &'a Cgroup,
        address: Ipv4Addr,
        state: &'static str,
    ) -> Self {
        Self { ns, cgroup, address, state, inventory: inventory::FILE, agent_port: 10262, admin_port: 10265 }
    }
}

impl<'a> Builder<'a> {
    /// Makes a builder for a server of this testbed with the flags that every scenario needs.
    pub fn new(testbed: &'a Testbed) -> Self {
        let (name, ports) = ("tunnel-server".to_owned(), Some(PORTS.to_owned()));
        let host = Host::new(&testbed.cloud, &testbed.cloud_cgroup, CLOUD, "server");
        Self {
            testbed,
            flags: Vec::new(),
            environment: Vec::new(),
            ports,
            name,
            kubeconfig: None,
            stderr: None,
            open_files: None,
            memory: None,
            without_sys_admin: false,
            program: None,
            version: Version::This,
            host,
        }
    }

    /// Makes a builder for a server on [`Testbed::add_neighbour`] with its own CA, without a redirect.
    pub fn alone_on_neighbour(testbed: &'a Testbed, neighbour: &'a Namespace) -> Self {
        let cgroup = &testbed.cloud_cgroup;
        Self::alone_on(testbed, Host::new(neighbour, cgroup, NEIGHBOUR, "neighbour"))
    }

    /// Makes a builder for a server of another installation on the first one's host, with its own state and ports. Its
    /// nodes are in `inventory`, of [`Inventory::in_file`](inventory::Inventory::in_file).
    pub fn of_another_installation(testbed: &'a Testbed, inventory: &'static str) -> Self {
        let (agent_port, admin_port) = (11262, 11265);
        let builder = Self::new(testbed);
        let host = Host { state: "another", inventory, agent_port, admin_port, ..builder.host };
        Self { name: "tunnel-server-another".to_owned(), host, ..builder }
            .flag(format!("--agent-port={agent_port}"))
            .flag("--secure-port=11263")
            .flag("--insecure-port=11264")
            .flag(format!("--admin-address=127.0.0.1:{admin_port}"))
    }

    pub(super) fn alone_on(testbed: &'a Testbed, host: Host<'a>) -> Self {
        let name = format!("tunnel-server-{}", host.state);
        Self { host, name, ports: None, ..Self::new(testbed) }.flag("--redirect=off")
    }

    /// Makes a builder for the arm64 build, without a redirect: processor emulation has no bpf(2).
    pub fn arm64(testbed: &'a Testbed) -> Result<Self> {
        let program = Some(process::arm64_program("tunnel-server")?);
        Ok(Self { ports: None, program, ..Self::new(testbed) }.flag("--redirect=off"))
    }

    /// Makes a builder for a server of a cluster; its ports are those of the cluster's ConfigMap.
    pub fn in_cluster(testbed: &'a Testbed, kubeconfig: PathBuf) -> Self {
        Self { ports: None, kubeconfig: Some(kubeconfig), ..Self::new(testbed) }
    }

    /// As [`Builder::in_cluster`], on another host and with a redirect there; `state` names its state folder and its
    /// log.
    pub fn in_cluster_on(
        testbed: &'a Testbed,
        host: &'a CloudHost,
        state: &'static str,
        kubeconfig: PathBuf,
    ) -> Self {
        Self { ports: None, kubeconfig: Some(kubeconfig), ..Self::redirector_on(testbed, host, state) }
    }

    /// Makes a builder for a server or redirector without a CA, on another host and with a redirect there; `state` names
    /// its state folder and its log.
    pub fn redirector_on(testbed: &'a Testbed, host: &'a CloudHost, state: &'static str) -> Self {
        let host = Host::new(&host.ns, &host.cgroup, host.address, state);
        let name = format!("tunnel-server-{state}");
        Self { host, name, ..Self::new(testbed) }
    }

    #[must_use]
    pub fn flag(mut self, flag: impl Into<String>) -> Self {
        self.flags.push(flag.into());
        self
    }

    #[must_use]
    pub fn env(mut self, name: &'static str, value: &str) -> Self {
        self.environment.push((name, value.to_owned()));
        self
    }

    #[must_use]
    pub fn envs(mut self, variables: impl IntoIterator<Item = (&'static str, impl Into<String>)>) -> Self {
        self.environment.extend(variables.into_iter().map(|(name, value)| (name, value.into())));
        self
    }

    /// Sends its log there instead of to the run's folder.
    #[must_use]
    pub fn stderr(mut self, stderr: impl Into<OwnedFd>) -> Self {
        self.stderr = Some(Arc::new(stderr.into()));
        self
    }

    /// Sets its soft and hard limits of open files.
    #[must_use]
    pub fn open_files(mut self, limit: u32) -> Self {
        self.open_files = Some(limit);
        self
    }

    /// Gives its host this name, as far as it can see.
    pub fn hostname(mut self, name: &str) -> Result<Self> {
        let named = r#"echo "$0" > /proc/sys/kernel/hostname && exec "$@""#;
        let line = ["unshare", "--uts", "sh", "-c", named, name].map(PathBuf::from);
        self.program = Some(line.into_iter().chain([process::program("tunnel-server")?]).collect());
        Ok(self)
    }

    /// Runs the program of this version.
    #[must_use]
    pub fn version(mut self, version: Version) -> Self {
        self.version = version;
        self
    }

    #[must_use]
    pub fn memory(mut self, limit: &MemoryLimit) -> Self {
        self.memory = Some(limit.clone());
        self
    }

    /// Drops CAP_SYS_ADMIN, without which the names of other programs in the kernel cannot be read.
    #[must_use]
    pub fn without_sys_admin(mut self) -> Self {
        self.without_sys_admin = true;
        self
    }

    #[must_use]
    pub fn ports(mut self, ports: &str) -> Self {
        self.ports = Some(ports.to_owned());
        self
    }

    /// Starts the program, without waiting until it is ready.
    pub fn spawn(&self) -> Result<Process> {
        match &self.stderr {
            Some(stderr) => Process::spawn_with_stderr(&self.name, self.command()?, stderr),
            None => Process::spawn(self.testbed.dir(), &self.name, self.command()?),
        }
    }

    fn command(&self) -> Result<Command> {
        let dir = self.testbed.dir();
        let mut line = Vec::new();
        if let Some(limit) = self.open_files {
            line.extend(["prlimit".to_owned(), format!("--nofile={limit}:{limit}")].map(PathBuf::from));
        }
        if self.without_sys_admin {
            line.extend(["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"].map(PathBuf::from));
        }
        match &self.program {
            Some(program) => line.extend(program.iter().cloned()),
            None => line.push(self.version.program("tunnel-server")?),
        }
        let (first, rest) = line.split_first().context("an empty command line")?;
        let host = Placement { ns: self.host.ns, cgroup: self.host.cgroup };
        let mut command = host.command_below(self.memory.as_ref(), first);
        // The command `redirector`, if given, precedes all flags.
        let (commands, flags): (Vec<_>, Vec<_>) = self.flags.iter().partition(|flag| !flag.starts_with('-'));
        command.args(rest).args(commands);
        match &self.kubeconfig {
            Some(kubeconfig) => command.arg(format!("--kubeconfig={}", kubeconfig.display())),
            None => command.arg(format!("--inventory={}", dir.join(self.host.inventory).display())),
        };
        if let Some(ports) = &self.ports {
            command.arg(format!("--redirect-ports={ports}"));
        }
        command
            .arg(format!("--state-dir={}", dir.join(self.host.state).display()))
            .arg(format!("--redirect-cgroup={}", self.host.cgroup.path().display()))
            .arg(format!("--bpffs={}", self.testbed.bpffs().display()))
            .arg("--log-format=json")
            .args(flags)
            .envs(self.environment.iter().map(|(name, value)| (name, value)));
        Ok(command)
    }
}
