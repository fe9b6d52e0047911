//! Postern outside of the cluster: an inventory file and tokens, and the cluster is served all the same.
use anyhow::{Context as _, Result, ensure};

use super::checks::Checks;
use crate::agent::Agent;
use crate::cluster::{Cluster, EDGE_NODE, pods};
use crate::server::Builder;
use crate::testbed::Testbed;

pub(super) async fn run(testbed: &Testbed) -> Result<()> {
    let cluster = Cluster::start(testbed).await?;
    pods::create(&cluster.api, &pods::shell("talker", EDGE_NODE, "echo hello from the edge; sleep 1000000"))
        .await?;
    pods::wait_ready(&cluster.api, "talker").await?;
    // The inventory is what its help says: the output of kubectl.
    let nodes = cluster.kubectl.run(&["get", "nodes", "-o", "yaml"]).await?;
    std::fs::write(testbed.dir().join("nodes.yaml"), nodes).context("writing the inventory")?;
    let server = Builder::new(testbed).start().await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let mut checks = Checks::new();
    checks
        .run("logs through a server that knows the nodes from a file", async {
            let logs = cluster.kubectl.run(&["logs", "talker"]).await?;
            ensure!(logs == "hello from the edge\n", "the logs are {logs:?}");
            Ok(())
        })
        .await;
    checks.finish()
}
