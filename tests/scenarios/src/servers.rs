//! One agent and two servers.
use std::cell::Cell;
use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::{self, Agent};
use postern_testbed::client::{self, connect_from, echo, end_of};
use postern_testbed::netns::Namespace;
use postern_testbed::server::Builder;
use postern_testbed::target::Behaviour;
use postern_testbed::{NEIGHBOUR, Testbed};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::common::{alongside, hold, pause, server, target};
use crate::https::{KUBELET, client_hello, expect_back};

scenarios! {
    one_of_two_is_killed(limit = 180),
}

/// A connection through the https door of the second server.
async fn through_second(neighbour: &Namespace) -> Result<TcpStream> {
    let door = SocketAddr::new(NEIGHBOUR.into(), 10263);
    let mut stream = connect_from(neighbour, door, client::PATIENCE).context("the second server's door")?;
    let hello = client_hello("edge-1")?;
    stream.write_all(&hello).await?;
    expect_back(&mut stream, &hello).await?;
    Ok(stream)
}

async fn one_of_two_is_killed(testbed: &Testbed) -> Result<()> {
    let mut first = server(testbed).await?;
    let neighbour = testbed.add_neighbour()?;
    let second = Builder::on_neighbour(&first, &neighbour)?.start().await?;
    let both = format!("--server={}", second.agent_address());
    let agent = Agent::enrol_with(&first, 1, &[&both]).await?;
    second.wait_connected("edge-1", true, agent::START).await?;
    agent.metrics().await?.expect("postern_agent_sessions_started_total", &[], 2.0)?;

    let on_edge = target(testbed, 1, KUBELET, Behaviour::Echo)?;
    let mut by_first = hold(on_edge.address, b"through the first").await?;
    let mut by_second = through_second(&neighbour).await?;
    for (server, door) in [(&first, "redirect"), (&second, "https")] {
        server.metrics().await?.expect("postern_connections_active", &[("door", door)], 1.0)?;
    }

    // Connections through the second one notice nothing.
    let killed = Cell::new(false);
    let kill = async {
        first.process.crash().await?;
        let end = end_of(&mut by_first, client::PATIENCE).await?;
        ensure!(end == client::End::Reset, "the connection through the killed server ended with {end:?}");
        // More than a retry of the agent takes.
        pause(5).await?;
        killed.set(true);
        anyhow::Ok(())
    };
    let go_on = async {
        while !killed.get() {
            echo(&mut by_second, b"through the second").await.context("on an open connection")?;
            through_second(&neighbour).await.context("on a new connection")?;
            ensure!(second.is_connected("edge-1").await?, "the second server has lost its agent");
        }
        Ok(())
    };
    tokio::try_join!(kill, go_on)?;
    agent.metrics().await?.expect("postern_agent_sessions_started_total", &[], 2.0)?;
    for line in second.access_log()? {
        ensure!(line.text("outcome") == "ok", "at the second server: {line:?}");
    }

    first.start_again().await?;
    let back = first.wait_connected("edge-1", true, agent::START);
    back.await.context("the agent comes back to the first")?;
    alongside("two servers", on_edge.address, async {
        echo(&mut by_second, b"still through the second").await
    })
    .await
}
