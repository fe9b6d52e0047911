//! Names of servers, with name servers as found at edges.
use std::net::Ipv6Addr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::{self, Agent};
use postern_testbed::dns::{Answer, Answers, NameServer};
use postern_testbed::server::Builder;
use postern_testbed::wait::wait_for;
use postern_testbed::{CLOUD, Testbed};

use crate::common::{Mounted, server};

scenarios! {
    one_kind_of_address_is_enough(limit = 240, quick),
    one_kind_of_address_is_enough_with_musl(arm64, limit = 300),
    a_name_that_does_not_exist_is_asked_for_ever_less(limit = 300),
}

const NAME: &str = "tunnel.postern.test";
const CLOUD_V6: Ipv6Addr = Ipv6Addr::new(0xfd70, 0, 0, 0, 0, 0, 0, 1);
const SERVFAIL: Answer = Answer::Code(2);
const NXDOMAIN: Answer = Answer::Code(3);
const REFUSED: Answer = Answer::Code(5);
const NODATA: Answer = Answer::Code(0);
/// Shorter than the resolver's timeout, for which an agent need not wait.
const ATTACHED: Duration = Duration::from_secs(20);

async fn resolver(testbed: &Testbed) -> Result<Mounted> {
    // One attempt: a resolver's retry does not hide a response that this server drops.
    let text = "nameserver 127.0.0.1\noptions timeout:30 attempts:1\n";
    Mounted::over(testbed, Path::new("/etc/resolv.conf"), text).await
}

async fn one_kind_of_address_is_enough(testbed: &Testbed) -> Result<()> {
    attaches_by(testbed, Ok).await
}

/// The released builds: without glibc, whose resolver is more lenient.
async fn one_kind_of_address_is_enough_with_musl(testbed: &Testbed) -> Result<()> {
    attaches_by(testbed, agent::Builder::arm64).await
}

async fn attaches_by<'a>(
    testbed: &'a Testbed,
    build: impl FnOnce(agent::Builder<'a>) -> Result<agent::Builder<'a>>,
) -> Result<()> {
    let names = NameServer::start(&testbed.edge(1).ns, Answers::v4(CLOUD, NODATA))?;
    let resolver = resolver(testbed).await?;
    let server = Builder::new(testbed).flag("--bind-address=::").start().await?;
    let builder = agent::Builder::alone(testbed, 1).flag(format!("--server={NAME}:10262"));
    let mut agent = build(builder)?.mounts_of(resolver.keeper.pid()).enrol(&server).await?;
    for other in [SERVFAIL, NXDOMAIN, REFUSED, Answer::Dropped] {
        for answers in [Answers::v4(CLOUD, other), Answers::v6(CLOUD_V6, other)] {
            agent.crash(&server).await?;
            names.set(answers);
            agent.start_again()?;
            let attached = server.wait_connected("edge-1", true, ATTACHED).await;
            attached.with_context(|| format!("with {answers:?}: {}", tail(&agent)))?;
        }
    }
    Ok(())
}

fn tail(agent: &Agent<'_>) -> String {
    let log = agent.process.output().unwrap_or_default();
    log.lines().rev().take(3).collect::<Vec<_>>().join(" | ")
}

/// A line that is down gives no answers, and is asked about twice a second; a name server that answers negatively is
/// not asked more often than a server that refuses. On another network the name may exist.
async fn a_name_that_does_not_exist_is_asked_for_ever_less(testbed: &Testbed) -> Result<()> {
    let edge = testbed.edge(1);
    let names = NameServer::start(&edge.ns, Answers::v4(CLOUD, NODATA))?;
    let resolver = resolver(testbed).await?;
    let server = server(testbed).await?;
    let builder = agent::Builder::alone(testbed, 1).flag(format!("--server={NAME}:10262"));
    let builder = builder.flag("--log-format=json").mounts_of(resolver.keeper.pid());
    let mut agent = builder.enrol(&server).await?;
    agent.crash(&server).await?;
    names.set(Answers { a: NODATA, aaaa: NXDOMAIN });
    agent.start_again()?;
    // With full jitter a pause this long occurs sooner or later, unless the maximum were half a second.
    let pause = pause_of_at_least(&agent, Duration::from_secs(7)).await?;
    let begin = Instant::now();
    names.set(Answers::v4(CLOUD, NXDOMAIN));
    edge.ns.ip("addr add 192.168.50.77/32 dev eth0")?;
    server.wait_connected("edge-1", true, agent::START).await?;
    let waited = begin.elapsed();
    ensure!(waited < pause, "the agent came back after {waited:?}, at the end of its pause of {pause:?}");
    Ok(())
}

/// Waits for the first pause of at least this length that the agent logs from now on.
async fn pause_of_at_least(agent: &Agent<'_>, least: Duration) -> Result<Duration> {
    let before = agent.process.mark()?;
    wait_for("a long pause between two attempts", Duration::from_secs(150), async || {
        let log = agent.process.output_since(before)?;
        let mut pauses = log.lines().filter_map(|line| {
            let line: serde_json::Value = serde_json::from_str(line).ok()?;
            line.pointer("/fields/retry_in_ms").or(line.get("retry_in_ms"))?.as_u64()
        });
        Ok(pauses.next_back().map(Duration::from_millis).filter(|pause| *pause >= least))
    })
    .await
}
