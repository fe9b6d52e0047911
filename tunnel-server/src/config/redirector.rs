//! The flags of `tunnel-server redirector`.

use std::path::PathBuf;

use clap::Args;
use tunnel_pki::enrol::EnrolmentFlags;
use tunnel_pki::{Holder, SecretString};
use tunnel_runtime::NodeName;
use tunnel_runtime::config::{ConfigError, Ignored};
use tunnel_runtime::logging::LogConfig;

use super::{Config, NodesConfig, ProcessConfig, RedirectFlags, WritesConfig};
use crate::kube::{KubeOptions, ObjectNames, object_name};
use crate::listen::{CommonConfig, ListenersConfig};

/// Settings that only a redirector has.
#[derive(Clone, Debug)]
pub struct RedirectorConfig {
    /// The node named in its certificate.
    pub node: NodeName,
    /// Enrolment token, and the hash of the CA as `sha256:HEX`; only without Kubernetes.
    pub token: Option<(SecretString, String)>,
}

/// Redirect on a cloud host without agents and without a CA, and have the servers forward every connection.
///
/// Its certificate comes by CertificateSigningRequest or, with --inventory, by token.
#[derive(Args, Clone, Debug)]
pub struct RedirectorFlags {
    #[command(flatten)]
    nodes: NodesConfig,
    #[command(flatten)]
    enrolment: EnrolmentFlags,
    #[command(flatten)]
    process: ProcessConfig,
    #[command(flatten)]
    listeners: CommonConfig,
    #[command(flatten)]
    log: LogConfig,
    #[command(flatten)]
    redirect: RedirectFlags,
    /// Kubeconfig for the API server [default: the service account of the pod that this runs in].
    #[arg(long, value_name = "FILE", conflicts_with = "inventory", help_heading = "Kubernetes")]
    kubeconfig: Option<PathBuf>,
    /// Namespace of the objects below [default: the pod's, else that of the kubeconfig's context, else kube-system].
    #[arg(long, value_name = "NAMESPACE", value_parser = object_name, help_heading = "Kubernetes")]
    namespace: Option<String>,
    /// ConfigMap with the port lists.
    #[arg(long, value_name = "NAME", env = "POSTERN_CONFIGMAP", default_value_t = ObjectNames::default().configmap,
          value_parser = object_name, help_heading = "Kubernetes")]
    configmap: String,
    /// Service that leads to the servers.
    #[arg(long, value_name = "NAME", default_value_t = ObjectNames::default().service, value_parser = object_name,
          help_heading = "Kubernetes")]
    service: String,
}

impl RedirectorFlags {
    /// Converts the flags to a configuration.
    ///
    /// # Errors
    /// See [`Config::check`].
    pub fn config(self, flags: Vec<String>) -> Result<Config, ConfigError> {
        let standalone = self.nodes.inventory.is_some();
        if standalone && self.nodes.peers.is_empty() {
            let reason = "needed with --inventory: the servers' agent ports";
            return Err(ConfigError::without_value("--peers", reason));
        }
        if let Some(flag) = self.enrolment.by_token().filter(|_| !standalone) {
            let reason = "not supported in a cluster, where a redirector enrols through the API server";
            return Err(ConfigError::without_value(flag, reason));
        }
        let (token, ca_hash) = self.enrolment.token(&self.process.state_dir, Holder::Redirector)?;
        let node = self.enrolment.node()?;
        let names =
            ObjectNames { configmap: self.configmap, service: self.service, ..ObjectNames::default() };
        let config = Config {
            nodes: self.nodes,
            process: self.process,
            log: self.log,
            redirects: true,
            redirect: self.redirect,
            listeners: ListenersConfig::of_redirector(self.listeners),
            kube: KubeOptions { kubeconfig: self.kubeconfig, namespace: self.namespace, names },
            writes: WritesConfig::default(),
            ignored: Ignored::default(),
            redirector: Some(RedirectorConfig { node, token: token.zip(ca_hash) }),
            flags: Vec::new(),
        };
        config.check(flags)
    }
}
