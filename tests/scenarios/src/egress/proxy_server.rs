//! The agent as a client of konnectivity's own proxy-server.
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use postern_testbed::agent::{Agent, Builder, START};
use postern_testbed::client::{PATIENCE, echo};
use postern_testbed::cluster::peers;
use postern_testbed::cluster::pki::Pki;
use postern_testbed::process::{Placement, Process};
use postern_testbed::target::Behaviour;
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, Testbed};
use serde_json::Value;
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tunnel_link::konnectivity::Packet;

use super::ECHO;
use super::client::{Caller, ask, connect};
use super::konnectivity::{BESIDE, PAGE, back_and_forth, page_by_its_client};
use crate::common::{balance, target};
use crate::gateway;
use crate::held::ALLOCATOR;

/// Port at which all servers are reached.
const SHARED: u16 = 8090;
/// Agent ports of the two servers: gRPC, and HTTP CONNECT.
const PORTS: [u16; 2] = [8091, 8191];
const MODES: [&str; 2] = ["grpc", "http-connect"];

/// A CA, with a certificate for the servers and one for the agents.
struct Certificates(Pki);

impl Certificates {
    fn create(testbed: &Testbed) -> Result<Self> {
        let pki = Pki::create(testbed.dir().join("konnectivity-certificates"))?;
        pki.server("server", "server", &[CLOUD.to_string()])?;
        pki.client("agent", "agent", &[])?;
        Ok(Self(pki))
    }

    fn flag(&self, flag: &str, file: &str) -> String {
        format!("--{flag}={}", self.0.file(file).display())
    }
}

fn socket(testbed: &Testbed, number: usize) -> PathBuf {
    testbed.dir().join(format!("proxy-server-{number}.sock"))
}

/// Starts one of the two servers.
async fn proxy_server(testbed: &Testbed, certificates: &Certificates, number: usize) -> Result<Process> {
    let mut command = testbed.on_cloud().command(&peers::konnectivity("proxy-server")?);
    let (port, socket) = (PORTS[number], socket(testbed, number));
    command
        .args(["--logtostderr=true", "--v=2", "--server-port=0", "--server-count=2"])
        .args(["--delete-existing-uds-file=true", &format!("--mode={}", MODES[number])])
        .args([format!("--server-id=server-{number}"), format!("--uds-name={}", socket.display())])
        .args([format!("--agent-port={port}"), format!("--health-port={}", port + 1)])
        .arg(format!("--admin-port={}", port + 4))
        .arg(certificates.flag("cluster-cert", "server.crt"))
        .arg(certificates.flag("cluster-key", "server.key"))
        .arg(certificates.flag("cluster-ca-cert", "ca.crt"));
    let process = Process::spawn(testbed.dir(), &format!("proxy-server-{number}"), command)?;
    let listens = async || Ok(TcpStream::connect((CLOUD, port)).await.is_ok());
    wait_until("proxy-server to listen", PATIENCE, listens, |listens| *listens).await?;
    Ok(process)
}

async fn wait_attached(agent: &Agent<'_>, count: usize) -> Result<Value> {
    let what = format!("the agent to be attached to {count} proxy-servers");
    let attached = |status: &Value| status["konnectivity"]["attached"].as_array().map_or(0, Vec::len);
    wait_until(&what, START, async || agent.status().await, |status| attached(status) == count).await
}

/// Both servers behind one address.
pub(super) struct Servers {
    certificates: Certificates,
    /// Sockets for gRPC and for HTTP CONNECT.
    pub(super) sockets: [PathBuf; 2],
    grpc: Process,
    http: Process,
    _balance: JoinSet<()>,
}

pub(super) async fn proxy_servers(testbed: &Testbed) -> Result<Servers> {
    let certificates = Certificates::create(testbed)?;
    let ports = PORTS.map(|port| SocketAddr::from((CLOUD, port)));
    let (_, balance) = balance((CLOUD, SHARED).into(), ports.into()).await?;
    Ok(Servers {
        grpc: proxy_server(testbed, &certificates, 0).await?,
        http: proxy_server(testbed, &certificates, 1).await?,
        sockets: [socket(testbed, 0), socket(testbed, 1)],
        certificates,
        _balance: balance,
    })
}

