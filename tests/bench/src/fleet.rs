//! Thousands of agents in one process: the agent's own session code, each with its own identity, session numbers,
//! policy and connection. Only what exists once per node (admin pages, renewal, discovery) is missing.
use std::ffi::OsString;
use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use postern_testbed::authority::Authority;
use postern_testbed::inventory::Inventory;
use postern_testbed::process::{self, Process};
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, Testbed};
use prometheus_client::registry::Registry;
use rcgen::KeyPair;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tunnel_agent::cli::Cli;
use tunnel_agent::metrics::Metrics;
use tunnel_agent::places::Places;
use tunnel_agent::runtime::Runtime;
use tunnel_agent::session::{LinkLoop, LinkSet, Shared};
use tunnel_doctor::parse_flags;
use tunnel_pki::{AgentIdentity, TrustBundle};
use tunnel_runtime::config::HostPort;

/// Lifetime of the agents' certificates.
const LIFETIME: Duration = Duration::from_secs(24 * 3600);
/// The range of the fleet's addresses, which belong to the host that it runs on.
pub(crate) const RANGE: &str = "10.128.0.0/14";

/// The pause before each further agent starts: handshakes of all at once would take longer on one thread than servers wait.
const PACE: Duration = Duration::from_millis(4);

/// The n-th node's name.
pub(crate) fn name(n: usize) -> String {
    format!("fleet-{n}")
}

/// The n-th node's address.
pub(crate) fn address(n: usize) -> Ipv4Addr {
    const FIRST: u32 = u32::from_be_bytes([10, 128, 0, 1]);
    Ipv4Addr::from(FIRST.saturating_add(u32::try_from(n).unwrap_or(u32::MAX)))
}

/// Replaces the inventory with the cloud host and that many nodes of the fleet.
pub(crate) fn write_inventory(testbed: &Testbed, nodes: usize) -> Result<()> {
    let mut inventory = Inventory::of(testbed)?;
    inventory.nodes.truncate(1);
    let fleet =
        (0..nodes).map(|n| postern_testbed::inventory::node(&name(n), true, &[address(n).into()], &[]));
    inventory.nodes.extend(fleet);
    inventory.write()
}

/// Number of agents in one process: while they attach again, each has two links, which are open files.
const EACH: usize = 5_000;

/// Agents in processes of their own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fleet<'a> {
    pub(crate) count: usize,
    /// The servers' addresses.
    pub(crate) servers: &'a [String],
    /// Number of agents a second that lose their session, one after the other, and come back at once.
    pub(crate) flaps: u32,
}

impl Fleet<'_> {
    pub(crate) fn start(self, testbed: &Testbed, edge: usize) -> Result<Vec<Process>> {
        let dir = testbed.dir().join("fleet");
        let process = |first: usize| {
            let end = self.count.min(first + EACH);
            let mut command = testbed.on_edge(edge).command(&process::program("bench")?);
            command.arg("--fleet").arg(testbed.dir().join("server")).arg(self.servers.join(","));
            command.arg(first.to_string()).arg(end.to_string()).arg(&dir).arg(self.flaps.to_string());
            Process::spawn(testbed.dir(), &format!("fleet-{first}"), command)
        };
        (0..self.count).step_by(EACH).map(process).collect()
    }
}

/// Printed by the fleet once its agents have no session to resume.
const FORGOTTEN: &str = "TLS sessions forgotten";

/// Makes each agent's next handshake a full one.
pub(crate) async fn forget_sessions(fleet: &mut [Process]) -> Result<()> {
    for process in fleet {
        let before = process.mark()?;
        process.signal(Signal::SIGUSR1)?;
        let printed = async || process.output_since(before);
        wait_until(FORGOTTEN, Duration::from_secs(10), printed, |text| text.contains(FORGOTTEN)).await?;
    }
    Ok(())
}

pub(crate) fn start(testbed: &Testbed, edge: usize, count: usize) -> Result<Vec<Process>> {
    Fleet { count, servers: &[format!("{CLOUD}:10262")], flaps: 0 }.start(testbed, edge)
}

/// One agent's sessions.
struct Agent {
    shared: Arc<Shared>,
    servers: Arc<Vec<HostPort>>,
    identity: watch::Sender<Arc<AgentIdentity>>,
    tasks: JoinSet<()>,
}

impl Agent {
    /// The same identity, without the sessions that its links may resume.
    fn forget_sessions(&self) {
        self.identity
            .send_modify(|identity| *identity = Arc::new(identity.with_bundle(identity.bundle.clone())));
    }

    fn attach(&mut self) {
        if let [server] = &self.servers[..] {
            let link = LinkLoop::new(self.shared.clone(), server.to_string());
            self.tasks.spawn(link.run());
            return;
        }
        let links = LinkSet::new(self.shared.clone());
        let servers = self.servers.clone();
        self.tasks.spawn(async move {
            let (_known, known) = watch::channel(servers);
            links.follow(known).await;
        });
    }

