//! A running cluster, from its first process until every node is ready.
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::api::{Api, is_true};
use super::control_plane::{ControlPlane, Master, start_apiserver};
use super::host::{Host, Spec};
use super::kubectl::Kubectl;
use super::names::CLOUD_NODE;
use super::pki::Pki;
use super::pod_logs::PodLogs;
use super::{balancer, image, peers};
use crate::process::{Placement, Process};
use crate::report::progress;
use crate::topology::{CLOUD, CloudHost, POD_CIDR, ROUTER, Testbed};
use crate::wait::wait_until;

const NODE_READY: Duration = Duration::from_secs(90);

/// A running cluster. Dropping it kills every process; the testbed removes the rest.
pub struct Cluster<'a> {
    pub testbed: &'a Testbed,
    /// The API, as the administrator.
    pub api: Api,
    /// kubectl, as the administrator.
    pub kubectl: Kubectl,
    pub pki: Pki,
    pub control_plane: ControlPlane,
    /// The cloud's node first, then edge 1, and so on.
    pub hosts: Vec<Host>,
    pub image: PathBuf,
    pub server: String,
    /// Load balancer in front of the API servers and tunnel servers of several masters.
    _balancer: Option<Process>,
    /// Last: pods log until their hosts are gone.
    _pod_logs: PodLogs,
}

impl<'a> Cluster<'a> {
    /// Brings the cluster up, with a node on the cloud host and one on every edge, all ready.
    pub async fn start(testbed: &'a Testbed) -> Result<Self> {
        Self::start_saying(testbed, progress).await
    }

    /// As [`Cluster::start`], with a load balancer for several masters at [`ROUTER`], through which every client
    /// reaches the API.
    pub async fn start_balanced(testbed: &'a Testbed) -> Result<Self> {
        let balancer = balancer::start(testbed)?;
        let mut cluster = Self::start_at(testbed, format!("https://{ROUTER}:6443"), progress).await?;
        cluster._balancer = Some(balancer);
        Ok(cluster)
    }

    /// As [`Cluster::start`], reporting its progress to `say`.
    pub async fn start_saying(testbed: &'a Testbed, say: impl Fn(&str)) -> Result<Self> {
        Self::start_at(testbed, format!("https://{CLOUD}:6443"), say).await
    }

    async fn start_at(testbed: &'a Testbed, server: String, say: impl Fn(&str)) -> Result<Self> {
        let start = Instant::now();
        let dir = testbed.dir().join("kubernetes");
        let pki = Pki::create(dir.clone())?;
        let mut control_plane = ControlPlane::start(testbed, &pki)?;
        let mut hosts = Vec::new();
        for spec in specs(testbed) {
            hosts.push(Host::create(testbed, spec, &pki, &server).await?);
        }
        let image_dir = dir.join("image");
        let image = image::busybox(&image_dir)?;
        for host in &mut hosts {
            host.import(&image).await?;
        }
        say(&format!("containerd of {} hosts is up, {:.1?} from the start", hosts.len(), start.elapsed()));

        let admin = pki.client("admin", "kubernetes-admin", &["system:masters"])?;
        let kubeconfig = pki.kubeconfig("admin", &server, &admin)?;
        let api = Api::open(&kubeconfig).await?;
        let kubectl = Kubectl::new(peers::kubernetes("kubectl")?, kubeconfig, dir);
        control_plane.wait_ready(&api).await?;
        say(&format!("the API server is ready, {:.1?} from the start", start.elapsed()));
        control_plane.start_controllers(testbed, &pki, &server)?;
        let proxy = pki.client("kube-proxy", "system:kube-proxy", &[])?;
        let proxy = pki.kubeconfig("kube-proxy", &server, &proxy)?;
        for host in &mut hosts {
            host.start_kubelet(testbed, &pki)?;
            host.start_proxy(testbed, &proxy)?;
        }
        let (_balancer, _pod_logs) = (None, PodLogs::keep(testbed.dir())?);
        let cluster =
            Self { testbed, api, kubectl, pki, control_plane, hosts, image, server, _balancer, _pod_logs };
        for host in &cluster.hosts {
            cluster.label_node(&host.spec.name).await?;
        }
        for host in &cluster.hosts {
            cluster.wait_ready(&host.spec.name).await?;
        }
        cluster
            .api
            .wait(
                "the default service account",
                "/api/v1/namespaces/default/serviceaccounts/default",
                NODE_READY,
                |_| true,
            )
            .await?;
        // A scenario may use Services at once.
        for host in &cluster.hosts {
            host.wait_services().await?;
        }
        say(&format!("every node is ready, {:.1?} from the start", start.elapsed()));
        Ok(cluster)
    }

    /// Sets the labels and fields that an administrator sets once per node: its role and its pod CIDR.
    pub async fn label_node(&self, node: &str) -> Result<()> {
        let role = if node == CLOUD_NODE { "control-plane" } else { "edge" };
        self.label_node_as(node, role).await
    }

    /// As [`Self::label_node`], with this role.
    pub async fn label_node_as(&self, node: &str, role: &str) -> Result<()> {
        let pod_cidr = &self.host(node)?.spec.pod_cidr;
        let path = format!("/api/v1/nodes/{node}");
        self.api.wait(&format!("node {node} to register"), &path, NODE_READY, |_| true).await?;
        let change = json!({
            "metadata": { "labels": { format!("node-role.kubernetes.io/{role}"): "" } },
            "spec": { "podCIDR": pod_cidr, "podCIDRs": [pod_cidr] },
        });
        self.api.patch(&path, &change).await.with_context(|| format!("labelling {node}"))?;
        Ok(())
    }

