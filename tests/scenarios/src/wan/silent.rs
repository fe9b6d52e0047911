//! Lines that are down, NATs that forget, addresses that change, edges that sleep.
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use postern_testbed::Testbed;
use postern_testbed::agent;
use postern_testbed::asleep::Asleep;
use postern_testbed::client::{self, echo};
use postern_testbed::inventory::{self, Inventory};
use postern_testbed::report::figure;
use postern_testbed::server::Builder;
use postern_testbed::target::{Behaviour, Target};
use postern_testbed::wait::{wait_for, wait_until};
use postern_testbed::wan::Path;

use super::{PATIENCE, session};
use crate::common::{hold, server_and_agent, target};

/// Time limit for a link to be used again after its line was out.
const USABLE: Duration = Duration::from_secs(5);

pub(super) async fn outages_of_up_to_ten_seconds_are_survived(testbed: &Testbed) -> Result<()> {
    let wan = testbed.wan(1, Path::new(50, 50))?;
    let (server, _agent) = server_and_agent(testbed).await?;
    let shell = target(testbed, 1, 9102, Behaviour::Echo)?;
    let before = session(&server).await?;
    let mut stream = hold(shell.address, b"before").await?;
    let mut outages = Vec::new();
    for seconds in [5, 8, 10] {
        wan.set_out(true);
        let typing = async {
            echo(&mut stream, b"during").await?;
            echo(&mut stream, b"after").await?;
            anyhow::Ok(Instant::now())
        };
        let outage = async {
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            wan.set_out(false);
            anyhow::Ok(Instant::now())
        };
        let both = tokio::time::timeout(PATIENCE, async { tokio::try_join!(typing, outage) });
        let (usable, back) = both.await.with_context(|| format!("an outage of {seconds} s"))??;
        figure(&format!("usable {:.2?} after an outage of {seconds} s", usable - back));
        outages.push(usable - back);
        ensure!(session(&server).await? == before, "the agent attached again after {seconds} s");
    }
    // Beside other work it may take longer after one.
    let soon = outages.iter().filter(|usable| **usable <= USABLE).count();
    ensure!(soon + 1 >= outages.len(), "usable again after {outages:?} each");
    Ok(())
}

pub(super) async fn a_long_outage_ends_at_once(testbed: &Testbed) -> Result<()> {
    let wan = testbed.wan(1, Path::new(50, 50))?;
    let (server, _agent) = server_and_agent(testbed).await?;
    let shell = target(testbed, 1, 9102, Behaviour::Echo)?;
    client::visit(shell.address).await?;
    wan.set_out(true);
    let out = Instant::now();
    // While the link still looks alive, clients soon get an error.
    let error = client::visit(shell.address).await.err().context("a visit over a line that is out")?;
    figure(&format!("a new connection fails after {:.1?}: {error:#}", out.elapsed()));
    server.wait_access("the silent link", |line| line.text("error").contains("has been silent for")).await?;
    // Longer than it takes to notice a dead link.
    server.wait_connected("edge-1", false, PATIENCE).await?;
    tokio::time::sleep(Duration::from_secs(30).saturating_sub(out.elapsed())).await;
    wan.set_out(false);
    let start = Instant::now();
    wait_for("a new connection", PATIENCE, async || Ok(client::visit(shell.address).await.ok())).await?;
    figure(&format!("usable {:.2?} after the outage", start.elapsed()));
    Ok(())
}

/// Waits until a connection works.
async fn usable(address: SocketAddr, after: &str) -> Result<()> {
    let start = Instant::now();
    wait_for("a new connection", PATIENCE, async || {
        let visit = tokio::time::timeout(PATIENCE, client::visit(address)).await;
        Ok(visit.context("a visit")?.ok())
    })
    .await?;
    figure(&format!("usable {:.1?} after {after}", start.elapsed()));
    Ok(())
}

pub(super) async fn nat_forgets_the_link(testbed: &Testbed) -> Result<()> {
    let _wan = testbed.wan(1, Path::new(50, 50))?;
    let (_server, agent) = server_and_agent(testbed).await?;
    let shell = target(testbed, 1, 9102, Behaviour::Echo)?;
    client::visit(shell.address).await?;
    testbed.forget_mappings()?;
    usable(shell.address, "the NAT forgot the link").await?;
    // Without waiting for PING's timeout.
    agent.wait_log("it is silent, and another connection to the server works").await
}

pub(super) async fn the_edge_gets_another_address(testbed: &Testbed) -> Result<()> {
    const NEXT: Ipv4Addr = Ipv4Addr::new(192, 168, 50, 3);
    let _wan = testbed.wan(1, Path::new(50, 50))?;
    let (_server, agent) = server_and_agent(testbed).await?;
    let edge = testbed.edge(1);
    let mut nodes = Inventory::of(testbed)?;
    nodes.nodes[1] = inventory::node(&edge.name, true, &[edge.ip(), NEXT.into()], &[]);
    nodes.write()?;
    // Otherwise the second address is deleted with the first.
    edge.ns.write("/proc/sys/net/ipv4/conf/eth0/promote_secondaries", "1")?;
    edge.ns.ip(&format!("addr add {NEXT}/24 dev eth0"))?;
    let shell = Target::start(&edge.ns, NEXT, 9102, Behaviour::Echo)?;
    let works = async || client::visit(shell.address).await;
    wait_until("a visit", PATIENCE, works, |_| true).await?;
    edge.ns.ip(&format!("addr del {}/24 dev eth0", edge.address))?;
    edge.ns.ip("route replace default via 192.168.50.1")?;
    let start = Instant::now();
    wait_until("a new connection", PATIENCE, works, |_| true).await?;
    figure(&format!("usable {:.1?} after the edge has another address", start.elapsed()));
    agent.wait_log("link lost its address, replacing it").await
}

pub(super) async fn the_edge_was_asleep(testbed: &Testbed) -> Result<()> {
    let _wan = testbed.wan(1, Path::new(50, 50))?;
    let server = Builder::new(testbed).start().await?;
    let clock = Asleep::new(testbed)?;
    // Without the clock only PING would notice.
    let builder = agent::Builder::new(&server, 1).flag("--keepalive=5m").envs(clock.environment());
    let mut agent = builder.enrol(&server).await?;
    let shell = target(testbed, 1, 9102, Behaviour::Echo)?;
    client::visit(shell.address).await?;
    agent.process.freeze().await?;
    testbed.forget_mappings()?;
    clock.set(Duration::from_secs(3600))?;
    agent.process.signal(Signal::SIGCONT)?;
    usable(shell.address, "the edge has woken up").await?;
    agent.wait_log("asleep_s=3600").await?;
    agent.wait_log("it is silent, and another connection to the server works").await
}
