//! The client of the API server.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::header::RETRY_AFTER;
use http::{Response, StatusCode};
use http_body_util::{Either, Full};
use kube::Client;
use kube::client::ClientBuilder;
use kube::config::{Config, InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::core::Status;
use kube::core::response::StatusDetails;
use tower::util::MapResponseLayer;

use super::KubeOptions;

const DEFAULT_NAMESPACE: &str = "kube-system";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// A watch that has nothing to tell ends before (290 s), and any other request has an answer by then: what is left is a
/// peer that is gone without a word.
const READ_TIMEOUT: Duration = Duration::from_secs(300);

/// Why there is no client.
#[derive(Debug, thiserror::Error)]
pub enum KubeError {
    #[error(
        "--kubeconfig={}: {reason}; name a file with which `kubectl --kubeconfig {}` works",
        path.display(),
        path.display()
    )]
    Kubeconfig { path: PathBuf, reason: String },
    #[error(
        "this is not a pod with a service account: {reason}; run it as one, or give --kubeconfig FILE, or enrol without \
         an API server by --server, --token and --ca-hash"
    )]
    NotInCluster { reason: String },
}

/// The API server, as the configuration says at each moment.
pub struct ApiServer {
    options: KubeOptions,
    namespace: String,
    client: Mutex<Option<Client>>,
}

impl ApiServer {
    /// Reads the configuration. No request is made: an API server that is away is no error here.
    ///
    /// # Errors
    /// When the configuration is missing or wrong.
    pub async fn open(options: KubeOptions) -> Result<Arc<Self>, KubeError> {
        let (client, configured) = connect(&options).await?;
        let pod = std::env::var("POD_NAMESPACE").ok().filter(|namespace| !namespace.is_empty());
        let namespace = options.namespace.clone().or(pod).or(configured);
        let namespace = namespace.unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned());
        Ok(Arc::new(Self { options, namespace, client: Mutex::new(Some(client)) }))
    }

    /// Where the Service is.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The Service that leads to the servers.
    pub fn service(&self) -> &str {
        &self.options.service
    }

    fn cached(&self) -> std::sync::MutexGuard<'_, Option<Client>> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The client for the next request.
    ///
    /// # Errors
    /// When the configuration, which is read again after a failure, is missing or wrong now.
    pub async fn client(&self) -> Result<Client, KubeError> {
        if let Some(client) = self.cached().clone() {
            return Ok(client);
        }
        let (client, _) = connect(&self.options).await?;
        *self.cached() = Some(client.clone());
        Ok(client)
    }

    /// After a failure the configuration is read again: the kubelet replaces its certificate, and an administrator the
    /// CA or the address. (Token files are read again by the client itself, once a minute.)
    pub fn failed(&self) {
        *self.cached() = None;
    }
}

async fn connect(options: &KubeOptions) -> Result<(Client, Option<String>), KubeError> {
    let (mut config, namespace) = match &options.kubeconfig {
        Some(path) => from_file(path).await?,
        None => {
            let config = Config::incluster()
                .map_err(|error| KubeError::NotInCluster { reason: in_cluster(&error) })?;
            let namespace = config.default_namespace.clone();
            (config, Some(namespace))
        }
    };
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.read_timeout = Some(READ_TIMEOUT);
    // Else the time that a connection was in the pool counts.
    config.reset_reader_on_write = true;
    // Whoever asks has its own pauses, and says what it waits for.
    config.default_retry = false;
    let builder = ClientBuilder::try_from(config).map_err(|error| match &options.kubeconfig {
        Some(path) => KubeError::Kubeconfig { path: path.clone(), reason: reason(&error) },
        None => KubeError::NotInCluster { reason: reason(&error) },
    })?;
    Ok((builder.with_layer(&MapResponseLayer::new(keep_retry_after)).build(), namespace))
}

/// Moves the header Retry-After into the body: the client hands on nothing else of an error.
pub(super) fn keep_retry_after<B>(response: Response<B>) -> Response<Either<B, Full<Bytes>>> {
    let seconds =
        response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse::<u32>().ok());
    let (code, reason) = match response.status() {
        StatusCode::TOO_MANY_REQUESTS => (429, "TooManyRequests"),
        StatusCode::SERVICE_UNAVAILABLE => (503, "ServiceUnavailable"),
        _ => return response.map(Either::Left),
    };
    let Some(seconds) = seconds else { return response.map(Either::Left) };
    let mut status =
        Status::failure(&format!("the API server asks to wait for {seconds} s"), reason).with_code(code);
    status.details = Some(StatusDetails {
        name: String::new(),
        group: String::new(),
        kind: String::new(),
        uid: String::new(),
        causes: Vec::new(),
        retry_after_seconds: seconds,
    });
    match serde_json::to_vec(&status) {
        Ok(body) => response.map(|_| Either::Right(Full::from(body))),
        Err(_) => response.map(Either::Left),
    }
}

