//! Starts the admin endpoints.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use prometheus_client::registry::Registry;
use tunnel_core::admin::{Admin, Serving};
use tunnel_core::logging;

use crate::bench;
use crate::config::Config;
use crate::page::PAGES;
use crate::status::{Reporter, connections_endpoint};
use crate::takeover::Predecessor;

/// The admin port's name among the listening sockets.
const ADMIN: &str = "admin";

/// What they show.
pub(crate) struct AdminParts {
    pub(crate) registry: Arc<Registry>,
    pub(crate) reporter: Reporter,
    pub(crate) log: logging::Handle,
}

impl AdminParts {
    /// Answers, at the listener of `before` if that has the same address, which goes to `copies`; None: they are switched off.
    ///
    /// # Errors
    /// The address cannot be listened on.
    pub(crate) fn serve(
        self,
        config: &Config,
        before: &mut Option<Predecessor>,
        copies: &mut Vec<(String, SocketAddr, OwnedFd)>,
    ) -> anyhow::Result<Option<Serving>> {
        let Some(address) = config.process.admin_address else { return Ok(None) };
        let runtime = &self.reporter.runtime;
        let endpoints = Admin {
            registry: self.registry,
            readiness: runtime.readiness.clone(),
            connections: Some(connections_endpoint(runtime.metrics.clone())),
            flags: config.flags.clone().into(),
            bench: Some(bench::endpoint(runtime.sessions.clone())),
            status: self.reporter.into_status(),
            pages: PAGES,
            log: self.log,
        };
        let taken = before.as_mut().and_then(|before| before.listener(ADMIN, |at| at == address));
        let bound = match taken {
            Some(listener) => endpoints.at(listener)?,
            None => endpoints.bind("--admin-address", address)?,
        };
        copies.push((ADMIN.to_owned(), bound.address(), bound.copy()?));
        Ok(Some(bound.serve()?))
    }
}
