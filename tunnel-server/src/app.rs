//! Builds everything, runs until told to stop, and stops in order. The only module that knows all parts.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use prometheus_client::registry::Registry;
use socket2::SockRef;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tunnel_core::admin::{Admin, register_process_metrics};
use tunnel_core::config::{BindError, ConfigError};
use tunnel_core::identity::{NodeName, TrustBundle};
use tunnel_core::lifecycle::{Drain, Readiness, Shutdown, raise_open_files};
use tunnel_core::logging;
use tunnel_kube::KubeError;

use crate::admission::Admission;
use crate::config::{Config, NodeSource};
use crate::door::{self, Door, Hall, Http, Https, Redirected};
use crate::inventory::{FileSource, Inventory};
use crate::kube::{Kube, Parts};
use crate::metrics::Metrics;
use crate::pki::{Ca, EnrollService, Lifetimes, PkiMetrics, ServerCertificate, ServerFile, ServerNames};
use crate::redirect::{Redirect, RedirectConfig, RedirectError, RedirectMetrics};
use crate::report::{Reporter, SourceReport};
use crate::route::{Router, RouterConfig, host_addresses};
use crate::session::{AgentPort, AgentPortConfig, Sessions, Workers};
use crate::settings::Doors;

/// How long the agents' links, and this server's own tasks, may take to end once nothing is carried any more.
const CLOSING: Duration = Duration::from_secs(3);
/// Redirected connections that the kernel completes before they are accepted (`net.core.somaxconn` may say less): those
/// beyond are dialled again by the caller's kernel, after a second.
const BACKLOG: i32 = 4096;
/// Changes of routes within this time are applied as one.
const FEED_PAUSE: Duration = Duration::from_millis(20);
/// How often this host's addresses are compared with the inventory's.
const HOST_PERIOD: Duration = Duration::from_secs(30);
/// Pause after the kernel refused a change of its maps.
const FEED_RETRY: Duration = Duration::from_secs(1);

