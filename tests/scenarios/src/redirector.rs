//! A host that only redirects: the servers and the agents' sessions are elsewhere.
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::{self, Agent};
use postern_testbed::client::{self, expect_unreachable, visit};
use postern_testbed::netns::Namespace;
use postern_testbed::server::{self, Builder, Server, Token};
use postern_testbed::target::Behaviour;
use postern_testbed::wait::wait_until;
use postern_testbed::{NEIGHBOUR, Testbed};
use tokio::io::AsyncReadExt as _;

use crate::common::{alongside, target};
use crate::hostile_peer::Credentials;
use crate::path;

scenarios! {
    a_redirector_has_connections_forwarded(limit = 180, quick),
    a_redirectors_certificate_is_good_for_nothing_else,
}

/// Time limit for a change at the server to take effect at the redirector.
const TOLD: Duration = Duration::from_secs(10);

/// A redirector on the cloud host; the server and its agent are elsewhere.
struct Fleet<'a> {
    server: Server<'a>,
    redirector: Server<'a>,
    agent: Agent<'a>,
}

/// Returns a token for the redirector of a host.
pub(crate) fn token(server: &Server<'_>, name: &str) -> Result<Token> {
    let printed = server.run(&["token", "create", "--redirector", name, "-o", "json"])?;
    serde_json::from_str(&printed).context("a redirector's token")
}

/// The redirector of a host, beside the server on the neighbour.
pub(crate) fn enrolled<'a>(builder: Builder<'a>, name: &str, token: &Token) -> Builder<'a> {
    builder
        .flag("redirector")
        .flag(format!("--node-name={name}"))
        .flag(format!("--peers={NEIGHBOUR}:10262"))
        .flag(format!("--token={}", token.token))
        .flag(format!("--ca-hash={}", token.ca_hash))
}

impl<'a> Fleet<'a> {
    async fn start(testbed: &'a Testbed, neighbour: &'a Namespace) -> Result<Self> {
        // It lets redirectors reach the ports that it would redirect itself.
        let server = Builder::alone_on_neighbour(testbed, neighbour).ports(server::PORTS).start().await?;
        let agent = Agent::enrol(&server, 1).await?;
        let token = token(&server, "cloud-1")?;
        ensure!(
            token.command.contains("tunnel-server redirector "),
            "the printed command is {:?}",
            token.command
        );
        let redirector = enrolled(Builder::new(testbed), "cloud-1", &token).start().await?;
        let fleet = Self { server, redirector, agent };
        fleet.wait_told(true).await?;
        Ok(fleet)
    }

    /// Waits until the redirector knows that the server has the node, or no longer has it.
    async fn wait_told(&self, has: bool) -> Result<()> {
        let what =
            format!("the redirector to know that the server {} the node", if has { "has" } else { "lost" });
        let via = async || self.redirector.holders().await;
        wait_until(&what, TOLD, via, |servers| servers.len() == usize::from(has)).await?;
        if has { self.redirector.session_began("edge-1").await } else { Ok(()) }
    }
}

async fn a_redirector_has_connections_forwarded(testbed: &Testbed) -> Result<()> {
    let neighbour = testbed.add_neighbour()?;
    let mut fleet = Fleet::start(testbed, &neighbour).await?;
    path::half_closes(testbed).await.context("half-closes")?;
    path::small_writes(testbed).await.context("small writes")?;
    let on_edge = target(testbed, 1, 9100, Behaviour::Echo)?;
    visit(on_edge.address).await?;
    let line = fleet.redirector.wait_access("of the redirect", |line| line.text("outcome") == "ok").await?;
    ensure!(line.text("listener") == "redirect" && !line.text("via").is_empty(), "{line:?}");
    let line = fleet.server.wait_access("of the redirector", |line| line.text("listener") == "peer").await?;
    ensure!(line.text("via") == "redirector of cloud-1", "{line:?}");

    let status = fleet.redirector.status().await?;
    ensure!(status["role"] == "redirector", "its role in {status}");
    let listeners: Vec<_> =
        status["listeners"].as_array().into_iter().flatten().map(|listener| &listener["name"]).collect();
    ensure!(
        listeners.iter().all(|listener| *listener == "redirect"),
        "the redirector's listeners are {listeners:?}"
    );
    let text = server::run(testbed, &["status"])?;
    let text = String::from_utf8_lossy(&text.stdout);
    ensure!(text.starts_with("tunnel-redirector "), "its status:\n{text}");
    fleet.redirector.expect_metric("postern_role", &[("role", "redirector")], 1.0).await?;
    fleet.server.expect_metric("postern_role", &[("role", "server")], 1.0).await?;

    // The server dies: connects fail at once. It comes back, and so does its agent.
    fleet.server.process.crash().await?;
    fleet.wait_told(false).await?;
    expect_unreachable((testbed.edge(1).address, 9100)).await?;
    fleet.server.start_again().await?;
    fleet.server.wait_connected("edge-1", true, agent::START).await?;
    fleet.wait_told(true).await?;
    visit(on_edge.address).await?;

    // A redirector is upgraded like a server: no connection fails.
    let taken_over = fleet.redirector.take_over();
    let second = alongside("a second redirector", on_edge.address, taken_over).await?;
    ensure!(second.status().await?["role"] == "redirector", "the second redirector is another thing");
    ensure!(fleet.agent.process.ended()?.is_none(), "the agent ended");
    Ok(())
}

async fn a_redirectors_certificate_is_good_for_nothing_else(testbed: &Testbed) -> Result<()> {
    let neighbour = testbed.add_neighbour()?;
    let fleet = Fleet::start(testbed, &neighbour).await?;
    let own = Credentials::of_redirector(&testbed.dir().join("server"))?;
    let address = fleet.server.agent_address().parse()?;
    let mut stream = own.dial(&testbed.cloud, address).await?;
    let mut bytes = Vec::new();
    let read = tokio::time::timeout(client::PATIENCE, stream.read_to_end(&mut bytes)).await;
    let read = read.context("not closed")?;
    ensure!(read.is_err() || bytes.is_empty(), "the server talked to a redirector as to an agent: {bytes:?}");
    fleet.server.wait_log("an agent's link needs").await?;
    // A revoked redirector is no longer served.
    fleet.server.run(&["agent", "revoke", "cloud-1"])?;
    fleet.wait_told(false).await?;
    expect_unreachable((testbed.edge(1).address, 9100)).await
}
