//! Addresses that move away from their node.
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::agent::{self, Agent};
use postern_testbed::client;
use postern_testbed::inventory::{self, Inventory};
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::wait::wait_until;
use tokio::io::AsyncReadExt as _;

use crate::common::{expect_reset, server};
use crate::web::curl;

scenarios! {
    the_next_holder_of_a_nodes_address_is_never_dialled,
}

const KUBELET: u16 = 10250;
const EXPORTER: u16 = 9100;
const LOCAL: u16 = 9101;
/// How long an agent may take to come back at its new address.
const BACK: Duration = Duration::from_secs(30);


/// What the target at an address says first.
async fn greeting(address: SocketAddr) -> Result<String> {
    let mut stream = client::connect(address).await?;
    let mut said = [0; 8];
    let read = tokio::time::timeout(client::PATIENCE, stream.read(&mut said)).await;
    let length = read.context("no greeting")?.context("reading the greeting")?;
    Ok(String::from_utf8_lossy(&said[..length]).into_owned())
}

/// As DHCP does: the edge gets another address, and its router takes the one before, in place of another machine of the LAN.
async fn the_next_holder_of_a_nodes_address_is_never_dialled(testbed: &Testbed) -> Result<()> {
    const NEXT: Ipv4Addr = Ipv4Addr::new(192, 168, 50, 7);
    let edge = testbed.edge(1);
    let server = server(testbed).await?;
    // As the Downward API says it when the container starts.
    let node_ip = format!("--node-ip={}", edge.address);
    let agent = Agent::enrol_with(&server, 1, &[&node_ip]).await?;
    let kubelet = Target::start(&edge.ns, Ipv4Addr::UNSPECIFIED, KUBELET, Behaviour::HelloFirst("edge-1"))?;
    let local = Target::start(&edge.ns, Ipv4Addr::LOCALHOST, LOCAL, Behaviour::HelloFirst("edge-1"))?;
    let old = |port| SocketAddr::new(edge.address.into(), port);
    ensure!(greeting(old(KUBELET)).await? == "edge-1");

    // Otherwise the next address goes with the first.
    edge.ns.write("/proc/sys/net/ipv4/conf/eth0/promote_secondaries", "1")?;
    edge.ns.ip(&format!("addr add {NEXT}/24 dev eth0"))?;
    edge.ns.ip(&format!("addr del {}/24 dev eth0", edge.address))?;
    edge.ns.ip("route replace default via 192.168.50.1")?;
    testbed.router.ip(&format!("addr add {}/24 dev {}", edge.address, edge.router_port))?;
    let neighbours: Vec<Target> = [KUBELET, EXPORTER, LOCAL]
        .into_iter()
        .map(|port| Target::start(&testbed.router, edge.address, port, Behaviour::HelloFirst("neighbour")))
        .collect::<Result<_>>()?;

    // The Node is not updated yet: the node itself answers, where it listens for others.
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

    // The Node is updated: its address before is not its own any more.
    let mut nodes = Inventory::of(testbed)?;
    nodes.nodes[1] = inventory::node(&edge.name, true, &[NEXT.into()], &[]);
    nodes.write()?;
    let updated = async || greeting(SocketAddr::new(NEXT.into(), KUBELET)).await;
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
    agent.metrics().await?.expect("postern_agent_dials_total", &[("outcome", "denied")], 1.0)
}
