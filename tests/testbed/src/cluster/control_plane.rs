//! etcd, kube-apiserver, kube-controller-manager and kube-scheduler on the cloud host, with the usual flags: nothing
//! here is configured for a tunnel, and the API server verifies kubelets' certificates.
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

use super::api::Api;
use super::names::{KUBERNETES_SERVICE, SERVICE_CIDR};
use super::peers;
use super::pki::{FRONT_PROXY, Pki};
use crate::process::{Placement, Process};
use crate::topology::{CLOUD, ROUTER, Testbed};
use crate::wait::wait_for;

const START: Duration = Duration::from_secs(60);

/// A machine with an API server.
#[derive(Clone, Copy, Debug)]
pub struct Master<'a> {
    /// Name of its log and files.
    pub name: &'a str,
    pub address: Ipv4Addr,
    pub place: Placement<'a>,
    /// Additional flags.
    pub flags: &'a [String],
}

#[derive(Debug)]
pub struct ControlPlane {
    _etcd: Process,
    apiserver: Process,
    others: Vec<Process>,
    /// Additional flags of the API server.
    flags: Vec<String>,
}

impl ControlPlane {
    /// Starts etcd and the API server, without waiting for them.
    pub fn start(testbed: &Testbed, pki: &Pki) -> Result<Self> {
        let etcd = Process::spawn(testbed.dir(), "etcd", etcd(testbed))?;
        let apiserver = start_apiserver(testbed, pki, first(testbed))?;
        Ok(Self { _etcd: etcd, apiserver, others: Vec::new(), flags: Vec::new() })
    }

    pub async fn wait_ready(&mut self, api: &Api) -> Result<()> {
        wait_for("kube-apiserver's /readyz", START, async || {
            if let Some(status) = self.apiserver.ended()? {
                bail!("kube-apiserver ended with {status}");
            }
            Ok(api.text("/readyz").await.is_ok_and(|text| text == "ok").then_some(()))
        })
        .await
    }

    /// Starts the controllers and the scheduler.
    pub fn start_controllers(&mut self, testbed: &Testbed, pki: &Pki, server: &str) -> Result<()> {
        let user = |name: &str| -> Result<PathBuf> {
            pki.kubeconfig(name, server, &pki.client(name, &format!("system:{name}"), &[])?)
        };
        let mut manager = testbed.on_cloud().command(&peers::kubernetes("kube-controller-manager")?);
        manager
            .arg(format!("--kubeconfig={}", user("kube-controller-manager")?.display()))
            .arg(format!("--service-account-private-key-file={}", pki.file("service-account.key").display()))
            .arg(format!("--root-ca-file={}", pki.file("ca.crt").display()))
            .arg(format!("--cluster-signing-cert-file={}", pki.file("ca.crt").display()))
            .arg(format!("--cluster-signing-key-file={}", pki.file("ca.key").display()))
            .args(["--use-service-account-credentials", "--leader-elect=false"])
            // Each controller requests a ServiceAccount at its start: at the default of 20 requests a second, that
            // takes most of the time until a new cluster is ready.
            .args(["--kube-api-qps=200", "--kube-api-burst=400"]);
        let mut scheduler = testbed.on_cloud().command(&peers::kubernetes("kube-scheduler")?);
        scheduler
            .arg(format!("--kubeconfig={}", user("kube-scheduler")?.display()))
            .arg("--leader-elect=false");
        self.others.push(Process::spawn(testbed.dir(), "kube-controller-manager", manager)?);
        self.others.push(Process::spawn(testbed.dir(), "kube-scheduler", scheduler)?);
        Ok(())
    }

    /// Returns the API server's flags that concern kubelets.
    pub fn kubelet_flags(&self) -> Result<Vec<String>> {
        let file = format!("/proc/{}/cmdline", self.apiserver.pid());
        let text = std::fs::read(&file).with_context(|| format!("reading {file}"))?;
        let text = String::from_utf8_lossy(&text);
        Ok(text.split('\0').filter(|word| word.starts_with("--kubelet-")).map(str::to_owned).collect())
    }

    /// Sets additional flags of the API server for its next start.
    pub fn set_flags(&mut self, flags: Vec<String>) {
        self.flags = flags;
    }

    pub async fn kill_apiserver(&mut self) -> Result<()> {
        self.apiserver.crash().await
    }

    /// Starts the API server again and waits until it is ready.
    pub async fn restart_apiserver(&mut self, testbed: &Testbed, pki: &Pki, api: &Api) -> Result<()> {
        ensure!(self.apiserver.ended()?.is_some(), "kube-apiserver still runs");
        self.apiserver = start_apiserver(testbed, pki, Master { flags: &self.flags, ..first(testbed) })?;
        self.wait_ready(api).await
    }
}