    /// Ends its only link as when a process is killed, and attaches again.
    async fn flap(&mut self) {
        self.tasks.shutdown().await;
        self.attach();
    }
}

/// The process `--fleet …`: runs until killed.
pub(crate) fn run(args: &[OsString]) -> Result<()> {
    let text = |at: usize| {
        args.get(at).and_then(|arg| arg.to_str()).context("STATE_DIR SERVERS FIRST END DIR FLAPS")
    };
    let (state_dir, dir) = (PathBuf::from(text(0)?), PathBuf::from(text(4)?));
    let servers = text(1)?.split(',').map(|server| server.parse::<HostPort>().map_err(anyhow::Error::msg));
    let servers = Arc::new(servers.collect::<Result<Vec<_>>>().context("SERVERS")?);
    let first: usize = text(2)?.parse().context("FIRST")?;
    let end: usize = text(3)?.parse().context("END")?;
    let flaps: u32 = text(5)?.parse().context("FLAPS")?;
    ensure!(flaps == 0 || servers.len() == 1, "agents that flap have one server");
    tunnel_runtime::lifecycle::raise_open_files();
    fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
    let identities = identities(&state_dir, first..end)?;
    println!("{} identities", identities.len());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("runtime")?;
    runtime.block_on(async {
        let metrics = Metrics::new(&mut Registry::default());
        let flags = [
            "--node-name=fleet",
            "--server=given.by.the.fleet:1",
            "--proxy=none",
            "--congestion-control=system",
            "--max-servers=1",
            "--keepalive=10s",
            "--bench=off",
        ];
        let cli = parse_flags::<Cli>(&flags.map(str::to_owned)).context("the agents' flags")?;
        let config = cli.run.config(Vec::new())?;
        // Every agent already has the bundle that the server announces.
        let (bundles, mut announced) = mpsc::channel(64);
        tokio::spawn(async move { while announced.recv().await.is_some() {} });
        let mut agents = Vec::with_capacity(identities.len());
        let mut tick = tokio::time::interval(PACE);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        for (n, identity) in (first..).zip(identities) {
            let own: IpAddr = address(n).into();
            let mut config = config.clone();
            config.node_name = identity.node.clone();
            config.given.state_dir = dir.join(n.to_string());
            let runtime = Runtime::new(config, Places::new(1024, 1 << 30), metrics.clone());
            runtime.addresses.send_replace(Arc::new(vec![own]));
            let (sender, identity) = watch::channel(Arc::new(identity));
            let shared = Shared::new(runtime, identity, bundles.clone());
            let mut agent =
                Agent { shared, servers: servers.clone(), identity: sender, tasks: JoinSet::new() };
            tick.tick().await;
            agent.attach();
            agents.push(agent);
        }
        match Duration::from_secs(1).checked_div(flaps) {
            Some(pause) => flap_in_turn(&mut agents, pause).await,
            None => forget_when_told(&agents).await,
        }
    })
}

async fn flap_in_turn(agents: &mut [Agent], pause: Duration) -> Result<()> {
    let mut tick = tokio::time::interval(pause);
    for n in (0..agents.len()).cycle() {
        tick.tick().await;
        agents[n].flap().await;
    }
    anyhow::bail!("a fleet without agents")
}

async fn forget_when_told(agents: &[Agent]) -> Result<()> {
    let mut told = signal(SignalKind::user_defined1()).context("SIGUSR1")?;
    while told.recv().await.is_some() {
        agents.iter().for_each(Agent::forget_sessions);
        println!("{FORGOTTEN}");
    }
    anyhow::bail!("no more signals")
}

fn identities(state_dir: &Path, numbers: Range<usize>) -> Result<Vec<AgentIdentity>> {
    let authority = Authority::open(state_dir)?;
    let roots = fs::read_to_string(state_dir.join("ca/ca.crt")).context("reading ca.crt")?;
    let bundle = TrustBundle::from_pem(&roots).context("the CA's certificate")?;
    let now = SystemTime::now();
    let one = |n: usize| {
        let key = KeyPair::generate().context("a key")?;
        // A little in the past, for clocks that count whole seconds.
        let valid = now - Duration::from_secs(60)..now + LIFETIME;
        let chain = authority.agent(&name(n), &key, valid)?;
        AgentIdentity::from_pem(&chain, &key.serialize_pem(), bundle.clone())
            .with_context(|| format!("the identity of {}", name(n)))
    };
    numbers.map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hundred_thousand_addresses_fit_into_the_range() {
        assert_eq!(address(0), Ipv4Addr::new(10, 128, 0, 1));
        let last = address(100_000).octets();
        assert!(RANGE == "10.128.0.0/14" && last[0] == 10 && last[1] < 132, "{last:?}");
    }
}
