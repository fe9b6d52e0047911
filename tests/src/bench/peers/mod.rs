//! Starting the peers on the testbed: edge 1 stands behind NAT, the router lets the cloud into the site of edge 2.
mod haproxy;
mod konnectivity;
mod rathole;
mod tls;
mod tonic;

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

pub use konnectivity::Frontend;
pub use tls::Certificates;

use super::dial::Dialer;
use super::line::Peer;
use super::load;
use super::target::CARRIED;
use super::usage::{Part, Side};
use crate::agent::{self, Agent};
use crate::server::{Builder, Server};
use crate::testbed::Testbed;
use crate::testbed::process::Process;
use crate::wait::wait_until;

/// How long a peer may take until its first connection works.
const START: Duration = Duration::from_secs(30);
/// The edge behind NAT.
pub const BEHIND_NAT: usize = 1;
/// The edge that can be dialled.
pub const OPEN: usize = 2;
/// Where a caller on the cloud host finds peers that have ports of their own.
const LOOPBACK: Ipv4Addr = Ipv4Addr::LOCALHOST;

/// Where the programs of the peers are, or why they are missing.
#[derive(Clone, Debug, Default)]
pub struct Programs(BTreeMap<String, Result<PathBuf, String>>);

impl Programs {
    /// Notes `NAME=PATH`.
    pub fn found(&mut self, argument: &str) -> Result<()> {
        let (name, path) = argument.split_once('=').context("--program NAME=PATH")?;
        self.0.insert(name.to_owned(), Ok(path.into()));
        Ok(())
    }

    /// Notes `NAME=REASON`.
    pub fn missing(&mut self, argument: &str) -> Result<()> {
        let (name, reason) = argument.split_once('=').context("--missing NAME=REASON")?;
        self.0.insert(name.to_owned(), Err(reason.to_owned()));
        Ok(())
    }

    /// A program's file, or its folder where there are several.
    pub fn path(&self, name: &str) -> Result<PathBuf, String> {
        let unknown = || Err(format!("{name} is missing: `cargo xtask bench` installs it"));
        self.0.get(name).cloned().unwrap_or_else(unknown)
    }
}

/// The name of what has to be installed for a peer.
pub fn needs(peer: Peer) -> Option<&'static str> {
    match peer {
        Peer::Haproxy => Some("haproxy"),
        Peer::Rathole => Some("rathole"),
        Peer::KonnectivityGrpc | Peer::KonnectivityHttp => Some("konnectivity"),
        Peer::Direct | Peer::Tonic | Peer::Iptables | Peer::Postern => None,
    }
}

/// A peer that runs.
#[derive(Debug)]
pub struct Running<'a> {
    /// The way through it.
    pub dialer: Dialer,
    /// Its programs.
    pub parts: Vec<Part>,
    /// The edge that it leads to.
    pub edge: usize,
    keep: Keep<'a>,
}

#[derive(Debug)]
enum Keep<'a> {
    Processes(Vec<(Side, Process)>),
    Postern(Box<(Server<'a>, Agent<'a>)>),
}

impl<'a> Running<'a> {
    fn of_processes(dialer: Dialer, edge: usize, processes: Vec<(Side, Process)>) -> Self {
        let parts = processes.iter().map(|(side, process)| Part::new(*side, process)).collect();
        Self { dialer, parts, edge, keep: Keep::Processes(processes) }
    }

    /// Starts a peer and waits until a connection through it works.
    pub async fn start(
        testbed: &'a Testbed,
        peer: Peer,
        programs: &Programs,
        certificates: &Certificates,
    ) -> Result<Self> {
        let program = || programs.path(needs(peer).unwrap_or_default()).map_err(anyhow::Error::msg);
        let mut running = match peer {
            Peer::Direct | Peer::Iptables => {
                Self::of_processes(Dialer::Tcp(testbed.edge(OPEN).ip()), OPEN, Vec::new())
            }
            Peer::Haproxy => haproxy::start(testbed, &program()?, certificates)?,
            Peer::Rathole => rathole::start(testbed, &program()?)?,
            Peer::KonnectivityGrpc => {
                konnectivity::start(testbed, &program()?, certificates, Frontend::Grpc)?
            }
            Peer::KonnectivityHttp => {
                konnectivity::start(testbed, &program()?, certificates, Frontend::HttpConnect)?
            }
            Peer::Tonic => tonic::start(testbed, certificates)?,
            Peer::Postern => postern(testbed).await?,
        };
        running.wait_ready(peer).await?;
        Ok(running)
    }

    async fn wait_ready(&mut self, peer: Peer) -> Result<()> {
        let what = format!("a connection through {peer}");
        let visit = async || {
            if let Keep::Processes(processes) = &mut self.keep {
                for (_, process) in processes {
                    if let Some(status) = process.ended()? {
                        anyhow::bail!("{} ended with {status}: {}", process.name(), process.output()?);
                    }
                }
            }
            Ok(load::visit(&self.dialer).await.map_err(|error| format!("{error:#}")))
        };
        wait_until(&what, START, visit, Result::is_ok).await.map(drop)
    }

    /// The server, if this is Postern.
    pub fn server(&self) -> Option<&Server<'a>> {
        match &self.keep {
            Keep::Postern(both) => Some(&both.0),
            Keep::Processes(_) => None,
        }
    }

    /// Ends it. Postern in order, so that its programs are detached.
    pub async fn stop(self) -> Result<()> {
        match self.keep {
            Keep::Processes(_) => Ok(()),
            Keep::Postern(both) => {
                let (mut server, mut agent) = *both;
                let status = agent.stop().await?;
                ensure!(status.success(), "the agent ended with {status}");
                let status = server.stop().await?;
                ensure!(status.success(), "the server ended with {status}");
                Ok(())
            }
        }
    }
}

/// The ports that the load uses, and nothing else that differs from the defaults. What is still open when a round
/// ends is not worth waiting for.
pub fn server_builder(testbed: &Testbed) -> Builder<'_> {
    let ports = CARRIED.map(|port| port.to_string()).join(",");
    Builder::new(testbed).ports(&ports).flag("--drain-timeout=1s")
}

/// Server and agent, without waiting for a connection.
pub async fn postern(testbed: &Testbed) -> Result<Running<'_>> {
    let server = server_builder(testbed).start().await?;
    let agent = agent::Builder::new(&server, BEHIND_NAT);
    let node = testbed.edge(BEHIND_NAT).name.clone();
    // An agent that ran before has its certificate.
    let enrolled = agent.state_dir().join("agent.crt").exists();
    let agent = if enrolled { agent } else { agent.token(server.token(&node)?) };
    let agent = agent.flag("--drain-timeout=1s").spawn()?;
    server.wait_connected(&node, true, agent::START).await?;
    let dialer = Dialer::Tcp(testbed.edge(BEHIND_NAT).ip());
    let parts = vec![Part::new(Side::Cloud, &server.process), Part::new(Side::Edge, &agent.process)];
    Ok(Running { dialer, parts, edge: BEHIND_NAT, keep: Keep::Postern(Box::new((server, agent))) })
}
