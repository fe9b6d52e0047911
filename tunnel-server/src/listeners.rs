//! The sockets through which connections come in.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use tokio::net::TcpListener;
use tunnel_core::config::{BindError, ConfigError};

use crate::config::Config;
use crate::door::{Door as _, Http, Https, Redirected};
use crate::redirect::{self, Redirect, RedirectConfig, RedirectError};
use crate::status::AGENTS;

/// A listener that is None is switched off.
pub(crate) struct Listeners {
    pub(crate) agents: Option<TcpListener>,
    pub(crate) https: Option<TcpListener>,
    pub(crate) http: Option<TcpListener>,
    /// For IPv4 and IPv6; none without the redirect.
    pub(crate) redirected: Vec<TcpListener>,
}

impl Listeners {
    /// Binds all but those of the redirect.
    pub(crate) async fn bind(config: &Config) -> Result<Self, BindError> {
        let http = config.insecure_address;
        let http_ip = http.map_or(config.bind_address, |address| address.ip());
        Ok(Self {
            agents: bind("--agent-port", config.bind_address, config.agent_port).await?,
            https: bind("--secure-port", config.bind_address, config.secure_port).await?,
            http: bind("--insecure-port", http_ip, http.map(|address| address.port())).await?,
            redirected: Vec::new(),
        })
    }

    /// Starts the redirect and takes its listeners.
    pub(crate) async fn start_redirect(&mut self, options: RedirectConfig) -> anyhow::Result<Arc<Redirect>> {
        let started = redirect::listen(options).await.map_err(|error| match error {
            RedirectError::NotCgroup { path, reason } => anyhow::Error::new(ConfigError::new(
                "--redirect-cgroup",
                path.display().to_string(),
                format!("{reason}: give a directory of a cgroup v2 hierarchy"),
            )),
            other => anyhow::Error::new(other).context("--redirect=on"),
        });
        let (redirect, listeners) = started?;
        self.redirected = listeners;
        Ok(redirect)
    }

    /// The door and the address of each.
    pub(crate) fn addresses(&self) -> io::Result<Vec<(&'static str, SocketAddr)>> {
        let agents = self.agents.iter().map(|listener| (AGENTS, listener));
        let https = self.https.iter().map(|listener| (Https::NAME, listener));
        let http = self.http.iter().map(|listener| (Http::NAME, listener));
        let redirected = self.redirected.iter().map(|listener| (Redirected::NAME, listener));
        let all = agents.chain(https).chain(http).chain(redirected);
        all.map(|(door, listener)| Ok((door, listener.local_addr()?))).collect()
    }
}

async fn bind(
    key: &'static str,
    address: IpAddr,
    port: Option<u16>,
) -> Result<Option<TcpListener>, BindError> {
    let Some(port) = port else { return Ok(None) };
    let address = SocketAddr::new(address, port);
    TcpListener::bind(address).await.map(Some).map_err(|error| BindError::new(key, address, error))
}