/// Runs the server until `shutdown`.
///
/// # Errors
/// What keeps it from starting, each with its mend: files, addresses in use, a redirect that is on and impossible.
pub async fn run(config: Config, log: logging::Handle, shutdown: Shutdown) -> anyhow::Result<()> {
    let open_files = raise_open_files();
    let server_id = server_id();
    let mut registry = Registry::default();
    register_process_metrics(&mut registry, env!("CARGO_PKG_VERSION"));
    let pki_metrics = PkiMetrics::register(&mut registry);
    let postern = registry.sub_registry_with_prefix("postern");
    let metrics = Metrics::new(postern);
    let router = Arc::new(Router::new(router_config(&config), postern));
    let lifetimes = Lifetimes::from_environment()?;
    let source = Source::open(&config, lifetimes, postern).await?;
    let sessions = Arc::new(Sessions::new(router.clone(), metrics.clone()));
    let drain = Drain::new(shutdown.clone());
    let readiness = Readiness::new();
    let starting = readiness.pending("start");

    // The doors' addresses are taken before the redirect is touched: a second server fails before it gets that far.
    let agents = listen("--agent-port", config.bind_address, config.agent_port).await?;
    let https = listen("--secure-port", config.bind_address, config.secure_port).await?;
    let http = match config.insecure_address {
        Some(address) => listen("--insecure-port", address.ip(), Some(address.port())).await?,
        None => None,
    };
    let redirected = match &config.redirect {
        Some(options) => Some(start_redirect(options.clone()).await?),
        None => None,
    };
    let redirect = redirected.as_ref().map(|started| started.redirect.clone());
    if let Some(redirect) = &redirect {
        let postern = registry.sub_registry_with_prefix("postern");
        postern.register_collector(Box::new(RedirectMetrics(redirect.clone())));
    }
    let reporter = Reporter::new(
        &server_id,
        &readiness,
        &sessions,
        &router,
        source.status(&router),
        &metrics,
        redirect.clone(),
    );
    let doors = [("agents", agents.as_ref()), (Https::NAME, https.as_ref()), (Http::NAME, http.as_ref())];
    for (door, listener) in doors.into_iter().filter_map(|(door, listener)| Some((door, listener?))) {
        reporter.door(door, listener.local_addr()?);
    }
    for listener in redirected.iter().flat_map(|started| &started.listeners) {
        reporter.door(Redirected::NAME, listener.local_addr()?);
    }
    let admin = match config.admin_address {
        Some(address) => {
            let admin = Admin {
                registry: Arc::new(registry),
                readiness: readiness.clone(),
                status: reporter.status(),
                log,
            };
            Some(admin.bind("--admin-address", address)?.serve()?)
        }
        None => None,
    };
    let workers = Arc::new(Workers::start(std::thread::available_parallelism().map_or(1, usize::from))?);
    if let Some(listener) = &agents {
        ServerFile { agent_addresses: agent_addresses(&config, listener.local_addr()?) }
            .write(&config.state_dir)?;
    }

    let Some(ca) = source.authority(&config, lifetimes, &readiness, &shutdown).await? else { return Ok(()) };
    let certificate = Arc::new(ServerCertificate::start(ca, server_names(&config), pki_metrics.clone())?);

    // From here on nothing fails any more; what runs is stopped below.
    let tasks = TaskTracker::new();
    let stop = CancellationToken::new();
    let (settings, settings_now) = watch::channel(Arc::default());
    match source {
        Source::File { source, inventory, .. } => {
            router.set_inventory(inventory);
            let following = router.clone();
            tasks.spawn(source.run(move |inventory| following.set_inventory(inventory), shutdown.clone()));
        }
        Source::Kubernetes(kube) => kube.start(Parts {
            router: router.clone(),
            sessions: sessions.clone(),
            certificate: certificate.clone(),
            server_names: server_names(&config),
            server_id: &server_id,
            selector: config.edge_selector.clone(),
            doors: doors_of(&config),
            state_dir: config.state_dir.clone(),
            pki_metrics: pki_metrics.clone(),
            settings: settings.clone(),
            nodes_known: readiness.pending("nodes"),
            tasks: &tasks,
            draining: shutdown.draining_token().child_token(),
            stop: stop.clone(),
        }),
    }
    if let Some(redirect) = &redirect {
        feed_once(redirect, &router, None).await;
        tasks.spawn(feed(redirect.clone(), router.clone(), stop.clone()));
        tasks.spawn(redirect.clone().watch(stop.clone()));
        tasks.spawn(follow_host(router.clone(), stop.clone()));
    }
    let agent_port = AgentPort::new(AgentPortConfig {
        server_id: server_id.clone(),
        tls: certificate.tls(),
        bundle: follow_bundle(certificate.ca(), &tasks, stop.clone()),
        settings: settings_now,
        sessions: sessions.clone(),
        workers: workers.clone(),
        enroll: EnrollService::new(certificate.ca(), &config.state_dir, pki_metrics),
        metrics: metrics.clone(),
        draining: shutdown.draining_token().clone(),
        stop: stop.clone(),
        drain_timeout: config.drain_timeout,
    });
    // Anybody may dial the https door; they must leave file descriptors for the agents and for this host's own callers.
    let strangers = Admission::new(open_files / 4, open_files / 8);
    let hall = Hall { router, sessions, metrics, drain: drain.clone() };
    if let Some(listener) = agents {
        tasks.spawn(agent_port.clone().serve(listener));
    }
    if let Some(listener) = https {
        tasks.spawn(door::serve(Https, listener, hall.clone(), Some(strangers.clone())));
    }
    if let Some(listener) = http {
        tasks.spawn(door::serve(Http, listener, hall.clone(), Some(strangers.clone())));
    }
    for listener in redirected.into_iter().flat_map(|started| started.listeners) {
        // There are listeners only when there is a redirect.
        let Some(redirect) = redirect.clone() else { continue };
        tasks.spawn(door::serve(Redirected { redirect }, listener, hall.clone(), None));
    }
    tasks.close();
    starting.ready();
    tracing::info!(server_id, "serving");

    shutdown.draining().await;
    let stopping = readiness.pending("stopping");
    if let Some(redirect) = &redirect
        && let Err(error) = redirect.drain()
    {
        tracing::warn!(%error, "new connects to edge nodes are not refused while draining");
    }
    let drained = drain.finish(config.drain_timeout).await;
    stop.cancel();
    let closed = async {
        agent_port.closed().await;
        tasks.wait().await;
    };
    if tokio::time::timeout(CLOSING, closed).await.is_err() {
        tracing::debug!("some links or tasks did not end in time");
    }
    if let Some(redirect) = redirect {
        tokio::task::spawn_blocking(move || redirect.stop()).await.context("stopping the redirect")?;
    }
    tracing::info!(%drained, "stopped");
    drop((stopping, admin, settings));
    Ok(())
}

/// Where nodes and CA come from.
enum Source {
    File { source: Arc<FileSource>, inventory: Inventory, ca: Ca },
    Kubernetes(Kube),
}

impl Source {
    /// Everything about it that can be wrong before anything else is touched.
    async fn open(config: &Config, lifetimes: Lifetimes, postern: &mut Registry) -> anyhow::Result<Self> {
        match &config.source {
            NodeSource::File(path) => {
                let (source, inventory) =
                    FileSource::open(path.clone(), config.edge_selector.clone(), postern).map_err(
                        |error| {
                            ConfigError::new("--inventory", path.display().to_string(), error.to_string())
                        },
                    )?;
                let ca = Ca::load_or_create(&config.state_dir, lifetimes)?;
                Ok(Self::File { source, inventory, ca })
            }
            NodeSource::Kubernetes(options) => {
                let kube = Kube::connect(options, postern).await.map_err(configuration)?;
                Ok(Self::Kubernetes(kube))
            }
        }
    }

