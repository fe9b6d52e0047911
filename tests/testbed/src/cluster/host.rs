//! A machine of the cluster: containerd and kubelet in a network namespace and cgroup of the testbed.
//!
//! A mount namespace gives it its own /var and /run, so that programs find their default paths and hosts do not share
//! them, and so that every mount is gone with the host's last process, however that ends.
use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

use super::names::{KUBERNETES_SERVICE, SERVICE_CIDR};
use super::peers;
use super::pki::{Pair, Pki};
use crate::cgroup;
use crate::netns::Namespace;
use crate::process::{Placement, Process};
use crate::topology::Testbed;
use crate::wait::{wait_for, wait_until};

const START: Duration = Duration::from_secs(60);

/// A machine and its identity.
#[derive(Debug, Clone)]
pub struct Spec {
    pub name: String,
    /// Address on its LAN.
    pub address: Ipv4Addr,
    /// Addresses of its pods, a /24.
    pub pod_cidr: String,
    pub ns: Namespace,
    pub cgroup: cgroup::Cgroup,
}

#[derive(Debug)]
pub struct Host {
    pub spec: Spec,
    /// Credentials of its kubelet.
    pub kubeconfig: PathBuf,
    dir: PathBuf,
    pods_cgroup: String,
    /// Keeps the mount and UTS namespaces alive.
    holder: Process,
    containerd: Process,
    kubelet: Option<Process>,
    proxy: Option<Process>,
}

impl Host {
    /// Makes the machine and starts its containerd, without waiting for it.
    pub async fn create(testbed: &Testbed, spec: Spec, pki: &Pki, api: &str) -> Result<Self> {
        let name = spec.name.clone();
        let dir = testbed.dir().join("hosts").join(&name);
        for folder in
            ["var/lib/kubelet", "var/lib/containerd", "var/log", "var/tmp", "var/cache", "cni", "manifests"]
        {
            let folder = dir.join(folder);
            fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
        }
        symlink("/run", dir.join("var/run")).context("linking /var/run")?;
        let pods_cgroup = cgroup::create_for_kubelet(&spec.cgroup, &name)?;

        let user =
            pki.client(&format!("kubelet-{name}"), &format!("system:node:{name}"), &["system:nodes"])?;
        let kubeconfig = pki.kubeconfig(&format!("kubelet-{name}"), api, &user)?;
        serving_certificate(pki, &spec)?;
        let placement = Placement { ns: &spec.ns, cgroup: &spec.cgroup };
        let holder = hold_namespaces(testbed, placement, &name, &dir).await?;
        fs::write(dir.join("containerd.toml"), containerd_configuration(&dir))
            .context("writing containerd.toml")?;
        fs::write(dir.join("cni/10-bridge.conflist"), bridge(&spec))
            .context("writing the CNI configuration")?;
        let mut command = inside(placement, &holder, Path::new("containerd"));
        command.arg("--config").arg(dir.join("containerd.toml"));
        let containerd = Process::spawn(testbed.dir(), &format!("containerd-{name}"), command)?;
        Ok(Self { spec, kubeconfig, dir, pods_cgroup, holder, containerd, kubelet: None, proxy: None })
    }

    /// Returns the folder of its kubelet's static pods, like /etc/kubernetes/manifests of kubeadm's nodes.
    pub fn manifests(&self) -> PathBuf {
        self.dir.join("manifests")
    }

    /// Returns a command that runs on this machine, with its files.
    pub fn command(&self, program: &Path) -> Command {
        let placement = Placement { ns: &self.spec.ns, cgroup: &self.spec.cgroup };
        inside(placement, &self.holder, program)
    }

