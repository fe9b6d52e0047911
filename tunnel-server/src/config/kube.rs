//! The flags of the Kubernetes side.

use std::path::PathBuf;

use clap::Args;
use ipnet::IpNet;
use tunnel_core::config::{ConfigError, parse_cidrs};

use crate::kube::{KubeOptions, ObjectNames};

/// How to reach the API server, and what the objects there are called.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Kubernetes")]
pub struct KubeArgs {
    /// Reach the API server by this file [default: the service account of the pod that this runs in].
    #[arg(long, value_name = "FILE", alias = "kube-config", conflicts_with = "inventory")]
    pub kubeconfig: Option<PathBuf>,
    /// Namespace of the objects below [default: the pod's, else that of the kubeconfig's context, else kube-system].
    #[arg(long, value_name = "NAMESPACE")]
    pub namespace: Option<String>,
    /// ConfigMap with the port lists: http-proxy-ports, https-proxy-ports, dnat-ports-pair, localhost-proxy-ports.
    #[arg(long, value_name = "NAME", default_value_t = ObjectNames::default().configmap)]
    pub configmap: String,
    /// ConfigMap that gets the DNS records of the nodes, for CoreDNS's hosts plugin.
    #[arg(long, value_name = "NAME", default_value_t = ObjectNames::default().dns_configmap)]
    pub dns_configmap: String,
    /// Service that agents dial; the server's certificate follows it.
    #[arg(long, value_name = "NAME", default_value_t = ObjectNames::default().service)]
    pub service: String,
    /// Service for components of the cloud; edge nodes' DNS records lead to it.
    #[arg(long, value_name = "NAME", default_value_t = ObjectNames::default().internal_service)]
    pub internal_service: String,
    /// Secret that keeps the CA; the first server makes it.
    #[arg(long, value_name = "NAME", default_value_t = ObjectNames::default().ca_secret)]
    pub ca_secret: String,
    /// Lease whose holder writes DNS records, Service ports, certificates and conditions.
    #[arg(long, value_name = "NAME", default_value_t = ObjectNames::default().lease)]
    pub lease: String,
    /// ServiceAccount of agents that run as pods: with it they get a certificate for the node that they run on.
    #[arg(long, value_name = "NAME", default_value_t = ObjectNames::default().agent_service_account)]
    pub agent_service_account: String,
    /// Redirect connections to pods of edge nodes too, on any port: the ranges that these pods' ranges may lie in,
    /// comma-separated; off: none. A kubelet can choose its own range, so name what is used for pods of edge nodes only.
    #[arg(long, value_name = "CIDRS|off", default_value = "off")]
    pub edge_pod_routes: String,
}

impl KubeArgs {
    /// # Errors
    /// Names the flag, its value and the reason.
    pub(super) fn options(&self) -> Result<KubeOptions, ConfigError> {
        let name = |key: &str, value: &str| object_name(key, value).map(|()| value.to_owned());
        if let Some(namespace) = &self.namespace {
            object_name("--namespace", namespace)?;
        }
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
                agent_service_account: name("--agent-service-account", &self.agent_service_account)?,
            },
        })
    }

    pub(super) fn edge_pod_routes(&self) -> Result<Vec<IpNet>, ConfigError> {
        const KEY: &str = "--edge-pod-routes";
        match self.edge_pod_routes.as_str() {
            "off" => Ok(Vec::new()),
            "" | "on" => {
                let reason = "name the ranges of edge nodes' pods, such as 10.244.0.0/16, or off";
                Err(ConfigError::new(KEY, &self.edge_pod_routes, reason))
            }
            ranges => parse_cidrs(KEY, ranges),
        }
    }
}

/// The flags that give these options.
pub(super) fn flags(options: &KubeOptions) -> Vec<(&'static str, String)> {
    let names = &options.names;
    let mut flags = vec![
        ("configmap", names.configmap.clone()),
        ("dns-configmap", names.dns_configmap.clone()),
        ("service", names.service.clone()),
        ("internal-service", names.internal_service.clone()),
        ("ca-secret", names.ca_secret.clone()),
        ("lease", names.lease.clone()),
        ("agent-service-account", names.agent_service_account.clone()),
    ];
    flags.extend(options.kubeconfig.as_ref().map(|path| ("kubeconfig", path.display().to_string())));
    flags.extend(options.namespace.as_ref().map(|namespace| ("namespace", namespace.clone())));
    flags
}

/// As the API server checks them: RFC 1123 subdomains.
fn object_name(key: &str, value: &str) -> Result<(), ConfigError> {
    let label = |label: &str| {
        let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        !label.is_empty()
            && label.bytes().all(|byte| inner(byte) || byte == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    if value.len() <= 253 && value.split('.').all(label) {
        return Ok(());
    }
    let reason = "not the name of an object; use lower-case letters, digits, - and ., such as tunnel-server";
    Err(ConfigError::new(key, value, reason))
}