/// Starts an agent on edge 1 and waits until it is attached to both.
pub(super) async fn agent_at_both<'a>(testbed: &'a Testbed, servers: &Servers) -> Result<Agent<'a>> {
    let certificates = &servers.certificates;
    let agent = Builder::alone(testbed, 1)
        .envs(ALLOCATOR)
        .flag(format!("--proxy-server-host={CLOUD}"))
        .flag(format!("--proxy-server-port={SHARED}"))
        .flag(certificates.flag("ca-cert", "ca.crt"))
        .flag(certificates.flag("agent-cert", "agent.crt"))
        .flag(certificates.flag("agent-key", "agent.key"))
        .flag("--sync-interval=200ms")
        .flag("--sync-interval-cap=1s")
        // No name server is reachable from there, and a lookup must end before its dial times out.
        .env("RES_OPTIONS", "timeout:1 attempts:1")
        .spawn()?;
    wait_attached(&agent, 2).await?;
    Ok(agent)
}

async fn expect_ready(agent: &Agent<'_>, expected: u16) -> Result<()> {
    let (ready, body) = agent.get("/readyz").await?;
    ensure!(ready == expected, "/readyz answered {ready}: {body}");
    Ok(())
}

pub(super) async fn the_agent_attaches_to_konnectivitys_servers(testbed: &Testbed) -> Result<()> {
    let mut servers = proxy_servers(testbed).await?;
    let sockets = servers.sockets.clone();
    let mut agent = agent_at_both(testbed, &servers).await?;
    let status = agent.status().await?;
    ensure!(status["konnectivity"]["server_count"] == 2, "{status}");
    expect_ready(&agent, 200).await?;
    agent.expect_metric("konnectivity_network_proxy_agent_open_server_connections", &[], 2.0).await?;

    let echoes = target(testbed, 1, ECHO, Behaviour::Echo)?;
    relays(testbed, &sockets, echoes.address).await?;
    stalls_nobody(testbed, &sockets[0], echoes.address).await?;

    // One server restarts: the other one goes on, and the agent finds the restarted one.
    servers.grpc.crash().await?;
    wait_attached(&agent, 1).await?;
    expect_ready(&agent, 200).await?;
    echo(&mut connect(&sockets[1], &echoes.address.to_string()).await?, b"through the other").await?;
    // Without any server it is not ready, like konnectivity's own agent.
    servers.http.crash().await?;
    wait_attached(&agent, 0).await?;
    expect_ready(&agent, 503).await?;
    servers.http = proxy_server(testbed, &servers.certificates, 1).await?;
    servers.grpc = proxy_server(testbed, &servers.certificates, 0).await?;
    wait_attached(&agent, 2).await?;
    expect_ready(&agent, 200).await?;
    let mut caller = Caller::open(&sockets[0]).await?;
    let connect_id = caller.connected(&echoes.address.to_string()).await?;
    caller.echo(connect_id, b"after a restart").await?;

    // Connections go on while it drains, and end when the agent ends.
    let mut held = connect(&sockets[1], &echoes.address.to_string()).await?;
    agent.process.signal(Signal::SIGTERM)?;
    agent.wait_log("draining; a second signal ends immediately").await?;
    echo(&mut held, b"while it drains").await?;
    caller.echo(connect_id, b"while it drains").await?;
    drop((held, caller));
    let ended = agent.process.wait_exit(Duration::from_secs(20)).await?;
    ensure!(ended.success(), "the agent ended with {ended}");
    agent.wait_log("left a konnectivity server").await?;
    // The target runs in this process, and sees the ends after the agent's exit.
    let left = async || Ok(echoes.open());
    wait_until("the target's connections to end", PATIENCE, left, |open| *open == 0).await.map(drop)
}

async fn relays(testbed: &Testbed, sockets: &[PathBuf; 2], echoes: SocketAddr) -> Result<()> {
    testbed.black_hole(1, 9103)?;
    back_and_forth(connect(&sockets[1], &echoes.to_string()).await?, 3, 20_000_000).await?;
    // The agent resolves its own name.
    echo(&mut connect(&sockets[1], &format!("edge-1:{ECHO}")).await?, b"by name").await?;
    let mut caller = Caller::open(&sockets[0]).await?;
    let connect_id = caller.connected(&echoes.to_string()).await?;
    let mut sent = Vec::new();
    for round in 0..200_u32 {
        let piece: Vec<u8> = (0..10_000_u32).flat_map(|word| (round ^ word).to_le_bytes()).collect();
        caller.echo(connect_id, &piece).await?;
        sent.push(piece.len());
    }
    ensure!(sent.iter().sum::<usize>() == 8_000_000);
    caller.close(connect_id).await?;

    let page = target(testbed, 1, 9102, Behaviour::Answers(PAGE))?;
    let edge = testbed.edge(1).ip();
    for (mode, socket) in MODES.iter().zip(sockets) {
        page_by_its_client(socket, mode, &edge.to_string(), &page).await?;
    }
    for (asked, status, reason) in [
        (format!("{edge}:9101"), 502, "connection refused"),
        (format!("{edge}:9103"), 504, "i/o timeout"),
        // Not an address of this node, and no --allow-target permits it.
        (format!("{CLOUD}:{SHARED}"), 502, "may not be dialled here"),
        ("no-such-host.invalid:1".to_owned(), 502, "no such host"),
    ] {
        let error = Caller::open(&sockets[0]).await?.dial(&asked).await?.err().unwrap_or_default();
        ensure!(error.contains(reason), "the dial of {asked} was answered {error:?}");
        let (_, answer) = ask(UnixStream::connect(&sockets[1]).await?, &asked).await?;
        ensure!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "CONNECT {asked} was answered {answer:?}"
        );
    }
    Ok(())
}

