//! The inventory changes while the server runs.
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::{self, Agent};
use postern_testbed::client::{self, expect_unreachable, visit};
use postern_testbed::inventory::{Inventory, node};
use postern_testbed::server::{Builder, Server, run};
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::wait::{wait_for, wait_until};
use postern_testbed::{NEIGHBOUR, Testbed};

use crate::common::{server, server_and_agent, target, within};

scenarios! {
    nodes_come_go_and_move(edges = 2, quick),
    changes_take_effect_at_once(edges = 2),
    broken_file_is_refused,
    two_nodes_with_one_address(edges = 2),
    cloud_and_edge_with_one_address,
    an_edge_node_names_an_address_of_the_clouds_network,
    edge_inside_an_excluded_range(edges = 2),
}

const SOON: Duration = Duration::from_secs(15);

/// The path that connect() to an address takes.
#[derive(Debug, PartialEq, Eq)]
enum Way {
    Tunnel,
    NoTunnel,
    Direct,
}

async fn way_to(address: SocketAddr) -> Result<Way> {
    match tokio::time::timeout(Duration::from_secs(1), tokio::net::TcpStream::connect(address)).await {
        Ok(Ok(_)) => Ok(Way::Tunnel),
        Ok(Err(error)) if client::is_unreachable(&error) => Ok(Way::NoTunnel),
        Err(_) => Ok(Way::Direct),
        // The agent does not dial the address yet. Its reset may arrive before connect() returns.
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::ConnectionReset => Ok(Way::Tunnel),
        Ok(Err(error)) => Err(error.into()),
    }
}

async fn wait_way(address: SocketAddr, way: Way) -> Result<()> {
    wait_for(&format!("{address} to be reached by way of {way:?}"), SOON, async || {
        Ok((way_to(address).await? == way).then_some(()))
    })
    .await
}

/// Visits until one succeeds: an agent re-reads its host's addresses every 10 s.
async fn wait_visit(address: SocketAddr) -> Result<()> {
    let visited = async || visit(address).await;
    wait_until(&format!("the agent to dial {address}, its node's new address"), 2 * SOON, visited, |_| true)
        .await
        .map(drop)
}

async fn nodes_come_go_and_move(testbed: &Testbed) -> Result<()> {
    let mut inventory = Inventory::of(testbed)?;
    let edge_2 = inventory.nodes.pop().unwrap_or_default();
    inventory.write()?;
    let (server, _agent) = server_and_agent(testbed).await?;
    let first = target(testbed, 1, 10250, Behaviour::Echo)?;
    let second = target(testbed, 2, 10250, Behaviour::Echo)?;
    visit(first.address).await?;
    ensure!(way_to(second.address).await? == Way::Direct, "a node that is not listed is redirected");
    // Edge 2 is added.
    inventory.nodes.push(edge_2);
    inventory.write()?;
    wait_way(second.address, Way::NoTunnel).await?;
    let _second_agent = Agent::enrol(&server, 2).await?;
    visit(second.address).await?;
    visit(first.address).await?;
    // It gets another address, also on its host.
    let moved = IpAddr::from([192, 168, 51, 77]);
    testbed.edge(2).ns.ip("addr add 192.168.51.77/24 dev eth0")?;
    inventory.nodes[2] = node("edge-2", true, &[moved], &[]);
    inventory.write()?;
    let on_moved = Target::start(&testbed.edge(2).ns, moved, 10250, Behaviour::Echo)?;
    wait_way(on_moved.address, Way::Tunnel).await?;
    wait_visit(on_moved.address).await?;
    wait_way(second.address, Way::Direct).await?;
    // Edge 1 is removed; edge 2 stays.
    inventory.nodes.remove(1);
    inventory.write()?;
    wait_way(first.address, Way::Direct).await?;
    visit(on_moved.address).await?;
    // Its virtual address was not given to another node: it comes back and works.
    inventory.nodes.push(node("edge-1", true, &[testbed.edge(1).ip()], &[]));
    inventory.write()?;
    // The session was ended if the node was absent for long; the agent then comes back after a pause.
    server.wait_connected("edge-1", true, Duration::from_secs(60)).await?;
    wait_way(first.address, Way::Tunnel).await?;
    visit(first.address).await?;
    visit(on_moved.address).await?;
    Ok(())
}

