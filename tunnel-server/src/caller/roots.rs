//! Roots of callers' certificates in a cluster: those that kube-apiserver itself accepts.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use tokio_util::sync::CancellationToken;
use tunnel_kube::request;
use tunnel_pki::TrustBundle;
use tunnel_runtime::log_once::LogOnce;

use super::tls::CallerTls;

/// ConfigMap in which kube-apiserver publishes its --client-ca-file (for aggregated API servers).
pub(crate) const ROOTS_NAMESPACE: &str = "kube-system";
pub(crate) const ROOTS_CONFIGMAP: &str = "extension-apiserver-authentication";
const KEY: &str = "client-ca-file";
/// Interval at which the ConfigMap is read again, normally and after a failure.
const EVERY: Duration = Duration::from_secs(300);
const AGAIN: Duration = Duration::from_secs(10);
const DEADLINE: Duration = Duration::from_secs(10);

/// Keeps the roots that a [`CallerTls`] accepts up to date.
pub struct ClientRoots {
    client: kube::Client,
    tls: Arc<CallerTls>,
    known: Option<TrustBundle>,
    failing: LogOnce,
}

impl ClientRoots {
    pub fn new(client: kube::Client, tls: Arc<CallerTls>) -> Self {
        Self { client, tls, known: None, failing: LogOnce::default() }
    }

    /// Follows the ConfigMap until `stop`. If the roots cannot be read, the last ones stay in effect.
    pub async fn follow(mut self, stop: CancellationToken) {
        loop {
            let pause = match self.refresh().await {
                Ok(()) => {
                    self.failing.clear();
                    EVERY
                }
                Err(error) => {
                    if self.failing.is_new(&error) {
                        tracing::warn!(%error, "failed to read the client CA, keeping the known roots");
                    }
                    AGAIN
                }
            };
            if stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
                return;
            }
        }
    }

    async fn refresh(&mut self) -> Result<(), String> {
        let bundle = published(&self.client).await?;
        if self.known.as_ref() == Some(&bundle) {
            return Ok(());
        }
        self.tls.accept_roots(&bundle).map_err(|error| error.to_string())?;
        tracing::info!(roots = bundle.roots().len(), "applied the roots of the client CA");
        self.known = Some(bundle);
        Ok(())
    }
}

async fn published(client: &kube::Client) -> Result<TrustBundle, String> {
    let api = Api::<ConfigMap>::namespaced(client.clone(), ROOTS_NAMESPACE);
    let object = request(DEADLINE, "reading ConfigMap", ROOTS_CONFIGMAP, api.get(ROOTS_CONFIGMAP)).await;
    let object = object.map_err(|error| error.to_string())?;
    let pem = object.data.unwrap_or_default().remove(KEY).ok_or_else(|| {
        format!(
            "ConfigMap {ROOTS_NAMESPACE}/{ROOTS_CONFIGMAP} has no key {KEY}: kube-apiserver runs without --client-ca-file"
        )
    })?;
    TrustBundle::from_foreign_pem(&pem)
        .map_err(|error| format!("ConfigMap {ROOTS_NAMESPACE}/{ROOTS_CONFIGMAP}, key {KEY}: {error}"))
}
