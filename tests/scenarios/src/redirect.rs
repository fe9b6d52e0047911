//! The redirect is repaired while it runs, and opens no more than it should.
use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::Agent;
use postern_testbed::client::{
    End, PATIENCE, connect, connect_from, echo, end_at_once, is_unreachable, visit,
};
use postern_testbed::cluster::peers::cilium_without_socket_lb;
use postern_testbed::inventory::Inventory;
use postern_testbed::report::figure;
use postern_testbed::server::{Builder, START};
use postern_testbed::target::Behaviour;
use postern_testbed::wait::wait_until;
use postern_testbed::{POD, Testbed};
use serde_json::json;
use tokio::net::TcpStream;

use crate::common::{server_and_agent, target};

scenarios! {
    lost_route_is_restored,
    a_range_that_others_use_is_refused,
    rules_about_marks_of_others_do_not_meet_it,
    two_installations_on_one_host(edges = 2),
    virtual_addresses_open_only_tunnelled_ports(quick),
    clients_of_ranges_that_no_node_names,
    pods_are_taken_by_route,
    no_thread_keeps_what_only_the_start_needs,
    cilium_without_socket_load_balancing(cilium),
}

/// CAP_PERFMON and CAP_SYS_RESOURCE by their numbers (capabilities(7)).
const GIVEN_UP: u64 = 1 << 38 | 1 << 24;

/// A server that runs as root has CAP_SYS_ADMIN, with which no kernel wants CAP_PERFMON too. Each thread has capabilities of its own.
async fn no_thread_keeps_what_only_the_start_needs(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    visit(on_edge.address).await?;
    let mut threads = 0;
    for thread in fs::read_dir(format!("/proc/{}/task", server.process.pid()))? {
        let status = fs::read_to_string(thread?.path().join("status"))?;
        for field in ["CapEff:", "CapPrm:", "CapInh:"] {
            let text = status.lines().find_map(|line| line.strip_prefix(field)).context(field)?;
            let has = u64::from_str_radix(text.trim(), 16)?;
            ensure!(has & GIVEN_UP == 0, "a thread still has {has:#x} in {field} {status}");
        }
        threads += 1;
    }
    ensure!(threads > 2, "there are {threads} threads");
    Ok(())
}

/// Cilium's own code, of a version that detaches all programs attached to the root cgroup and has no datapath as long
/// as that fails; before the server starts, while it runs, and while no server runs.
async fn cilium_without_socket_load_balancing(testbed: &Testbed) -> Result<()> {
    cilium_starts(testbed)?;
    let mut server = Builder::new(testbed).start().await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    visit(on_edge.address).await?;
    let visited = async || visit(on_edge.address).await;
    for round in 1..=3 {
        cilium_starts(testbed)?;
        let start = std::time::Instant::now();
        // The repairs are counted, because connects might still be redirected by programs of the previous round.
        let repaired = |repairs| repairs >= f64::from(round);
        server.wait_metric_for(NOTICED, "postern_redirect_mended_total", &[], repaired).await?;
        wait_until("redirected connects", NOTICED, visited, |_| true).await?;
        figure(&format!("connects are redirected again {:.1?} after Cilium's start", start.elapsed()));
    }
    server.process.crash().await?;
    cilium_starts(testbed)?;
    server.start_again().await?;
    server.wait_connected("edge-1", true, START).await?;
    visit(on_edge.address).await?;
    Ok(())
}

