//! A running peer.
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use postern_testbed::agent::Agent;
use postern_testbed::process::Process;
use postern_testbed::server::Server;
use postern_testbed::wait::wait_until;
use tokio::time::sleep;

use crate::dial::Dialer;
use crate::line::Peer;
use crate::load;
use crate::usage::{Part, Side};

/// Maximum wait until a peer's first connection works.
const START: Duration = Duration::from_secs(30);
/// Pause before a connect that has failed is made again.
const AGAIN: Duration = Duration::from_millis(2);
/// The edge behind NAT.
pub(crate) const BEHIND_NAT: usize = 1;
/// The edge that the cloud can dial.
pub(crate) const OPEN: usize = 2;
/// Address at which a client on the cloud host reaches peers that listen there.
pub(crate) const LOOPBACK: Ipv4Addr = Ipv4Addr::LOCALHOST;

#[derive(Debug)]
pub(crate) struct Running<'a> {
    /// Dials through it.
    pub(crate) dialer: Dialer,
    pub(crate) parts: Vec<Part>,
    /// The edge that it leads to.
    pub(crate) edge: usize,
    pub(super) keep: Keep<'a>,
}

#[derive(Debug)]
pub(super) enum Keep<'a> {
    Processes(Vec<(Side, Process)>),
    /// The servers, the one that redirects first, and the agent.
    Postern(Box<(Vec<Server<'a>>, Agent<'a>)>),
}

impl<'a> Running<'a> {
    pub(super) fn of_processes(dialer: Dialer, edge: usize, processes: Vec<(Side, Process)>) -> Self {
        let parts = processes.iter().map(|(side, process)| Part::new(*side, process)).collect();
        Self { dialer, parts, edge, keep: Keep::Processes(processes) }
    }

    pub(super) async fn wait_ready(&mut self, peer: Peer) -> Result<()> {
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
    pub(crate) fn server(&self) -> Option<&Server<'a>> {
        match &self.keep {
            Keep::Postern(both) => both.0.first(),
            Keep::Processes(_) => None,
        }
    }

    /// Stops Postern's agent and starts it again. Returns the time until a connection is carried; redirected connects fail at
    /// once before that.
    pub(crate) async fn restart_agent(&mut self) -> Result<Duration> {
        let Keep::Postern(both) = &mut self.keep else { bail!("it has no agent of Postern's") };
        let (servers, agent) = &mut **both;
        agent.process.stop().await?;
        let server = servers.last().context("no server")?;
        server.wait_connected(agent.node(), false, START).await?;
        let start = Instant::now();
        agent.start_again()?;
        while load::visit(&self.dialer).await.is_err() {
            ensure!(start.elapsed() < START, "the agent carries nothing after {START:?}");
            sleep(AGAIN).await;
        }
        Ok(start.elapsed())
    }

    /// Stops it; Postern gracefully, so that its eBPF programs are detached.
    pub(crate) async fn stop(self) -> Result<()> {
        match self.keep {
            Keep::Processes(_) => Ok(()),
            Keep::Postern(both) => {
                let (servers, mut agent) = *both;
                let status = agent.process.stop().await?;
                ensure!(status.success(), "the agent ended with {status}");
                for mut server in servers {
                    let status = server.process.stop().await?;
                    ensure!(status.success(), "a server ended with {status}");
                }
                Ok(())
            }
        }
    }
}
