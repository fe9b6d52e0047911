//! The flags that are about Kubernetes.

use std::path::PathBuf;

use clap::Args;
use tunnel_core::config::ConfigError;

use crate::config::object_name;
use crate::kube::{KubeOptions, ObjectNames};

/// How to reach the API server, and the names of the objects there.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Kubernetes")]
pub struct KubeArgs {
    /// Kubeconfig for the API server [default: the service account of the pod that this runs in].
    #[arg(long, value_name = "FILE", alias = "kube-config", conflicts_with = "inventory")]
    pub kubeconfig: Option<PathBuf>,
    /// Namespace of the objects below [default: the pod's, else that of the kubeconfig's context, else kube-system].
    #[arg(long, value_name = "NAMESPACE")]
    pub namespace: Option<String>,
    /// ConfigMap with the port lists: http-proxy-ports, https-proxy-ports, dnat-ports-pair, localhost-proxy-ports.
    #[arg(long, value_name = "NAME", default_value_t = ObjectNames::default().configmap)]
    pub configmap: String,
    /// ConfigMap to write the nodes' DNS records to, for CoreDNS's hosts plugin.
    #[arg(long, value_name = "NAME", default_value_t = ObjectNames::default().dns_configmap)]
    pub dns_configmap: String,
    /// Service that agents dial; the server's certificate follows it.
    #[arg(long, value_name = "NAME", default_value_t = ObjectNames::default().service)]
    pub service: String,
    /// Service for clients in the cloud; edge nodes' DNS records point to it.
    #[arg(long, value_name = "NAME", default_value_t = ObjectNames::default().internal_service)]
    pub internal_service: String,
    /// Secret that holds the CA; the first server creates it.
    #[arg(long, value_name = "NAME", default_value_t = ObjectNames::default().ca_secret)]
    pub ca_secret: String,
    /// Lease whose holder writes DNS records, Service ports, certificates and conditions.
    #[arg(long, value_name = "NAME", default_value_t = ObjectNames::default().lease)]
    pub lease: String,
    /// ConfigMap with the nodes that `tunnel-server agent revoke` has shut out; it creates it.
    #[arg(long, value_name = "NAME", default_value_t = ObjectNames::default().revocations)]
    pub revocations_configmap: String,
    /// ServiceAccount of agents that run as pods: it entitles them to a certificate for the node that they run on.
    #[arg(long, value_name = "NAME", default_value_t = ObjectNames::default().agent_service_account)]
    pub agent_service_account: String,
    /// on or off: keep the nodes' DNS records in --dns-configmap.
    #[arg(long, value_name = "on|off", default_value = "on")]
    pub dns_records: String,
    /// on or off: also keep a condition PosternTunnel on each edge node, which takes the right to patch the status of Nodes.
    #[arg(long, value_name = "on|off", default_value = "off")]
    pub node_condition: String,
    /// ServiceAccount of redirectors: it entitles them to a redirector's certificate for the node that they run on.
    #[arg(long, value_name = "NAME", default_value_t = ObjectNames::default().redirector_service_account)]
    pub redirector_service_account: String,
    /// Also redirect connections to edge nodes' pods, on any port: the ranges that hold the pods' addresses,
    /// comma-separated, or off. A kubelet can report any range, so name only what is used for pods of edge nodes.
    #[arg(long, value_name = "CIDRS|off", default_value = "off")]
    pub edge_pod_routes: String,
}

impl KubeArgs {
    /// `konnectivitys`: `--agent-service-account` is that of konnectivity's agents.
    ///
    /// # Errors
    /// Names the flag, its value and the reason.
    pub(super) fn options(&self, konnectivitys: bool) -> Result<KubeOptions, ConfigError> {
        let name = |key: &str, value: &str| object_name(key, value).map(|()| value.to_owned());
        if let Some(namespace) = &self.namespace {
            object_name("--namespace", namespace)?;
        }
        let agents = name("--agent-service-account", &self.agent_service_account)?;
        Ok(KubeOptions {
            kubeconfig: self.kubeconfig.clone(),
            namespace: self.namespace.clone(),
            names: ObjectNames {
                configmap: name("--configmap", &self.configmap)?,
                dns_configmap: name("--dns-configmap", &self.dns_configmap)?,
                service: name("--service", &self.service)?,
                internal_service: name("--internal-service", &self.internal_service)?,
                ca_secret: name("--ca-secret", &self.ca_secret)?,
                lease: name("--lease", &self.lease)?,
                revocations: name("--revocations-configmap", &self.revocations_configmap)?,
                agent_service_account: if konnectivitys {
                    ObjectNames::default().agent_service_account
                } else {
                    agents
                },
                redirector_service_account: name(
                    "--redirector-service-account",
                    &self.redirector_service_account,
                )?,
            },
        })
    }
}
