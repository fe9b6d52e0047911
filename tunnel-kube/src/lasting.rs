//! A client that outlives its credentials.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response, StatusCode};
use kube::Client;
use kube::client::Body;
use parking_lot::Mutex;
use tokio::time::Instant;
use tunnel_runtime::log_once::LogOnce;

use crate::client::{ClientSettings, KubeError, connect};

/// Minimum time between two reads of the file, which may name a program that makes the credentials.
const AGAIN: Duration = Duration::from_secs(10);

/// [`connect`] for a process that runs for years. After a failure the next request uses the configuration as it is then,
/// or the last usable version. The kubelet, k3s and kubeadm replace certificates every year, and an administrator may
/// replace the CA or the address. (The client itself reads token files again once a minute.)
///
/// # Errors
/// Those of [`connect`].
///
/// [`connect`]: crate::connect
pub async fn connect_lasting(
    kubeconfig: Option<PathBuf>,
    namespace: Option<String>,
    settings: ClientSettings,
) -> Result<(Client, String), KubeError> {
    let (good, found) = connect(kubeconfig.as_deref(), namespace.as_deref(), &settings).await?;
    let state = State { good, stale: false, unusable: LogOnce::default(), renewed: None };
    let lasting = Arc::new(Lasting { kubeconfig, namespace, settings, state: Mutex::new(state) });
    let service = tower::service_fn(move |request: Request<Body>| {
        let lasting = Arc::clone(&lasting);
        async move { lasting.send(request).await }
    });
    Ok((Client::new(service, found.clone()), found))
}

struct Lasting {
    kubeconfig: Option<PathBuf>,
    /// None: as configured.
    namespace: Option<String>,
    settings: ClientSettings,
    state: Mutex<State>,
}

struct State {
    /// The last client that could be made.
    good: Client,
    /// The configuration has to be read again.
    stale: bool,
    unusable: LogOnce,
    renewed: Option<Instant>,
}

impl Lasting {
    async fn send(&self, request: Request<Body>) -> Result<Response<Body>, kube::Error> {
        let answer = self.client().await.send(request).await;
        let failed = match &answer {
            Ok(answer) => answer.status() == StatusCode::UNAUTHORIZED,
            Err(_) => true,
        };
        if failed {
            self.renew();
        }
        answer
    }

    async fn client(&self) -> Client {
        {
            let state = self.state.lock();
            if !state.stale {
                return state.good.clone();
            }
        }
        let (kubeconfig, namespace) = (self.kubeconfig.as_deref(), self.namespace.as_deref());
        let made = connect(kubeconfig, namespace, &self.settings).await;
        let mut state = self.state.lock();
        match made {
            Ok((client, _)) => {
                state.unusable.clear();
                state.good = client;
                state.stale = false;
            }
            Err(error) => {
                if state.unusable.is_new(&error) {
                    tracing::warn!(%error, "failed to reload the API server credentials, keeping the previous ones");
                }
            }
        }
        state.good.clone()
    }

    fn renew(&self) {
        let mut state = self.state.lock();
        if state.renewed.is_none_or(|at| at.elapsed() >= AGAIN) {
            state.renewed = Some(Instant::now());
            state.stale = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Node;
    use kube::Api;
    use kube::api::ListParams;
    use postern_fake_kube::{ApiServer, Fault};

    use super::*;

    #[tokio::test]
    async fn it_takes_new_credentials_once_the_old_ones_are_refused() {
        let (old, new) = (ApiServer::start(), ApiServer::start());
        let path = old.dir().join("kubeconfig-of-both");
        std::fs::copy(old.kubeconfig(), &path).unwrap();
        let (client, namespace) =
            connect_lasting(Some(path.clone()), None, ClientSettings::SERVER).await.unwrap();
        assert_eq!((client.default_namespace(), namespace.as_str()), ("kube-system", "kube-system"));
        let nodes = Api::<Node>::all(client);
        let list = async || nodes.list(&ListParams::default()).await;
        let asked = || [&old, &new].map(|server| server.requests("list", "/api/v1/nodes"));

        // The file does not matter while the credentials work. While it is unusable the last ones are used.
        std::fs::write(&path, "").unwrap();
        list().await.unwrap();
        old.inject("list", "nodes", Fault::Status(401), 1);
        list().await.unwrap_err();
        list().await.unwrap();
        assert_eq!(asked(), [3, 0]);

        std::fs::copy(new.kubeconfig(), &path).unwrap();
        list().await.unwrap();
        assert_eq!(asked(), [3, 1]);
    }

    #[tokio::test]
    async fn it_takes_a_new_address_once_nobody_answers_at_the_old_one() {
        let (old, new) = (ApiServer::start(), ApiServer::start());
        let path = new.dir().join("kubeconfig-of-both");
        std::fs::copy(old.kubeconfig(), &path).unwrap();
        let (client, _) = connect_lasting(Some(path.clone()), None, ClientSettings::SERVER).await.unwrap();
        let nodes = Api::<Node>::all(client);
        old.down();
        std::fs::copy(new.kubeconfig(), &path).unwrap();
        nodes.list(&ListParams::default()).await.unwrap_err();
        nodes.list(&ListParams::default()).await.unwrap();
    }
}