/// A node of the inventory, and a session of an agent: each has its route within a second.
/// Without the event it would be 10 s, the interval at which the inventory is read in any case.
async fn changes_take_effect_at_once(testbed: &Testbed) -> Result<()> {
    const AT_ONCE: Duration = Duration::from_secs(1);
    let mut inventory = Inventory::of(testbed)?;
    let (server, mut agent) = server_and_agent(testbed).await?;
    let first = target(testbed, 1, 10250, Behaviour::Echo)?;
    let second = target(testbed, 2, 10250, Behaviour::Echo)?;
    within("from a node's change to its route", AT_ONCE, async || {
        let node = inventory.nodes.pop().context("a node")?;
        inventory.write()?;
        wait_way(second.address, Way::Direct).await?;
        inventory.nodes.push(node);
        let start = Instant::now();
        inventory.write()?;
        // Soon repeated: what is not redirected is never answered.
        let refused = async || {
            let error = client::attempt(second.address, Duration::from_millis(50)).await.err();
            Ok(error.filter(client::is_unreachable).map(drop))
        };
        wait_for("the node's route", SOON, refused).await?;
        Ok(start.elapsed())
    })
    .await?;
    within("from a session's start to its route", AT_ONCE, async || {
        agent.crash(&server).await?;
        expect_unreachable(first.address).await?;
        agent.start_again()?;
        server.wait_connected("edge-1", true, agent::START).await?;
        let start = Instant::now();
        wait_way(first.address, Way::Tunnel).await?;
        Ok(start.elapsed())
    })
    .await
}

async fn broken_file_is_refused(testbed: &Testbed) -> Result<()> {
    let inventory = Inventory::of(testbed)?;
    let (server, _agent) = server_and_agent(testbed).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let broken = [
        // An invalid address in line 10.
        (
            "apiVersion: v1\nkind: List\nitems:\n- metadata:\n    name: edge-1\n    labels:\n      node-role.kubernetes.io/edge: \"\"\n  status:\n    addresses:\n    - {type: InternalIP, address: 192.168.50.999}\n",
            "line 10",
        ),
        ("apiVersion: v1\nkind: List\nitems:\n- metadata: {name: Edge_1}\n", "line 4"),
        ("apiVersion: v1\nkind: List\nitems: [\n", "line 3"),
        ("", "it is empty"),
        ("\u{0}\u{1}", "unexpected character"),
    ];
    for (text, expected) in broken {
        testbed.expect_error(expected);
        let before = server.process.mark()?;
        inventory.write_raw(text)?;
        wait_for(&format!("a log line about the broken file with {expected:?}"), SOON, async || {
            let log = server.process.output_since(before)?;
            Ok(log.lines().any(|line| line.contains("nodes.yaml") && line.contains(expected)).then_some(()))
        })
        .await?;
        visit(on_edge.address).await?;
    }
    inventory.write()?;
    visit(on_edge.address).await?;
    testbed.expect_error("nodes.yaml: No such file");
    std::fs::remove_file(inventory.path())?;
    crate::common::never("an outage without the file", Duration::from_secs(3), async || {
        Ok(way_to(on_edge.address).await? != Way::Tunnel)
    })
    .await?;
    let mut moved = inventory;
    moved.nodes[1] = node("edge-1", true, &[testbed.edge(1).ip(), IpAddr::from([192, 168, 50, 88])], &[]);
    moved.write()?;
    testbed.edge(1).ns.ip("addr add 192.168.50.88/24 dev eth0")?;
    let second =
        Target::start(&testbed.edge(1).ns, IpAddr::from([192, 168, 50, 88]), 10250, Behaviour::Echo)?;
    wait_way(second.address, Way::Tunnel).await?;
    wait_visit(second.address).await?;
    Ok(())
}

async fn expect_conflict(server: &Server<'_>) -> Result<()> {
    server.wait_metric("postern_inventory_conflicts", &[], |conflicts| conflicts >= 1.0).await.map(drop)
}

