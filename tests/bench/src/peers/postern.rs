//! Postern: a server in the cloud, an agent on the edge behind NAT.
use anyhow::Result;
use postern_testbed::Testbed;
use postern_testbed::agent;
use postern_testbed::load_target::CARRIED;
use postern_testbed::server::Builder;

use super::running::{BEHIND_NAT, Keep, Running};
use crate::dial::Dialer;
use crate::usage::{Part, Side};

/// The load's ports, and otherwise the defaults, except that connections open at the end of a round are cut.
pub(crate) fn server_builder(testbed: &Testbed) -> Builder<'_> {
    let ports = CARRIED.map(|port| port.to_string()).join(",");
    Builder::new(testbed).ports(&ports).flag("--drain-timeout=1s")
}

/// Server and agent, without waiting for a connection.
pub(crate) async fn start(testbed: &Testbed) -> Result<Running<'_>> {
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
