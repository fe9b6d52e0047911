//! Servers and redirectors of different versions.
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::Agent;
use postern_testbed::client::{self, end_of};
use postern_testbed::process::Version;
use postern_testbed::server::{self, Builder, Server};
use postern_testbed::target::Behaviour;
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, NEIGHBOUR, Testbed};
use serde_json::Value;

use super::expect_version;
use super::pair::download_and_upload;
use crate::common::{expect_reset, hold, target};
use crate::path;
use crate::redirector::{enrolled, token};

/// Time limit for a change at one server to take effect at the other.
const TOLD: Duration = Duration::from_secs(30);

pub(super) async fn the_agent_is_at_a_server_of_the_previous_version(testbed: &Testbed) -> Result<()> {
    forward(testbed, Version::This, Version::Previous).await
}

pub(super) async fn the_client_is_at_a_server_of_the_previous_version(testbed: &Testbed) -> Result<()> {
    forward(testbed, Version::Previous, Version::This).await
}

/// Waits until the server or redirector knows that another one has the node's agent.
async fn wait_via(server: &Server<'_>) -> Result<()> {
    let via = async || server.holders().await;
    wait_until("the node to be known at another server", TOLD, via, |via| via.len() == 1).await?;
    server.session_began("edge-1").await
}

async fn relayed(testbed: &Testbed) -> Result<()> {
    path::half_closes(testbed).await.context("half-closes")?;
    path::target_speaks_first(testbed).await.context("a greeting")?;
    download_and_upload(testbed).await?;
    expect_reset((testbed.edge(1).ip(), 9105).into()).await.context("a port without a target")
}

async fn forward(testbed: &Testbed, redirects: Version, attached: Version) -> Result<()> {
    let neighbour = testbed.add_neighbour()?;
    let peers = format!("--peers={CLOUD}:10262,{NEIGHBOUR}:10262");
    let first = Builder::new(testbed).version(redirects).flag(&peers).start().await?;
    let second = Builder::on_neighbour(&first, &neighbour)?.version(attached).flag(&peers).start().await?;
    expect_version(&first.process, redirects, "tunnel-server")?;
    expect_version(&second.process, attached, "tunnel-server")?;
    let mut agent = Agent::enrol(&second, 1).await?;
    wait_via(&first).await?;
    relayed(testbed).await?;
    if redirects == Version::This {
        // With the other one's status, or why it does not tell it.
        let (status, cluster) = first.get("/cluster").await?;
        let cluster: Vec<Value> =
            serde_json::from_str(&cluster).with_context(|| format!("/cluster: {status}"))?;
        let other = second.status().await?["server_id"].clone();
        ensure!(cluster.len() == 2 && cluster[1]["server_id"] == other, "no {other} in {cluster:?}");
    }

    // Lost and found again: told over the servers' link.
    agent.crash(&second).await?;
    client::expect_unreachable((testbed.edge(1).address, 9100)).await?;
    agent.return_to(&second).await?;
    wait_via(&first).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let mut held = hold(on_edge.address, b"before the revocation").await?;

    // One server tells the other what is revoked.
    testbed.allow_error("revoked");
    first.run(&["agent", "revoke", "edge-1"])?;
    second.wait_connected("edge-1", false, TOLD).await.context("revoked at the other server")?;
    let end = end_of(&mut held, client::PATIENCE).await?;
    ensure!(end == client::End::Reset, "a revoked node's connection ended with {end:?}");
    Ok(())
}

pub(super) async fn a_redirector_of_the_previous_version(testbed: &Testbed) -> Result<()> {
    redirect(testbed, Version::Previous, Version::This).await
}

pub(super) async fn a_server_of_the_previous_version_and_a_redirector(testbed: &Testbed) -> Result<()> {
    redirect(testbed, Version::This, Version::Previous).await
}

async fn redirect(testbed: &Testbed, of_redirector: Version, of_server: Version) -> Result<()> {
    let neighbour = testbed.add_neighbour()?;
    let server = Builder::alone_on_neighbour(testbed, &neighbour).version(of_server).ports(server::PORTS);
    let server = server.start().await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let token = token(&server, "cloud-1")?;
    let redirector =
        enrolled(Builder::new(testbed).version(of_redirector), "cloud-1", &token).start().await?;
    expect_version(&server.process, of_server, "tunnel-server")?;
    expect_version(&redirector.process, of_redirector, "tunnel-server")?;
    wait_via(&redirector).await?;
    relayed(testbed).await?;

    server.run(&["agent", "revoke", "cloud-1"])?;
    let address = (testbed.edge(1).address, 9100).into();
    let unreachable = async || {
        Ok(client::attempt(address, client::PATIENCE)
            .await
            .is_err_and(|error| client::is_unreachable(&error)))
    };
    wait_until("a revoked redirector to reach no node", TOLD, unreachable, |refused| *refused).await.map(drop)
}
