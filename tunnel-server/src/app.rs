//! Builds everything, runs until told to stop, and stops in order. The only module that knows all parts.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tunnel_core::admin::{Admin, register_process_metrics};
use tunnel_core::config::BindError;
use tunnel_core::identity::TrustBundle;
use tunnel_core::lifecycle::{Drain, Readiness, Shutdown};
use tunnel_core::logging;

use crate::config::Config;
use crate::door::{self, Door, Hall, Https, Redirected};
use crate::inventory::FileSource;
use crate::metrics::Metrics;
use crate::pki::{Ca, EnrollService, Lifetimes, PkiMetrics, ServerCertificate, ServerFile, ServerNames};
use crate::redirect::{Redirect, RedirectConfig, SOCKET_MARK};
use crate::route::{Router, RouterConfig, host_addresses};
use crate::session::{AgentPort, AgentPortConfig, Sessions, Workers};
use crate::status::{DoorStatus, Reporter};

/// How long the agents' links may take to close once everything carried has ended.
const LINKS_CLOSE: Duration = Duration::from_secs(3);
/// Changes of routes within this time are applied as one.
const FEED_INTERVAL: Duration = Duration::from_millis(20);

/// Runs the server until `shutdown`.
///
/// # Errors
/// What keeps it from starting, each with its mend: files, addresses in use, a redirect that is on and impossible.
pub async fn run(config: Config, log: logging::Handle, shutdown: Shutdown) -> anyhow::Result<()> {
    raise_open_files();
    let mut registry = Registry::default();
    register_process_metrics(&mut registry, env!("CARGO_PKG_VERSION"));
    let postern = registry.sub_registry_with_prefix("postern");
    let metrics = Metrics::new(postern);
    let router = Arc::new(Router::new(router_config(&config), postern));
    let (source, inventory) = FileSource::open(config.inventory.clone(), config.edge_selector.clone(), postern)
        .with_context(|| format!("--inventory={}", config.inventory.display()))?;
    let pki_metrics = PkiMetrics::register(postern);
    let ca = Ca::load_or_create(&config.state_dir, Lifetimes::from_environment()?)?;
    let names = ServerNames {
        dns: config.cert_dns_names.clone(),
        addresses: config.cert_ips.clone(),
        local_addresses: true,
    };
    let certificate = ServerCertificate::start(ca, names, pki_metrics.clone())?;
    let sessions = Arc::new(Sessions::new(router.clone(), metrics.clone()));
    let drain = Drain::new(shutdown.clone());
    let hall = Hall { router: router.clone(), sessions: sessions.clone(), metrics: metrics.clone(), drain: drain.clone() };
    let readiness = Readiness::new();

    // Every address is taken before anything is served, so that a second server fails before it disturbs the first.
    let agent_listener = match config.agent_port {
        Some(port) => Some(bind("--agent-port", SocketAddr::new(config.bind_address, port)).await?),
        None => None,
    };
    let https_listener = match config.secure_port {
        Some(port) => Some(bind("--secure-port", SocketAddr::new(config.bind_address, port)).await?),
        None => None,
    };
    let starting = readiness.pending("redirect");
    let redirect = match &config.redirect {
        Some(options) => Some(start_redirect(options).await?),
        None => None,
    };
    if let Some(started) = &redirect {
        started.redirect.register_metrics(registry.sub_registry_with_prefix("postern"));
    }
    let reporter = Reporter::new(&config, &readiness, &sessions, &router, &source, &metrics);
    let reporter = match &redirect {
        Some(started) => reporter.with_redirect(started.redirect.clone()),
        None => reporter,
    };
    let admin = match config.admin_address {
        Some(address) => {
            let admin = Admin { registry: Arc::new(registry), readiness: readiness.clone(), status: reporter.status(), log };
            Some(admin.bind("--admin-address", address)?.serve()?)
        }
        None => None,
    };

    // From here on nothing fails any more; what is running is stopped below.
    let workers = Arc::new(Workers::start(config.workers).context("data path threads")?);
    let tasks = TaskTracker::new();
    router.set_inventory(inventory);
    tasks.spawn({
        let router = router.clone();
        source.clone().run(move |inventory| router.set_inventory(inventory), shutdown.clone())
    });
    let stop_redirect = CancellationToken::new();
    if let Some(started) = &redirect {
        started.feed_once(&router);
        tasks.spawn(feed(started.redirect.clone(), router.clone(), stop_redirect.clone()));
        tasks.spawn(started.redirect.clone().watch(stop_redirect.clone()));
    }
    starting.ready();
    let agent_port = AgentPort::new(AgentPortConfig {
        server_id: config.server_id.clone(),
        tls: certificate.tls(),
        bundle: follow_bundle(&certificate, &tasks, &shutdown),
        sessions: sessions.clone(),
        workers: workers.clone(),
        enroll: EnrollService::new(certificate.ca(), &config.state_dir, pki_metrics),
        metrics: metrics.clone(),
        draining: shutdown.draining_token().clone(),
        stop: CancellationToken::new(),
        drain_timeout: config.drain_timeout,
    });
    if let Some(listener) = agent_listener {
        let address = listener.local_addr()?;
        ServerFile { agent_addresses: agent_addresses(&config, address) }.write(&config.state_dir)?;
        reporter.door(DoorStatus::listening("agents", address));
        tasks.spawn(agent_port.clone().serve(listener));
    }
    if let Some(listener) = https_listener {
        reporter.door(DoorStatus::listening(Https::NAME, listener.local_addr()?));
        tasks.spawn(door::serve(Https, listener, hall.clone()));
    }
    if let Some(started) = redirect.as_ref() {
        for listener in started.listeners()? {
            reporter.door(DoorStatus::listening(Redirected::NAME, listener.local_addr()?));
            let door = Redirected { self_test: started.redirect.self_test_tokens() };
            tasks.spawn(door::serve(door, listener, hall.clone()));
        }
    }
    tasks.close();
    tracing::info!(server_id = %config.server_id, "serving");

    shutdown.draining().await;
    let draining = readiness.pending("stopping");
    if let Some(started) = &redirect
        && let Err(error) = started.redirect.set_serving(false)
    {
        tracing::warn!(%error, "connects to edge nodes are not refused while draining");
    }
    let drained = drain.finish(config.drain_timeout).await;
    agent_port.stop().await;
    if tokio::time::timeout(LINKS_CLOSE, agent_port.closed()).await.is_err() {
        tracing::debug!("some links did not close in time");
    }
    stop_redirect.cancel();
    if tokio::time::timeout(LINKS_CLOSE, tasks.wait()).await.is_err() {
        tracing::debug!("some tasks did not end in time");
    }
    if let Some(started) = redirect {
        started.redirect.stop().await;
    }
    tracing::info!(%drained, "stopped");
    drop((draining, admin));
    Ok(())
}

fn router_config(config: &Config) -> RouterConfig {
    RouterConfig {
        token_range: config.token_range,
        token_range_v6: config.token_range_v6,
        ports: config.redirect_ports.clone(),
        exclude: config.exclude.clone(),
        clients: config.redirect_clients.clone(),
        host_addresses,
    }
}