/// A target that does not read makes the others wait for 2 s at most, and loses its connection.
async fn stalls_nobody(testbed: &Testbed, socket: &Path, echoes: SocketAddr) -> Result<()> {
    let stalled = target(testbed, 1, 9106, Behaviour::NeverReads)?;
    let mut held = Caller::open(socket).await?;
    let healthy = held.connected(&echoes.to_string()).await?;
    let beside = async {
        for _ in 0..50 {
            timeout(BESIDE, held.echo(healthy, b"beside a stalled target")).await??;
        }
        anyhow::Ok(())
    };
    let (cut, beside) = tokio::join!(flood_until_it_is_cut(socket, stalled.address), beside);
    beside?;
    cut?;
    held.echo(healthy, b"after it").await?;
    // It also does not keep others from connecting while it has the agent's only connection.
    held.close(healthy).await?;
    flood_until_it_is_cut(socket, stalled.address).await?;
    let mut next = Caller::open(socket).await?;
    let healthy = timeout(BESIDE, next.connected(&echoes.to_string())).await??;
    next.echo(healthy, b"after both").await
}

async fn flood_until_it_is_cut(socket: &Path, stalled: SocketAddr) -> Result<()> {
    let mut flood = Caller::open(socket).await?;
    let connect_id = flood.connected(&stalled.to_string()).await?;
    let (mut flooding, sender) = (JoinSet::new(), flood.sender());
    flooding.spawn(async move {
        // Sends until it is dropped: the server keeps accepting data for a closed connection.
        while sender.send(Packet::data(connect_id, vec![0_u8; 32 << 10].into())).await.is_ok() {}
    });
    let cut = flood.closed().await;
    drop(flooding);
    let (closed, reason) = cut?;
    ensure!(closed == connect_id && reason.contains("did not take"), "{closed} was closed: {reason}");
    Ok(())
}

/// A control plane of somebody else, whose only ways to nodes are konnectivity's agents on cloud hosts: one that has a
/// redirector, and one that has only routes to it.
pub(super) async fn konnectivitys_agents_reach_edges_by_a_gateway(testbed: &Testbed) -> Result<()> {
    let hosts = gateway::Hosts::create(testbed)?;
    let fleet = gateway::Fleet::start(testbed, &hosts).await?;
    hosts.route(&hosts.client, &[0])?;
    let certificates = Certificates::create(testbed)?;
    let (_server, socket) = (proxy_server(testbed, &certificates, 1).await?, socket(testbed, 1));
    let kubelet = target(testbed, 1, 10250, Behaviour::Echo)?;
    let to = kubelet.address.to_string();
    let behind = Placement { ns: &hosts.client, cgroup: &testbed.edge_cgroup };
    for (name, host, client) in [
        ("proxy-agent-beside-a-redirector", hosts.gateways[0].placement(), "198.18."),
        ("proxy-agent-behind-a-gateway", behind, "10.70.0.5:"),
    ] {
        let mut command = host.command(&peers::konnectivity("proxy-agent")?);
        command
            .args(["--logtostderr=true", "--v=2", "--sync-interval=200ms", "--sync-interval-cap=1s"])
            .args([format!("--proxy-server-host={CLOUD}"), format!("--proxy-server-port={}", PORTS[1])])
            .arg(format!("--agent-id={name}"))
            .arg(certificates.flag("ca-cert", "ca.crt"))
            .arg(certificates.flag("agent-cert", "agent.crt"))
            .arg(certificates.flag("agent-key", "agent.key"));
        let mut agent = Process::spawn(testbed.dir(), name, command)?;
        let attached = async || Ok(connect(&socket, &to).await.is_ok());
        wait_until("a connection by konnectivity's agent", START, attached, |attached| *attached).await?;
        back_and_forth(connect(&socket, &to).await?, 5, 5_000_000).await.context(name)?;
        let line =
            fleet.gateways[0].wait_access(name, |line| line.text("client").starts_with(client)).await?;
        ensure!(line.text("destination") == to, "{line:?}");
        agent.crash().await?;
    }
    Ok(())
}
