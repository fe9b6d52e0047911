//! Addresses that move away from their node.
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::agent::{self, Agent};
use postern_testbed::client;
use postern_testbed::inventory::{self, Inventory};
use postern_testbed::server::Server;
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::wait::wait_until;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;

use crate::common::{expect_reset, hold, server};
use crate::web::curl;

scenarios! {
    the_next_holder_of_a_nodes_address_is_never_dialled,
    held_connections_end_when_their_address_moves(edges = 2, quick),
}

const KUBELET: u16 = 10250;
const EXPORTER: u16 = 9100;
const LOCAL: u16 = 9101;
const SHELL: u16 = 9102;
const SILENT: u16 = 9103;
/// Time limit for an agent to come back at its new address.
const BACK: Duration = Duration::from_secs(30);

/// Time limit for held connections to end.
const ENDS: Duration = Duration::from_secs(10);

/// Returns the greeting of the target at an address.
async fn greeting(address: SocketAddr) -> Result<String> {
    let mut stream = client::connect(address).await?;
    let mut said = [0; 8];
    let read = tokio::time::timeout(client::PATIENCE, stream.read(&mut said)).await;
    let length = read.context("no greeting")?.context("reading the greeting")?;
    Ok(String::from_utf8_lossy(&said[..length]).into_owned())
}

/// Simulates DHCP: the edge gets another address, and its router takes the previous one, in the role of another machine
/// of the LAN.
async fn the_next_holder_of_a_nodes_address_is_never_dialled(testbed: &Testbed) -> Result<()> {
    const NEXT: Ipv4Addr = Ipv4Addr::new(192, 168, 50, 7);
    let edge = testbed.edge(1);
    let server = server(testbed).await?;
    // As the Downward API reports it when the container starts.
    let node_ip = format!("--node-ip={}", edge.address);
    let agent = Agent::enrol_with(&server, 1, &[&node_ip]).await?;
    let kubelet = Target::start(&edge.ns, Ipv4Addr::UNSPECIFIED, KUBELET, Behaviour::HelloFirst("edge-1"))?;
    let local = Target::start(&edge.ns, Ipv4Addr::LOCALHOST, LOCAL, Behaviour::HelloFirst("edge-1"))?;
    let old = |port| SocketAddr::new(edge.address.into(), port);
    ensure!(greeting(old(KUBELET)).await? == "edge-1");

    // Otherwise the next address is deleted with the first.
    edge.ns.write("/proc/sys/net/ipv4/conf/eth0/promote_secondaries", "1")?;
    edge.ns.ip(&format!("addr add {NEXT}/24 dev eth0"))?;
    edge.ns.ip(&format!("addr del {}/24 dev eth0", edge.address))?;
    edge.ns.ip("route replace default via 192.168.50.1")?;
    testbed.router.ip(&format!("addr add {}/24 dev {}", edge.address, edge.router_port))?;
    let neighbours: Vec<Target> = [KUBELET, EXPORTER, LOCAL]
        .into_iter()
        .map(|port| Target::start(&testbed.router, edge.address, port, Behaviour::HelloFirst("neighbour")))
        .collect::<Result<_>>()?;

    // The Node is not updated yet: the node answers itself, on ports where it listens on more than the loopback.
    let answers = async || greeting(old(KUBELET)).await;
    wait_until("the kubelet to answer at the Node's address", BACK, answers, |said| said == "edge-1").await?;
    ensure!(kubelet.connections() >= 2, "the kubelet has seen {} connections", kubelet.connections());
    for port in [EXPORTER, LOCAL] {
        expect_reset(old(port)).await?;
        let at = old(port).to_string();
        let refused = server.wait_access("refused by the node itself", |line| {
            line.text("destination") == at && line.text("outcome") == "refused"
        });
        refused.await?;
    }
    ensure!(local.connections() == 0, "what listens on the loopback only was reached");

    // The Node is updated: the previous address is no longer its own.
    let mut nodes = Inventory::of(testbed)?;
    nodes.nodes[1] = inventory::node(&edge.name, true, &[NEXT.into()], &[]);
    nodes.write()?;
    // Until the server knows the address, a connect to it is not answered.
    let updated = async || {
        let attempt = greeting(SocketAddr::new(NEXT.into(), KUBELET));
        tokio::time::timeout(Duration::from_secs(1), attempt).await.context("no connection")?
    };
    wait_until("the kubelet to answer at the new address", agent::START, updated, |said| said == "edge-1")
        .await?;
    let (host, elsewhere) =
        (format!("Host: edge-1:{EXPORTER}"), format!("X-Tunnel-Proxy-Dest: {}", old(EXPORTER)));
    let answer = curl(testbed, &["http://127.0.0.1:10264", "-H", &host, "-H", &elsewhere]).await?;
    answer.expect(403, "it is not an address of this node")?;

    for neighbour in &neighbours {
        ensure!(
            neighbour.connections() == 0,
            "the agent has dialled another machine at {}",
            neighbour.address
        );
    }
    agent.expect_metric("postern_agent_dials_total", &[("outcome", "denied")], 1.0).await
}