    fn status(&self, router: &Arc<Router>) -> SourceReport {
        match self {
            Self::File { source, .. } => {
                let source = source.clone();
                Box::new(move || (*source.status()).clone())
            }
            Self::Kubernetes(kube) => kube.status(router),
        }
    }

    /// None: the server was stopped while it waited for the API server.
    async fn authority(
        &self,
        config: &Config,
        lifetimes: Lifetimes,
        readiness: &Readiness,
        shutdown: &Shutdown,
    ) -> anyhow::Result<Option<Ca>> {
        let kube = match self {
            Self::File { ca, .. } => return Ok(Some(ca.clone())),
            Self::Kubernetes(kube) => kube,
        };
        let waiting = readiness.pending("the CA of the cluster");
        let stop = shutdown.draining_token();
        let ca = match kube.authority(&config.state_dir, lifetimes, stop).await {
            Err(_) if stop.is_cancelled() => return Ok(None),
            ca => ca?,
        };
        waiting.ready();
        Ok(Some(ca))
    }
}

/// Nothing was asked of the API server yet: what is wrong is the configuration.
fn configuration(error: KubeError) -> ConfigError {
    match error {
        KubeError::Kubeconfig { path, reason } => {
            let mend = format!("{reason}; name a file with which kubectl works");
            ConfigError::new("--kubeconfig", path.display().to_string(), mend)
        }
        KubeError::NotInCluster { .. } => ConfigError::without_value("--kubeconfig", error.to_string()),
        KubeError::Namespace { key, value } => ConfigError::new(
            key,
            value,
            "not the name of a namespace: at most 63 lower-case letters, digits and '-'",
        ),
    }
}

/// Where the internal Service's ports lead to.
fn doors_of(config: &Config) -> Doors {
    let http = config.insecure_address.map(|address| address.port());
    Doors { https: config.secure_port.unwrap_or_default(), http: http.unwrap_or_default() }
}

fn router_config(config: &Config) -> RouterConfig {
    RouterConfig {
        token_range: config.token_range,
        token_range_v6: config.token_range_v6,
        ports: config.redirect_ports.clone(),
        pods: config.edge_pod_routes.clone(),
        host: host_node(config),
        exclude: config.exclude.clone(),
        clients: config.redirect_clients.clone(),
        host_addresses,
    }
}

/// Which node this host is, as the manifests tell a pod. The file of a standalone server is the operator's own.
fn host_node(config: &Config) -> Option<NodeName> {
    match &config.source {
        NodeSource::File(_) => None,
        NodeSource::Kubernetes(_) => std::env::var("NODE_NAME").ok()?.parse().ok(),
    }
}

fn server_names(config: &Config) -> ServerNames {
    ServerNames {
        dns: config.cert_dns_names.clone(),
        addresses: config.cert_ips.clone(),
        local_addresses: config.bind_address.is_unspecified(),
    }
}

/// This server's name for itself: the host's, and a number that differs between two on one host.
fn server_id() -> String {
    let host = nix::unistd::gethostname()
        .map_or_else(|_| "server".into(), |name| name.to_string_lossy().into_owned());
    format!("{host}-{:08x}", rand::random::<u32>())
}

/// Where agents can dial this server: the names and addresses that the operator gave its certificate, else the address
/// that this host uses towards the world.
fn agent_addresses(config: &Config, listening: SocketAddr) -> Vec<String> {
    let port = listening.port();
    let names = config
        .cert_dns_names
        .iter()
        .filter(|name| !name.starts_with('*'))
        .map(|name| format!("{name}:{port}"));
    let addresses = config.cert_ips.iter().map(|address| SocketAddr::new(*address, port).to_string());
    let given: Vec<_> = names.chain(addresses).collect();
    if !given.is_empty() {
        return given;
    }
    let own = if listening.ip().is_unspecified() { primary_address() } else { Some(listening.ip()) };
    own.map(|address| SocketAddr::new(address, port).to_string()).into_iter().collect()
}

/// The source address towards the default route. Connecting a UDP socket asks the routing table and sends nothing; the
/// destinations are documentation addresses (RFC 5737, RFC 3849).
fn primary_address() -> Option<IpAddr> {
    let source = |from: IpAddr, towards: IpAddr| {
        let socket = UdpSocket::bind((from, 0)).ok()?;
        socket.connect((towards, 9)).ok()?;
        socket.local_addr().ok().map(|address| address.ip()).filter(|address| !address.is_loopback())
    };
    source(Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::new(192, 0, 2, 1).into()).or_else(|| {
        source(Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into())
    })
}

