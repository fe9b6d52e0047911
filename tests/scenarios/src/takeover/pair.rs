//! Two servers with a redirect each and their agent, replaced one after the other under the load of a cluster's rolling
//! update.
use std::cell::Cell;
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::{self, Agent};
use postern_testbed::client::{self, echo, end_of};
use postern_testbed::inventory::{Inventory, node};
use postern_testbed::process::Placement;
use postern_testbed::report::figure;
use postern_testbed::server::{Builder, Server};
use postern_testbed::target::Behaviour;
use postern_testbed::visitors::Visitors;
use postern_testbed::wait::while_running;
use postern_testbed::{CLOUD, NEIGHBOUR, Testbed};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use super::ends::ENDS;
use super::nothing_is_left;
use crate::common::{hold, target};
use crate::https::KUBELET;
use crate::servers::through_second;

/// New connections per second, over both hosts.
const RATE: u32 = 200;
/// Minimum number of connections of each host's clients, however slow the machine.
const LEAST: usize = 500;
/// Longer than any of the long connections.
const DRAIN: &str = "--drain-timeout=2m";
/// Pause between two lines of a long connection.
const LINE: Duration = Duration::from_millis(20);
/// Number of lines after the other program has taken over.
const LINES_AFTER: u32 = 50;

pub(super) async fn a_pair_and_its_agent_are_replaced_under_load(testbed: &Testbed) -> Result<()> {
    let host = testbed.add_cloud_host("second", NEIGHBOUR)?;
    let mut inventory = Inventory::of(testbed)?;
    inventory.nodes.push(node("cloud-2", false, &[NEIGHBOUR.into()], &[]));
    inventory.write()?;
    let first = paired(Builder::new(testbed)).start().await?;
    let second = paired(Builder::with_redirect_on(&first, &host, "second")?).start().await?;
    let both = format!("--server={}", second.agent_address());
    let agent = Agent::enrol_with(&first, 1, &[&both, DRAIN]).await?;
    second.wait_connected("edge-1", true, agent::START).await?;

    let visited = target(testbed, 1, 9102, Behaviour::Echo)?;
    let followed = target(testbed, 1, KUBELET, Behaviour::Echo)?;
    let by_first = async || hold(followed.address, b"through the first").await;
    let by_second = async || through_second(&host.ns).await;
    let hosts = [("first", testbed.on_cloud()), ("second", Placement { ns: &host.ns, cgroup: &host.cgroup })];
    let visitors = Visitors::start(testbed, &hosts, visited.address, RATE, LEAST).await?;
    let work = async {
        let first = replace_server(first, by_first().await?).await.context("the first server")?;
        let second = replace_server(second, by_second().await?).await.context("the second server")?;
        let streams = [by_first().await?, by_second().await?];
        let agent = replace_agent(agent, streams).await.context("the agent")?;
        anyhow::Ok((first, second, agent))
    };
    let ((first, second, mut agent), visits) = visitors.alongside(work).await?;
    for ((name, _), visits) in hosts.iter().zip(&visits) {
        let (count, seconds) = (visits.count, visits.seconds);
        figure(&format!("the {name} host: {count} new connections in {seconds:.0} s, {}", visits.times));
    }
    for server in [&first, &second] {
        ensure!(server.is_connected("edge-1").await?, "{} has no session", server.process.name());
    }
    ended("the last agent", agent.process.stop().await?)?;
    for mut server in [first, second] {
        ended("the last server", server.process.stop().await?)?;
        all_were_whole(&server).await?;
    }
    nothing_is_left(testbed)
}

/// Adds the list of peers, which includes the server's own address.
fn paired(builder: Builder<'_>) -> Builder<'_> {
    builder.flag(format!("--peers={CLOUD}:10262,{NEIGHBOUR}:10262")).flag(DRAIN)
}

/// Replaces a server: the new one takes over, `stream` goes on to its own end, and the old one ends with it.
async fn replace_server<'a>(mut old: Server<'a>, stream: TcpStream) -> Result<Server<'a>> {
    let replacing = async {
        let new = old.take_over().await?;
        ensure!(old.process.ended()?.is_none(), "it ended with a connection open");
        anyhow::Ok(new)
    };
    let new = follow(stream, replacing).await?;
    ended("taken over from, it", old.process.wait_exit(ENDS).await?)?;
    all_were_whole(&old).await?;
    Ok(new)
}

async fn replace_agent<'a>(mut old: Agent<'a>, streams: [TcpStream; 2]) -> Result<Agent<'a>> {
    let replacing = async {
        let new = old.take_over().await?;
        ensure!(old.process.ended()?.is_none(), "it ended with connections open");
        anyhow::Ok(new)
    };
    let [by_first, by_second] = streams;
    let new = follow(by_first, follow(by_second, replacing)).await?;
    ended("taken over from, it", old.process.wait_exit(ENDS).await?)?;
    Ok(new)
}

/// Sends lines on one connection while `work` runs and a second longer, as in `kubectl logs -f`; each must come back,
/// followed by the end.
async fn follow<T>(mut stream: TcpStream, work: impl Future<Output = Result<T>>) -> Result<T> {
    let lines = async |done: &Cell<bool>| {
        let (mut count, mut after) = (0, 0);
        while after < LINES_AFTER {
            count += 1;
            after += u32::from(done.get());
            let line = format!("line {count} of a connection that lasts\n");
            echo(&mut stream, line.as_bytes()).await.with_context(|| format!("line {count}"))?;
            tokio::time::sleep(LINE).await;
        }
        stream.shutdown().await.context("closing")?;
        let end = end_of(&mut stream, client::PATIENCE).await?;
        ensure!(end == client::End::Eof(0), "after {count} lines it ended with {end:?}");
        Ok(count)
    };
    let (result, count): (T, u32) = while_running(work, lines).await?;
    figure(&format!("{count} lines on a connection beside a replacement"));
    Ok(result)
}

fn ended(what: &str, status: ExitStatus) -> Result<()> {
    ensure!(status.code() == Some(0), "{what} ended with {status}");
    Ok(())
}

async fn all_were_whole(server: &Server<'_>) -> Result<()> {
    server.expect_every_access(|line| line.text("outcome") == "ok").await
}