/// Runs Cilium's start with the cloud's cgroup as the root.
fn cilium_starts(testbed: &Testbed) -> Result<()> {
    let program = cilium_without_socket_lb()?;
    let root = testbed.dir().join("cilium");
    std::fs::create_dir_all(&root)?;
    let output = std::process::Command::new("unshare")
        .args(["--mount", "sh", "-c", r#"mount --bind "$1" "$2" && exec "$3" "$2""#, "sh"])
        .args([testbed.cloud_cgroup.path(), &root, &program])
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "Cilium: {}: {said}", output.status);
    Ok(())
}

/// Far below the 30 s between two verifications.
const NOTICED: Duration = Duration::from_secs(10);

async fn lost_route_is_restored(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    visit(on_edge.address).await?;
    testbed.cloud.output("ip", "route del local 198.18.0.0/15 dev lo")?;
    let start = std::time::Instant::now();
    let routes = async || testbed.cloud.output("ip", "route show table local");
    wait_until("the redirect route to be back", NOTICED, routes, |routes| routes.contains("198.18.0.0/15"))
        .await?;
    figure(&format!("a lost redirect route is back after {:.1?}", start.elapsed()));
    visit(on_edge.address).await?;
    server.wait_metric_for(NOTICED, "postern_redirect_mended_total", &[], |repairs| repairs >= 1.0).await?;
    // The verification after the repair goes through the listener like any other connection.
    server.expect_metric("postern_redirect_verified", &[], 1.0).await?;
    let status = server.status().await?;
    ensure!(status["redirect"]["state"] == "on", "{}", status["redirect"]);
    Ok(())
}

/// Conflicts with the range: an address in it, as of a proxy with "fake IP", a route to it, and a rule with priority
/// over the virtual addresses' route.
async fn a_range_that_others_use_is_refused(testbed: &Testbed) -> Result<()> {
    let refused = async |user: &str| {
        let mut server = Builder::new(testbed).spawn()?;
        let status = server.wait_exit(START).await?;
        let said = server.output()?;
        let named = said.contains(user) && said.contains("--redirect-range=198.18.0.0/15");
        ensure!(!status.success() && named, "the server ended with {status}: {said}");
        let routes = testbed.cloud.output("ip", "route show table local type local 198.18.0.0/15")?;
        ensure!(routes.is_empty(), "a server that did not start has left {routes}");
        anyhow::Ok(())
    };
    let ip = |arguments: &str| testbed.cloud.ip(arguments);
    Inventory::of(testbed)?;
    ip("link add meta0 type veth peer name meta1")?;
    ip("link set meta1 up")?;
    ip("link set meta0 up")?;
    ip("address add 198.18.0.1/16 dev meta0")?;
    refused("the address 198.18.0.1/16 of the interface meta0").await?;
    ip("address del 198.18.0.1/16 dev meta0")?;
    ip("route add 198.19.4.0/24 dev meta0 proto static")?;
    refused("the route 198.19.4.0/24 by the interface meta0 in the table main").await?;
    ip("route del 198.19.4.0/24")?;
    // The rule of the table `local` can be moved only by adding it again.
    ip("route add default dev meta0 table 77")?;
    ip("rule add priority 20 lookup local")?;
    ip("rule add priority 10 lookup 77")?;
    ip("rule del priority 0")?;
    refused("the route default by the interface meta0 in the table 77").await?;
    ip("rule del priority 10")?;
    // A wider route, or a rule after that of the table `local`, does not conflict.
    ip("route add 198.0.0.0/8 dev meta0")?;
    let server = Builder::new(testbed).start().await?;
    ip("route add 198.19.4.0/24 dev meta0")?;
    server.wait_log("the route 198.19.4.0/24 by the interface meta0").await
}

/// Calico's rules in the filter table when kube-proxy uses IPVS: a local process's packet whose mark has bits of
/// Calico's is looked up as an endpoint's, and dropped if there is no such endpoint.
const CALICO: [&str; 5] = [
    "-N cali-from-endpoint-mark",
    "-A cali-from-endpoint-mark -j DROP",
    "-N cali-forward-endpoint-mark",
    "-A cali-forward-endpoint-mark -m mark ! --mark 0x100000/0xfff00000 -j cali-from-endpoint-mark",
    "-I OUTPUT -m mark ! --mark 0x0/0xfff00000 -g cali-forward-endpoint-mark",
];

async fn rules_about_marks_of_others_do_not_meet_it(testbed: &Testbed) -> Result<()> {
    for rule in CALICO {
        testbed.cloud.iptables(rule)?;
        testbed.cloud.ip6tables(rule)?;
    }
    let (server, _agent) = server_and_agent(testbed).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    visit(on_edge.address).await?;
    // A client on the host itself is logged by its packets' source, the virtual address.
    let line = server.wait_access("of the visit", |line| line.text("outcome") == "ok").await?;
    ensure!(line.text("client").starts_with("198.18."), "the client in {line:?}");
    Ok(())
}

/// Each installation has one of the edges, and gives it the first virtual address of its range.
async fn two_installations_on_one_host(testbed: &Testbed) -> Result<()> {
    const OTHERS: &str = "another.yaml";
    let mut theirs = Inventory::in_file(testbed, OTHERS)?;
    theirs.nodes.retain(|node| node["metadata"]["name"] != "edge-1");
    theirs.write()?;
    let mut ours = Inventory::of(testbed)?;
    ours.nodes.retain(|node| node["metadata"]["name"] != "edge-2");
    ours.write()?;
    let mut first = Builder::new(testbed).flag("--redirect-range=198.18.0.0/16").start().await?;
    let _agent = Agent::enrol(&first, 1).await?;
    let (on_first, on_second) =
        (target(testbed, 1, 9100, Behaviour::Echo)?, target(testbed, 2, 9100, Behaviour::Echo)?);
    visit(on_first.address).await?;

    let another = Builder::of_another_installation(testbed, OTHERS);
    let apart = another.clone().flag("--redirect-range=198.19.0.0/16");
    for (builder, conflict) in [
        (
            &another,
            "--redirect-range=198.18.0.0/15: a tunnel-server that runs on this host has the range 198.18.0.0/16",
        ),
        (&apart, "--redirect-range-v6=fd9e:706f:7374:6572::/64: a tunnel-server"),
    ] {
        let mut refused = builder.spawn()?;
        let status = refused.wait_exit(START).await?;
        let said = refused.output()?;
        ensure!(!status.success() && said.contains(conflict), "a second server ended with {status}: {said}");
    }
    visit(on_first.address).await?;

    let second = apart.flag("--redirect-range-v6=fd9e:706f:7374:6573::/64").start().await?;
    let _agent = Agent::enrol(&second, 2).await?;
    for (server, node, target) in [(&first, "edge-1", &on_first), (&second, "edge-2", &on_second)] {
        visit(target.address).await?;
        server.wait_access(node, |line| line.text("node") == node && line.text("outcome") == "ok").await?;
    }
    // Each removes only its own objects, and recognises its own successor.
    let second = second.take_over().await?;
    visit(on_second.address).await?;
    let status = first.process.stop().await?;
    ensure!(status.success(), "the first server ended with {status}");
    let routes = testbed.cloud.output("ip", "route show table local")?;
    ensure!(!routes.contains("198.18.0.0/16") && routes.contains("198.19.0.0/16"), "{routes}");
    visit(on_second.address).await?;
    ensure!(second.is_connected("edge-2").await?, "the second server has lost its agent");
    Ok(())
}

/// Any process on the host may dial a virtual address.
async fn virtual_addresses_open_only_tunnelled_ports(testbed: &Testbed) -> Result<()> {
    let (server, _agent) = server_and_agent(testbed).await?;
    let tunnelled = target(testbed, 1, 10250, Behaviour::Echo)?;
    let other = target(testbed, 1, 2222, Behaviour::Echo)?;
    let stream = connect(tunnelled.address).await?;
    // A packet to a `local` route without a preferred source has its destination, the virtual address, as its source.
    let virtual_address = stream.local_addr()?.ip();
    visit((virtual_address, 10250).into()).await?;
    let end = end_at_once(TcpStream::connect((virtual_address, other.address.port())).await).await?;
    ensure!(end == End::Reset, "a virtual address opened a port that is not tunnelled");
    server.wait_log("is not tunnelled").await
}

/// By default: a pod's connection and a Service's arrive with the edge node's own address, which a
/// NetworkPolicy would judge. A neighbour that routes edge addresses here gets nothing.
async fn pods_are_taken_by_route(testbed: &Testbed) -> Result<()> {
    let pod = testbed.add_pod()?;
    let neighbour = testbed.add_neighbour()?;
    let mut server = Builder::new(testbed).start().await?;
    let mut agent = Agent::enrol(&server, 1).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let steered = [("hook", "route4"), ("outcome", "steered")];

    let mut from_pod = connect_from(&pod, on_edge.address, PATIENCE).await.context("from the pod")?;
    echo(&mut from_pod, b"from a pod").await?;
    let client = from_pod.local_addr()?.to_string();
    let sockets = testbed.cloud.output("ss", "-Htn state established")?;
    let pair = |line: &str| line.contains(&on_edge.address.to_string()) && line.contains(&client);
    ensure!(sockets.lines().any(pair), "no socket has the true addresses:\n{sockets}");
    drop(from_pod);
    let line = server.wait_access("from the pod", |line| line.text("client") == client).await?;
    ensure!(line.text("destination") == on_edge.address.to_string(), "{line:?}");
    server.expect_metric("postern_redirect_verdicts_total", &steered, 1.0).await?;

    // As kube-proxy writes it.
    let service = "10.96.0.10:443".parse()?;
    for chain in ["PREROUTING", "OUTPUT"] {
        let rule =
            format!("-d 10.96.0.10/32 -p tcp --dport 443 -j DNAT --to-destination {}", on_edge.address);
        testbed.cloud.output("iptables", &format!("-w -t nat -A {chain} {rule}"))?;
    }
    let mut from_pod = connect_from(&pod, service, PATIENCE).await.context("to the Service, from the pod")?;
    echo(&mut from_pod, b"to a Service").await?;
    drop(from_pod);
    visit(service).await.context("to the Service, from the host")?;
    server.expect_metric("postern_redirect_verdicts_total", &steered, 3.0).await?;
    // The host's own connects do not need a route.
    visit(on_edge.address).await?;
    server.settled().await?;
    server.expect_metric("postern_redirect_verdicts_total", &steered, 3.0).await?;

    neighbour.ip(&format!("route add {}/32 via 10.70.0.1", on_edge.address.ip()))?;
    let before = on_edge.connections();
    let refused = connect_from(&neighbour, on_edge.address, Duration::from_secs(3)).await;
    ensure!(refused.is_err(), "a neighbour reached an edge node");
    let foreign = [("hook", "route4"), ("outcome", "foreign_client")];
    server.wait_metric("postern_redirect_verdicts_total", &foreign, |count| count >= 1.0).await?;
    ensure!(on_edge.connections() == before, "the target saw the neighbour's connection");

    agent.process.stop().await?;
    let unreachable = async || Ok(connect_from(&pod, on_edge.address, PATIENCE).await);
    let failed = |result: &std::io::Result<TcpStream>| result.as_ref().is_err_and(is_unreachable);
    let failing = wait_until("the pod's connect to fail", PATIENCE, unreachable, failed).await?;
    ensure!(failing.is_err(), "{failing:?}");
    let end = end_at_once(connect_from(&pod, service, PATIENCE).await).await?;
    ensure!(end == End::Reset, "a Service of a node without a tunnel: {end:?}");

    server.process.crash().await?;
    let links = testbed.cloud.output("ip", "-o link show type tun")?;
    ensure!(links.is_empty(), "the device outlived the server: {links}");
    Ok(())
}

/// Calico, Cilium and clouds give pods addresses outside of `spec.podCIDRs`. (Without the flag such a client is
/// refused: `path::pod_is_redirected_and_neighbour_is_refused`.)
async fn clients_of_ranges_that_no_node_names(testbed: &Testbed) -> Result<()> {
    let mut inventory = Inventory::of(testbed)?;
    inventory.nodes[0]["spec"]["podCIDRs"] = json!([]);
    inventory.write()?;
    let pod = testbed.add_pod()?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let server = Builder::new(testbed).flag(format!("--redirect-clients={POD}/32")).start().await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let mut stream = connect_from(&pod, on_edge.address, PATIENCE).await?;
    echo(&mut stream, b"from a pod").await
}