/// The cloud host.
fn first(testbed: &Testbed) -> Master<'_> {
    Master { name: "kube-apiserver", address: CLOUD, place: testbed.on_cloud(), flags: &[] }
}

/// URL of etcd for the API servers of all masters.
fn etcd_url() -> String {
    format!("http://{CLOUD}:2379")
}

fn etcd(testbed: &Testbed) -> Command {
    let mut command = testbed.on_cloud().command(Path::new("etcd"));
    command
        .arg(format!("--data-dir={}", testbed.dir().join("etcd").display()))
        .arg(format!("--listen-client-urls=http://127.0.0.1:2379,{}", etcd_url()))
        .arg(format!("--advertise-client-urls={}", etcd_url()))
        .args(["--listen-peer-urls=http://127.0.0.1:2380", "--logger=zap", "--log-level=warn"]);
    command
}

/// Starts the API server of a master, without waiting for it.
pub fn start_apiserver(testbed: &Testbed, pki: &Pki, master: Master<'_>) -> Result<Process> {
    let names = [
        master.address.to_string(),
        ROUTER.to_string(),
        "127.0.0.1".to_owned(),
        KUBERNETES_SERVICE.to_owned(),
        "kubernetes".to_owned(),
        "kubernetes.default".to_owned(),
        "kubernetes.default.svc".to_owned(),
        "kubernetes.default.svc.cluster.local".to_owned(),
    ];
    let serving = pki.server(&format!("{}-serving", master.name), "kube-apiserver", &names)?;
    let kubelet = pki.client(
        &format!("{}-kubelet-client", master.name),
        "kube-apiserver-kubelet-client",
        &["system:masters"],
    )?;
    let ca = pki.file("ca.crt");
    let mut command = master.place.command(&peers::kubernetes("kube-apiserver")?);
    command
        .arg(format!("--etcd-servers={}", etcd_url()))
        .arg(format!("--service-cluster-ip-range={SERVICE_CIDR}"))
        .arg("--bind-address=0.0.0.0")
        .arg(format!("--advertise-address={}", master.address))
        .arg(format!("--tls-cert-file={}", serving.certificate.display()))
        .arg(format!("--tls-private-key-file={}", serving.key.display()))
        .arg(format!("--client-ca-file={}", ca.display()))
        .arg(format!("--kubelet-client-certificate={}", kubelet.certificate.display()))
        .arg(format!("--kubelet-client-key={}", kubelet.key.display()))
        .arg(format!("--kubelet-certificate-authority={}", ca.display()))
        .arg("--kubelet-preferred-address-types=InternalIP")
        .arg(format!("--service-account-key-file={}", pki.file("service-account.pub").display()))
        .arg(format!("--service-account-signing-key-file={}", pki.file("service-account.key").display()))
        .arg("--service-account-issuer=https://kubernetes.default.svc")
        .args(["--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction"])
        .args(["--allow-privileged", "--profiling=false"])
        .args(aggregation(pki));
    let policy = testbed.dir().join("audit-policy.json");
    std::fs::write(&policy, audit_policy().to_string()).context("writing the audit policy")?;
    command
        .arg(format!("--audit-policy-file={}", policy.display()))
        .arg(format!("--audit-log-path={}", audit_log(testbed).display()))
        .args(master.flags);
    Process::spawn(testbed.dir(), master.name, command)
}

/// The flags for aggregated API servers such as metrics-server, as kubeadm sets them.
fn aggregation(pki: &Pki) -> Vec<String> {
    let file = |name: &str| pki.file(name).display().to_string();
    vec![
        format!("--requestheader-client-ca-file={}", file("front-proxy-ca.crt")),
        format!("--requestheader-allowed-names={FRONT_PROXY}"),
        "--requestheader-username-headers=X-Remote-User".to_owned(),
        "--requestheader-group-headers=X-Remote-Group".to_owned(),
        "--requestheader-extra-headers-prefix=X-Remote-Extra-".to_owned(),
        format!("--proxy-client-cert-file={}", file(&format!("{FRONT_PROXY}.crt"))),
        format!("--proxy-client-key-file={}", file(&format!("{FRONT_PROXY}.key"))),
    ]
}

/// Returns the path of the API server's log of every request by Postern's service accounts, with its outcome: one JSON
/// object per line.
pub fn audit_log(testbed: &Testbed) -> PathBuf {
    testbed.dir().join("audit.log")
}

fn audit_policy() -> Value {
    let users = ["tunnel-server", "tunnel-agent", "tunnel-redirector"];
    let users = users.map(|name| format!("system:serviceaccount:kube-system:{name}"));
    json!({
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [{ "level": "Metadata", "users": users }, { "level": "None" }],
    })
}
