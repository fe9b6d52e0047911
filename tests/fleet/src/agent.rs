//! An agent: the parts that deal with servers, and with another agent of its node.

use std::future::ready;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, anyhow};
use kube::Client;
use prometheus_client::registry::Registry;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;
use tunnel_agent::app;
use tunnel_agent::cli::Cli;
use tunnel_agent::konnectivity;
use tunnel_agent::metrics::Metrics;
use tunnel_agent::places::Places;
use tunnel_agent::reach::Reach;
use tunnel_agent::runtime::Runtime;
use tunnel_agent::session::{LinkPhase, LinkSet, Running, Shared};
use tunnel_agent::takeover::{Predecessor, Succession, take_over};
use tunnel_doctor::parse_flags;
use tunnel_pki::enrol::{Announced, EnrollConfig, Enrolled, IdentityKeeper, IdentityMetrics, Recovery};
use tunnel_pki::{AgentIdentity, Holder, PrivateKey, create_csr, public_key_of_csr};
use tunnel_runtime::NodeName;
use tunnel_runtime::lifecycle::Shutdown;
use tunnel_server::pki::Ca;

use crate::cluster::Cluster;
use crate::fleet::Host;
use crate::network::Net;
use crate::server::{self, RESTARTS};

/// `--keepalive`.
const KEEPALIVE: Duration = Duration::from_secs(10);

/// One process of an agent.
pub(crate) struct Agent {
    /// Number of the process.
    pub(crate) process: usize,
    pub(crate) runtime: Runtime,
    pub(crate) sessions: Sessions,
    /// A signal to the process.
    signal: Shutdown,
    serving: JoinHandle<()>,
}

/// An agent's sessions with the servers.
pub(crate) enum Sessions {
    /// Set once the agent has an identity.
    Links(Arc<OnceLock<Running>>),
    OfKonnectivity(Arc<konnectivity::Set>),
}

/// How an agent comes by its identity.
enum Identity {
    Given,
    /// It requests a certificate at the API server, unless it has one on its disk.
    Requested(Box<EnrollConfig>, Client),
}

/// Address of the node with this index.
pub(crate) fn host(index: usize) -> IpAddr {
    let last = u8::try_from(index + 1).unwrap_or(u8::MAX);
    IpAddr::V4(Ipv4Addr::new(10, 1, 0, last))
}

/// Address of the host that has a copy of that node's disk.
pub(crate) fn twin(index: usize) -> IpAddr {
    let last = u8::try_from(index + 1).unwrap_or(u8::MAX);
    IpAddr::V4(Ipv4Addr::new(10, 8, 0, last))
}

/// Where the agent of a host waits for its successor, and the address from which that comes.
pub(crate) fn takeover(host: Host) -> (SocketAddr, IpAddr) {
    let IpAddr::V4(address) = host.address() else { unreachable!("all hosts have such addresses") };
    let [net, last] = [1, 3].map(|byte| address.octets()[byte]);
    let [waits, comes] = [3, 4].map(|more| IpAddr::V4(Ipv4Addr::new(10, net + more, 0, last)));
    (SocketAddr::new(waits, 1), comes)
}

pub(crate) fn node(index: usize) -> Result<NodeName> {
    format!("edge-{index}").parse().map_err(|error| anyhow!("{error}"))
}

/// An identity that the CA has signed, and that counts as issued after this time.
pub(crate) fn identity(ca: &Ca, index: usize, after: SystemTime) -> Result<AgentIdentity> {
    let (state, key) = (ca.state()?, PrivateKey::generate()?);
    let (node, public) = (node(index)?, public_key_of_csr(&create_csr(&key)?)?);
    let issued = state.issue_for((Holder::Agent, &node), &public, Duration::MAX, after)?;
    Ok(AgentIdentity::new(issued.chain, key.to_der(), state.bundle().clone())?)
}

