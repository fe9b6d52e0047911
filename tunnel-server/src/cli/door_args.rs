//! The flags of the doors that speak HTTP.

use std::path::PathBuf;

use clap::Args;
use tunnel_core::config::{ConfigError, parse_cidrs, parse_port, parse_ports};

use crate::config::{DoorConfig, PlainConfig, TargetConfig, on_or_off, parse_secure_ports};

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Doors that speak HTTP")]
pub struct DoorArgs {
    /// Further ports of the https door, on --bind-address, for other ports of nodes than the kubelet's: PORT=NODE-PORT,
    /// comma-separated, such as 10270=9443 [default: none].
    #[arg(long, value_name = "LIST", default_value = "", hide_default_value = true)]
    pub secure_ports: String,
    /// on or off: --secure-port also ends the TLS of callers that address the server itself, who show a certificate or a bearer
    /// token [default: on with --client-ca-file, off without; with --client-ca-file and --connect-port or --metrics-port it has to
    /// be said].
    #[arg(long, value_name = "on|off")]
    pub terminate_tls: Option<String>,
    /// CAs (PEM) of callers' certificates, at --connect-port and --metrics-port and with --terminate-tls, and again when the file
    /// changes [default: in a cluster, the one that kube-apiserver accepts; else none is asked for].
    #[arg(long, value_name = "FILE")]
    pub client_ca_file: Option<PathBuf>,
    /// CA of nodes' serving certificates, for TLS to nodes [default: in a pod, the cluster's].
    #[arg(long, value_name = "FILE")]
    pub kubelet_certificate_authority: Option<PathBuf>,
    /// The server's own certificate for TLS to nodes; the file may come later [default: none, and kubelets answer 401].
    #[arg(long, value_name = "FILE")]
    pub kubelet_client_certificate: Option<PathBuf>,
    /// Key of --kubelet-client-certificate.
    #[arg(long, value_name = "FILE")]
    pub kubelet_client_key: Option<PathBuf>,
    /// Ports of nodes to which the https door speaks plain HTTP, besides http-proxy-ports of the ConfigMap, comma-separated.
    #[arg(long, value_name = "LIST", default_value = "10255")]
    pub http_ports: String,
    /// Port of the plain door, on --bind-address: HTTP by a node's name for clients in the cloud; 0: off.
    #[arg(long, value_name = "PORT", default_value = "0")]
    pub plain_port: String,
    /// Source addresses that may use --plain-port without a bearer token, comma-separated [default: none].
    #[arg(long, value_name = "CIDRS", default_value = "", hide_default_value = true)]
    pub plain_clients: String,
    /// Ports of nodes that these reach, comma-separated [default: every tunnelled port].
    #[arg(long, value_name = "LIST", default_value = "", hide_default_value = true)]
    pub plain_ports: String,
}

/// Where a pod has the cluster's CA.
const POD_CA: &str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt";

impl DoorArgs {
    /// `standalone`: there is no cluster. `kubeconfig`: this is no pod. `secure_port`: that door is on. `others`: one
    /// of those that take callers' certificates besides it is.
    ///
    /// # Errors
    /// Names the flag, its value and the reason.
    pub(super) fn config(
        &self,
        standalone: bool,
        kubeconfig: bool,
        (secure_port, others): (bool, bool),
    ) -> Result<DoorConfig, ConfigError> {
        let terminate_tls = match &self.terminate_tls {
            Some(value) => on_or_off("--terminate-tls", value)?,
            // Whom a policy restricts at one door, or who may read metrics, would reach every kubelet through the other.
            None if secure_port && others && self.client_ca_file.is_some() => {
                let reason = "with --client-ca-file and --connect-port or --metrics-port say on or off: whether these \
                              certificates open the https door too";
                return Err(ConfigError::without_value("--terminate-tls", reason));
            }
            None => secure_port && self.client_ca_file.is_some(),
        };
        let clients = parse_cidrs("--plain-clients", &self.plain_clients)?;
        let ports = parse_ports("--plain-ports", &self.plain_ports)?;
        let plain = parse_port("--plain-port", &self.plain_port)?;
        if plain.is_none() {
            let given = [("--plain-clients", &self.plain_clients), ("--plain-ports", &self.plain_ports)];
            if let Some((flag, value)) = given.into_iter().find(|(_, value)| !value.is_empty()) {
                let reason = "the plain door is off; give --plain-port, or leave it out";
                return Err(ConfigError::new(flag, value, reason));
            }
        }
        let pod_ca =
            || (!standalone && !kubeconfig).then(|| PathBuf::from(POD_CA)).filter(|path| path.exists());
        let config = DoorConfig {
            secure_ports: parse_secure_ports(&self.secure_ports)?,
            terminate_tls,
            client_ca: self.client_ca_file.clone(),
            targets: TargetConfig {
                ca: self.kubelet_certificate_authority.clone().or_else(pod_ca),
                certificate: self.kubelet_client_certificate.clone(),
                key: self.kubelet_client_key.clone(),
                plain_ports: parse_ports("--http-ports", &self.http_ports)?,
            },
            plain: plain.map(|port| PlainConfig { port, clients, ports }),
        };
        config.check(standalone, secure_port)?;
        Ok(config)
    }
}
