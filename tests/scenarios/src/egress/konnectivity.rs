//! konnectivity's own programs.
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use postern_testbed::agent::{Agent, START};
use postern_testbed::client::{self, PATIENCE, Pattern, digest, echo, pattern_digest};
use postern_testbed::cluster::peers;
use postern_testbed::process::Process;
use postern_testbed::server::Server;
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, Testbed};
use tokio::io::AsyncReadExt as _;
use tokio::net::UnixStream;
use tokio::process::Command;
use tokio::time::timeout;

use super::client::{ask, connect};
use super::{ECHO, server_and_agent, socket};
use crate::common::target;

/// Answer to every request; its connection ends with it.
pub(super) const PAGE: &str =
    "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 15\r\n\r\nfrom an edge 1\n";

/// The test client that konnectivity ships, in both of its modes.
pub(super) async fn konnectivitys_own_client_gets_its_page(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let page = target(testbed, 1, ECHO, Behaviour::Answers(PAGE))?;
    for (mode, host) in [("grpc", testbed.edge(1).address.to_string()), ("http-connect", "edge-1".to_owned())]
    {
        page_by_its_client(&socket(testbed), mode, &host, &page).await?;
    }
    let line = server.wait_access("of the client", |line| line.text("listener") == "egress").await?;
    ensure!(line.text("outcome") == "ok", "{line:?}");
    Ok(())
}

/// Fetches the page through a socket with konnectivity's test client.
pub(super) async fn page_by_its_client(socket: &Path, mode: &str, host: &str, page: &Target) -> Result<()> {
    let before = page.connections();
    let output = Command::new(peers::konnectivity("proxy-test-client")?)
        .arg(format!("--proxy-uds={}", socket.display()))
        .args(["--proxy-host=", "--proxy-port=0", &format!("--mode={mode}")])
        .args([format!("--request-host={host}"), format!("--request-port={}", page.address.port())])
        .args(["--request-path=page", "--test-requests=5", "--test-delay=0"])
        .kill_on_drop(true)
        .output();
    let output = timeout(Duration::from_secs(60), output).await.context("it did not end")?;
    let output = output.context("running it")?;
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "in mode {mode} it ended with {}: {said}", output.status);
    let made = page.connections() - before;
    ensure!(made >= 5, "in mode {mode} it made {made} connections: {said}");
    Ok(())
}

const AGENT_PORT: u16 = 8091;
/// Time limit for a step beside a connection that stalls the others for 2 s, on a busy machine.
pub(super) const BESIDE: Duration = Duration::from_secs(10);

/// Starts konnectivity's agent on edge 1. `state`: folder of a tunnel-agent whose certificate it presents, if any.
fn proxy_agent(testbed: &Testbed, name: &str, state: &Path, certificate: bool) -> Result<Process> {
    let host = testbed.on_edge(1);
    let mut command = host.command(&peers::konnectivity("proxy-agent")?);
    let file = |flag: &str, name: &str| format!("--{flag}={}", state.join(name).display());
    command
        .args(["--logtostderr=true", "--v=2", "--sync-interval=200ms", "--sync-interval-cap=1s"])
        .args([format!("--proxy-server-host={CLOUD}"), format!("--proxy-server-port={AGENT_PORT}")])
        // A false identifier: the certificate is not edge-2's.
        .args([format!("--agent-id={name}"), "--agent-identifiers=host=edge-2".to_owned()])
        .arg(file("ca-cert", "ca.crt"));
    if certificate {
        command.args([file("agent-cert", "agent.crt"), file("agent-key", "agent.key")]);
    }
    Process::spawn(testbed.dir(), name, command)
}

/// Sends and receives at the same time through an echo.
pub(super) async fn back_and_forth(mut stream: UnixStream, seed: u64, length: u64) -> Result<()> {
    let (read, mut write) = stream.split();
    let mut pattern = Pattern::new(seed, length);
    let mut back = read.take(length);
    let (written, got) = tokio::join!(pattern.write_to(&mut write), digest(&mut back));
    written?;
    ensure!(got? == (length, pattern_digest(seed, length)), "the echo came back changed");
    Ok(())
}