async fn listen(
    key: &'static str,
    address: IpAddr,
    port: Option<u16>,
) -> Result<Option<TcpListener>, BindError> {
    let Some(port) = port else { return Ok(None) };
    let address = SocketAddr::new(address, port);
    TcpListener::bind(address).await.map(Some).map_err(|error| BindError::new(key, address, error))
}

struct Redirecting {
    redirect: Arc<Redirect>,
    listeners: Vec<TcpListener>,
}

/// Loads, attaches and verifies the programs. Their connections arrive at listeners on loopback.
async fn start_redirect(options: RedirectConfig) -> anyhow::Result<Redirecting> {
    let (redirect, listeners) = tokio::task::spawn_blocking(move || {
        let v4 = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("a listener on loopback")?;
        // A host without IPv6 has none to redirect.
        let v6 = std::net::TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).ok();
        for listener in [Some(&v4), v6.as_ref()].into_iter().flatten() {
            SockRef::from(listener).listen(BACKLOG).context("a longer backlog for a listener on loopback")?;
        }
        let redirect = Redirect::start(options, &v4, v6.as_ref()).map_err(|error| match error {
            RedirectError::NotCgroup { path, reason } => anyhow::Error::new(ConfigError::new(
                "--redirect-cgroup",
                path.display().to_string(),
                format!("{reason}: give a directory of a cgroup v2 hierarchy"),
            )),
            other => anyhow::Error::new(other).context("--redirect=on"),
        })?;
        let v6 = v6.filter(|_| redirect.ipv6());
        anyhow::Ok((redirect, [Some(v4), v6]))
    })
    .await
    .context("starting the redirect")??;
    let listeners = listeners
        .into_iter()
        .flatten()
        .map(|listener| listener.set_nonblocking(true).and_then(|()| TcpListener::from_std(listener)))
        .collect::<Result<_, _>>()?;
    Ok(Redirecting { redirect: Arc::new(redirect), listeners })
}

/// Follows the router's changes into the kernel's maps.
async fn feed(redirect: Arc<Redirect>, router: Arc<Router>, stop: CancellationToken) {
    let mut changed = router.changed();
    // What changed between the first feeding and here is fed again; that costs no write.
    changed.mark_changed();
    loop {
        tokio::select! {
            changed = changed.changed() => if changed.is_err() { return },
            () = stop.cancelled() => return,
        }
        let failing = redirect.health().stale;
        if !feed_once(&redirect, &router, failing).await {
            tokio::time::sleep(FEED_RETRY).await;
            changed.mark_changed();
        }
        tokio::time::sleep(FEED_PAUSE).await;
    }
}

/// `failing` is the error of the last time: one that stays is logged once.
async fn feed_once(redirect: &Arc<Redirect>, router: &Arc<Router>, failing: Option<String>) -> bool {
    let (redirect, router) = (redirect.clone(), router.clone());
    let applied = tokio::task::spawn_blocking(move || redirect.apply(&router.desired())).await;
    match applied {
        Ok(Ok(applied)) => {
            tracing::debug!(writes = applied.writes, deletes = applied.deletes, "routes applied");
            true
        }
        Ok(Err(error)) => {
            if failing.is_none_or(|before| before != error.to_string()) {
                tracing::error!(%error, "the routes in the kernel are not current");
            }
            false
        }
        Err(error) => {
            tracing::error!(%error, "feeding the redirect failed");
            false
        }
    }
}

/// Which node of the inventory is this host may change with this host's addresses.
async fn follow_host(router: Arc<Router>, stop: CancellationToken) {
    let mut tick = tokio::time::interval(HOST_PERIOD);
    loop {
        tokio::select! {
            _ = tick.tick() => router.refresh_host(),
            () = stop.cancelled() => return,
        }
    }
}

/// The trust bundle of the CA as it changes.
fn follow_bundle(
    mut ca: watch::Receiver<Arc<crate::pki::CaState>>,
    tasks: &TaskTracker,
    stop: CancellationToken,
) -> watch::Receiver<Arc<TrustBundle>> {
    let current = Arc::new(ca.borrow_and_update().bundle().clone());
    let (sender, receiver) = watch::channel(current);
    tasks.spawn(async move {
        loop {
            tokio::select! {
                changed = ca.changed() => if changed.is_err() { return },
                () = stop.cancelled() => return,
            }
            let bundle = Arc::new(ca.borrow_and_update().bundle().clone());
            sender.send_if_modified(|current| {
                let differs = **current != *bundle;
                *current = bundle;
                differs
            });
        }
    });
    receiver
}