async fn two_nodes_with_one_address(testbed: &Testbed) -> Result<()> {
    let mut inventory = Inventory::of(testbed)?;
    let shared = testbed.edge(1).ip();
    inventory.nodes[2] = node("edge-2", true, &[shared], &[]);
    inventory.write()?;
    let server = server(testbed).await?;
    let _first = Agent::enrol(&server, 1).await?;
    let _second = Agent::enrol(&server, 2).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    // Ambiguous: connect() fails rather than reaching the wrong site.
    expect_unreachable(on_edge.address).await?;
    expect_conflict(&server).await?;
    let logged = server
        .settled_log()
        .await?
        .lines()
        .filter(|line| {
            line.contains("edge-2") && line.contains(&shared.to_string()) && line.contains("inventory")
        })
        .count();
    ensure!(logged == 1, "the conflict was logged {logged} times");
    inventory.nodes[2] = node("edge-2", true, &[testbed.edge(2).ip()], &[]);
    inventory.write()?;
    wait_way(on_edge.address, Way::Tunnel).await?;
    visit(on_edge.address).await?;
    Ok(())
}

async fn cloud_and_edge_with_one_address(testbed: &Testbed) -> Result<()> {
    let neighbour = testbed.add_neighbour()?;
    let mut inventory = Inventory::of(testbed)?;
    inventory.nodes.push(node("cloud-2", false, &[NEIGHBOUR.into()], &[]));
    inventory.nodes[1] = node("edge-1", true, &[testbed.edge(1).ip(), NEIGHBOUR.into()], &[]);
    inventory.write()?;
    let (server, _agent) = server_and_agent(testbed).await?;
    let on_neighbour = Target::start(&neighbour, NEIGHBOUR, 10250, Behaviour::Echo)?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    visit(on_neighbour.address).await?;
    ensure!(on_neighbour.connections() == 1, "the cloud node's address went elsewhere");
    visit(on_edge.address).await?;
    expect_conflict(&server).await?;
    server.wait_log(&NEIGHBOUR.to_string()).await
}

/// A host of the cloud that is no Node: it is reached, unless the operator says that the address is an edge node's.
async fn an_edge_node_names_an_address_of_the_clouds_network(testbed: &Testbed) -> Result<()> {
    let neighbour = testbed.add_neighbour()?;
    let mut inventory = Inventory::of(testbed)?;
    inventory.nodes[1] = node("edge-1", true, &[testbed.edge(1).ip(), NEIGHBOUR.into()], &[]);
    inventory.write()?;
    let (mut server, _agent) = server_and_agent(testbed).await?;
    server.wait_log("name the networks of edge nodes with --edge-addresses").await?;
    let on_neighbour = Target::start(&neighbour, NEIGHBOUR, 10250, Behaviour::Echo)?;
    visit(on_neighbour.address).await?;
    visit(target(testbed, 1, 10250, Behaviour::Echo)?.address).await?;
    ensure!(on_neighbour.connections() == 1, "the neighbour's address went elsewhere");
    server.expect_metric("postern_inventory_conflicts", &[], 1.0).await?;
    let conflict = format!("address {NEIGHBOUR} of edge-1: it lies in a network of this host");
    let status = run(testbed, &["status"])?;
    let status = String::from_utf8_lossy(&status.stdout);
    ensure!(status.contains(&conflict) && status.contains("--edge-addresses"), "{status}");
    server.process.stop().await?;
    let flag = format!("--edge-addresses={NEIGHBOUR}/32,{}/32", testbed.edge(1).ip());
    let again = Builder::new(testbed).flag(flag).start().await?;
    again.expect_metric("postern_inventory_conflicts", &[], 0.0).await.context("the operator said so")
}

async fn edge_inside_an_excluded_range(testbed: &Testbed) -> Result<()> {
    let server = Builder::new(testbed).flag("--exclude=192.168.51.0/24").start().await?;
    let _first = Agent::enrol(&server, 1).await?;
    let _second = Agent::enrol(&server, 2).await?;
    let on_first = target(testbed, 1, 10250, Behaviour::Echo)?;
    visit(on_first.address).await?;
    let on_second = target(testbed, 2, 10250, Behaviour::Echo)?;
    ensure!(way_to(on_second.address).await? == Way::Direct, "an excluded address is redirected");
    expect_conflict(&server).await?;
    server.wait_log("192.168.51.").await?;
    ensure!(client::connect(on_first.address).await.is_ok(), "the other node");
    Ok(())
}
