//! A client that outlives its credentials.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response, StatusCode};
use kube::Client;
use kube::client::Body;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::time::Instant;
use tunnel_runtime::config::ConfigError;
use tunnel_runtime::log_once::LogOnce;

use crate::client::{ClientSettings, connect};

/// Minimum time between two reads of the file, which may name a program that makes the credentials.
const AGAIN: Duration = Duration::from_secs(10);
/// Maximum wait for that program.
const PATIENCE: Duration = Duration::from_secs(60);
/// Maximum time for which a program that hangs keeps another one from being started. Each of them holds a thread.
const HANGS: Duration = Duration::from_secs(3600);

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
) -> Result<(Client, String), ConfigError> {
    connect_reading(kubeconfig, namespace, settings, AGAIN).await
}

async fn connect_reading(
    kubeconfig: Option<PathBuf>,
    namespace: Option<String>,
    settings: ClientSettings,
    again: Duration,
) -> Result<(Client, String), ConfigError> {
    let (good, found) = connect(kubeconfig.as_deref(), namespace.as_deref(), &settings).await?;
    let (unusable, due) = (LogOnce::default(), None);
    let state = State { good, due, reading: false, unusable, renewed: None };
    let lasting = Arc::new(Lasting { kubeconfig, namespace, settings, again, state: Mutex::new(state) });
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
    again: Duration,
    state: Mutex<State>,
}

struct State {
    /// The last client that could be made.
    good: Client,
    /// Time from which the configuration has to be read again.
    due: Option<Instant>,
    /// True while a thread reads it, also after [`PATIENCE`].
    reading: bool,
    unusable: LogOnce,
    renewed: Option<Instant>,
}

impl Lasting {
    async fn send(self: Arc<Self>, request: Request<Body>) -> Result<Response<Body>, kube::Error> {
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

    async fn client(self: &Arc<Self>) -> Client {
        {
            let mut state = self.state.lock();
            if state.reading || state.due.is_none_or(|due| due > Instant::now()) {
                return state.good.clone();
            }
            state.reading = true;
        }
        // Goes on if the request is given up meanwhile.
        let _ = tokio::spawn(self.clone().read()).await;
        self.state.lock().good.clone()
    }

    async fn read(self: Arc<Self>) {
        let (kubeconfig, namespace, settings) =
            (self.kubeconfig.clone(), self.namespace.clone(), self.settings);
        let runtime = Handle::current();
        let connect = async move { connect(kubeconfig.as_deref(), namespace.as_deref(), &settings).await };
        // kube waits for a program that makes the credentials, without a limit.
        let mut made = tokio::task::spawn_blocking(move || runtime.block_on(connect));
        let waited = tokio::time::timeout(PATIENCE, &mut made).await;
        let ended = waited.is_ok();
        let made = match waited {
            Ok(made) => made.map_err(|error| error.to_string()),
            Err(_) => {
                let lasting = self.clone();
                tokio::spawn(async move {
                    let _ = tokio::time::timeout(HANGS, made).await;
                    lasting.state.lock().reading = false;
                });
                Err(format!("no credentials within {} s", PATIENCE.as_secs()))
            }
        };
        let mut state = self.state.lock();
        // Otherwise the program still runs, or the task above has noted its end.
        if ended {
            state.reading = false;
        }
        match made.and_then(|made| made.map_err(|error| error.to_string())) {
            Ok((client, _)) => {
                state.unusable.clear();
                state.good = client;
                state.due = None;
            }
            Err(error) => {
                if state.unusable.is_new(&error) {
                    tracing::warn!(%error, "failed to reload the API server credentials, keeping the previous ones");
                }
                state.due = Some(Instant::now() + self.again);
            }
        }
    }

    fn renew(&self) {
        let mut state = self.state.lock();
        if state.renewed.is_none_or(|at| at.elapsed() >= self.again) {
            state.renewed = Some(Instant::now());
            state.due.get_or_insert_with(Instant::now);
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
        let again = Duration::from_millis(200);
        let (client, namespace) =
            connect_reading(Some(path.clone()), None, ClientSettings::SERVER, again).await.unwrap();
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
        let deadline = Instant::now() + Duration::from_secs(30);
        while asked()[1] == 0 {
            assert!(Instant::now() < deadline, "it is not read again");
            tokio::time::sleep(again / 10).await;
            list().await.unwrap();
        }
        list().await.unwrap();
        assert_eq!(asked()[1], 2);
    }

    #[tokio::test]
    async fn a_plugin_that_takes_long_holds_up_nothing() {
        let server = ApiServer::start();
        let (path, runs) = (server.dir().join("kubeconfig-with-plugin"), server.dir().join("runs"));
        std::fs::copy(server.kubeconfig(), &path).unwrap();
        let (client, _) = connect_lasting(Some(path.clone()), None, ClientSettings::SERVER).await.unwrap();
        let nodes = Api::<Node>::all(client);
        let list = async || nodes.list(&ListParams::default()).await;
        let script = format!("echo >> {}; sleep 1; exit 1", runs.display());
        let plugin = format!(
            "{{exec: {{apiVersion: client.authentication.k8s.io/v1, command: sh, args: [-c, \"{script}\"], \
             interactiveMode: Never}}}}"
        );
        let kubeconfig = std::fs::read_to_string(&path).unwrap();
        assert!(kubeconfig.contains("{token: fake}"));
        std::fs::write(&path, kubeconfig.replace("{token: fake}", &plugin)).unwrap();
        server.inject("list", "nodes", Fault::Status(401), 1);
        list().await.unwrap_err();

        let mut ticks = 0;
        let mut asked = std::pin::pin!(list());
        let answer = loop {
            tokio::select! {
                answer = asked.as_mut() => break answer,
                () = tokio::time::sleep(Duration::from_millis(20)) => ticks += 1,
            }
        };
        answer.expect("the earlier credentials are used");
        assert!(ticks >= 10, "{ticks} pauses of 20 ms in a second");
        let ran = || std::fs::read_to_string(&runs).unwrap().lines().count();
        let before = ran();
        list().await.unwrap();
        assert!(before > 0 && ran() == before, "it runs once in {AGAIN:?}");
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