async fn from_file(path: &Path) -> Result<(Config, Option<String>), KubeError> {
    let wrong = |reason| KubeError::Kubeconfig { path: path.to_owned(), reason };
    let read = |error: KubeconfigError| wrong(chain(&error));
    let mut kubeconfig = Kubeconfig::read_from(path).map_err(read)?;
    for cluster in kubeconfig.clusters.iter_mut().filter_map(|named| named.cluster.as_mut()) {
        // An empty one keeps $HTTPS_PROXY out, which this client does not use.
        cluster.proxy_url.get_or_insert_default();
    }
    let namespace = kubeconfig.current_context.as_ref().and_then(|current| {
        let context = kubeconfig.contexts.iter().find(|named| &named.name == current)?;
        context.context.as_ref()?.namespace.clone().filter(|namespace| !namespace.is_empty())
    });
    let config =
        Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.map_err(read)?;
    if let Some(proxy) = &config.proxy_url {
        return Err(wrong(format!(
            "proxy-url {proxy} is not supported; the API server must be reached directly"
        )));
    }
    if config.root_cert.is_none()
        && !config.accept_invalid_certs
        && config.cluster_url.scheme_str() == Some("https")
    {
        // The system's roots, which an edge may not have, sign no cluster's API server.
        return Err(wrong(
            "the cluster has neither certificate-authority nor certificate-authority-data".to_owned(),
        ));
    }
    Ok((config, namespace))
}

fn in_cluster(error: &InClusterError) -> String {
    match error {
        InClusterError::ReadEnvironmentVariable(_) => {
            "$KUBERNETES_SERVICE_HOST and $KUBERNETES_SERVICE_PORT are not set".to_owned()
        }
        _ => chain(error),
    }
}

/// What went wrong with a request, for people.
pub(crate) fn reason(error: &kube::Error) -> String {
    match error {
        // A missing permission is named there by verb, resource and namespace.
        kube::Error::Api(status) if status.reason.is_empty() => {
            format!("{} ({})", status.message, status.code)
        }
        kube::Error::Api(status) => format!("{} ({} {})", status.message, status.code, status.reason),
        kube::Error::Service(error) => chain(error.as_ref()),
        _ => chain(error),
    }
}

/// An error and its causes: the outer ones say little ("client error (Connect)").
pub(super) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(current) = cause {
        let part = current.to_string();
        // Some quote their source themselves.
        if !text.contains(&part) {
            text = format!("{text}: {part}");
        }
        cause = current.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const CA: &str = ", insecure-skip-tls-verify: true";

    fn options(directory: &Path, cluster: &str, context: &str) -> KubeOptions {
        let path = directory.join("kubeconfig");
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
             clusters:\n- name: k\n  cluster: {{server: 'https://127.0.0.1:1'{cluster}}}\n\
             users:\n- name: u\n  user: {{token: secret-token}}\n\
             contexts:\n- name: c\n  context: {{cluster: k, user: u{context}}}\n"
        );
        std::fs::write(&path, text).unwrap();
        KubeOptions { kubeconfig: Some(path), namespace: None, service: "s".to_owned() }
    }

    async fn error(options: KubeOptions) -> String {
        ApiServer::open(options).await.map(|_| ()).unwrap_err().to_string()
    }

    #[tokio::test]
    async fn the_namespace_is_the_flags_else_the_contexts_else_kube_system() {
        let directory = tempfile::tempdir().unwrap();
        for (flag, context, expected) in [
            (None, "", "kube-system"),
            (None, ", namespace: edge", "edge"),
            (Some("x"), ", namespace: edge", "x"),
        ] {
            let mut options = options(directory.path(), CA, context);
            options.namespace = flag.map(str::to_owned);
            assert_eq!(ApiServer::open(options).await.unwrap().namespace(), expected);
        }
    }

    #[tokio::test]
    async fn a_bad_kubeconfig_is_named_with_the_mend() {
        let directory = tempfile::tempdir().unwrap();
        for (cluster, part) in [
            ("", "neither certificate-authority nor"),
            (", certificate-authority: /no/such.crt", "/no/such.crt"),
            (", certificate-authority-data: '!'", ""),
            (", proxy-url: 'http://p:1', insecure-skip-tls-verify: true", "proxy-url"),
        ] {
            let options = options(directory.path(), cluster, "");
            let path = options.kubeconfig.clone().unwrap();
            let expected = format!("--kubeconfig={}: ", path.display());
            let error = error(options).await;
            assert!(
                error.starts_with(&expected) && error.contains(part) && error.contains("kubectl"),
                "{error}"
            );
            assert!(!error.contains("secret-token"));
        }
        let missing = KubeOptions {
            kubeconfig: Some(directory.path().join("none")),
            namespace: None,
            service: "s".to_owned(),
        };
        assert!(error(missing).await.contains("No such file"));
    }

    #[tokio::test]
    async fn after_a_failure_the_file_is_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let api = ApiServer::open(options(directory.path(), CA, "")).await.unwrap();
        std::fs::write(directory.path().join("kubeconfig"), "").unwrap();
        api.client().await.unwrap();
        api.failed();
        assert!(api.client().await.is_err());
        options(directory.path(), CA, "");
        api.client().await.unwrap();
    }
}