    /// Waits for containerd and imports an image into it.
    pub async fn import(&mut self, archive: &Path) -> Result<()> {
        wait_for("containerd's socket", START, async || {
            if let Some(status) = self.containerd.ended()? {
                bail!("containerd of {} ended with {status}", self.spec.name);
            }
            Ok(self.ctr(&["version"]).output().is_ok_and(|output| output.status.success()).then_some(()))
        })
        .await?;
        let mut command = self.ctr(&["--namespace=k8s.io", "images", "import", "--no-unpack"]);
        let command = command.arg(archive).output();
        let output = command.context("running ctr")?;
        ensure!(output.status.success(), "ctr images import: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    fn ctr(&self, args: &[&str]) -> Command {
        let mut command = self.command(Path::new("ctr"));
        command.args(args);
        command
    }

    /// Starts the kubelet; [`super::Cluster::wait_ready`] waits for its node.
    pub fn start_kubelet(&mut self, testbed: &Testbed, pki: &Pki) -> Result<()> {
        let name = &self.spec.name;
        let config = self.dir.join("kubelet.yaml");
        fs::write(&config, self.kubelet_configuration(pki)).context("writing kubelet.yaml")?;
        let mut command = self.command(&peers::kubernetes("kubelet")?);
        command
            .arg(format!("--config={}", config.display()))
            .arg(format!("--kubeconfig={}", self.kubeconfig.display()))
            .arg(format!("--hostname-override={name}"))
            .arg(format!("--node-ip={}", self.spec.address))
            .arg("--v=1");
        self.kubelet = Some(Process::spawn(testbed.dir(), &format!("kubelet-{name}"), command)?);
        Ok(())
    }

    /// Starts kube-proxy, which makes Services work in this network namespace; does not wait for it.
    pub fn start_proxy(&mut self, testbed: &Testbed, kubeconfig: &Path) -> Result<()> {
        self.start_proxy_with(testbed, kubeconfig, &["--proxy-mode=iptables"])
    }

    /// Replaces kube-proxy, with all that it has written, by one with these flags, and waits for the rules of that.
    pub async fn restart_proxy(&mut self, testbed: &Testbed, pki: &Pki, flags: &[&str]) -> Result<()> {
        let kubeconfig = pki.file("kube-proxy.conf");
        let name = &self.spec.name;
        let mut proxy = self.proxy.take().with_context(|| format!("{name} has no kube-proxy"))?;
        proxy.kill_group();
        let mut cleanup = self.command(&peers::kubernetes("kube-proxy")?);
        let output = cleanup.arg("--cleanup").output().context("running kube-proxy --cleanup")?;
        ensure!(output.status.success(), "kube-proxy: {}", String::from_utf8_lossy(&output.stderr));
        self.start_proxy_with(testbed, &kubeconfig, flags)?;
        if flags.contains(&"--proxy-mode=nftables") {
            return self.wait_rules(("nft", "list table ip kube-proxy")).await;
        }
        self.wait_services().await
    }

    fn start_proxy_with(&mut self, testbed: &Testbed, kubeconfig: &Path, flags: &[&str]) -> Result<()> {
        let name = &self.spec.name;
        let mut command = self.command(&peers::kubernetes("kube-proxy")?);
        command
            .arg(format!("--kubeconfig={}", kubeconfig.display()))
            .arg(format!("--hostname-override={name}"))
            .args(flags)
            .arg("--nodeport-addresses=primary")
            // These limits are the whole machine's, not this namespace's: left as they are.
            .args(["--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0s"])
            .args(["--conntrack-tcp-timeout-close-wait=0s", "--metrics-bind-address=127.0.0.1:10249"]);
        self.proxy = Some(Process::spawn(testbed.dir(), &format!("kube-proxy-{name}"), command)?);
        Ok(())
    }

    /// Starts kube-router's controller of NetworkPolicies, without waiting for it.
    pub fn start_policies(&self, testbed: &Testbed, pki: &Pki) -> Result<Process> {
        let mut command = self.command(&peers::network_policies()?);
        command.arg(pki.file("admin.conf")).arg(&self.spec.name).arg(SERVICE_CIDR);
        Process::spawn(testbed.dir(), &format!("network-policies-{}", self.spec.name), command)
    }

    /// Waits until its kube-proxy has made the rules for Services.
    pub async fn wait_services(&self) -> Result<()> {
        self.wait_rules(("iptables-save", "-t nat")).await
    }

    async fn wait_rules(&self, tool: (&str, &str)) -> Result<()> {
        let what = format!("the rules for Services of {}", self.spec.name);
        let (tool, arguments) = tool;
        let rules = async || self.spec.ns.output(tool, arguments);
        wait_until(&what, START, rules, |rules| rules.contains(KUBERNETES_SERVICE)).await.map(drop)
    }

    /// Kills the kubelet; containerd and the pods go on.
    pub fn kill_kubelet(&mut self) -> Result<()> {
        let mut kubelet =
            self.kubelet.take().with_context(|| format!("{} has no kubelet", self.spec.name))?;
        kubelet.kill_group();
        Ok(())
    }

    /// Gives the machine another address; the next kubelet uses it, with a certificate for it.
    pub fn set_address(&mut self, address: Ipv4Addr, pki: &Pki) -> Result<()> {
        self.spec.address = address;
        serving_certificate(pki, &self.spec)?;
        Ok(())
    }

    /// Signs a new serving certificate, which the kubelet loads by itself.
    pub fn rotate_certificate(&self, pki: &Pki) -> Result<Pair> {
        serving_certificate(pki, &self.spec)
    }

    fn kubelet_configuration(&self, pki: &Pki) -> String {
        let serving = format!("serving-{}", self.spec.name);
        format!(
            "apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
authentication:
  anonymous: {{ enabled: false }}
  webhook: {{ enabled: true }}
  x509: {{ clientCAFile: {ca} }}
authorization: {{ mode: Webhook }}
tlsCertFile: {certificate}
tlsPrivateKeyFile: {key}
readOnlyPort: 10255
staticPodPath: {manifests}
cgroupDriver: cgroupfs
cgroupRoot: {cgroup}
enforceNodeAllocatable: []
failSwapOn: false
evictionHard: {{ memory.available: 0%, nodefs.available: 0%, nodefs.inodesFree: 0%, imagefs.available: 0%, imagefs.inodesFree: 0% }}
imageGCHighThresholdPercent: 100
clusterDomain: cluster.local
resolvConf: ''
shutdownGracePeriod: 0s
# When pods see a changed Secret or ConfigMap; a minute by default.
syncFrequency: 10s
",
            ca = pki.file("ca.crt").display(),
            certificate = pki.file(&format!("{serving}.crt")).display(),
            key = pki.file(&format!("{serving}.key")).display(),
            manifests = self.manifests().display(),
            cgroup = self.pods_cgroup,
        )
    }
}

fn serving_certificate(pki: &Pki, spec: &Spec) -> Result<Pair> {
    let names = [spec.name.clone(), spec.address.to_string()];
    pki.server(&format!("serving-{}", spec.name), &format!("system:node:{}", spec.name), &names)
}

/// Makes a host's mounts and keeps its namespaces alive until killed. A kubelet writes kernel settings of the whole
/// machine; here files of this host that already hold its values are mounted over them, so the machine keeps its own.
const HOLD: &str = r#"
set -e
hostname "$1"
mount --bind "$2/var" /var
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p "$2/settings"
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
    kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
    path="${setting%%=*}"
    file="$2/settings/$(echo "$path" | tr / .)"
    echo "${setting#*=}" > "$file"
    mount --bind "$file" "/proc/sys/$path"
done
mount --make-rshared /
touch "$2/held"
exec sleep infinity
"#;

async fn hold_namespaces(
    testbed: &Testbed,
    placement: Placement<'_>,
    name: &str,
    dir: &Path,
) -> Result<Process> {
    let mut command = placement.command(Path::new("unshare"));
    command.args(["--mount", "--uts", "--propagation=slave", "sh", "-c", HOLD, "sh"]).arg(name).arg(dir);
    let mut holder = Process::spawn(testbed.dir(), &format!("host-{name}"), command)?;
    let held = dir.join("held");
    wait_for(&format!("the mounts of {name}"), Duration::from_secs(10), async || {
        ensure!(holder.ended()?.is_none(), "the mounts of {name} failed: {}", holder.output()?);
        Ok(held.exists().then_some(()))
    })
    .await?;
    Ok(holder)
}

fn inside(placement: Placement<'_>, holder: &Process, program: &Path) -> Command {
    let mut command = placement.command(Path::new("nsenter"));
    let namespaces = format!("/proc/{}/ns", holder.pid());
    command
        .arg(format!("--mount={namespaces}/mnt"))
        .arg(format!("--uts={namespaces}/uts"))
        .arg("--")
        .arg(program);
    command
}

/// Returns containerd's configuration: its defaults except for these few lines.
fn containerd_configuration(dir: &Path) -> String {
    format!(
        r#"version = 2
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs", "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing"]

[plugins."io.containerd.internal.v1.opt"]
  path = "/var/lib/containerd/opt"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{image}"
  # Raising a process's oom score back needs CAP_SYS_RESOURCE, which CI machines may not have.
  restrict_oom_score_adj = true

[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "/usr/lib/cni"
  conf_dir = "{dir}/cni"
"#,
        image = super::image::BUSYBOX,
        dir = dir.display(),
    )
}

fn bridge(spec: &Spec) -> String {
    serde_json::json!({
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            { "type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "ipam": {
                "type": "host-local",
                "dataDir": "/var/lib/cni",
                "ranges": [[{ "subnet": spec.pod_cidr }]],
                "routes": [{ "dst": "0.0.0.0/0" }],
            }},
        ],
    })
    .to_string()
}
