//! The client of the API server.

use std::path::{Path, PathBuf};
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

/// Where the objects are when nothing says otherwise.
pub const DEFAULT_NAMESPACE: &str = "kube-system";

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Nothing is silent for longer: a watch ends earlier by itself (`watch.rs`), and any other request has an answer by then.
/// What is left is a peer that is gone without a word.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

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
        "this is not a pod with a service account: {reason}; run it as one, or name a cluster with --kubeconfig FILE, \
         or run standalone with --inventory FILE"
    )]
    NotInCluster { reason: String },
    #[error("{key}={value}: not the name of a namespace (at most 63 lower-case letters, digits and '-')")]
    Namespace { key: &'static str, value: String },
}

/// A client as `options` say, and the namespace of the objects. No request is made: an API server that is away is no
/// error here.
///
/// # Errors
/// When the configuration is missing or wrong.
pub async fn connect(options: &KubeOptions) -> Result<(Client, String), KubeError> {
    connect_from(options, std::env::var("POD_NAMESPACE").ok()).await
}

async fn connect_from(options: &KubeOptions, pod: Option<String>) -> Result<(Client, String), KubeError> {
    let (config, configured) = match &options.kubeconfig {
        Some(path) => {
            let wrong = |reason| KubeError::Kubeconfig { path: path.clone(), reason };
            let (config, namespace) = from_file(path).await.map_err(|error| wrong(chain(&error)))?;
            if let Some(proxy) = &config.proxy_url {
                let reason =
                    format!("proxy-url {proxy} is not supported; the API server must be reached directly");
                return Err(wrong(reason));
            }
            (config, namespace)
        }
        None => {
            let config = Config::incluster()
                .map_err(|error| KubeError::NotInCluster { reason: in_cluster(&error) })?;
            let namespace = config.default_namespace.clone();
            (config, Some(namespace))
        }
    };
    let namespace = namespace(options.namespace.clone(), pod, configured)?;
    let client = build(config, &namespace).map_err(|error| match &options.kubeconfig {
        Some(path) => KubeError::Kubeconfig { path: path.clone(), reason: reason(&error) },
        None => KubeError::NotInCluster { reason: reason(&error) },
    })?;
    Ok((client, namespace))
}

async fn from_file(path: &Path) -> Result<(Config, Option<String>), KubeconfigError> {
    let mut kubeconfig = Kubeconfig::read_from(path)?;
    for cluster in kubeconfig.clusters.iter_mut().filter_map(|named| named.cluster.as_mut()) {
        // An empty one keeps $HTTPS_PROXY out: that is for the world outside, and a cluster's API server is not there.
        cluster.proxy_url.get_or_insert_default();
    }
    let namespace = kubeconfig.current_context.as_ref().and_then(|current| {
        let context = kubeconfig.contexts.iter().find(|named| &named.name == current)?;
        context.context.as_ref()?.namespace.clone().filter(|namespace| !namespace.is_empty())
    });
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    Ok((config, namespace))
}

/// The flag, else the pod's, else what the kubeconfig's context or the service account says.
fn namespace(
    flag: Option<String>,
    pod: Option<String>,
    configured: Option<String>,
) -> Result<String, KubeError> {
    let pod = pod.filter(|pod| !pod.is_empty());
    let (key, value) = match (flag, pod, configured) {
        (Some(flag), ..) => ("--namespace", flag),
        (None, Some(pod), _) => ("$POD_NAMESPACE", pod),
        (None, None, Some(configured)) => ("namespace", configured),
        (None, None, None) => return Ok(DEFAULT_NAMESPACE.to_owned()),
    };
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let valid = !value.is_empty()
        && value.len() <= 63
        && value.bytes().all(|byte| plain(byte) || byte == b'-')
        && !value.starts_with('-')
        && !value.ends_with('-');
    if valid { Ok(value) } else { Err(KubeError::Namespace { key, value }) }
}

fn build(mut config: Config, namespace: &str) -> Result<Client, kube::Error> {
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.read_timeout = Some(READ_TIMEOUT);
    // Else the time that a connection was in the pool counts.
    config.reset_reader_on_write = true;
    // Hidden retries of up to minutes would leave nobody to say that the API server is away.
    config.default_retry = false;
    namespace.clone_into(&mut config.default_namespace);
    let layer = MapResponseLayer::new(keep_retry_after);
    Ok(ClientBuilder::try_from(config)?.with_layer(&layer).build())
}

