//! The redirect is repaired while it runs, and opens no more than it should.
use std::io::ErrorKind;
use std::time::Duration;

use anyhow::{Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::client::{End, PATIENCE, connect, end_of, visit};
use postern_testbed::report::figure;
use postern_testbed::target::Behaviour;
use postern_testbed::wait::wait_until;
use tokio::net::TcpStream;

use crate::common::{server_and_agent, target};

scenarios! {
    lost_route_is_restored,
    token_opens_only_tunnelled_ports,
}

/// The redirect is verified every 30 s; the rest is slack.
const NOTICED: Duration = Duration::from_secs(40);

async fn lost_route_is_restored(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    visit(on_edge.address).await?;
    testbed.cloud.output("ip", "route del local 198.18.0.0/15 dev lo")?;
    let start = std::time::Instant::now();
    let routes = async || testbed.cloud.output("ip", "route show table local");
    wait_until("the token route to be back", NOTICED, routes, |routes| routes.contains("198.18.0.0/15"))
        .await?;
    figure(&format!("a lost token route is back after {:.1?}", start.elapsed()));
    visit(on_edge.address).await?;
    let repairs = async || Ok(server.metrics().await?.sum("postern_redirect_mended_total", &[]));
    wait_until("the repair to be counted", NOTICED, repairs, |repairs| *repairs >= 1.0).await?;
    // The verification after the repair went through the door like any other connection.
    let verified = server.metrics().await?.sum("postern_redirect_verified", &[]);
    ensure!(verified == 1.0, "the redirect counts as broken after its repair");
    let status = server.status().await?;
    ensure!(status["redirect"]["state"] == "on", "{}", status["redirect"]);
    Ok(())
}

/// A token is an address that any process on the host may dial.
async fn token_opens_only_tunnelled_ports(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let tunnelled = target(testbed, 1, 10250, Behaviour::Echo)?;
    let other = target(testbed, 1, 2222, Behaviour::Echo)?;
    let stream = connect(tunnelled.address).await?;
    // A packet to a `local` route without a preferred source has its destination, the token, as its source.
    let token = stream.local_addr()?.ip();
    visit((token, 10250).into()).await?;
    // The reset may come before connect() has returned.
    let end = match TcpStream::connect((token, other.address.port())).await {
        Ok(mut direct) => end_of(&mut direct, PATIENCE).await?,
        Err(error) if error.kind() == ErrorKind::ConnectionReset => End::Reset,
        Err(error) => return Err(error.into()),
    };
    ensure!(end == End::Reset, "a token opened a port that is not tunnelled");
    server.wait_log("is not tunnelled").await
}
