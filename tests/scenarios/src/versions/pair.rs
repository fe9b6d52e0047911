//! One server and one agent, of different versions.
use std::fs;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::agent::{self, Agent};
use postern_testbed::client::{self, connect, echo, end_of};
use postern_testbed::process::Version;
use postern_testbed::server::{Builder, Server};
use postern_testbed::target::Behaviour;
use postern_testbed::wait::wait_until;
use postern_testbed::wan::Path;
use tokio::io::AsyncWriteExt as _;
use tokio::net::UnixStream;

use super::expect_version;
use crate::common::{expect_reset, hold, target};
use crate::egress::client::ask;
use crate::identity::renewed;
use crate::mapped::{self, MAP, visit_mapped};
use crate::wan::{download, hold_on_links_of_their_own, upload};
use crate::web::Web;
use crate::{front, path};

/// Time limit for a change at the server to take effect at the agent.
const TOLD: Duration = Duration::from_secs(30);
/// Bytes of a transfer.
const LENGTH: u64 = 10_000_000;

pub(super) async fn an_agent_of_the_previous_version(testbed: &Testbed) -> Result<()> {
    work_together(testbed, Version::This, Version::Previous).await
}

pub(super) async fn a_server_of_the_previous_version(testbed: &Testbed) -> Result<()> {
    work_together(testbed, Version::Previous, Version::This).await
}

async fn work_together(testbed: &Testbed, of_server: Version, of_agent: Version) -> Result<()> {
    // A session of a node that is near has one link.
    let _wan = testbed.wan(1, Path::new(40, 100))?;
    let socket = testbed.dir().join("egress.sock");
    let server = Builder::new(testbed).version(of_server).flag("--drain-timeout=5s");
    let server = server.flag(format!("--egress-socket={}", socket.display()));
    let (mut server, _in_cloud) = mapped::server_of(testbed, server).await?;
    let agent = agent::Builder::new(&server, 1).version(of_agent).flag(MAP).flag("--max-links=8");
    let mut agent = agent.enrol(&server).await?;
    expect_version(&server.process, of_server, "tunnel-server")?;
    expect_version(&agent.process, of_agent, "tunnel-agent")?;

    // Each is asked of the agent by the server.
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    drop(hold_on_links_of_their_own(&server, on_edge.address, 3).await.context("further links")?);
    traffic(testbed).await?;
    visit_mapped(testbed).await.context("from the edge to the cloud")?;
    let (mut by_egress, answer) = ask(UnixStream::connect(&socket).await?, "edge-1:10250").await?;
    ensure!(answer.starts_with("HTTP/1.1 200 "), "CONNECT was answered {answer:?}");
    echo(&mut by_egress, b"by the egress listener").await?;
    drop(by_egress);
    drop(renewed(testbed, &server, &mut agent, on_edge.address).await.context("renewal")?);
    introduce_root(&server, &agent).await.context("a further root of the CA")?;

    // A server that stops tells its agent, which comes back to it.
    let mut held = hold(on_edge.address, b"before the stop").await?;
    held.shutdown().await?;
    ensure!(end_of(&mut held, client::PATIENCE).await? == client::End::Eof(0), "no clean end");
    ensure!(server.process.stop().await?.success(), "the server's end");
    server.start_again().await?;
    server.wait_connected("edge-1", true, TOLD).await.context("after a stop")?;
    download_and_upload(testbed).await?;

    testbed.allow_error("revoked");
    let mut held = hold(on_edge.address, b"before the revocation").await?;
    server.run(&["agent", "revoke", "edge-1"])?;
    server.wait_connected("edge-1", false, TOLD).await.context("revoked")?;
    let end = end_of(&mut held, client::PATIENCE).await?;
    ensure!(end == client::End::Reset, "a revoked node's connection ended with {end:?}");
    Ok(())
}

/// Every way in which a connection begins and ends.
async fn traffic(testbed: &Testbed) -> Result<()> {
    path::half_closes(testbed).await.context("half-closes")?;
    path::target_speaks_first(testbed).await.context("a greeting")?;
    download_and_upload(testbed).await?;
    expect_reset((testbed.edge(1).ip(), 9105).into()).await.context("a port without a target")?;
    let resets = target(testbed, 1, 9103, Behaviour::Resets)?;
    let mut stream = connect(resets.address).await?;
    stream.write_all(b"x").await?;
    let end = end_of(&mut stream, client::PATIENCE).await?;
    ensure!(end == client::End::Reset, "the target's reset arrived as {end:?}");
    // As kubectl exec.
    let _web = Web::start(testbed, 1, 9104)?;
    let listener = async || connect(SocketAddr::from(([127, 0, 0, 1], 10264))).await;
    front::an_upgrade_is_relayed(listener, "edge-1:9104", ("POST", "SPDY/3.1")).await.context("an upgrade")
}

pub(super) async fn download_and_upload(testbed: &Testbed) -> Result<()> {
    let source = target(testbed, 1, 9101, Behaviour::Source(5, LENGTH))?;
    download(source.address, 5, LENGTH).await.context("a download")?;
    let sink = target(testbed, 1, 9102, Behaviour::Sink)?;
    upload(sink.address, 6, LENGTH).await.context("an upload").map(drop)
}

async fn introduce_root(server: &Server<'_>, agent: &Agent<'_>) -> Result<()> {
    server.run(&["ca", "introduce"])?;
    let roots = agent.state_dir().join("ca.crt");
    let stored = async || Ok(fs::read_to_string(&roots)?.matches("BEGIN CERTIFICATE").count());
    wait_until("the agent to trust two roots", TOLD, stored, |roots| *roots == 2).await.map(drop)
}
