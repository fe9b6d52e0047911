//! An agent: the parts that deal with servers.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use prometheus_client::registry::Registry;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tunnel_agent::cli::Cli;
use tunnel_agent::metrics::Metrics;
use tunnel_agent::places::Places;
use tunnel_agent::reach::Reach;
use tunnel_agent::runtime::Runtime;
use tunnel_agent::session::{LinkSet, Shared};
use tunnel_doctor::parse_flags;
use tunnel_pki::{AgentIdentity, PrivateKey, create_csr, public_key_of_csr};
use tunnel_runtime::NodeName;
use tunnel_server::pki::Ca;

use crate::network::Net;
use crate::server;

/// `--keepalive`.
const KEEPALIVE: Duration = Duration::from_secs(10);

/// One process of an agent.
pub(crate) struct Agent {
    pub(crate) runtime: Runtime,
    pub(crate) links: Arc<LinkSet>,
    tasks: Vec<JoinHandle<()>>,
    _identity: watch::Sender<Arc<AgentIdentity>>,
}

/// Address of the node with this index.
pub(crate) fn host(index: usize) -> IpAddr {
    let last = u8::try_from(index + 1).unwrap_or(u8::MAX);
    IpAddr::V4(Ipv4Addr::new(10, 1, 0, last))
}

pub(crate) fn node(index: usize) -> Result<NodeName> {
    format!("edge-{index}").parse().map_err(|error| anyhow!("{error}"))
}

/// An identity that the CA has signed.
pub(crate) fn identity(ca: &Ca, index: usize) -> Result<Arc<AgentIdentity>> {
    let (state, key) = (ca.state()?, PrivateKey::generate()?);
    let issued = state.issue_agent(&node(index)?, &public_key_of_csr(&create_csr(&key)?)?)?;
    Ok(Arc::new(AgentIdentity::new(issued.chain, key.to_der(), state.bundle().clone())?))
}

impl Agent {
    pub(crate) fn start(
        net: &Net,
        index: usize,
        identity: Arc<AgentIdentity>,
        state_dir: &Path,
        servers: usize,
    ) -> Result<Self> {
        let flags = [
            format!("--node-name={}", identity.node),
            "--server=given.by.the.fleet:1".to_owned(),
            "--proxy=none".to_owned(),
            "--congestion-control=system".to_owned(),
            "--max-links=1".to_owned(),
            "--max-servers=all".to_owned(),
            format!("--keepalive={}s", KEEPALIVE.as_secs()),
            format!("--state-dir={}", state_dir.display()),
        ];
        let cli = parse_flags::<Cli>(&flags).context("the agent's flags")?;
        let mut config = cli.run.config(Vec::new())?;
        config.reach = Reach::over(net.at(host(index), KEEPALIVE));
        let runtime =
            Runtime::new(config, Places::new(1024, 1 << 30), Metrics::new(&mut Registry::default()));
        runtime.addresses.send_replace(Arc::new(vec![host(index)]));
        let (sender, identities) = watch::channel(identity);
        let (bundles, mut announced) = mpsc::channel(16);
        let links = LinkSet::new(Shared::new(runtime.clone(), identities, bundles));
        let known = (0..servers).map(server::address).map(server::host_port).collect::<Vec<_>>();
        let known = watch::Sender::new(Arc::new(known));
        let follow = links.clone().follow(known.subscribe());
        let tasks = vec![
            tokio::spawn(async move {
                follow.await;
                drop(known);
            }),
            tokio::spawn(async move { while announced.recv().await.is_some() {} }),
        ];
        Ok(Self { runtime, links, tasks, _identity: sender })
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.runtime.shutdown.force();
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}