    /// Adds a machine of the cloud as a node, and waits until it is ready.
    pub async fn join(&mut self, name: &str, role: &str, host: &CloudHost, pod_cidr: &str) -> Result<()> {
        let spec = Spec {
            name: name.to_owned(),
            address: host.address,
            pod_cidr: pod_cidr.to_owned(),
            ns: host.ns.clone(),
            cgroup: host.cgroup.clone(),
        };
        let mut machine = Host::create(self.testbed, spec, &self.pki, &self.server).await?;
        machine.import(&self.image).await?;
        machine.start_kubelet(self.testbed, &self.pki)?;
        machine.start_proxy(self.testbed, &self.pki.file("kube-proxy.conf"))?;
        self.hosts.push(machine);
        self.label_node_as(name, role).await?;
        self.wait_ready(name).await
    }

    /// Starts one more API server, on a host that has joined, and waits until it is ready.
    pub async fn add_apiserver(&self, name: &str, host: &CloudHost) -> Result<Process> {
        let place = Placement { ns: &host.ns, cgroup: &host.cgroup };
        let master = Master { name, address: host.address, place, flags: &[] };
        let process = start_apiserver(self.testbed, &self.pki, master)?;
        let kubectl = self.kubectl_at(host.address)?;
        let ready = async || kubectl.run(&["get", "--raw", "/readyz"]).await;
        wait_until(&format!("{name}'s /readyz"), NODE_READY, ready, |text| text == "ok").await?;
        Ok(process)
    }

    /// Returns kubectl, as the administrator, for the API server at this address.
    pub fn kubectl_at(&self, address: Ipv4Addr) -> Result<Kubectl> {
        let name = format!("admin-{address}");
        let admin = self.pki.client(&name, "kubernetes-admin", &["system:masters"])?;
        let kubeconfig = self.pki.kubeconfig(&name, &format!("https://{address}:6443"), &admin)?;
        Ok(Kubectl::new(peers::kubernetes("kubectl")?, kubeconfig, self.testbed.dir().join("kubernetes")))
    }

    pub async fn wait_ready(&self, node: &str) -> Result<()> {
        let path = format!("/api/v1/nodes/{node}");
        let ready = |node: &Value| is_true(node, "Ready");
        self.api.wait(&format!("node {node} to be ready"), &path, NODE_READY, ready).await?;
        Ok(())
    }

    pub fn host(&self, node: &str) -> Result<&Host> {
        self.hosts.iter().find(|host| host.spec.name == node).with_context(|| format!("no host {node}"))
    }

    pub fn host_mut(&mut self, node: &str) -> Result<&mut Host> {
        self.hosts.iter_mut().find(|host| host.spec.name == node).with_context(|| format!("no host {node}"))
    }

    /// Starts a kubelet again after it was killed.
    pub fn start_kubelet(&mut self, node: &str) -> Result<()> {
        let host = self.hosts.iter_mut().find(|host| host.spec.name == node);
        host.with_context(|| format!("no host {node}"))?.start_kubelet(self.testbed, &self.pki)
    }

    /// Replaces a host's kube-proxy by one with these flags.
    pub async fn restart_proxy(&mut self, node: &str, flags: &[&str]) -> Result<()> {
        let host = self.hosts.iter_mut().find(|host| host.spec.name == node);
        let host = host.with_context(|| format!("no host {node}"))?;
        host.restart_proxy(self.testbed, &self.pki, flags).await
    }

    /// Gives a host another address.
    pub fn move_host(&mut self, node: &str, address: Ipv4Addr) -> Result<()> {
        let host = self.hosts.iter_mut().find(|host| host.spec.name == node);
        host.with_context(|| format!("no host {node}"))?.set_address(address, &self.pki)
    }

    /// Restarts the API server with this `connection` of an EgressSelectorConfiguration for nodes, pods and Services,
    /// and additional flags.
    pub async fn select_egress(&mut self, connection: &Value, more: &[&str]) -> Result<()> {
        let file = self.testbed.dir().join("egress-selector.json");
        let configuration = json!({
            "apiVersion": "apiserver.k8s.io/v1beta1",
            "kind": "EgressSelectorConfiguration",
            "egressSelections": [{ "name": "cluster", "connection": connection }],
        });
        std::fs::write(&file, configuration.to_string())
            .with_context(|| format!("writing {}", file.display()))?;
        self.control_plane.kill_apiserver().await?;
        let flag = format!("--egress-selector-config-file={}", file.display());
        let more = more.iter().map(|flag| (*flag).to_owned());
        self.control_plane.set_flags([flag].into_iter().chain(more).collect());
        self.restart_apiserver().await
    }

    /// Starts the API server again after it was killed, and waits until it is ready.
    pub async fn restart_apiserver(&mut self) -> Result<()> {
        self.control_plane.restart_apiserver(self.testbed, &self.pki, &self.api).await
    }
}

fn specs(testbed: &Testbed) -> Vec<Spec> {
    let mut specs = vec![Spec {
        name: CLOUD_NODE.to_owned(),
        address: CLOUD,
        pod_cidr: POD_CIDR.to_owned(),
        ns: testbed.cloud.clone(),
        cgroup: testbed.cloud_cgroup.clone(),
    }];
    for (at, edge) in testbed.edges().iter().enumerate() {
        specs.push(Spec {
            name: edge.name.clone(),
            address: edge.address,
            pod_cidr: format!("10.72.{}.0/24", at + 1),
            ns: edge.ns.clone(),
            cgroup: testbed.edge_cgroup.clone(),
        });
    }
    specs
}