/// How an agent starts.
pub(crate) struct Start<'a> {
    pub(crate) net: &'a Net,
    /// Index of its node.
    pub(crate) index: usize,
    /// The host that it runs on: the node's own, or another one with a copy of the disk.
    pub(crate) at: Host,
    pub(crate) process: usize,
    pub(crate) identity: &'a AgentIdentity,
    /// The API server, where it gets another identity than that.
    pub(crate) cluster: Option<&'a Cluster>,
    pub(crate) state_dir: PathBuf,
    /// Number of servers.
    pub(crate) servers: usize,
    /// Number of them that it has sessions with.
    pub(crate) links: usize,
    /// Once a successor has taken over. Otherwise it waits to be stopped, as a pod.
    pub(crate) ends_when_passed: bool,
}

impl Start<'_> {
    /// Starts an agent. It takes over from the one that runs on the node, if there is one.
    pub(crate) fn start(self) -> Result<Agent> {
        let runtime = self.runtime(&self.flags())?;
        let enroll = EnrollConfig {
            servers: (0..self.servers).map(|index| server::address(index).to_string()).collect(),
            holder: Holder::Agent,
            node: runtime.config.node_name.clone(),
            state_dir: self.state_dir.clone(),
            token: None,
            reach: runtime.config.reach.clone(),
            clock: self.at.clock(),
        };
        let (bundles, announced) = mpsc::channel(16);
        let running = Arc::<OnceLock<Running>>::default();
        let identity = match self.cluster {
            Some(cluster) => {
                let killed = runtime.shutdown.forced_token().clone();
                Identity::Requested(Box::new(enroll), cluster.client_of_node(&self.identity.node, killed))
            }
            None => {
                let identity = self.identity.with_bundle(self.identity.bundle.clone());
                let keeper =
                    IdentityKeeper::start(enroll, identity, IdentityMetrics::default(), Recovery::Token);
                // Nobody else sets it.
                let _ = running.set(run(&runtime, Arc::new(keeper), bundles.clone()));
                Identity::Given
            }
        };
        let signal = Shutdown::default();
        let parts = Parts {
            net: self.net.clone(),
            at: self.at,
            state_dir: self.state_dir,
            servers: self.servers,
            runtime: runtime.clone(),
            identity,
            running: running.clone(),
            bundles,
            announced,
        };
        let serving = tokio::spawn(parts.serve(signal.clone()));
        Ok(Agent::new(self.process, runtime, Sessions::Links(running), signal, serving))
    }

    fn flags(&self) -> [String; 9] {
        [
            format!("--node-name={}", self.identity.node),
            "--server=given.by.the.fleet:1".to_owned(),
            "--proxy=none".to_owned(),
            "--congestion-control=system".to_owned(),
            "--max-links=1".to_owned(),
            match self.links {
                all if all == self.servers => "--max-servers=all".to_owned(),
                some => format!("--max-servers={some}"),
            },
            format!("--when-replaced={}", if self.ends_when_passed { "exit" } else { "wait" }),
            format!("--keepalive={}s", KEEPALIVE.as_secs()),
            format!("--state-dir={}", self.state_dir.display()),
        ]
    }

    pub(crate) fn runtime(&self, flags: &[String]) -> Result<Runtime> {
        let cli = parse_flags::<Cli>(flags).context("the agent's flags")?;
        let mut config = cli.run.config(Vec::new())?;
        let network = self.net.at(self.at.address(), KEEPALIVE);
        // Without the environment's proxy.
        config.reach = Reach { network: Some(network), ..Reach::default() };
        let runtime =
            Runtime::new(config, Places::new(1024, 1 << 30), Metrics::new(&mut Registry::default()));
        // Of the node. A copy is where these addresses are used as well.
        runtime.addresses.send_replace(Arc::new(vec![host(self.index)]));
        Ok(runtime)
    }
}

/// The parts with which a process serves.
struct Parts {
    net: Net,
    at: Host,
    state_dir: PathBuf,
    servers: usize,
    runtime: Runtime,
    identity: Identity,
    running: Arc<OnceLock<Running>>,
    bundles: mpsc::Sender<Announced>,
    announced: mpsc::Receiver<Announced>,
}

fn run(runtime: &Runtime, keeper: Arc<IdentityKeeper>, bundles: mpsc::Sender<Announced>) -> Running {
    let links = LinkSet::new(Shared::new(runtime.clone(), keeper.subscribe(), bundles));
    Running { links, keeper }
}

