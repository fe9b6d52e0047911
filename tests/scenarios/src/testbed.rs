//! Checks the assumptions of the other scenarios about the testbed.
use std::time::Duration;

use anyhow::{Result, ensure};
use postern_testbed::client::{self, connect_error, connect_from, digest, pattern_digest, visit};
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::{CLOUD, NEIGHBOUR, POD, Testbed};

scenarios! {
    edges_only_dial_out(edges = 2, quick),
    neighbour_and_pod_reach_the_cloud_host,
    targets_behave,
}

async fn edges_only_dial_out(testbed: &Testbed) -> Result<()> {
    let on_cloud = Target::start(&testbed.cloud, CLOUD, 10262, Behaviour::Echo)?;
    for edge in testbed.edges() {
        let on_edge = Target::start(&edge.ns, edge.address, 10250, Behaviour::Echo)?;
        let mut stream = connect_from(&edge.ns, on_cloud.address, client::PATIENCE).await?;
        client::echo(&mut stream, b"out through NAT").await?;
        let error = connect_error(on_edge.address, Duration::from_secs(2)).await?;
        ensure!(
            error.kind() == std::io::ErrorKind::TimedOut,
            "the edge must not be reachable from the cloud: {error}"
        );
        let on_v6 = Target::start(&edge.ns, edge.address_v6, 10250, Behaviour::Echo)?;
        let error = connect_error(on_v6.address, Duration::from_secs(2)).await?;
        ensure!(error.kind() == std::io::ErrorKind::TimedOut, "nor by IPv6: {error}");
        let v6_on_cloud =
            Target::start(&testbed.cloud, "fd70::1".parse::<std::net::IpAddr>()?, 10262, Behaviour::Echo)?;
        client::echo(
            &mut connect_from(&edge.ns, v6_on_cloud.address, client::PATIENCE).await?,
            b"out by IPv6",
        )
        .await?;
        ensure!(on_edge.connections() == 0, "a connection got through to {}", edge.name);
    }
    testbed.cut_link(1)?;
    let cut = connect_from(&testbed.edge(1).ns, on_cloud.address, Duration::from_secs(1)).await;
    ensure!(cut.is_err(), "the cut link of edge-1 still works");
    connect_from(&testbed.edge(2).ns, on_cloud.address, client::PATIENCE).await?;
    testbed.restore_link(1)?;
    connect_from(&testbed.edge(1).ns, on_cloud.address, client::PATIENCE).await?;
    Ok(())
}

async fn neighbour_and_pod_reach_the_cloud_host(testbed: &Testbed) -> Result<()> {
    let on_cloud = Target::start(&testbed.cloud, CLOUD, 10262, Behaviour::Echo)?;
    for (ns, address) in [(testbed.add_neighbour()?, NEIGHBOUR), (testbed.add_pod()?, POD)] {
        let mut stream = connect_from(&ns, on_cloud.address, client::PATIENCE).await?;
        ensure!(stream.local_addr()?.ip() == address, "{} came from elsewhere", ns.name());
        client::echo(&mut stream, b"hello").await?;
    }
    Ok(())
}

async fn targets_behave(testbed: &Testbed) -> Result<()> {
    let ns = &testbed.cloud;
    visit(Target::start(ns, CLOUD, 0, Behaviour::Echo)?.address).await?;
    let source = Target::start(ns, CLOUD, 0, Behaviour::Source(7, 3_000_000))?;
    let mut stream = client::connect(source.address).await?;
    ensure!(
        digest(&mut stream).await? == (3_000_000, pattern_digest(7, 3_000_000)),
        "the source sent something else"
    );
    let refused = Target::start(ns, CLOUD, 0, Behaviour::Resets)?;
    let mut stream = client::connect(refused.address).await?;
    tokio::io::AsyncWriteExt::write_all(&mut stream, b"x").await?;
    ensure!(client::end_of(&mut stream, client::PATIENCE).await? == client::End::Reset, "no reset came");
    testbed.black_hole(1, 9105)?;
    let edge = testbed.edge(1);
    let hole = Target::start(&edge.ns, edge.address, 9105, Behaviour::Echo)?;
    let dropped = connect_from(&edge.ns, hole.address, Duration::from_millis(500)).await;
    ensure!(
        dropped.is_err_and(|error| error.kind() == std::io::ErrorKind::TimedOut),
        "the black hole answered"
    );
    Ok(())
}
