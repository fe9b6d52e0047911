//! Flags for the cluster that a subcommand works on instead of the state directory.

use std::path::PathBuf;

use clap::Args;
use kube::Client;
use tunnel_kube::KubeError;

use crate::kube::{KubeOptions, ObjectNames};

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
    pub(super) async fn connect(&self) -> anyhow::Result<(Client, String)> {
        let (kubeconfig, namespace) = (self.kubeconfig.clone(), self.namespace.clone());
        let options = KubeOptions { kubeconfig, namespace, names: ObjectNames::default() };
        options.connect().await.map_err(|error| match error {
            KubeError::NotInCluster { reason, .. } => anyhow::anyhow!(
                "--in-cluster: this is not a pod with a service account: {reason}; use --kubeconfig FILE"
            ),
            other => other.into(),
        })
    }
}
