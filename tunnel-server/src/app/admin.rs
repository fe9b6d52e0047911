//! Starts the admin endpoints.

use std::sync::Arc;

use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tunnel_runtime::admin::{Admin, Serving};
use tunnel_runtime::logging;

use crate::session::bench;
use crate::status::page::PAGES;
use crate::status::{Reporter, connections_endpoint};

/// Answers at the listener; None: they are switched off.
pub(super) fn serve(
    listener: Option<TcpListener>,
    registry: Arc<Registry>,
    reporter: Reporter,
    flags: &[String],
    log: logging::Handle,
) -> anyhow::Result<Option<Serving>> {
    let Some(listener) = listener else { return Ok(None) };
    let runtime = &reporter.runtime;
    let endpoints = Admin {
        registry,
        readiness: runtime.readiness.clone(),
        connections: Some(connections_endpoint(runtime.metrics.clone())),
        flags: flags.into(),
        bench: Some(bench::endpoint(runtime.sessions.clone())),
        status: reporter.into_status(),
        pages: PAGES,
        log,
    };
    Ok(Some(endpoints.serve(listener.into_std()?)?))
}
