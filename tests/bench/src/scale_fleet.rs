//! Agents that come and go: flapping among many nodes, and a server that is lost.
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::server::{Builder, Server};
use postern_testbed::wait::wait_until;

use crate::catalogue::{AGENTS, ROUTES};
use crate::fleet::{self, Fleet};
use crate::line::Peer;
use crate::load::as_f64;
use crate::peers;
use crate::peers::BEHIND_NAT;
use crate::record::Record;
use crate::scale::{Size, open_files, tunnels, wait_tunnels};
use crate::usage::{self, Part, Side};

/// Agents that are attached while some of them flap.
const FLAPPING: usize = 100;
/// Number of flaps a second.
const FLAPS: u32 = 10;
/// The hosts of the other servers.
const SECOND: Ipv4Addr = Ipv4Addr::new(10, 70, 0, 4);
const THIRD: Ipv4Addr = Ipv4Addr::new(10, 70, 0, 5);
/// Maximum time for a fleet to attach.
const ATTACH: Duration = Duration::from_secs(300);

/// Measures the cost of a few agents that flap among many nodes.
pub(crate) async fn of_flaps(testbed: &Testbed, size: Size, record: &mut Record) -> Result<()> {
    fleet::write_inventory(testbed, size.part(ROUTES[ROUTES.len() - 1]))?;
    let mut server = peers::postern::server_builder(testbed).start().await?;
    let servers = [server.agent_address()];
    let own = [Part::new(Side::Cloud, &server.process)];
    for (line, flaps) in [("scale-flaps-idle", 0), ("scale-flaps-cpu", FLAPS)] {
        let count = size.part(FLAPPING);
        let fleet = Fleet { count, servers: &servers, flaps }.start(testbed, BEHIND_NAT)?;
        // Those that flap may never all be attached at once.
        let most = as_f64(count as u64) / 2.0;
        wait_until("agents to be attached", ATTACH, async || tunnels(&server).await, |seen| *seen >= most)
            .await?;
        tokio::time::sleep(size.idle).await;
        let (cpu, watched) = (usage::cpu_seconds(&own)?, Instant::now());
        tokio::time::sleep(size.idle).await;
        let cpu = (usage::cpu_seconds(&own)? - cpu) / watched.elapsed().as_secs_f64();
        record.value(line, Peer::Postern, cpu * 1e3);
        drop(fleet);
        wait_tunnels(&server, 0).await?;
    }
    server.process.stop().await?;
    Ok(())
}

/// Measures many agents with one session each over three servers, one of which is killed.
pub(crate) async fn of_lost_server(testbed: &Testbed, size: Size, record: &mut Record) -> Result<()> {
    let count = size.part(AGENTS[AGENTS.len() - 1]);
    let limit = open_files()?;
    ensure!(count + 500 < limit, "the limit of open files here is {limit}");
    fleet::write_inventory(testbed, count)?;
    let hosts = (testbed.add_to_cloud_lan("second", SECOND)?, testbed.add_to_cloud_lan("third", THIRD)?);
    let first = peers::postern::server_builder(testbed).start().await?;
    let second = Builder::on_host(&first, &hosts.0, SECOND, "second")?.start().await?;
    let third = Builder::on_host(&first, &hosts.1, THIRD, "third")?.start().await?;
    let addresses = [&first, &second, &third].map(Server::agent_address);
    let start = Instant::now();
    let fleet = Fleet { count, servers: &addresses, flaps: 0 }.start(testbed, BEHIND_NAT)?;
    let most = wait_attached(&[&first, &second, &third], count).await?;
    record.value("scale-lost-attach", Peer::Postern, start.elapsed().as_secs_f64());
    record.value("scale-lost-most", Peer::Postern, most);

    let Server { process: mut lost, .. } = third;
    lost.crash().await?;
    let start = Instant::now();
    let most = wait_attached(&[&first, &second], count).await?;
    record.value("scale-lost-back", Peer::Postern, start.elapsed().as_secs_f64());
    record.value("scale-lost-most-after", Peer::Postern, most);
    drop(fleet);
    for server in [second, first] {
        let Server { mut process, .. } = server;
        process.stop().await?;
    }
    Ok(())
}

/// Waits until the servers have as many sessions as there are agents; returns the most that one has, over its share.
async fn wait_attached(servers: &[&Server<'_>], count: usize) -> Result<f64> {
    let expected = as_f64(count as u64);
    let each = async || {
        let mut each = Vec::new();
        for server in servers {
            each.push(tunnels(server).await?);
        }
        Ok(each)
    };
    let what = format!("{count} agents to be attached to {} servers", servers.len());
    let each = wait_until(&what, ATTACH, each, |each| each.iter().sum::<f64>() >= expected).await?;
    let most = each.iter().copied().fold(0.0, f64::max);
    Ok(most / (expected / as_f64(servers.len() as u64)))
}
