//! The API server's client.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http::header::RETRY_AFTER;
use http::{Response, StatusCode};
use http_body_util::{Either, Full};
use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::dns::Name;
use hyper_util::rt::TokioExecutor;
use kube::Client;
use kube::client::ConfigExt as _;
use kube::config::{Config, InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::core::Status;
use kube::core::response::StatusDetails;
use tower::util::MapResponseLayer;
use tower::{BoxError, ServiceBuilder, service_fn};
use tunnel_runtime::NodeName;
use tunnel_runtime::config::ConfigError;
use tunnel_runtime::error::chain;
use tunnel_runtime::net::lookup;
use tunnel_runtime::text::printable;

/// Namespace of the objects if none is configured.
const DEFAULT_NAMESPACE: &str = "kube-system";

/// Differences between the server's and the agent's client.
#[derive(Clone, Copy, Debug)]
pub struct ClientSettings {
    /// An edge's uplink may take long to connect.
    pub connect_timeout: Duration,
    /// Maximum time without a byte from the API server. At least as long as any request may take, and longer than a
    /// watch is silent: the API server ends a watch or sends a bookmark each minute. Only a peer that is gone without
    /// closing is silent for this long.
    pub read_timeout: Duration,
    /// Accepts the system's roots for a kubeconfig without a CA. An edge may have none.
    pub system_roots: bool,
    /// Advice for the error when there is neither a service account nor a kubeconfig.
    pub advice: &'static str,
}

impl ClientSettings {
    pub const SERVER: Self = Self {
        connect_timeout: Duration::from_secs(5),
        read_timeout: Duration::from_secs(60),
        system_roots: true,
        advice: "run it as one, or name a cluster with --kubeconfig FILE, or run standalone with --inventory FILE",
    };

    pub const AGENT: Self = Self {
        connect_timeout: Duration::from_secs(10),
        read_timeout: Duration::from_secs(300),
        system_roots: false,
        advice: "run it as one, or give --kubeconfig FILE, or enrol without an API server by --server, --token and \
                 --ca-hash",
    };
}

/// Returns a client and the namespace of the objects. Without `kubeconfig` the client is configured as in a pod. Makes
/// no request, so an API server that is down is no error here.
///
/// The namespace is the one given, else the pod's ($POD_NAMESPACE), else that of the kubeconfig's context or of the
/// service account, else `kube-system`.
///
/// # Errors
/// The configuration is missing or wrong.
pub async fn connect(
    kubeconfig: Option<&Path>,
    namespace: Option<&str>,
    settings: &ClientSettings,
) -> Result<(Client, String), ConfigError> {
    let pod = std::env::var("POD_NAMESPACE").ok();
    connect_from(kubeconfig, namespace, pod, settings).await
}

/// The IP address at which [`connect`] reaches the API server. None if it is a name or the configuration is wrong.
pub async fn api_server_address(kubeconfig: Option<&Path>) -> Option<IpAddr> {
    let config = match kubeconfig {
        Some(path) => from_file(path).await.ok()?.0,
        None => Config::incluster_env().ok()?,
    };
    let host = config.cluster_url.host()?;
    host.trim_start_matches('[')
        .trim_end_matches(']')
        .parse::<IpAddr>()
        .ok()
        .map(|address| address.to_canonical())
}

async fn connect_from(
    kubeconfig: Option<&Path>,
    namespace: Option<&str>,
    pod: Option<String>,
    settings: &ClientSettings,
) -> Result<(Client, String), ConfigError> {
    let unusable = |reason: String| unusable(kubeconfig, &reason, settings.advice);
    let (config, configured) = match kubeconfig {
        Some(path) => {
            let (config, namespace) = from_file(path).await.map_err(|error| unusable(chain(&error)))?;
            supported(&config, settings).map_err(unusable)?;
            (config, namespace)
        }
        None => {
            let config = Config::incluster().map_err(|error| unusable(in_cluster(&error)))?;
            let namespace = config.default_namespace.clone();
            (config, Some(namespace))
        }
    };
    let namespace = choose_namespace(namespace.map(str::to_owned), pod, configured)?;
    let client = build(config, &namespace, settings).map_err(|error| unusable(reason(&error)))?;
    Ok((client, namespace))
}

fn unusable(kubeconfig: Option<&Path>, reason: &str, advice: &str) -> ConfigError {
    match kubeconfig.map(Path::display) {
        Some(path) => {
            let fix = if reason.contains("UnsupportedCertVersion") {
                // kubectl works with such a file.
                "issue a client certificate of X.509 version 3, the only one that this program can use here, or use a token".to_owned()
            } else {
                format!("name a file with which `kubectl --kubeconfig {path}` works")
            };
            ConfigError::new("--kubeconfig", path.to_string(), format!("{reason}; {fix}"))
        }
        None => {
            let reason = format!("this is not a pod with a service account: {reason}; {advice}");
            ConfigError::without_value("--kubeconfig", reason)
        }
    }
}

/// Reads a kubeconfig. Also returns the namespace of the current context.
async fn from_file(path: &Path) -> Result<(Config, Option<String>), KubeconfigError> {
    let mut kubeconfig = Kubeconfig::read_from(path)?;
    for cluster in kubeconfig.clusters.iter_mut().filter_map(|named| named.cluster.as_mut()) {
        // An empty URL keeps kube from taking $HTTPS_PROXY, which this client does not use.
        cluster.proxy_url.get_or_insert_default();
    }
    let namespace = kubeconfig.current_context.as_ref().and_then(|current| {
        let context = kubeconfig.contexts.iter().find(|named| &named.name == current)?;
        context.context.as_ref()?.namespace.clone().filter(|namespace| !namespace.is_empty())
    });
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    Ok((config, namespace))
}

fn supported(config: &Config, settings: &ClientSettings) -> Result<(), String> {
    if let Some(proxy) = &config.proxy_url {
        return Err(format!("proxy-url {proxy} is not supported; the API server must be reached directly"));
    }
    let verified = config.cluster_url.scheme_str() == Some("https") && !config.accept_invalid_certs;
    if verified && config.root_cert.is_none() && !settings.system_roots {
        return Err("the cluster has neither certificate-authority nor certificate-authority-data".to_owned());
    }
    Ok(())
}

fn choose_namespace(
    flag: Option<String>,
    pod: Option<String>,
    configured: Option<String>,
) -> Result<String, ConfigError> {
    let pod = pod.filter(|pod| !pod.is_empty());
    let (key, value) = match (flag, pod, configured) {
        (Some(flag), ..) => ("--namespace", flag),
        (None, Some(pod), _) => ("$POD_NAMESPACE", pod),
        (None, None, Some(configured)) => ("namespace", configured),
        (None, None, None) => return Ok(DEFAULT_NAMESPACE.to_owned()),
    };
    let valid = value.len() <= 63 && !value.contains('.') && value.parse::<NodeName>().is_ok();
    if valid {
        Ok(value)
    } else {
        let reason = "not the name of a namespace (at most 63 lower-case letters, digits and '-')";
        Err(ConfigError::new(key, value, reason))
    }
}

fn build(mut config: Config, namespace: &str, settings: &ClientSettings) -> Result<Client, kube::Error> {
    config.connect_timeout = Some(settings.connect_timeout);
    config.read_timeout = Some(settings.read_timeout);
    // As in `ClientBuilder::try_from`, except for the resolver and the time for each address.
    let http = http_connector(service_fn(resolve), settings);
    let mut connector = TimeoutConnector::new(config.rustls_https_connector_with_connector(http)?);
    connector.set_connect_timeout(config.connect_timeout);
    connector.set_read_timeout(config.read_timeout);
    // Without this the time that a connection spent in the pool would count.
    connector.set_reset_reader_on_write(true);
    let service = ServiceBuilder::new()
        .layer(MapResponseLayer::new(keep_retry_after))
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(HttpClient::builder(TokioExecutor::new()).build(connector));
    Ok(Client::new(service, namespace))
}

/// Connects to the addresses of a name in turn.
fn http_connector<R>(resolver: R, settings: &ClientSettings) -> HttpConnector<R> {
    let mut http = HttpConnector::new_with_resolver(resolver);
    http.enforce_http(false);
    // Divided among the addresses, so that one that does not answer does not hide the others. Less than the limit of the
    // whole attempt, which includes the lookup and TLS.
    http.set_connect_timeout(Some(settings.connect_timeout * 9 / 10));
    http
}

/// Resolves the API server's name. The port is filled in later.
async fn resolve(name: Name) -> io::Result<std::vec::IntoIter<SocketAddr>> {
    Ok(lookup(name.as_str(), 0).await?.into_iter())
}

/// Copies the Retry-After header into the body, because kube's client returns nothing but the body of an error.
pub(crate) fn keep_retry_after<B>(response: Response<B>) -> Response<Either<B, Full<Bytes>>> {
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

/// The text of a failed request's error. If the API server answered, its own message, which names a missing permission
/// by verb, resource and namespace. A proxy's may be a page.
pub fn reason(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => {
            let code = format!("{} {}", status.code, status.reason);
            format!("{} ({})", printable(&status.message, 512), code.trim_end())
        }
        kube::Error::Service(error) => chain(error.as_ref()),
        _ => chain(error),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use http::Uri;
    use tokio::net::{TcpListener, TcpSocket, TcpStream};
    use tokio::time::timeout;
    use tower::ServiceExt as _;

    use super::*;

    const SKIP_VERIFY: &str = ", insecure-skip-tls-verify: true";

    fn kubeconfig(dir: &Path, cluster: &str, context: &str) -> PathBuf {
        let path = dir.join("kubeconfig");
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
             clusters:\n- name: k\n  cluster: {{server: 'https://127.0.0.1:1'{cluster}}}\n\
             users:\n- name: u\n  user: {{token: secret-token}}\n\
             contexts:\n- name: c\n  context: {{cluster: k, user: u{context}}}\n"
        );
        std::fs::write(&path, text).unwrap();
        path
    }

    async fn open(path: &Path, namespace: Option<&str>) -> Result<(Client, String), ConfigError> {
        connect_from(Some(path), namespace, None, &ClientSettings::AGENT).await
    }

    /// Such a kubeconfig keeps YurtTunnel from starting.
    #[tokio::test]
    async fn a_kubeconfig_may_name_a_ca_file_next_to_it() {
        let dir = tempfile::tempdir().unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        let ca = rcgen::CertificateParams::new(Vec::new()).unwrap().self_signed(&key).unwrap();
        std::fs::write(dir.path().join("ca.crt"), ca.pem()).unwrap();
        let path = kubeconfig(dir.path(), ", certificate-authority: ca.crt", ", namespace: tunnel");
        let (client, namespace) = open(&path, None).await.unwrap();
        assert_eq!((client.default_namespace(), namespace.as_str()), ("tunnel", "tunnel"));
    }

    /// MicroK8s' kubeconfigs have such certificates.
    #[tokio::test]
    async fn a_client_certificate_of_x509_version_1_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let both = include_str!("../../tunnel-pki/testdata/version_1.pem");
        std::fs::write(dir.path().join("both.pem"), both).unwrap();
        let path = kubeconfig(dir.path(), SKIP_VERIFY, "");
        let text = std::fs::read_to_string(&path).unwrap();
        let user = "client-certificate: both.pem, client-key: both.pem";
        std::fs::write(&path, text.replace("token: secret-token", user)).unwrap();
        let error = open(&path, None).await.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains("X.509 version 3") && !error.contains("kubectl"), "{error}");
    }

    #[tokio::test]
    async fn the_api_servers_address_is_that_of_the_kubeconfig() {
        let dir = tempfile::tempdir().unwrap();
        let path = kubeconfig(dir.path(), SKIP_VERIFY, "");
        let text = std::fs::read_to_string(&path).unwrap();
        for (host, expected) in
            [("10.70.0.2", Some("10.70.0.2")), ("[fd00::2]", Some("fd00::2")), ("api.example", None)]
        {
            std::fs::write(&path, text.replace("127.0.0.1:1", &format!("{host}:6443"))).unwrap();
            let expected = expected.map(|address| address.parse().unwrap());
            assert_eq!(api_server_address(Some(&path)).await, expected, "{host}");
        }
    }

    #[tokio::test]
    async fn an_address_that_does_not_answer_does_not_hide_the_next() {
        // Its queue is full, so the kernel drops further SYNs.
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let silent = socket.listen(1).unwrap();
        let mut queued = Vec::new();
        let connect = || TcpStream::connect(silent.local_addr().unwrap());
        while let Ok(stream) = timeout(Duration::from_millis(500), connect()).await {
            queued.push(stream.unwrap());
        }
        let answers = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addresses = [&silent, &answers].map(|listener| listener.local_addr().unwrap());
        let resolver =
            service_fn(move |_: Name| std::future::ready(Ok::<_, io::Error>(addresses.into_iter())));
        let settings = ClientSettings { connect_timeout: Duration::from_secs(4), ..ClientSettings::AGENT };
        let connecting = http_connector(resolver, &settings).oneshot(Uri::from_static("http://api.example"));
        let stream = timeout(settings.connect_timeout, connecting).await.expect("no turn for it").unwrap();
        assert_eq!(stream.inner().peer_addr().unwrap(), addresses[1]);
    }

    #[tokio::test]
    async fn the_namespace_is_the_flags_then_the_contexts_then_kube_system() {
        let dir = tempfile::tempdir().unwrap();
        for (flag, context, expected) in [
            (None, "", "kube-system"),
            (None, ", namespace: edge", "edge"),
            (Some("x"), ", namespace: edge", "x"),
        ] {
            let path = kubeconfig(dir.path(), SKIP_VERIFY, context);
            assert_eq!(open(&path, flag).await.unwrap().1, expected);
        }
    }

    #[test]
    fn the_flag_precedes_the_pod_precedes_the_configuration() {
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(choose_namespace(some("a"), some("b"), some("c")).unwrap(), "a");
        assert_eq!(choose_namespace(None, some("b"), some("c")).unwrap(), "b");
        assert_eq!(choose_namespace(None, some(""), some("c")).unwrap(), "c");
        assert_eq!(choose_namespace(None, None, None).unwrap(), "kube-system");
        assert_eq!(
            choose_namespace(some("Kube"), None, None).unwrap_err().to_string(),
            "--namespace=Kube: not the name of a namespace (at most 63 lower-case letters, digits and '-')"
        );
        let error = choose_namespace(None, some("a/b"), None).unwrap_err().to_string();
        assert!(error.starts_with("$POD_NAMESPACE=a/b: "), "{error}");
    }

    #[tokio::test]
    async fn an_unusable_kubeconfig_is_named_with_the_fix_and_without_its_token() {
        let dir = tempfile::tempdir().unwrap();
        let check = async |path: &Path, part: &str| {
            let error = open(path, None).await.map(|_| ()).unwrap_err().to_string();
            assert!(error.starts_with(&format!("--kubeconfig={}: ", path.display())), "{error}");
            assert!(error.ends_with(&format!("`kubectl --kubeconfig {}` works", path.display())), "{error}");
            assert!(error.contains(part) && !error.contains("secret-token"), "{error}");
        };
        for (cluster, part) in [
            ("", "neither certificate-authority nor"),
            (", certificate-authority: /no/such.crt", "/no/such.crt"),
            (", certificate-authority: ca.crt", "No such file"),
            (", certificate-authority-data: '!'", ""),
            (", proxy-url: 'http://proxy:3128'", "proxy-url http://proxy:3128/ is not supported"),
        ] {
            check(&kubeconfig(dir.path(), cluster, ""), part).await;
        }
        let missing = dir.path().join("missing");
        check(&missing, "failed to read").await;
        check(&missing, "No such file").await;
        let garbage = dir.path().join("garbage");
        std::fs::write(&garbage, "a: [").unwrap();
        check(&garbage, "failed to parse kubeconfig YAML").await;
    }

    #[test]
    fn outside_a_pod_the_error_says_what_to_do() {
        let missing = InClusterError::ReadEnvironmentVariable(std::env::VarError::NotPresent);
        let error = unusable(None, &in_cluster(&missing), ClientSettings::SERVER.advice);
        assert_eq!(
            error.to_string(),
            "--kubeconfig: this is not a pod with a service account: $KUBERNETES_SERVICE_HOST and $KUBERNETES_SERVICE_PORT are not \
             set; run it as one, or name a cluster with --kubeconfig FILE, or run standalone with --inventory FILE"
        );
    }

    #[test]
    fn a_page_of_a_proxy_does_not_fill_the_log() {
        let mut status =
            Status::failure(&"<html>\n".repeat(10_000), "Failed to parse error data").with_code(502);
        let text = reason(&kube::Error::Api(Box::new(status.clone())));
        assert!(text.len() < 2000 && text.ends_with(" (502 Failed to parse error data)"), "{text}");
        assert!(!text.contains('\n'));
        status.message = "no".to_owned();
        status.reason = String::new();
        assert_eq!(reason(&kube::Error::Api(Box::new(status))), "no (502)");
    }
}
