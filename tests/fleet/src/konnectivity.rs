//! An agent of konnectivity's: the product's own, as it attaches to konnectivity's servers, at the servers' port for such agents.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use anyhow::Result;
use prometheus_client::registry::Registry;
use tunnel_agent::app;
use tunnel_agent::konnectivity::{KonnectivityMetrics, Set, Shared};
use tunnel_pki::{PrivateKey, pem_of_certificates};
use tunnel_runtime::files::create_private_directory;
use tunnel_runtime::lifecycle::Shutdown;

use crate::agent::{Agent, Sessions, Start};
use crate::server;

/// Address that leads to all servers, in turn for each host.
pub(crate) const BALANCER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 7, 0, 1)), PORT);
const PORT: u16 = 10263;

/// Where a server accepts these agents.
pub(crate) fn address(server: usize) -> SocketAddr {
    SocketAddr::new(server::address(server).ip(), PORT)
}

impl Start<'_> {
    /// Starts the agent. It has no successors.
    pub(crate) fn start_of_konnectivity(self) -> Result<Agent> {
        let (identity, dir) = (self.identity, &self.state_dir);
        create_private_directory(dir)?;
        let file = |name: &str, text: &str| -> Result<String> {
            let path = dir.join(name);
            std::fs::write(&path, text)?;
            Ok(path.display().to_string())
        };
        let flags = [
            format!("--node-name={}", identity.node),
            format!("--konnectivity-server={BALANCER}"),
            format!("--konnectivity-ca={}", file("ca.pem", &identity.bundle.to_pem())?),
            format!("--konnectivity-cert={}", file("agent.pem", &pem_of_certificates(&identity.chain))?),
            format!(
                "--konnectivity-key={}",
                file("key.pem", &PrivateKey::from_der(&identity.key)?.to_pem())?
            ),
            "--congestion-control=system".to_owned(),
            "--proxy=none".to_owned(),
        ];
        let runtime = self.runtime(&flags)?;
        let mut config = runtime.config.konnectivity.clone().unwrap_or_else(|| unreachable!("its flags"));
        config.clock = self.at.clock();
        let metrics = KonnectivityMetrics::register(&mut Registry::default());
        let set = Set::new(Shared::new(runtime.clone(), config, metrics));
        let signal = Shutdown::default();
        let (serving, shown, told) = (runtime.clone(), set.clone(), signal.clone());
        let serving = tokio::spawn(async move { app::keep_streams(&serving, set, &told).await });
        Ok(Agent::new(self.process, runtime, Sessions::OfKonnectivity(shown), signal, serving))
    }
}
