//! Flags for the cluster that a subcommand works on instead of the state directory.

use std::path::PathBuf;

use clap::Args;
use kube::Client;
use tunnel_kube::{ClientSettings, connect};
use tunnel_runtime::config::ConfigError;

#[derive(Args, Clone, Debug)]
pub(super) struct ClusterArgs {
    /// Work on this kubeconfig's cluster instead of on --state-dir.
    #[arg(long, value_name = "FILE", alias = "kube-config", global = true)]
    kubeconfig: Option<PathBuf>,
    /// The same, from a pod of the cluster.
    #[arg(long, global = true, conflicts_with = "kubeconfig")]
    in_cluster: bool,
    /// Namespace of the object there [default: the pod's, else that of the kubeconfig's context, else kube-system].
    #[arg(long, value_name = "NAME", global = true)]
    namespace: Option<String>,
}

impl ClusterArgs {
    pub(super) fn is_given(&self) -> bool {
        self.kubeconfig.is_some() || self.in_cluster
    }

    /// Refuses flags that need a cluster: the namespace, and `flag` with its value. Called without one.
    pub(super) fn refuse(&self, flag: &str, value: Option<&String>, why: &str) -> anyhow::Result<()> {
        let given = [("--namespace", self.namespace.is_some()), (flag, value.is_some())];
        match given.into_iter().find(|(_, given)| *given) {
            Some((flag, _)) => anyhow::bail!("{flag}: only with --kubeconfig or --in-cluster; {why}"),
            None => Ok(()),
        }
    }

    /// Returns a client and the namespace.
    pub(super) async fn connect(&self) -> Result<(Client, String), ConfigError> {
        let settings = ClientSettings { advice: "use --kubeconfig FILE", ..ClientSettings::SERVER };
        let made = connect(self.kubeconfig.as_deref(), self.namespace.as_deref(), &settings).await;
        made.map_err(|mut error| {
            // Outside of a pod, what is wrong is the flag that was given.
            if self.in_cluster && error.key == "--kubeconfig" {
                error.key = "--in-cluster".to_owned();
            }
            error
        })
    }
}
