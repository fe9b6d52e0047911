//! Programs that are replaced by those of the other version: upgrades, and the way back.
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::agent::{self, Agent};
use postern_testbed::client::visit;
use postern_testbed::process::Version;
use postern_testbed::server::{Builder, Server};
use postern_testbed::target::Behaviour;
use postern_testbed::wait::wait_until;

use super::expect_version;
use crate::common::{alongside, hold, session_of, target};
use crate::mapped::{self, MAP, alongside_map, visit_mapped};
use crate::takeover::ends::{LENGTH, Open};

const TAKES_OVER: Duration = Duration::from_secs(30);
/// A program and its successors: an upgrade, and the way back.
const BOTH_WAYS: [Version; 2] = [Version::This, Version::Previous];
const DRAIN: &str = "--drain-timeout=1m";

pub(super) async fn take_over<'a>(before: &Server<'a>, version: Version) -> Result<Server<'a>> {
    let own = before.status().await?["server_id"].clone();
    let after = before.successor_as(version)?;
    // Its admin port is that of the one before.
    let ready = async || {
        let other = after.status().await.is_ok_and(|status| status["server_id"] != own);
        Ok(other && after.get("/readyz").await.is_ok_and(|(status, _)| status == 200))
    };
    wait_until("the successor to be ready", TAKES_OVER, ready, |ready| *ready).await?;
    expect_version(&after.process, version, "tunnel-server")?;
    Ok(after)
}

pub(super) async fn agent_takes_over<'a>(
    server: &Server<'_>,
    before: &Agent<'a>,
    version: Version,
) -> Result<Agent<'a>> {
    let epoch = async || Ok(session_of(server, 0).await?["epoch"].clone());
    let own = epoch().await?;
    let after = before.successor_as(version)?;
    wait_until("the successor's session", TAKES_OVER, epoch, |now| *now != own).await?;
    expect_version(&after.process, version, "tunnel-agent")?;
    Ok(after)
}

/// Agents are the last to be upgraded, and the first to be brought back.
pub(super) async fn servers_are_upgraded_and_brought_back(testbed: &Testbed) -> Result<()> {
    let server = Builder::new(testbed).version(Version::Previous).flag(DRAIN);
    let (mut server, _in_cloud) = mapped::server_of(testbed, server).await?;
    let agent = agent::Builder::new(&server, 1).version(Version::Previous).flag(MAP);
    let _agent = agent.enrol(&server).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let source = target(testbed, 1, 9101, Behaviour::Source(8, LENGTH))?;
    for version in BOTH_WAYS {
        let open = Open::new(hold(on_edge.address, b"before").await?, &source).await?;
        let what = format!("a server's replacement by {version:?}");
        let replacing = async {
            let after = take_over(&server, version).await?;
            open.finish(&mut server.process).await?;
            anyhow::Ok(after)
        };
        server = alongside(&what, on_edge.address, replacing).await.context(what.clone())?;
        visit_mapped(testbed).await.context("from the edge to the cloud")?;
    }
    ensure!(server.process.stop().await?.success(), "the last server's end");
    Ok(())
}

pub(super) async fn an_agent_is_upgraded_and_brought_back(testbed: &Testbed) -> Result<()> {
    agent_at(testbed, Version::This).await
}

/// Against the order of an upgrade.
pub(super) async fn an_agent_is_upgraded_before_its_server(testbed: &Testbed) -> Result<()> {
    agent_at(testbed, Version::Previous).await
}

async fn agent_at(testbed: &Testbed, of_server: Version) -> Result<()> {
    let (server, _in_cloud) = mapped::server_of(testbed, Builder::new(testbed).version(of_server)).await?;
    let agent = agent::Builder::new(&server, 1).version(Version::Previous).flag(DRAIN).flag(MAP);
    let mut agent = agent.enrol(&server).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let source = target(testbed, 1, 9101, Behaviour::Source(8, LENGTH))?;
    for version in BOTH_WAYS {
        let open = Open::new(hold(on_edge.address, b"before").await?, &source).await?;
        let what = format!("an agent's replacement by {version:?}");
        let replacing = async {
            let after = agent_takes_over(&server, &agent, version).await?;
            open.finish(&mut agent.process).await?;
            anyhow::Ok(after)
        };
        let replacing = alongside_map(testbed, replacing);
        agent = alongside(&what, on_edge.address, replacing).await.context(what.clone())?;
    }
    ensure!(agent.process.stop().await?.success(), "the last agent's end");
    Ok(())
}

/// Without a takeover, as after a crash or with an update strategy that stops first: an agent that is revoked, one that has
/// a token, and one that has a certificate.
pub(super) async fn each_version_reads_what_the_other_has_stored(testbed: &Testbed) -> Result<()> {
    let mut server = Builder::new(testbed).version(Version::Previous).start().await?;
    let mut first = agent::Builder::new(&server, 1).version(Version::Previous).enrol(&server).await?;
    let mut second = None;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    testbed.allow_error("revoked");
    server.run(&["agent", "revoke", "edge-3"])?;
    let revoked = server.run(&["agent", "list", "-o", "json"])?;
    for version in BOTH_WAYS {
        let token = server.token("edge-2")?;
        first.process.stop().await?;
        server.process.crash().await?;
        server.start_again_as(version).await.with_context(|| format!("a server of {version:?}"))?;
        first.start_again_as(version)?;
        server.wait_connected("edge-1", true, agent::START).await.with_context(|| format!("{version:?}"))?;
        visit(on_edge.address).await?;
        // A token that the other version has made.
        if let Some(mut agent) = second.take() {
            Agent::crash(&mut agent, &server).await?;
        }
        let name = format!("agent-{version:?}").to_lowercase();
        let agent = agent::Builder::new(&server, 2).named(&name).version(version).token(token).spawn()?;
        server.wait_connected("edge-2", true, agent::START).await.context("by a token")?;
        second = Some(agent);
        let now = server.run(&["agent", "list", "-o", "json"])?;
        ensure!(now.contains("edge-3") && revoked.contains("edge-3"), "revoked: {now}, before: {revoked}");
    }
    Ok(())
}
