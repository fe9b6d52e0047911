use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::Agent;
use postern_testbed::client::visit;
use postern_testbed::inventory::Inventory;
use postern_testbed::process::program;
use postern_testbed::server::Builder;
use postern_testbed::target::Behaviour;
use postern_testbed::wait::wait_until;
use postern_testbed::{Testbed, agent, tls};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{Said, run};
use crate::common::{server, target};

scenarios! {
    the_way_to_a_node_is_tested(quick),
    without_the_redirect_the_listeners_are_used,
}

/// Runs `tunnel-server test` on the cloud host.
async fn test(testbed: &Testbed, args: &[&str]) -> Result<Said> {
    let mut command = testbed.on_cloud().command(&program("tunnel-server")?);
    command.args(["test", "-o", "json"]).args(args);
    run(command).await
}

/// Starts a kubelet of edge 1 with a certificate for `name`, which answers with `status`.
async fn kubelet(testbed: &Testbed, name: &str, status: &'static str) -> Result<tokio::task::JoinHandle<()>> {
    let (_, acceptor) = tls::self_signed(name, None)?;
    let address = SocketAddr::new(testbed.edge(1).ip(), 10250);
    let listener = testbed.edge(1).ns.run(|| {
        let listener = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
        listener.set_reuse_address(true)?;
        listener.bind(&address.into())?;
        listener.listen(16)?;
        listener.set_nonblocking(true)?;
        Ok(std::net::TcpListener::from(listener))
    })?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    Ok(tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let mut stream = acceptor.accept(stream).await?;
                stream.read_u8().await?;
                let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
                stream.write_all(answer.as_bytes()).await?;
                stream.shutdown().await
            });
        }
    }))
}

async fn the_way_to_a_node_is_tested(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    let said = test(testbed, &["edge-1"]).await?;
    said.expect_only(&["node-without-tunnel"])?;
    ensure!(said.state("kubelet")? == "skipped" && said.state("ports")? == "skipped", "{:#}", said.report);
    test(testbed, &["edge-9"]).await?.expect_only(&["node-unknown"])?;

    let mut agent = Agent::enrol(&server, 1).await?;
    let echo = target(testbed, 1, 9100, Behaviour::Echo)?;
    // The kernel's routes follow the session a moment later, and the command tries only once.
    visit(echo.address).await?;
    // A port that does not refuse within half a second plus two round trips counts as open.
    let tested = async || test(testbed, &["edge-1", "--port=9100,9101"]).await;
    let refused = |said: &Said| said.has("port-not-reached");
    let said = wait_until("the closed port to be found", agent::START, tested, refused).await?;
    said.expect("kubelet-unexpected", "")?;
    said.expect("port-not-reached", "port 9101: ")?;
    said.expect("port-not-reached", "connection refused by 192.168.50.2:9101")?;
    ensure!(
        !said.codes().is_empty() && !format!("{}", said.report).contains("port 9100:"),
        "{:#}",
        said.report
    );

    for (name, status, expected) in [
        ("edge-1", "401 Unauthorized", None),
        ("192.168.50.2", "403 Forbidden", None),
        ("edge-7", "401 Unauthorized", Some("names edge-7")),
        ("edge-1", "200 OK", Some("without credentials")),
        ("edge-1", "404 Not Found", Some("404 Not Found")),
    ] {
        let kubelet = kubelet(testbed, name, status).await?;
        let said = test(testbed, &["edge-1", "--port=9100,10250"]).await?;
        match expected {
            None => said.expect_only(&[])?,
            Some(found) => said.expect("kubelet-unexpected", found)?,
        }
        // Its listener is closed after this.
        kubelet.abort();
        ensure!(kubelet.await.is_err_and(|error| error.is_cancelled()), "the kubelet ended");
    }
    // A kubelet at another port, which no flag names.
    let mut inventory = Inventory::of(testbed)?;
    inventory.nodes[1]["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"] = json!(10350);
    inventory.write()?;
    let tested = async || test(testbed, &["edge-1", "--port=9100,10250"]).await;
    let missed = |said: &Said| said.has("kubelet-not-tunnelled");
    let said = wait_until("the kubelet's port to be missed", agent::START, tested, missed).await?;
    said.expect("kubelet-not-tunnelled", "edge-1: the Node names port 10350")?;

    agent.process.stop().await?;
    server.wait_connected("edge-1", false, agent::START).await?;
    test(testbed, &["edge-1"]).await?.expect("node-without-tunnel", "last seen")
}

async fn without_the_redirect_the_listeners_are_used(testbed: &Testbed) -> Result<()> {
    let server = Builder::new(testbed).flag("--redirect=off").start().await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let _kubelet = kubelet(testbed, "edge-1", "401 Unauthorized").await.context("the kubelet")?;
    let _echo = target(testbed, 1, 9100, Behaviour::Echo)?;
    let said = test(testbed, &["edge-1", "--port=9100,9101"]).await?;
    said.expect_only(&["port-not-reached"])?;
    said.expect("port-not-reached", "refused by 192.168.50.2:9101")
}