/// konnectivity's own agent attaches, and its node is reached like any other.
pub(super) async fn konnectivitys_own_agent_attaches(testbed: &Testbed) -> Result<()> {
    let socket = socket(testbed);
    let mut server = postern_testbed::server::Builder::new(testbed)
        .flag(format!("--egress-socket={}", socket.display()))
        .flag(format!("--konnectivity-agent-port={AGENT_PORT}"))
        .start()
        .await?;
    // Obtains the certificate of the node.
    let mut enrolled = Agent::enrol(&server, 1).await?;
    let state = enrolled.state_dir();
    let turned_away = proxy_agent(testbed, "proxy-agent-too-early", &state, true)?;
    server.wait_log("node edge-1 has a tunnel-agent, which is attached").await?;
    drop(turned_away);
    enrolled.process.stop().await?;
    server.wait_connected("edge-1", false, PATIENCE).await?;
    let stranger = proxy_agent(testbed, "proxy-agent-stranger", &state, false)?;
    server.wait_log("a client certificate of this server's CA or a service account's token").await?;
    ensure!(!server.is_connected("edge-1").await?, "an agent without a certificate is attached");
    drop(stranger);

    let mut agent = proxy_agent(testbed, "proxy-agent", &state, true)?;
    server.wait_connected("edge-1", true, START).await?;
    let echoes = target(testbed, 1, ECHO, Behaviour::Echo)?;
    relays(testbed, &server, &socket, &echoes).await?;
    stalls_nobody(testbed, &server, &socket).await?;
    let by_name = format!("edge-1:{ECHO}");
    let mut held = connect(&socket, &by_name).await?;
    echo(&mut held, b"before").await?;
    // It drains until it is killed, and the next one takes over.
    agent.signal(Signal::SIGTERM)?;
    server.wait_log("konnectivity agent is draining").await?;
    echo(&mut connect(&socket, &by_name).await?, b"while it drains").await?;
    let _next = proxy_agent(testbed, "proxy-agent-next", &state, true)?;
    server.wait_log("session moved to the successor of its agent").await?;
    echo(&mut held, b"through the one before").await?;
    agent.crash().await?;
    echo(&mut connect(&socket, &by_name).await?, b"through the next").await?;
    // Without a port for other agents, a revocation ends the session as well.
    server.process.stop().await?;
    server.start_again_with("--agent-port=0").await?;
    server.wait_connected("edge-1", true, START).await?;
    server.run(&["agent", "revoke", "edge-1"])?;
    server.wait_connected("edge-1", false, PATIENCE).await
}

async fn relays(testbed: &Testbed, server: &Server<'_>, socket: &Path, echoes: &Target) -> Result<()> {
    let source = target(testbed, 1, 9102, Behaviour::Source(7, 20_000_000))?;
    let greeter = target(testbed, 1, 9104, Behaviour::HelloFirst("220 first\r\n"))?;
    testbed.black_hole(1, 9103)?;
    // Through the redirect, and by name through the egress listener.
    echo(&mut client::connect(echoes.address).await?, b"redirected").await?;
    back_and_forth(connect(socket, &format!("edge-1:{ECHO}")).await?, 3, 20_000_000).await?;
    let got = digest(&mut connect(socket, &source.address.to_string()).await?).await?;
    ensure!(got == (20_000_000, pattern_digest(7, 20_000_000)), "the source's bytes changed: {got:?}");
    for round in 0..100 {
        let mut stream = connect(socket, &greeter.address.to_string()).await?;
        let mut greeting = [0; 11];
        timeout(PATIENCE, stream.read_exact(&mut greeting)).await??;
        ensure!(&greeting == b"220 first\r\n", "round {round}: {greeting:?}");
    }
    for (asked, status, reason) in [
        ("edge-1:9101", 502, "connection refused"),
        ("edge-1:9103", 504, "i/o timeout"),
        // The false identifier that the agent sends.
        ("edge-2:9100", 503, "no tunnel to node edge-2"),
    ] {
        let (_, answer) = ask(UnixStream::connect(socket).await?, asked).await?;
        ensure!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")) && answer.contains(reason),
            "{asked} was answered {answer:?}"
        );
    }
    let line = server.wait_access("of the redirect", |line| line.text("listener") == "redirect").await?;
    ensure!(line.text("node") == "edge-1", "{line:?}");
    let left = async || Ok(echoes.open());
    wait_until("the targets' connections to end", Duration::from_secs(30), left, |open| *open == 0).await?;
    Ok(())
}

/// One client that does not read makes the others wait for 2 s, and is cut off.
async fn stalls_nobody(testbed: &Testbed, server: &Server<'_>, socket: &Path) -> Result<()> {
    let source = target(testbed, 1, 9105, Behaviour::Source(1, 1 << 30))?;
    let mut held = connect(socket, &format!("edge-1:{ECHO}")).await?;
    let stalled = connect(socket, &source.address.to_string()).await?;
    for _ in 0..50 {
        timeout(BESIDE, echo(&mut held, b"beside a stalled client")).await??;
        let mut stream = timeout(BESIDE, connect(socket, &format!("edge-1:{ECHO}"))).await??;
        timeout(BESIDE, echo(&mut stream, b"new")).await??;
    }
    wait_until("the stalled client's target to end", PATIENCE, async || Ok(source.open()), |open| *open == 0)
        .await?;
    let memory = server.process.resident_bytes()?;
    ensure!(memory < 256 << 20, "the server holds {} MiB", memory >> 20);
    drop(stalled);
    Ok(())
}