/// Two addresses of edge 1 besides the one that its agent's link uses: one moves to edge 2, although edge 1 keeps it on
/// its interface; the other one is lost.
async fn held_connections_end_when_their_address_moves(testbed: &Testbed) -> Result<()> {
    const PASSES: Ipv4Addr = Ipv4Addr::new(192, 168, 50, 8);
    const LOST: Ipv4Addr = Ipv4Addr::new(192, 168, 50, 9);
    let (first, second) = (testbed.edge(1), testbed.edge(2));
    for address in [PASSES, LOST] {
        first.ns.ip(&format!("addr add {address}/32 dev eth0"))?;
    }
    second.ns.ip(&format!("addr add {PASSES}/32 dev eth0"))?;
    let mut nodes = Inventory::of(testbed)?;
    let own = [first.ip(), PASSES.into(), LOST.into()];
    nodes.nodes[1] = inventory::node(&first.name, true, &own, &[]);
    nodes.write()?;
    let server = server(testbed).await?;
    let _agents = [Agent::enrol(&server, 1).await?, Agent::enrol(&server, 2).await?];
    let at = |address: Ipv4Addr, port| SocketAddr::new(address.into(), port);
    let _targets = [
        Target::start(&first.ns, Ipv4Addr::UNSPECIFIED, SHELL, Behaviour::Echo)?,
        Target::start(&second.ns, Ipv4Addr::UNSPECIFIED, SHELL, Behaviour::HelloFirst("edge-2"))?,
    ];
    let silent = Target::start(&first.ns, PASSES, SILENT, Behaviour::NeverReads)?;

    let mut stays = hold(at(first.address, SHELL), b"at an address that stays").await?;
    let (mut passes, mut lost) =
        (hold(at(PASSES, SHELL), b"passes").await?, hold(at(LOST, SHELL), b"lost").await?);
    let host = format!("Host: {}", at(PASSES, SILENT));
    let request = async {
        let answer = curl(testbed, &["http://127.0.0.1:10264", "-H", &host]).await?;
        answer.expect(502, "")
    };
    let moves = async {
        let asked = async || Ok(silent.open());
        wait_until("the request to arrive", client::PATIENCE, asked, |open| *open == 1).await?;
        nodes.nodes[1] = inventory::node(&first.name, true, &[first.ip(), LOST.into()], &[]);
        nodes.nodes[2] = inventory::node(&second.name, true, &[second.ip(), PASSES.into()], &[]);
        nodes.write()?;
        ended(&server, &mut passes, at(PASSES, SHELL), "another node").await
    };
    tokio::try_join!(request, moves)?;
    let next = async || greeting(at(PASSES, SHELL)).await;
    wait_until("the next node to answer", client::PATIENCE, next, |said| said == "edge-2").await?;

    first.ns.ip(&format!("addr del {LOST}/32 dev eth0"))?;
    ended(&server, &mut lost, at(LOST, SHELL), "").await?;
    client::echo(&mut stays, b"still there").await
}

/// Waits for the connection's reset and its access line.
async fn ended(server: &Server<'_>, held: &mut TcpStream, target: SocketAddr, why: &str) -> Result<()> {
    let end = client::end_of(held, ENDS).await.with_context(|| format!("held to {target}"))?;
    ensure!(end == client::End::Reset, "the connection to {target} ended with {end:?}");
    let target = target.to_string();
    let line = server.wait_access("of the connection that has moved", |line| {
        line.text("destination") == target && line.text("outcome") == "target_reset"
    });
    let line = line.await?;
    ensure!(line.text("error").contains(why), "the line says {line:?}");
    Ok(())
}