impl Parts {
    /// Serves until the signal, which comes from a successor too.
    async fn serve(self, signal: Shutdown) {
        let Self { net, runtime, running, bundles, mut announced, .. } = self;
        let (waits, comes) = takeover(self.at);
        let admin = SocketAddr::new(self.at.address(), 10266);
        let before = loop {
            let before = match net.succeed(comes, waits) {
                Ok(stream) => Predecessor::at(&self.state_dir, stream).await,
                Err(_) => None,
            };
            if before.is_some() || !net.has_listener(admin) {
                break before;
            }
            // The port is in use: it fails, and is started again.
            sleep(RESTARTS).await;
        };
        let _admin = net.hold(admin);
        runtime.handover.set_successor(before.is_some());
        let succession =
            Succession::new(runtime.clone(), Arc::default(), None, running.clone(), signal.clone());
        let succession = Arc::new(succession);
        // Ends with this process.
        let mut tasks = JoinSet::new();
        tasks.spawn(succession.clone().run(move || Ok(net.wait_at(waits))));
        if before.is_none() {
            succession.open();
        }
        if let Identity::Requested(enroll, api) = self.identity {
            let enrolled = Enrolled::obtain(*enroll, Some(api), IdentityMetrics::default());
            let enrolled = match signal.draining_token().run_until_cancelled(enrolled).await {
                Some(Ok(enrolled)) => enrolled,
                Some(Err(error)) => return tracing::error!(%error, "an agent failed to enrol"),
                None => return,
            };
            let begun = run(&runtime, enrolled.keeper.clone(), bundles);
            let links = begun.links.clone();
            tasks.spawn(enrolled.recover(move || links.refused()));
            // Nobody else sets it.
            let _ = running.set(begun);
        }
        let Some(Running { links, keeper }) = running.get() else { return };
        let before = match before {
            Some(before) => {
                let (pending, held) =
                    (runtime.readiness.pending("taking over"), keeper.hold_pending_key().await);
                Some(tasks.spawn(take_over(before, links.clone(), succession.clone(), pending, held)))
            }
            None => None,
        };
        let known = (0..self.servers).map(server::address).map(server::host_port).collect::<Vec<_>>();
        let known = watch::Sender::new(Arc::new(known));
        tasks.spawn(links.clone().follow(known.subscribe()));
        tasks.spawn(async move { while announced.recv().await.is_some() {} });
        app::end(&runtime, &succession, before, &signal, None, ready(())).await;
    }
}

impl Agent {
    pub(crate) fn new(
        process: usize,
        runtime: Runtime,
        sessions: Sessions,
        signal: Shutdown,
        serving: JoinHandle<()>,
    ) -> Self {
        Self { process, runtime, sessions, signal, serving }
    }

    /// How far a takeover is: whether it takes over, and is taken over from.
    pub(crate) fn stage(&self) -> (bool, bool, bool) {
        let handover = &self.runtime.handover;
        (handover.is_successor(), handover.is_alone(), handover.has_passed())
    }

    pub(crate) fn is_attached(&self) -> bool {
        match &self.sessions {
            Sessions::Links(running) => {
                let links = running.get().map(|running| running.links.status()).unwrap_or_default();
                links.iter().any(|link| link.phase == LinkPhase::Attached)
            }
            Sessions::OfKonnectivity(streams) => !streams.status().attached.is_empty(),
        }
    }

    /// True if it is to go on.
    pub(crate) fn goes_on(&self) -> bool {
        !self.signal.is_draining()
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.serving.is_finished()
    }

    /// SIGTERM.
    pub(crate) fn stop(&self) {
        self.signal.begin();
    }

    /// A connection that lasts so long.
    pub(crate) fn relay(&self, lasts: Duration) {
        let forced = self.runtime.shutdown.forced_token().clone();
        self.runtime.tasks.spawn(async move { forced.run_until_cancelled(sleep(lasts)).await });
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.runtime.shutdown.force();
        self.serving.abort();
    }
}
