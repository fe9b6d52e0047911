//! Agents whose only way out is an HTTP proxy: tinyproxy, on the router.
use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result};
use postern_testbed::agent::{self, Builder};
use postern_testbed::client;
use postern_testbed::netns::Namespace;
use postern_testbed::process::Process;
use postern_testbed::server::Server;
use postern_testbed::target::Behaviour;
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, Testbed, tls};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::common::{server, target};
use crate::doctor;

scenarios! {
    an_agent_gets_out_through_a_proxy(quick),
    a_proxy_that_ends_idle_tunnels,
    servers_in_no_proxy_are_dialled_directly,
    a_proxy_that_opens_tls_is_named,
}

const PORT: u16 = 3128;
/// Time limit for several links that are cut after 3 s each, and the pauses between them.
const NAMES: Duration = Duration::from_secs(45);

/// Returns the proxy's address for edge 1, with this prefix for the user.
fn url(user: &str) -> String {
    format!("http://{user}192.168.50.1:{PORT}")
}

/// Leaves only the proxy as a way out.
fn close_direct_way(testbed: &Testbed) -> Result<()> {
    testbed.router.iptables(&format!("-I FORWARD -i edge+ -d {CLOUD} -p tcp -j DROP"))
}

/// Starts the proxy, with more lines in its configuration.
pub(crate) fn start(testbed: &Testbed, directives: &str) -> Result<Process> {
    let path = testbed.dir().join("tinyproxy.conf");
    let config = format!("User root\nPort {PORT}\nLogLevel Connect\n{directives}\n");
    fs::write(&path, config).with_context(|| format!("writing {}", path.display()))?;
    let mut command = testbed.router.command("tinyproxy");
    command.args(["-d", "-c"]).arg(&path);
    Process::spawn(testbed.dir(), "tinyproxy", command)
}

/// Makes a builder for an agent that enrols through this proxy.
fn builder<'a>(server: &Server<'a>, proxy: &str) -> Result<Builder<'a>> {
    Ok(Builder::new(server, 1).token(server.token("edge-1")?).env("HTTPS_PROXY", proxy))
}

async fn an_agent_gets_out_through_a_proxy(testbed: &Testbed) -> Result<()> {
    close_direct_way(testbed)?;
    let server = server(testbed).await?;
    let mut proxy = start(testbed, "BasicAuth user secret")?;
    for (user, says) in [
        ("", "asks for a user and a password: give http://USER:PASSWORD@192.168.50.1:3128"),
        ("user:wrong@", "refuses the user and the password"),
    ] {
        let agent = builder(&server, &url(user))?.named(&format!("refused-{}", user.len())).spawn()?;
        agent.wait_log(says).await?;
    }
    let agent = builder(&server, &url("user:secret@"))?.spawn()?;
    server.wait_connected("edge-1", true, agent::START).await?;
    anyhow::ensure!(!agent.settled_log().await?.contains("secret"), "the password is in the log");
    let echo = target(testbed, 1, 9100, Behaviour::Echo)?;
    client::visit(echo.address).await?;

    // The proxy restarts.
    proxy.crash().await?;
    agent.wait_log("session ended").await?;
    let _proxy = start(testbed, "BasicAuth user secret")?;
    wait_until("a visit", agent::START, async || client::visit(echo.address).await, |_| true).await?;
    Ok(())
}

async fn a_proxy_that_ends_idle_tunnels(testbed: &Testbed) -> Result<()> {
    close_direct_way(testbed)?;
    let server = server(testbed).await?;
    // In seconds, shorter than the interval between PINGs.
    let _proxy = start(testbed, "Timeout 3")?;
    let agent = builder(&server, &url(""))?.spawn()?;
    server.wait_connected("edge-1", true, agent::START).await?;
    let echo = target(testbed, 1, 9100, Behaviour::Echo)?;
    agent.wait_log("session ended").await?;
    wait_until("a visit", agent::START, async || client::visit(echo.address).await, |_| true).await?;
    // The next session may have replaced one whose end the server had not seen yet; then a later end has the reason.
    let end = async || Ok(server.status().await?["nodes"][0]["last_end"].to_string());
    let closed = "link lost: the peer closed the connection";
    wait_until("the end as the server has it", NAMES, end, |end| end.contains(closed)).await?;
    // After several links were cut after the same time, the agent names the proxy. It waits a little longer before each
    // return.
    let says = "the proxy 192.168.50.1:3128 closes links that are idle for about ";
    let log = async || agent.process.output();
    wait_until("the agent to name the proxy", NAMES, log, |log| log.contains(says)).await?;
    let doctor = async || {
        let mut command = doctor::agent::command(testbed, &[])?;
        command.env("HTTPS_PROXY", url(""));
        Ok(doctor::run(command).await?.has("proxy-cuts-idle"))
    };
    wait_until("the doctor to name the proxy", NAMES, doctor, |named| *named).await?;
    Ok(())
}

async fn servers_in_no_proxy_are_dialled_directly(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    // No proxy runs at that address.
    let agent = builder(&server, &url(""))?.env("NO_PROXY", "10.70.0.0/16").spawn()?;
    server.wait_connected("edge-1", true, agent::START).await?;
    drop(agent);
    let agent = Builder::new(&server, 1).env("HTTPS_PROXY", &url("")).flag("--proxy=none").spawn()?;
    server.wait_connected("edge-1", true, agent::START).await?;
    drop(agent);
    let agent = Builder::new(&server, 1).env("HTTPS_PROXY", &url("")).spawn()?;
    agent.wait_log("proxy 192.168.50.1:3128: Connection refused").await
}

/// Answers each CONNECT and then terminates TLS itself, with its own certificate.
async fn open_tls(router: &Namespace) -> Result<()> {
    let (_, acceptor) = tls::self_signed("tunnel-server.postern.internal", Some(b"h2"))?;
    let listener = router.run(|| {
        let listener = std::net::TcpListener::bind(("0.0.0.0", PORT)).context("the proxy's port")?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    })?;
    let listener = TcpListener::from_std(listener)?;
    loop {
        let (mut stream, _) = listener.accept().await?;
        let acceptor = acceptor.clone();
        tokio::spawn(async move {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await?);
            }
            stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
            acceptor.accept(stream).await.map(drop)
        });
    }
}

async fn a_proxy_that_opens_tls_is_named(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    let enrolled = builder(&server, &url(""))?.flag("--proxy=none").spawn()?;
    server.wait_connected("edge-1", true, agent::START).await?;
    drop(enrolled);
    let seen = async {
        let says =
            "through the proxy 192.168.50.1:3128: one that opens TLS must pass this connection on unopened";
        // With a certificate, and before the first one.
        let attached = Builder::new(&server, 1).env("HTTPS_PROXY", &url("")).spawn()?;
        attached.wait_log(says).await?;
        drop(attached);
        testbed.expect_error("the server's CA is not the expected one: it presented no CA");
        let stranger = builder(&server, &url(""))?.named("stranger").spawn()?;
        stranger.wait_log(says).await
    };
    tokio::select! {
        proxy = open_tls(&testbed.router) => proxy,
        seen = seen => seen,
    }
}
