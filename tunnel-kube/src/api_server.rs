//! Clients of the API server, from the configuration as it is at each moment.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kube::Client;

use crate::client::{ClientSettings, KubeError, connect};

/// Makes clients of the API server.
pub struct ApiServer {
    kubeconfig: Option<PathBuf>,
    given_namespace: Option<String>,
    settings: ClientSettings,
    namespace: String,
    client: Mutex<Option<Client>>,
}

impl ApiServer {
    /// Reads the configuration: the kubeconfig, or that of a pod if there is none. Makes no request, so an API server
    /// that is down is no error here.
    ///
    /// # Errors
    /// The configuration is missing or wrong.
    pub async fn open(
        kubeconfig: Option<PathBuf>,
        namespace: Option<String>,
        settings: ClientSettings,
    ) -> Result<Arc<Self>, KubeError> {
        let (client, found) = connect(kubeconfig.as_deref(), namespace.as_deref(), &settings).await?;
        Ok(Arc::new(Self {
            kubeconfig,
            given_namespace: namespace,
            settings,
            namespace: found,
            client: Mutex::new(Some(client)),
        }))
    }

    /// Namespace of the objects.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Returns the client for the next request. Reads the configuration again after a failure.
    ///
    /// # Errors
    /// The configuration is now missing or wrong.
    pub async fn client(&self) -> Result<Client, KubeError> {
        if let Some(client) = self.cached().clone() {
            return Ok(client);
        }
        let (kubeconfig, namespace) = (self.kubeconfig.as_deref(), self.given_namespace.as_deref());
        let (client, _) = connect(kubeconfig, namespace, &self.settings).await?;
        *self.cached() = Some(client.clone());
        Ok(client)
    }

    /// Makes the next call of [`Self::client`] read the configuration again: the kubelet replaces its certificate, and
    /// an administrator the CA or the address. (The client itself reads token files again once a minute.)
    pub fn failed(&self) {
        *self.cached() = None;
    }

    fn cached(&self) -> MutexGuard<'_, Option<Client>> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn after_a_failure_the_file_is_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("kubeconfig");
        let text = "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
                    clusters:\n- name: k\n  cluster: {server: 'https://127.0.0.1:1', insecure-skip-tls-verify: true}\n\
                    users:\n- name: u\n  user: {token: t}\n\
                    contexts:\n- name: c\n  context: {cluster: k, user: u}\n";
        std::fs::write(&path, text).unwrap();
        let api = ApiServer::open(Some(path.clone()), None, ClientSettings::AGENT).await.unwrap();
        std::fs::write(&path, "").unwrap();
        api.client().await.unwrap();
        api.failed();
        assert!(api.client().await.is_err());
        std::fs::write(&path, text).unwrap();
        api.client().await.unwrap();
    }
}