/// Moves the header Retry-After into the body: the client hands on nothing else of an error.
fn keep_retry_after<B>(response: Response<B>) -> Response<Either<B, Full<Bytes>>> {
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
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
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
    use crate::kube::ObjectNames;

    const TOKEN_USER: &str = "users:\n- name: u\n  user: {token: secret-token}\n";

    fn options(path: PathBuf) -> KubeOptions {
        KubeOptions { kubeconfig: Some(path), namespace: None, names: ObjectNames::default() }
    }

    fn kubeconfig(dir: &Path, cluster: &str, context: &str) -> PathBuf {
        let path = dir.join("kubeconfig");
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
             clusters:\n- name: k\n  cluster: {{server: 'https://127.0.0.1:1'{cluster}}}\n{TOKEN_USER}\
             contexts:\n- name: c\n  context: {{cluster: k, user: u{context}}}\n"
        );
        std::fs::write(&path, text).unwrap();
        path
    }

    fn ca(dir: &Path) {
        let key = rcgen::KeyPair::generate().unwrap();
        let ca = rcgen::CertificateParams::new(Vec::new()).unwrap().self_signed(&key).unwrap();
        std::fs::write(dir.join("ca.crt"), ca.pem()).unwrap();
    }

    async fn error(options: &KubeOptions) -> String {
        match connect_from(options, None).await {
            Ok(_) => panic!("this should be refused"),
            Err(error) => error.to_string(),
        }
    }

    /// YurtTunnel does not start with such a file.
    #[tokio::test]
    async fn a_kubeconfig_may_name_its_ca_by_a_file_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        ca(dir.path());
        let path = kubeconfig(dir.path(), ", certificate-authority: ca.crt", ", namespace: tunnel");
        let (client, namespace) = connect_from(&options(path), None).await.unwrap();
        assert_eq!((client.default_namespace(), namespace.as_str()), ("tunnel", "tunnel"));
    }

    #[tokio::test]
    async fn without_a_namespace_it_is_kube_system() {
        let dir = tempfile::tempdir().unwrap();
        ca(dir.path());
        let path = kubeconfig(dir.path(), ", certificate-authority: ca.crt", "");
        assert_eq!(connect_from(&options(path), None).await.unwrap().1, "kube-system");
    }

    #[test]
    fn the_flag_goes_before_the_pod_before_the_configuration() {
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(namespace(some("a"), some("b"), some("c")).unwrap(), "a");
        assert_eq!(namespace(None, some("b"), some("c")).unwrap(), "b");
        assert_eq!(namespace(None, some(""), some("c")).unwrap(), "c");
        assert_eq!(namespace(None, None, None).unwrap(), "kube-system");
        assert_eq!(
            namespace(some("Kube"), None, None).unwrap_err().to_string(),
            "--namespace=Kube: not the name of a namespace (at most 63 lower-case letters, digits and '-')"
        );
        assert!(
            namespace(None, some("a/b"), None).unwrap_err().to_string().starts_with("$POD_NAMESPACE=a/b: ")
        );
    }

    #[tokio::test]
    async fn errors_name_the_flag_the_file_and_the_mend_and_no_token() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("missing");
        let text = error(&options(missing.clone())).await;
        assert!(text.starts_with(&format!("--kubeconfig={}: failed to read", missing.display())), "{text}");
        assert!(text.contains("No such file"), "{text}");
        assert!(text.ends_with(&format!("`kubectl --kubeconfig {}` works", missing.display())), "{text}");

        let without_ca = kubeconfig(dir.path(), ", certificate-authority: ca.crt", "");
        let text = error(&options(without_ca)).await;
        assert!(text.contains("ca.crt") && text.contains("No such file"), "{text}");
        assert!(!text.contains("secret-token"), "{text}");

        let proxied = kubeconfig(dir.path(), ", proxy-url: 'http://proxy:3128'", "");
        let text = error(&options(proxied)).await;
        assert!(text.contains("proxy-url http://proxy:3128/ is not supported"), "{text}");

        let garbage = dir.path().join("garbage");
        std::fs::write(&garbage, "a: [").unwrap();
        let text = error(&options(garbage)).await;
        assert!(text.contains("failed to parse kubeconfig YAML"), "{text}");
    }

    #[test]
    fn outside_a_pod_the_error_says_what_to_do() {
        let missing = InClusterError::ReadEnvironmentVariable(std::env::VarError::NotPresent);
        assert_eq!(
            KubeError::NotInCluster { reason: in_cluster(&missing) }.to_string(),
            "this is not a pod with a service account: $KUBERNETES_SERVICE_HOST and $KUBERNETES_SERVICE_PORT are not \
             set; run it as one, or name a cluster with --kubeconfig FILE, or run standalone with --inventory FILE"
        );
    }
}
