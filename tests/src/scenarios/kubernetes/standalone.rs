//! Postern outside of the cluster: an inventory file and tokens, and the cluster is served all the same.
use anyhow::{Context as _, Result};

use super::checks::Checks;
use super::{commands, views};
use crate::agent::Agent;
use crate::cluster::{Cluster, EDGE_NODE, pods};
use crate::server::Builder;
use crate::testbed::Testbed;

pub(super) async fn run(testbed: &Testbed) -> Result<()> {
    let cluster = Cluster::start(testbed).await?;
    pods::run(&cluster.api, &commands::pods(EDGE_NODE)).await?;
    // The inventory is what its help says: the output of kubectl.
    let nodes = cluster.kubectl.run(&["get", "nodes", "-o", "yaml"]).await?;
    std::fs::write(testbed.dir().join("nodes.yaml"), nodes).context("writing the inventory")?;
    let server = Builder::new(testbed).start().await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let mut checks = Checks::new();
    checks.run("logs", commands::logs(&cluster.kubectl)).await;
    checks.run("exec with standard input and an exit code", commands::exec(&cluster.kubectl)).await;
    checks.run("stats/summary of the edge node", views::summary(&cluster)).await;
    checks.finish()
}
