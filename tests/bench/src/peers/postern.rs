//! Postern: a server in the cloud, an agent on the edge behind NAT.
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use postern_testbed::agent;
use postern_testbed::load_target::RELAYED;
use postern_testbed::netns::Namespace;
use postern_testbed::server::{Builder, Server};
use postern_testbed::{NEIGHBOUR, Testbed};

use super::running::{BEHIND_NAT, Keep, Running};
use crate::dial::Dialer;
use crate::usage::{Part, Side};

/// A server with the load's ports and otherwise the defaults.
pub(crate) fn default_server(testbed: &Testbed) -> Builder<'_> {
    let ports = RELAYED.map(|port| port.to_string()).join(",");
    Builder::new(testbed).ports(&ports)
}

/// The same, except that it cuts connections open after a round.
pub(crate) fn server_builder(testbed: &Testbed) -> Builder<'_> {
    default_server(testbed).flag("--drain-timeout=1s")
}

/// Server and agent, without waiting for a connection.
pub(crate) async fn start(testbed: &Testbed) -> Result<Running<'_>> {
    start_with(testbed, &format!("--egress-socket={}", egress_socket(testbed).display())).await
}

/// The socket of its egress listener.
pub(crate) fn egress_socket(testbed: &Testbed) -> PathBuf {
    testbed.dir().join("egress.sock")
}

/// Like [`start`], with this flag for the server instead of an egress listener.
pub(crate) async fn start_with<'a>(testbed: &'a Testbed, flag: &str) -> Result<Running<'a>> {
    let server = server_builder(testbed).flag(flag).start().await?;
    with_agent(testbed, vec![server]).await
}

/// Attaches the agent to the server on `neighbour`: the one that redirects forwards every connection to it.
pub(crate) async fn start_forwarded<'a>(
    testbed: &'a Testbed,
    neighbour: &'a Namespace,
) -> Result<Running<'a>> {
    let first = server_builder(testbed).flag(format!("--peers={NEIGHBOUR}:10262")).start().await?;
    let second = Builder::on_neighbour(&first, neighbour)?.flag("--drain-timeout=1s").start().await?;
    with_agent(testbed, vec![first, second]).await
}

/// Attaches an agent to the last of the servers.
async fn with_agent<'a>(testbed: &'a Testbed, servers: Vec<Server<'a>>) -> Result<Running<'a>> {
    let server = servers.last().context("no server")?;
    let agent = agent::Builder::new(server, BEHIND_NAT);
    let node = testbed.edge(BEHIND_NAT).name.clone();
    // An agent that ran before has its certificate.
    let enrolled = agent.state_dir().join("agent.crt").exists();
    let agent = if enrolled { agent } else { agent.token(server.token(&node)?) };
    let agent = agent.flag("--drain-timeout=1s").spawn()?;
    server.wait_connected(&node, true, agent::START).await?;
    let dialer = Dialer::Tcp(testbed.edge(BEHIND_NAT).ip());
    let mut parts: Vec<Part> = servers.iter().map(|server| Part::new(Side::Cloud, &server.process)).collect();
    parts.push(Part::new(Side::Edge, &agent.process));
    Ok(Running { dialer, parts, edge: BEHIND_NAT, keep: Keep::Postern(Box::new((servers, agent))) })
}
