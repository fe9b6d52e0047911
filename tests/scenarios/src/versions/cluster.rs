//! An upgrade in a cluster and the way back, with this version's manifests. Each version uses the CA, the claims and the
//! certificates that the other one has stored.
use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::agent;
use postern_testbed::cluster::kubectl::Kubectl;
use postern_testbed::cluster::pods::{self, IDLE, TALK, shell};
use postern_testbed::cluster::{Cluster, EDGE_NODE, postern};
use postern_testbed::process::{Process, Version};

use super::replaced::{agent_takes_over, take_over};
use crate::kubernetes::following::Following;

/// The other program is stopped by a kubelet.
async fn stop(before: &mut Process) -> Result<()> {
    let status = before.stop().await?;
    ensure!(status.success(), "{} ended with {status}", before.name());
    Ok(())
}

async fn works(kubectl: &Kubectl) -> Result<()> {
    let said = kubectl.run(&["exec", "idle", "--", "echo", "hello"]).await?;
    ensure!(said.trim() == "hello", "exec printed {said:?}");
    Following::start(kubectl).await.map(drop)
}

pub(super) async fn a_cluster_is_upgraded_and_brought_back(testbed: &Testbed) -> Result<()> {
    let cluster = Cluster::start(testbed).await?;
    pods::run(&cluster.api, &[shell("talker", EDGE_NODE, TALK), shell("idle", EDGE_NODE, IDLE)]).await?;
    let manifests = postern::install(&cluster, "base").await?;
    let server = postern::server(&cluster, &manifests).await?.version(Version::Previous);
    let mut server = server.start().await?;
    let agent = postern::agent_builder(&cluster, &manifests, 1)?.version(Version::Previous);
    let mut agent = agent.spawn()?;
    server.wait_connected(EDGE_NODE, true, agent::START).await?;
    works(&cluster.kubectl).await.context("before the upgrade")?;
    let bundle = std::fs::read_to_string(agent.state_dir().join("ca.crt"))?;

    for version in [Version::This, Version::Previous] {
        // Agents are the last to be upgraded, and the first to be brought back.
        for is_server in [version == Version::This, version == Version::Previous] {
            let mut following = Following::start(&cluster.kubectl).await?;
            if is_server {
                let after = take_over(&server, version).await?;
                following.next(5).await.context("beside the next server")?;
                drop(following);
                stop(&mut server.process).await?;
                server = after;
            } else {
                let after = agent_takes_over(&server, &agent, version).await?;
                following.next(5).await.context("beside the next agent")?;
                drop(following);
                stop(&mut agent.process).await?;
                agent = after;
            }
            let what = if is_server { "a server" } else { "an agent" };
            works(&cluster.kubectl).await.with_context(|| format!("after {what} of {version:?}"))?;
        }
    }
    let now = std::fs::read_to_string(agent.state_dir().join("ca.crt"))?;
    ensure!(now == bundle, "the CA is another one");
    Ok(())
}
